//! The data folder of a host: one host at a time has it, and commands that read it make none by mistake.

use crate::durability::{Process, tiny_model};
use std::{
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
fn a_folder_has_one_host_until_that_is_gone_however_it_ends() {
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
fn keys_are_looked_for_only_where_a_host_has_been() {
    let parent = tempfile::tempdir().unwrap();
    let data = parent.path().join("data");
    for arguments in [&["key", "list"][..], &["key", "revoke", "key-5f0c2a9b81d4"]] {
        let output = skep(arguments, &data);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(said(&output).contains("is no data folder of a host"), "{}", said(&output));
        assert!(!data.exists(), "{arguments:?} made a folder");
    }
    let made = skep(&["key", "create", "--role", "admin"], &data);
    assert!(made.status.success() && said(&made).contains("made a new data folder"), "{}", said(&made));
    assert!(skep(&["key", "list"], &data).status.success());
}
