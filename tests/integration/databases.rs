//! Hosts whose data is in PostgreSQL, with a real server that is killed in between.

use crate::{
    console,
    durability::Process,
    harness::{Host, client, model_path, repository},
    postgres_server::{Pooler, Server},
};
use serde_json::json;
use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn up(server: &Server, data: &tempfile::TempDir) -> (Process, Host) {
    let process = Process::with(
        Stdio::inherit(),
        &["--database", &server.url()],
        model_path(),
        &data.path().join("data"),
    );
    let host = Host::elsewhere(process.url.clone());
    (process, host)
}

async fn turns(host: &Host, session: &str) -> u64 {
    host.get(&format!("/v1/agents/counter/sessions/{session}")).await.1["turns"].as_u64().unwrap()
}

/// Waits until the host says that it is ready, or that it is not.
async fn until_ready(host: &Host, ready: bool) {
    let begun = Instant::now();
    loop {
        let answer = client().get(host.at("/readyz")).send().await.unwrap();
        if answer.status().is_success() == ready {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "/readyz is {}", answer.status());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_and_its_database_server_are_killed_and_nothing_is_lost_or_doubled() {
    let Some(server) = tokio::task::spawn_blocking(Server::start).await.unwrap() else { return };
    let data = tempfile::tempdir().unwrap();
    let (process, host) = up(&server, &data);
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    for _ in 0..3 {
        let (status, answer) = host.message("counter", "one", "increment n").await;
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(turns(&host, "one").await, 3);

    // Another host gets an error, because the database is in use.
    let other = tempfile::tempdir().unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["up", "--listen", "127.0.0.1:0", "--database", &server.url(), "--data"])
        .arg(other.path())
        .arg("--model")
        .arg(model_path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("another host uses the database"), "{said}");

    // The host is killed; the next one continues with the same agents and sessions.
    process.kill();
    let (process, host) = up(&server, &data);
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    assert_eq!(turns(&host, "one").await, 4);

    // The server is killed under load: every message that was answered counts once, and the others not at all.
    let begun = Instant::now();
    let sending = (0..4).map(|worker| {
        let host = Host::elsewhere(process.url.clone());
        tokio::spawn(async move {
            let session = format!("load-{worker}");
            let mut answered = 0;
            while begun.elapsed() < Duration::from_secs(6) {
                answered += u64::from(host.message("counter", &session, "increment n").await.0 == 200);
            }
            (session, answered)
        })
    });
    let sending: Vec<_> = sending.collect();
    let server = tokio::task::spawn_blocking(move || {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(1_200));
            server.restart();
        }
        server
    });
    let server = server.await.unwrap();
    for worker in sending {
        let (session, answered) = worker.await.unwrap();
        assert!(answered > 0, "{session} got no answer");
        assert_eq!(turns(&host, &session).await, answered, "{session}");
    }

    // While the server is away, the host is not ready; afterwards it is again, by itself.
    until_ready(&host, true).await;
    server.stop();
    until_ready(&host, false).await;
    server.start_again();
    until_ready(&host, true).await;
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    assert_eq!(turns(&host, "one").await, 5);
    process.terminate();
}

#[test]
fn keys_are_made_in_a_database_that_no_host_uses() {
    let Some(server) = Server::start() else { return };
    let key = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_skep")).arg("key").args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let url = server.url();
    let (made, secret) = key(&["create", "--role", "admin", "--database", &url]);
    assert!(made && !secret.trim().is_empty(), "{secret}");
    let (listed, keys) = key(&["list", "--database", &url]);
    assert!(listed && keys.contains("admin"), "{keys}");
}

