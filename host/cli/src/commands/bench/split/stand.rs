//! The hosts of the measurement: processes of `skep up` on one database, each pinned to CPUs of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::process::Command;

use super::super::cluster::{write_keys, write_private};
use super::super::storm::{Life, Startup};

/// Time in which hosts get to know each other.
const MEETING: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The folder and the model that all hosts share.
#[derive(Debug)]
pub struct Stand {
    folder: PathBuf,
    model: PathBuf,
    started: usize,
}

/// A running host.
pub struct Host {
    life: Life,
    http: reqwest::Client,
}

impl Stand {
    /// Writes the keys and the settings of the hosts.
    pub fn new(folder: PathBuf, model: PathBuf, database: &str, prefill_tokens: u32) -> Result<Self> {
        write_keys(&folder)?;
        let database = toml::Value::from(database);
        let settings = format!(
            "database = {database}\n[secrets]\nkey_file = \"secrets.key\"\n[cluster]\nenabled = true\n\
             key_file = \"cluster.key\"\nprefill_tokens = {prefill_tokens}\n[kv]\ndisk_gb = 0\n"
        );
        // The address of the database may contain a password.
        write_private(&folder.join("skep.toml"), settings.as_bytes())?;
        Ok(Stand { folder, model, started: 0 })
    }

    /// Starts a host with this role, whose threads stay on these CPUs.
    pub async fn start(&mut self, role: &str, cpus: &[usize]) -> Result<Host> {
        self.started += 1;
        let list: Vec<String> = cpus.iter().map(usize::to_string).collect();
        let mut command = Command::new("taskset");
        command.args(["-c", &list.join(",")]);
        command.arg(std::env::current_exe().context("cannot find this program")?);
        command.args(["up", "--device", "cpu", "--log-level", "error", "--listen", "127.0.0.1:0"]);
        command.args(["--role", role, "--threads", &cpus.len().to_string(), "--model"]).arg(&self.model);
        command.arg("--data").arg(self.folder.join(format!("host-{}", self.started)));
        command.arg("--config").arg(self.folder.join("skep.toml"));
        let started = Startup::run(command, &self.log());
        let started = started.context("taskset cannot be run\n  hint: it is part of util-linux")?;
        let life = started.ready().await.with_context(|| {
            format!("the host with the role {role} does not start; its log is {}", self.log().display())
        })?;
        Ok(Host { life, http: reqwest::Client::new() })
    }

    fn log(&self) -> PathBuf {
        self.folder.join("host.log")
    }
}

impl Host {
    /// Returns the address of the host.
    pub fn url(&self) -> &str {
        &self.life.url
    }

    /// Waits until the host knows a host with this role that has started.
    pub async fn knows(&self, role: &str) -> Result<()> {
        let until = Instant::now() + MEETING;
        loop {
            let listed: Value =
                self.http.get(format!("{}/v1/cluster", self.life.url)).send().await?.json().await?;
            let hosts = listed["hosts"].as_array().map(Vec::as_slice).unwrap_or_default();
            if hosts.iter().any(|host| host["role"] == role) {
                return Ok(());
            }
            if Instant::now() >= until {
                bail!("the host at {} does not see the one with the role {role}: {listed}", self.life.url);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns how often prompts were computed elsewhere, by the outcome.
    pub async fn prefills(&self) -> Result<Vec<(String, u64)>> {
        let text = self.http.get(format!("{}/metrics", self.life.url)).send().await?.text().await?;
        Ok(outcomes(&text))
    }

    /// Ends the host.
    pub async fn stop(self) -> Result<()> {
        self.life.kill().await
    }
}

/// Returns the counts of orders by their outcome that are not zero.
fn outcomes(metrics: &str) -> Vec<(String, u64)> {
    let series =
        metrics.lines().filter_map(|line| line.strip_prefix("skep_cluster_prefills_total{outcome=\""));
    let counts = series.filter_map(|rest| {
        let (outcome, value) = rest.split_once("\"}")?;
        Some((outcome.to_owned(), value.trim().parse::<f64>().ok()? as u64))
    });
    counts.filter(|(_, count)| *count > 0).collect()
}

/// Returns the CPUs that this process may use, in order.
pub fn allowed_cpus() -> Result<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpus = list.and_then(|list| parsed(list.trim()));
    cpus.filter(|cpus| !cpus.is_empty()).context("/proc/self/status does not say which CPUs may be used")
}

/// Reads a list such as `0-3,8`.
fn parsed(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        for (list, expected) in [("0", vec![0]), ("0-3,8", vec![0, 1, 2, 3, 8]), ("5,7-8", vec![5, 7, 8])] {
            assert_eq!(parsed(list), Some(expected), "{list}");
        }
        assert_eq!((parsed(""), parsed("a-b")), (None, None));
    }

    #[test]
    fn outcomes_that_happened_are_counted() {
        let text = "# TYPE skep_cluster_prefills_total counter\nskep_cluster_prefills_total{outcome=\"used\"} 7\n\
                    skep_cluster_prefills_total{outcome=\"full\"} 0\nskep_cluster_prefills_total{outcome=\"late\"} 1\n\
                    skep_cluster_prefills_served_total{outcome=\"accepted\"} 3\n";
        assert_eq!(outcomes(text), [("used".to_owned(), 7), ("late".to_owned(), 1)]);
    }
}
