//! A host in its own process, whose `skep.toml` a test rewrites while it runs.

use crate::{durability::tiny_model, harness::Host};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// A host in its own process, which is killed when the test finishes.
pub struct Up {
    child: Child,
    folder: TempDir,
    pub host: Host,
}

impl Up {
    /// Starts a host with the model `small` and this `skep.toml`.
    pub fn start(toml: &str) -> Up {
        let folder = tempfile::tempdir().unwrap();
        tiny_model(folder.path());
        fs::write(folder.path().join("skep.toml"), toml).unwrap();
        Up::run(folder, &["--config", "skep.toml"])
    }

    pub fn run(folder: TempDir, arguments: &[&str]) -> Up {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--ephemeral", "--listen", "127.0.0.1:0", "--threads", "1"])
            .args(arguments)
            .current_dir(folder.path())
            .env("LIBRARY_TOKEN", "from-the-environment")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let address = |line: String| {
            line.split_whitespace().find(|word| word.starts_with("http://")).map(str::to_owned)
        };
        let url = lines.find_map(address);
        let url = url.unwrap_or_else(|| panic!("{}", fs::read_to_string(folder.path().join("log")).unwrap()));
        std::thread::spawn(move || lines.for_each(drop));
        Up { child, folder, host: Host::elsewhere(url.trim_end_matches('/').to_owned()) }
    }

    /// Returns the path of the host's `skep.toml`.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("skep.toml")
    }

    pub fn write(&self, toml: &str) {
        fs::write(self.file(), toml).unwrap();
    }

    /// Writes the file and has it read again.
    pub async fn reload(&self, toml: &str) -> Value {
        self.write(toml);
        let (status, answer) = self.host.post("/v1/config/reload", json!(null)).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    pub fn skep(&self, arguments: &[&str]) -> Output {
        skep(arguments, &["--url", &self.host.url])
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Sends SIGHUP and waits until the log has this text.
    pub async fn hang_up(&self, text: &str) -> String {
        let sent = Command::new("kill").args(["-HUP", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        until(async || Some(self.log()).filter(|log| log.contains(text))).await
    }

    /// Returns the processes of MCP servers that the host has started.
    pub fn servers(&self) -> Vec<u32> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let ids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
        let is_ours = |id: &u32| {
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            let parent =
                stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)?.parse::<u32>().ok());
            let is_live = !stat.contains(") Z ");
            parent == Some(self.child.id()) && is_live
        };
        ids.filter(is_ours).collect()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn skep(arguments: &[&str], more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).args(more).env("NO_COLOR", "1").stdin(Stdio::null()).output().unwrap()
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Waits until this is something.
pub async fn until<T>(what: impl AsyncFn() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = what().await {
            return found;
        }
        assert!(Instant::now() < end, "it did not happen in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the changes of an answer as lines, as the command line prints them.
pub fn changes(answer: &Value, list: &str) -> Vec<String> {
    let changes = answer[list].as_array().unwrap().iter();
    let line = |change: &Value| {
        serde_json::from_value::<skep_api::SettingChange>(change.clone()).unwrap().to_string()
    };
    changes.map(line).collect()
}
