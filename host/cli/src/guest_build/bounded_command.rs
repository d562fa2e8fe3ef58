//! Runs a program with a time limit: a package tool that waits for a network that is not there must not hang
//! skep.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Result of a program that has ended.
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// Returns the last line that the program wrote to stderr, or its status if it wrote none.
    pub fn last_words(&self) -> String {
        match self.stderr.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(line) => line.trim().to_owned(),
            None => self.status.to_string(),
        }
    }
}

/// Runs `command` to its end, or kills it after `limit`. Its output is captured, not shown.
pub fn run(mut command: Command, limit: Duration) -> Result<Finished> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{program}`"))?;
    let stdout = drain(child.stdout.take().context("stdout was piped")?);
    let stderr = drain(child.stderr.take().context("stderr was piped")?);
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill().ok();
            child.wait().ok();
            bail!("`{program}` did not finish within {} s", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    };
    let text = |reader: thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned()
    };
    Ok(Finished { status, stdout: text(stdout), stderr: text(stderr) })
}

fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A broken pipe ends the output; what came before is still worth showing.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_past_its_limit_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("600");
        let error = run(command, Duration::from_millis(50)).err().expect("killed").to_string();
        assert!(error.contains("`sleep` did not finish"), "{error}");
    }
}
