//! The data folder of a host: only one host at a time uses it, and commands that read it never create one by
//! mistake.

use crate::{
    durability::{Process, tiny_model},
    harness::guest,
};
use std::{
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

fn skep(arguments: &[&str], data: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).arg("--data").arg(data).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_folder_has_one_host_at_a_time_even_after_a_kill() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let first = Process::start(model.path(), data.path());
    let up = ["up", "--listen", "127.0.0.1:0", "--threads", "1", "--model", model.path().to_str().unwrap()];
    let second = skep(&up, data.path());
    let wanted = format!("{} is in use by another host, process {}", data.path().display(), first.id());
    assert_eq!(second.status.code(), Some(1), "{}", said(&second));
    assert!(said(&second).contains(&wanted) && said(&second).contains("--data"), "{}", said(&second));

    let made = skep(&["key", "create", "--role", "admin"], data.path());
    assert!(made.status.success(), "{}", said(&made));
    assert!(!said(&made).contains("new data folder"), "{}", said(&made));

    first.kill();
    Process::start(model.path(), data.path()).kill();
}

#[test]
fn a_broken_agent_is_listed_with_the_reason_and_can_be_deleted() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let data = tempfile::tempdir().unwrap();
    tiny_model(before.path());
    tiny_model(after.path());
    let (component, manifest) = (data.path().join("noop.wasm"), data.path().join("agent.toml"));
    std::fs::write(&component, guest("noop")).unwrap();
    let name = before.path().file_name().unwrap().to_str().unwrap();
    std::fs::write(&manifest, format!("name = \"pinned\"\nmodel = \"{name}\"\n")).unwrap();
    let at = |host: &Process, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(arguments).args(["--url", &host.url]).stdin(Stdio::null()).output().unwrap()
    };
    let first = Process::start(before.path(), data.path());
    let deployed = at(&first, &["deploy", component.to_str().unwrap()]);
    assert!(deployed.status.success(), "{}", said(&deployed));
    let again = at(&first, &["deploy", component.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&again.stdout).starts_with("unchanged pinned, version 1"), "{again:?}");
    first.kill();

    let second = Process::start(after.path(), data.path());
    let listed = at(&second, &["list"]);
    let reason = format!("broken pinned: model \"{name}\" is not loaded");
    assert!(listed.status.success() && said(&listed).contains(&reason), "{}", said(&listed));
    assert!(!String::from_utf8_lossy(&listed.stdout).contains("no agents yet"), "{listed:?}");
    let refused = at(&second, &["list", "pinned"]);
    assert_eq!(refused.status.code(), Some(4), "{}", said(&refused));
    let deleted = at(&second, &["delete", "pinned", "--yes"]);
    assert!(deleted.status.success(), "{}", said(&deleted));
    assert!(said(&at(&second, &["list"])).is_empty());
    second.kill();
}

#[test]
fn keys_are_looked_up_only_in_existing_data_folders() {
    let parent = tempfile::tempdir().unwrap();
    let data = parent.path().join("data");
    for arguments in [&["key", "list"][..], &["key", "revoke", "key-5f0c2a9b81d4"]] {
        let output = skep(arguments, &data);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(said(&output).contains("is not the data folder of a host"), "{}", said(&output));
        assert!(!data.exists(), "{arguments:?} created a folder");
    }
    let made = skep(&["key", "create", "--role", "admin"], &data);
    assert!(made.status.success() && said(&made).contains("created a new data folder"), "{}", said(&made));
    assert!(skep(&["key", "list"], &data).status.success());
}

#[test]
fn a_lost_secrets_key_is_reported_and_not_replaced() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let key = data.path().join("secrets.key");
    let set = |url: &str, name: &str| {
        let arguments = ["secret", "set", name, "--to", "https://api.example.com", "--url", url];
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"s3cret-value").unwrap();
        child.wait_with_output().unwrap()
    };
    let first = Process::start(model.path(), data.path());
    let output = set(&first.url, "KEY");
    assert!(output.status.success() && key.exists(), "{}", said(&output));
    first.kill();

    let backup = std::fs::read(&key).unwrap();
    std::fs::remove_file(&key).unwrap();
    let log = data.path().join("log");
    let logged = Stdio::from(std::fs::File::create(&log).unwrap());
    let second = Process::logging_to(logged, model.path(), data.path());
    let told = std::fs::read_to_string(&log).unwrap();
    assert!(told.contains("secrets.key") && told.contains("skep secret set"), "{told}");
    let refused = set(&second.url, "OTHER");
    assert_eq!(refused.status.code(), Some(4), "{}", said(&refused));
    assert!(!key.exists(), "a new key replaced the old one");
    second.kill();

    std::fs::write(&key, backup).unwrap();
    Command::new("chmod").arg("600").arg(&key).status().unwrap();
    let third = Process::start(model.path(), data.path());
    let output = set(&third.url, "OTHER");
    assert!(output.status.success(), "{}", said(&output));
    third.kill();
}
