//! The present host opens what earlier versions left on their operators' disks: data folders, exported sessions, backups,
//! manifests and components.
//!
//! `tests/fixtures/upgrade` has a folder for each version, which its own binary made with `make.sh`.

use crate::{
    durability::{Process, tiny_model},
    harness::{client, repository},
};
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// The fixtures of one version, beside a folder for what a test makes of them.
struct Version {
    fixtures: PathBuf,
    scratch: TempDir,
}

impl Version {
    /// Returns all versions that have fixtures.
    fn all() -> Vec<Version> {
        let folder = repository().join("tests/fixtures/upgrade");
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let found: Vec<_> = entries
            .filter(|path| path.is_dir())
            .map(|fixtures| Version { fixtures, scratch: tempfile::tempdir().unwrap() })
            .collect();
        assert!(!found.is_empty());
        found
    }

    fn fixture(&self, name: &str) -> String {
        self.fixtures.join(name).display().to_string()
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.fixtures.join(name)).unwrap().trim().to_owned()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn unpack(&self, archive: &str) {
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(self.fixtures.join(archive)).arg("-C").arg(self.scratch.path());
        assert!(tar.status().unwrap().success(), "{archive}");
    }

    /// Starts a host of this build with the version's settings, and the model that the version used.
    fn host(&self, data: &str) -> Process {
        let model = self.at("tiny");
        if !model.exists() {
            fs::create_dir(&model).unwrap();
            tiny_model(&model);
        }
        Process::configured(&self.fixtures.join("skep.toml"), &model, &self.at(data))
    }
}

/// Runs a command, which must succeed, and returns what it prints.
fn skep(host: &Process, key: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).env("SKEP_URL", &host.url).env("SKEP_API_KEY", key).stdin(Stdio::null());
    let output = command.output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns one field of each element of a list that a command prints.
fn listed(host: &Process, key: &str, arguments: &[&str], field: &str) -> Vec<String> {
    let list: Value = serde_json::from_str(&skep(host, key, &[arguments, &["--json"]].concat())).unwrap();
    let elements = list.as_array().unwrap_or_else(|| panic!("{list}"));
    let mut found: Vec<_> =
        elements.iter().map(|element| element[field].as_str().unwrap().to_owned()).collect();
    found.sort();
    found
}

#[test]
fn data_folders_of_every_version_are_served() {
    for version in Version::all() {
        version.unpack("data.tar.gz");
        let host = version.host("data");
        let (admin, acme) = (version.text("admin.key"), version.text("acme.key"));
        assert_eq!(listed(&host, &admin, &["list"], "name"), ["hello"]);
        assert_eq!(listed(&host, &admin, &["session", "list", "hello"], "id"), ["ada", "bo"]);
        assert_eq!(listed(&host, &acme, &["session", "list", "hello"], "id"), ["ada"]);
        assert_eq!(listed(&host, &admin, &["schedule", "list"], "name"), ["leap-day"]);
        assert_eq!(listed(&host, &admin, &["key", "list"], "name"), ["operator", "shop"]);
        assert_eq!(listed(&host, &admin, &["secret", "list"], "name"), ["API_KEY"]);
        let before = skep(&host, &admin, &["session", "show", "hello", "ada"]);
        assert!(before.contains("Hello, I am Ada.") && before.contains("What did I say?"), "{before}");

        // The stored components answer, in both of their versions, and in the sessions that they had.
        let said = skep(&host, &admin, &["invoke", "hello", "Hello again.", "--session", "ada"]);
        assert!(said.contains("(visit 3)"), "{said}");
        let said = skep(&host, &acme, &["invoke", "hello", "Hello again.", "--session", "ada"]);
        assert!(said.contains("(visit 2)"), "{said}");
        skep(&host, &admin, &["rollback", "hello"]);
        let said = skep(&host, &admin, &["invoke", "hello", "Hello again.", "--session", "bo"]);
        assert!(said.contains("(visit 2)"), "{said}");
        // The use of models is counted from now on.
        let usage = skep(&host, &admin, &["usage", "--by", "session", "--json"]);
        let usage: Value = serde_json::from_str(&usage).unwrap();
        let lines = usage["data"].as_array().unwrap().iter();
        let sessions: Vec<_> = lines.filter_map(|line| line["name"].as_str()).collect();
        assert!(["acme/ada", "ada", "bo"].iter().all(|one| sessions.contains(one)), "{usage}");
        host.kill();
        let copy = format!("backup-before-schema-{}.db", skep_store::known_schema());
        assert_eq!(version.at("data").join(copy).exists(), schema(&version) < skep_store::known_schema());
    }
}

/// Rows of these tables were made by versions whose schema has at least this number. A host would delete some of them once their
/// time is over, so they are counted before one starts.
const LATER_ROWS: [(i64, &[&str]); 1] =
    [(24, &["usage", "requests", "request_bodies", "responses", "files", "file_parts", "batches"])];

