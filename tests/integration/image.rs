//! The image of a release: built from the real container file and run by a container engine, and the check of what an image
//! promises, which needs no engine. `.ci/release` does the same with the static binary.

use crate::{
    harness::{skipped, skipped_without},
    packages::{outcome, package, release_steps, status_of_release_steps},
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Status of a step that finds no container engine that works here.
const NO_ENGINE: i32 = 75;
/// The certificate authority in the image.
const ROOTS: &str = "\
-----BEGIN CERTIFICATE-----
MIIBdzCCAR2gAwIBAgIUXj+SG5zgFJmM2DxAAch4u1JKVDwwCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFdGVzdHMwIBcNMjYxMTI4MTQxNjMwWhgPMjEyNjExMDQxNDE2
MzBaMBAxDjAMBgNVBAMMBXRlc3RzMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
Wi7k9WLD70YR8uXSHeFbnbldU2wyHYqS2b62CFddAKI35NT8mewBVrVkSjcTk7Xs
Ss5ViWD5FKoVyh2W2fYQA6NTMFEwHQYDVR0OBBYEFCErIeGu5QV7CrqHqplHzYc4
uyUmMB8GA1UdIwQYMBaAFCErIeGu5QV7CrqHqplHzYc4uyUmMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgcKIoDLn9HwmoJAPggkj5obOiVFb/x58Q
Wi3WcYXCh80CIQCxv4VV6IONaWk+UPb7Rp3p+KPTJexZ0HhibnwD+cry1g==
-----END CERTIFICATE-----
";

/// Makes the folder of the image with a small program, and returns it.
fn image_folder(folder: &Path) -> PathBuf {
    let at = |name: &str| folder.join(name);
    for (name, text) in [("program", "#!/bin/sh\n"), ("notices", "licenses\n"), ("roots", ROOTS)] {
        fs::write(at(name), text).unwrap();
    }
    let steps = "CA_CERTIFICATES=$3 container \"$1\" \"$2\" skep-container \"$4\"; \
                 tar -C \"$4\" -xzf \"$4/skep-container.tar.gz\"";
    let files = ["program", "notices", "roots", ""].map(at);
    let (succeeds, printed) = release_steps(steps, &files);
    assert!(succeeds, "{printed}");
    at("skep-container")
}

#[test]
fn a_host_runs_in_the_image_and_its_data_outlives_the_container() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = vec![image_folder(folder.path())];
    // The binary of the tests replaces the program in the image. Unlike that of a release it needs the libraries of this machine.
    let mounted = [
        (env!("CARGO_BIN_EXE_skep"), "/skep"),
        ("/lib", "/lib"),
        ("/usr/lib", "/usr/lib"),
        ("/lib64", "/lib64"),
    ];
    for (from, to) in mounted.into_iter().filter(|(from, _)| Path::new(from).exists()) {
        arguments.push(format!("--volume={from}:{to}:ro").into());
    }
    let (status, printed) = status_of_release_steps("try_image \"$@\"", &arguments);
    if status == Some(NO_ENGINE) {
        return skipped_without("podman");
    }
    assert!(
        status == Some(0) && printed.contains("another container has the data of the volume"),
        "{printed}"
    );
}

/// Returns the configuration that podman shows of the image.
fn inspected() -> Value {
    json!({
        "Config": {
            "User": "65532:65532",
            "Env": ["SKEP_HOME=/data", "SSL_CERT_FILE=/etc/roots.crt"],
            "Volumes": { "/data": {} },
            "ExposedPorts": { "8080/tcp": {} },
            "Entrypoint": ["/skep"],
            "Cmd": ["up", "--listen", "0.0.0.0:8080"],
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "Skep",
                "org.opencontainers.image.version": "1.2.3",
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "Healthcheck": { "Test": ["CMD", "/skep", "health"] },
    })
}

#[test]
fn an_image_that_promises_what_its_files_do_not_hold_is_refused() {
    if !outcome(Command::new("python3").arg("--version")).0 {
        return skipped("Python 3 is not installed, which reads the image");
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["data", "tmp", "etc", "licenses", "roots/etc"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    for name in ["skep", "licenses/LICENSE", "licenses/THIRD-PARTY.txt", "roots/etc/roots.crt"] {
        fs::write(at(name), ROOTS).unwrap();
    }
    let packed = |options: &[&str], names: &[&str]| {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(folder.path()).args(["--numeric-owner", "--append", "--file"]).arg(at("exported"));
        let (succeeds, printed) = outcome(tar.args(options).args(names));
        assert!(succeeds, "{printed}");
    };
    // The user owns the folders that it may write to; the certificates are packed by each case.
    let pack = |writable: &[&str], others: &[&str], roots: bool| {
        let _ = fs::remove_file(at("exported"));
        packed(&["--owner=65532", "--group=65532", "--mode=755"], writable);
        packed(&["--owner=0", "--group=0", "--mode=755"], others);
        if roots {
            packed(&["--owner=0", "--group=0", "--mode=644", "--directory=roots"], &["etc/roots.crt"]);
        }
    };
    let check = |inspected: &Value| {
        fs::write(at("inspected"), json!([inspected]).to_string()).unwrap();
        let mut check = Command::new("python3");
        outcome(check.arg(package("image.py")).args([at("inspected"), at("exported")]).arg("1.2.3"))
    };
    let refused = |inspected: &Value, reason: &str| {
        let (succeeds, printed) = check(inspected);
        assert!(
            !succeeds && printed.starts_with("error: ") && printed.contains(reason),
            "{reason}: {printed}"
        );
    };

    let others = ["etc", "licenses", "skep"];
    pack(&["data", "tmp"], &others, true);
    assert_eq!(check(&inspected()), (true, "/skep\nhealth\n".to_owned()));
    for (field, value, reason) in [
        ("/Config/User", json!(""), "not the numbers of another user than root"),
        ("/Config/User", json!("0:65532"), "not the numbers of another user than root"),
        ("/Config/User", json!("1000:1000"), "/data is not a folder of the image's user"),
        ("/Config/Env/0", json!("SKEP_HOME=/other"), "SKEP_HOME is '/other', which is not a volume"),
        ("/Config/Env/1", json!("SSL_CERT_FILE=/roots"), "the image has no /roots"),
        ("/Config/Volumes", json!(null), "SKEP_HOME is '/data', which is not a volume"),
        ("/Config/ExposedPorts", json!({ "80/tcp": {} }), "port 8080 is not exposed"),
        ("/Config/Entrypoint/0", json!("/other"), "the image has no /other"),
        ("/Config/StopSignal", json!("SIGKILL"), "the host stops in order after SIGTERM"),
        ("/Config/Labels", json!(null), "the label org.opencontainers.image.title is None"),
        ("/Healthcheck", json!(null), "the health check is []"),
        ("/Healthcheck/Test/1", json!("curl"), "the health check is ['CMD', 'curl', 'health']"),
    ] {
        let mut changed = inspected();
        *changed.pointer_mut(field).unwrap() = value;
        refused(&changed, reason);
    }

    pack(&["tmp"], &others, true);
    refused(&inspected(), "the image has no /data");
    pack(&["data"], &["tmp", "etc", "licenses", "skep"], true);
    refused(&inspected(), "/tmp is not a folder of the image's user");
    pack(&["data", "tmp", "skep"], &["etc", "licenses"], true);
    refused(&inspected(), "the image's user may write to /skep");
    pack(&["data", "tmp"], &others, false);
    refused(&inspected(), "the image has no /etc/roots.crt");
}