/// Runs `skep db` and returns whether it succeeded, and what it printed.
fn db(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_skep")).arg("db").args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_moves_to_postgresql_and_back_with_its_sessions_and_secrets() {
    let Some(server) = tokio::task::spawn_blocking(Server::start).await.unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (data, file) = (path("data"), path("export.db"));
    let start = |arguments: &[&str]| {
        let process = Process::with(Stdio::inherit(), arguments, model_path(), Path::new(&data));
        (Host::elsewhere(process.url.clone()), process)
    };
    let (host, process) = start(&[]);
    assert_eq!(host.get("/v1/status").await.1["data"], "folder");
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    for _ in 0..3 {
        assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    }
    let secret = json!({ "value": "a long secret 7361", "hosts": ["https://api.example.com"] });
    let set = client().put(host.at("/v1/secrets/KEY")).json(&secret).send().await.unwrap();
    assert_eq!(set.status(), 204);

    // While the host runs, nothing can be moved, but the database can be checked.
    let database = path("data/skep.db");
    let (moved, said) = db(&["import", &database, "--database", &server.url()]);
    assert!(!moved && said.contains("in use by another host"), "{said}");
    let (fine, said) = db(&["check", "--data", &data]);
    assert!(fine && said.contains("sessions") && said.contains("1 of 1 open with the key"), "{said}");
    process.terminate();

    let (moved, said) = db(&["import", &database, "--database", &server.url()]);
    assert!(
        moved && said.contains("the row counts of all tables match") && said.contains("secrets.key"),
        "{said}"
    );
    let (again, said) = db(&["import", &database, "--database", &server.url()]);
    assert!(!again && said.contains("not empty"), "{said}");
    let (host, process) = start(&["--database", &server.url()]);
    let (_, status) = host.get("/v1/status").await;
    assert_eq!((&status["data"], &status["disk"]), (&json!("postgres"), &json!(null)), "{status}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    let shown = command.args(["status", "--url", &host.url]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("on a PostgreSQL server"), "{shown}");
    let url = host.url.clone();
    let page = "/ui/usage?tab=limits";
    tokio::task::spawn_blocking(move || console::shows(&url, page, "PostgreSQL")).await.unwrap();
    assert_eq!(turns(&host, "one").await, 3);
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    let (fine, said) = db(&["check", "--data", &data, "--database", &server.url()]);
    assert!(
        fine && said.contains("a host uses the database: number ") && said.contains("1 of 1 open"),
        "{said}"
    );
    let (moved, said) = db(&["export", &file, "--database", &server.url()]);
    assert!(!moved && said.contains("another host uses the database"), "{said}");
    assert!(!Path::new(&file).exists());
    process.terminate();

    // A new key, and back to a file.
    let (fine, said) = db(&["rotate-key", "--data", &data, "--database", &server.url()]);
    assert!(fine && said.contains("sealed 1 secret and"), "{said}");
    let (moved, said) = db(&["export", &file, "--database", &server.url(), "--json"]);
    assert!(moved, "{said}");
    let rows: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&rows["rows"]["sessions"], &rows["rows"]["secrets"]), (&json!(1), &json!(1)));
    let new = path("new");
    let (moved, said) = db(&["import", &file, "--data", &new]);
    assert!(moved, "{said}");
    let (fine, said) = db(&["check", "--data", &new]);
    assert!(!fine && said.contains("1 of 1 secrets do not open"), "{said}");
    std::fs::copy(path("data/secrets.key"), path("new/secrets.key")).unwrap();
    let (fine, said) = db(&["check", "--data", &new]);
    assert!(fine && said.contains("1 of 1 open"), "{said}");
    let process = Process::with(Stdio::inherit(), &[], model_path(), Path::new(&new));
    let host = Host::elsewhere(process.url.clone());
    assert_eq!(turns(&host, "one").await, 4);
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    assert_eq!(turns(&host, "one").await, 5);
    process.terminate();
}