#[test]
fn a_migration_keeps_the_rows_of_every_version() {
    for version in Version::all() {
        version.unpack("data.tar.gz");
        let data = version.at("data").display().to_string();
        let db = |arguments: &[&str]| {
            let skep = Command::new(env!("CARGO_BIN_EXE_skep"))
                .args([&["db"][..], arguments, &["--data", &data]].concat())
                .output()
                .unwrap();
            assert!(skep.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&skep.stderr));
            skep.stdout
        };
        db(&["migrate"]);
        let found: Value = serde_json::from_slice(&db(&["check", "--json"])).unwrap();
        let expected = LATER_ROWS.iter().filter(|(since, _)| schema(&version) >= *since);
        for table in expected.flat_map(|(_, tables)| *tables).chain(&["agents", "sessions", "secrets"]) {
            assert!(
                found["rows"][*table].as_u64() > Some(0),
                "{}: {table}: {found}",
                version.fixtures.display()
            );
        }
        assert_eq!(found["unreadable"], 0, "{found}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_and_requests_of_every_version_are_served_and_pages_under_other_names_are_removed() {
    for version in Version::all().into_iter().filter(|version| version.fixtures.join("response.id").exists())
    {
        version.unpack("data.tar.gz");
        let files = fs::read_dir(version.at("data/kv")).unwrap().map(|file| file.unwrap().path());
        let files: Vec<PathBuf> = files.filter(|file| file.extension().is_some()).collect();
        let host = tokio::task::block_in_place(|| version.host("data"));
        let key = version.text("admin.key");
        let get = async |path: &str| -> Value {
            let asked = client().get(format!("{}{path}", host.url)).bearer_auth(&key);
            let response = asked.send().await.unwrap();
            assert_eq!(response.status(), 200, "{path}");
            response.json().await.unwrap()
        };
        let response = get(&format!("/v1/responses/{}", version.text("response.id"))).await;
        // It was cut off after its four tokens.
        assert_eq!(response["status"], "incomplete", "{response}");
        assert_eq!(response["usage"]["output_tokens"], 4, "{response}");
        assert_ne!(response["output"][0]["content"][0]["text"], "", "{response}");
        assert!(!get("/v1/requests").await["data"].as_array().unwrap().is_empty());
        let kv = get("/v1/kv").await;
        assert_eq!(kv["pages_at_start"], 0, "{kv}");
        assert!(!files.is_empty() && !files.iter().any(|file| file.exists()), "{files:?}");
        host.kill();
    }
}

#[test]
fn exports_manifests_and_components_of_every_version_are_accepted() {
    for version in Version::all() {
        let data = version.at("data").display().to_string();
        let made = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["key", "create", "--role", "admin", "--data", &data])
            .output()
            .unwrap();
        let key = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let host = version.host("data");
        skep(&host, &key, &["deploy", &version.fixture("hello.wasm")]);
        assert_eq!(listed(&host, &key, &["schedule", "list"], "name"), ["leap-day"]);
        skep(&host, &key, &["session", "import", "hello", &version.fixture("session.json")]);
        let said = skep(&host, &key, &["invoke", "hello", "Hello again.", "--session", "ada"]);
        assert!(said.contains("(visit 3)"), "{said}");
        let shown = skep(&host, &key, &["session", "show", "hello", "ada"]);
        assert!(shown.contains("What did I say?") && shown.contains("Hello again."), "{shown}");
        host.kill();
    }
}

#[test]
fn backups_of_every_version_are_restored() {
    for version in Version::all() {
        version.unpack("backup.tar.gz");
        let restored = Command::new(env!("CARGO_BIN_EXE_skep"))
            .arg("restore")
            .arg(version.at("backup"))
            .arg("--data")
            .arg(version.at("restored"))
            .output()
            .unwrap();
        assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        let host = version.host("restored");
        let key = version.text("admin.key");
        assert_eq!(listed(&host, &key, &["session", "list", "hello"], "id"), ["ada", "bo"]);
        let said = skep(&host, &key, &["invoke", "hello", "Hello again.", "--session", "ada"]);
        assert!(said.contains("(visit 3)"), "{said}");
        host.kill();
    }
}

/// Returns the schema of the version's database.
fn schema(version: &Version) -> i64 {
    version.unpack("backup.tar.gz");
    let manifest = fs::read(version.at("backup").join("backup.json")).unwrap();
    serde_json::from_slice::<Value>(&manifest).unwrap()["schema"].as_i64().unwrap()
}

#[test]
fn fixtures_of_a_version_take_less_than_a_megabyte() {
    for version in Version::all() {
        let files = fs::read_dir(&version.fixtures).unwrap();
        let bytes: u64 = files.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        assert!(bytes < 1 << 20, "{}: {bytes}", version.fixtures.display());
    }
}
