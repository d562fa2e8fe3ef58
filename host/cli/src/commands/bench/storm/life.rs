//! One life of a host: a `skep up` process on a data folder, from its start until it is killed or stopped.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// Time after which a host that has not reported its address has failed to start.
const START: Duration = Duration::from_secs(180);

/// A running host in a process of its own.
pub struct Life {
    child: Child,
    pub url: String,
    /// Time from the start of the process until it accepts requests.
    pub ready: Duration,
}

/// A process that does not listen yet.
pub struct Startup {
    child: Child,
    began: Instant,
}

impl Startup {
    /// Starts the process. Errors of the host go to `log`.
    pub fn begin(folder: &Path, model: &str, log: &Path) -> Result<Self> {
        let mut command = Self::command(model, &folder.join("data"), &folder.join("skep.toml"))?;
        command.args(["--listen", "127.0.0.1:0"]);
        Self::run(command, log)
    }

    /// Returns the command of a host with this data folder and configuration.
    pub fn command(model: &str, data: &Path, config: &Path) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.args(["up", "--threads", "1", "--log-level", "error", "--device", "cpu", "--model", model]);
        command.arg("--data").arg(data).arg("--config").arg(config);
        Ok(command)
    }

    /// Runs the command of a host. Errors of the host go to `log`.
    pub fn run(mut command: Command, log: &Path) -> Result<Self> {
        let log = std::fs::File::options().create(true).append(true).open(log);
        let log = log.context("cannot write the host's log")?;
        let began = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a host")?;
        Ok(Self { child, began })
    }

    /// Kills the process with SIGKILL before it is ready.
    pub async fn kill(mut self) -> Result<()> {
        self.child.kill().await.context("cannot kill the host")
    }

    /// Waits until the host accepts requests.
    pub async fn ready(mut self) -> Result<Life> {
        let output = self.child.stdout.take().context("the host has no output")?;
        let mut lines = BufReader::new(output).lines();
        let listens = async {
            while let Some(line) = lines.next_line().await? {
                let url = line.split_whitespace().find(|word| word.starts_with("http://"));
                if let Some(url) = url {
                    return Ok(url.trim_end_matches('/').to_owned());
                }
            }
            bail!("the host exited while it started")
        };
        let url = tokio::time::timeout(START, listens)
            .await
            .with_context(|| format!("the host did not start within {} s", START.as_secs()))??;
        let ready = self.began.elapsed();
        // Nobody reads what the host prints after that.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Life { child: self.child, url, ready })
    }
}

impl Life {
    /// Kills the process with SIGKILL: none of its code runs anymore.
    pub async fn kill(mut self) -> Result<()> {
        self.child.kill().await.context("cannot kill the host")
    }

    /// Returns whether the host exited by itself, which no host should do.
    pub fn has_ended(&mut self) -> bool {
        self.exit_status().is_some()
    }

    /// Returns the status with which the host exited, if it has.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Returns the id of the process; `None` once it has ended.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }
}