#[test]
fn a_database_that_a_host_cannot_use_is_refused_with_the_reason() {
    let Some(server) = Server::start() else { return };
    // There are no tables, then those of this version.
    let (fine, said) = db(&["check", "--database", &server.url()]);
    assert!(fine && said.contains("there are no tables yet"), "{said}");
    let (fine, said) = db(&["migrate", "--database", &server.url()]);
    assert!(fine && said.contains("created the tables"), "{said}");
    let (fine, said) = db(&["check", "--database", &server.url(), "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert!(fine && report["current"] == true && report["rows"]["sessions"] == 0, "{said}");

    let refused = |url: &str, expected: &str| {
        let (fine, said) = db(&["check", "--database", url]);
        assert!(!fine && said.contains(expected), "{url}: {said}");
        // A host does not start either, and says the same.
        let data = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--listen", "127.0.0.1:0", "--database", url, "--data"])
            .arg(data.path())
            .arg("--model")
            .arg(model_path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{url}: {said}");
    };
    server.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0");
    refused(&server.url_of("skep", "latin"), "its encoding is LATIN1");
    server.execute("CREATE ROLE weak LOGIN");
    server.execute("CREATE DATABASE strict");
    server.execute_in("strict", "REVOKE CREATE ON SCHEMA public FROM PUBLIC");
    refused(&server.url_of("weak", "strict"), "its user may not create tables");
    server.execute("CREATE DATABASE other");
    server.execute_in("other", "CREATE TABLE books (title TEXT)");
    refused(&server.url_of("skep", "other"), "tables of another program");
    server.execute_in("postgres", "UPDATE skep_schema SET version = 99, oldest = 99");
    refused(&server.url(), "newer version of skep");
    refused(&server.url_of("skep", "absent"), "database \"absent\" does not exist");

    // A standby only reads, and a pooler mixes up the connections of a host.
    let standby = server.standby();
    refused(&standby.url(), "it is a standby");
    if let Some(pooler) = Pooler::start(&server) {
        refused(&pooler.url(), "a pooler gives each transaction another connection");
    }
}

#[test]
fn two_hosts_with_folders_of_their_own_cannot_use_the_same_file() {
    let (folder, one, other) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = format!("sqlite:{}/shared.db", folder.path().display());
    let process = Process::with(Stdio::inherit(), &["--database", &database], model_path(), one.path());
    let second = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["up", "--listen", "127.0.0.1:0", "--database", &database, "--data"])
        .arg(other.path())
        .arg("--model")
        .arg(model_path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && said.contains("is in use by another host"), "{said}");
    process.terminate();
}

#[test]
fn a_password_comes_from_a_variable_or_a_file_and_is_never_shown() {
    let Some(server) = Server::start() else { return };
    server.execute("CREATE ROLE ann LOGIN SUPERUSER PASSWORD 'hunter2-secret'");
    server.ask_for_passwords();
    let url = server.url_of("ann", "postgres");
    let check = |url: &str, variables: &[(&str, &str)]| {
        let output = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["db", "check", "--database", url, "--log-level", "debug"])
            .env_remove("PGPASSWORD")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!said.contains("hunter2"), "{said}");
        (output.status.success(), said)
    };
    let (fine, said) = check(&url, &[]);
    assert!(!fine && said.contains("hint:") && said.contains("PGPASSFILE"), "{said}");
    let (fine, said) = check(&url, &[("PGPASSWORD", "hunter2-secret")]);
    assert!(fine, "{said}");
    let (fine, said) = check(&url, &[("PGPASSWORD", "hunter2-wrong")]);
    assert!(!fine, "{said}");
    let (fine, said) = check(&url.replace("ann@", "ann:hunter2-secret@"), &[]);
    assert!(fine, "{said}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("passwords");
    std::fs::write(&file, "*:*:*:ann:hunter2-secret\n").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let (fine, said) = check(&url, &[("PGPASSFILE", file.to_str().unwrap())]);
    assert!(fine, "{said}");
}

#[test]
fn a_server_is_reached_over_tls_only_if_its_certificate_is_right() {
    let Some(server) = Server::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let authority = server.speak_tls(folder.path());
    let url = |mode: &str, host: &str| {
        let root = format!("&sslrootcert={}", authority.display());
        format!("{}?sslmode={mode}{root}", server.url().replace("127.0.0.1", host))
    };
    let (fine, said) = db(&["check", "--database", &url("verify-full", "localhost")]);
    assert!(fine && said.contains("encrypted") && !said.contains("not encrypted"), "{said}");
    // The certificate is for localhost.
    let (fine, said) = db(&["check", "--database", &url("verify-full", "127.0.0.1")]);
    assert!(!fine && said.contains("hint:"), "{said}");
    let (fine, said) = db(&["check", "--database", &url("verify-ca", "127.0.0.1")]);
    assert!(fine, "{said}");
    // Without the authority nobody vouches for the certificate.
    let unknown = format!("{}?sslmode=verify-full", server.url().replace("127.0.0.1", "localhost"));
    let (fine, said) = db(&["check", "--database", &unknown]);
    assert!(!fine, "{said}");
    let (fine, said) = db(&["check", "--database", &format!("{}?sslmode=disable", server.url())]);
    assert!(fine && said.contains("not encrypted"), "{said}");
}

/// Returns the binary with the unit tests of a crate, which is built already when all tests run.
fn tests_of(package: &str) -> std::path::PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo tells a test about its package. Some build scripts look at these variables, and would run again, with all
    // that depends on them.
    for (name, _) in std::env::vars() {
        if name.starts_with("CARGO_PKG_")
            || name.starts_with("CARGO_MANIFEST_")
            || name.starts_with("CARGO_BIN_")
        {
            cargo.env_remove(name);
        }
    }
    let output = cargo
        .args(["test", "--workspace", "--no-run", "--message-format", "json"])
        .current_dir(repository())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    let messages = String::from_utf8(output.stdout).unwrap();
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let found = messages.filter(|message| {
        message["target"]["name"] == package
            && message["target"]["kind"][0] == "lib"
            && message["profile"]["test"] == true
    });
    let mut binaries = found.filter_map(|message| Some(message["executable"].as_str()?.into()));
    binaries.next().expect("the crate has tests")
}

/// Runs tests of a binary on PostgreSQL and returns whether all passed, and what it printed.
fn run_on_postgresql(server: &Server, binary: &Path, folder: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(binary)
        .args(["--test-threads", "2"])
        .args(arguments)
        .env("SKEP_TEST_POSTGRES", server.url())
        .current_dir(folder)
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Modules with tests of the runtime that run only on SQLite. The first one copies SQLite's file; a host on PostgreSQL is
/// killed above. The others are about guests, models and servers, and write the same rows as the tests that are left.
const ONLY_ON_SQLITE: [&str; 13] = [
    "crashes",
    "broken_answers",
    "compaction",
    "compute",
    "deploying",
    "fetch_tool",
    "hostile",
    "inference",
    "interface_versions",
    "models",
    "reasoning",
    "warming",
    "web",
];

#[test]
fn the_tests_of_the_store_and_the_runtime_pass_on_postgresql() {
    let Some(server) = Server::start() else { return };
    let left_out = ONLY_ON_SQLITE.map(|module| {
        let path = repository().join("host/runtime/src/tests").join(module);
        assert!(path.is_dir() || path.with_extension("rs").is_file(), "{} is gone", path.display());
        format!("tests::{module}::")
    });
    let left_out: Vec<&str> = left_out.iter().flat_map(|name| ["--skip", name.as_str()]).collect();
    for package in ["skep_store", "skep_runtime"] {
        let folder = repository().join("host").join(package.trim_start_matches("skep_"));
        let binary = tests_of(package);
        let (passed, said) = run_on_postgresql(&server, &binary, &folder, &left_out);
        if passed {
            continue;
        }
        // The other tests of this program, which load the machine, can make a deadline pass: those that failed
        // run once more, alone.
        let end = &said[said.floor_char_boundary(said.len().saturating_sub(6_000))..];
        let failed = said.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"));
        let failed: Vec<&str> = failed.collect();
        assert!((1..=3).contains(&failed.len()), "{package}: {end}");
        for name in failed {
            let (passed, again) = run_on_postgresql(&server, &binary, &folder, &["--exact", name]);
            assert!(passed, "{package}, {name}, twice: {end}\nalone: {again}");
            eprintln!("{package}: {name} failed beside the others, and passed alone");
        }
    }
}
