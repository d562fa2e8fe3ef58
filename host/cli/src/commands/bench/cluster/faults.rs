//! The faults under load: a host is killed, stopped for longer than its lease, or paused for less, and the
//! database is restarted. A host that has exited is started again.

use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::RngExt as _;
use rand::rngs::StdRng;
use serde::Serialize;
use tokio::process::Command;

use super::hosts::Hosts;
use super::takeovers::Cause;
use super::world::World;

/// Time after which a host that was not heard of is replaced.
const LEASE_MS: u64 = 10_000;
/// Time in which a host that was replaced exits once it runs again.
const EXIT: Duration = Duration::from_secs(15);
const RESTART: Duration = Duration::from_secs(60);
/// Status of a host that exits because it was replaced.
const REPLACED: i32 = 1;
/// The first faults, so that a short run has each kind of them.
const OPENING: [Fault; 5] = [Fault::Stop, Fault::Kill, Fault::Database, Fault::Kill, Fault::Pause];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP for longer than the lease, and SIGCONT.
    Stop,
    /// SIGSTOP and SIGCONT within the lease, after which the host works as before.
    Pause,
    /// A restart of PostgreSQL.
    Database,
}

/// How often each fault happened.
#[derive(Debug, Default, Serialize)]
pub struct Counts {
    pub kills: usize,
    pub stops: usize,
    pub pauses: usize,
    pub database_restarts: usize,
    /// Hosts that exited because another one had replaced them.
    pub replaced: usize,
}

/// The faults of one run.
pub struct Faults<'a> {
    hosts: &'a mut Hosts,
    world: Arc<World>,
    draws: StdRng,
    /// Shell command that restarts the database.
    restart_database: Option<&'a str>,
    opening: VecDeque<Fault>,
    /// The place of a host that is stopped, and the moment at which it continues.
    stopped: Option<(usize, Instant)>,
    counts: Counts,
}

impl<'a> Faults<'a> {
    /// Creates the faults of one run. The draws decide which come, and when.
    pub fn new(
        hosts: &'a mut Hosts,
        world: Arc<World>,
        draws: StdRng,
        restart_database: Option<&'a str>,
    ) -> Self {
        let (opening, counts) = (OPENING.into(), Counts::default());
        Self { hosts, world, draws, restart_database, opening, stopped: None, counts }
    }

    /// Causes one fault after the other until this moment, and leaves all hosts running.
    pub async fn run(mut self, until: Instant) -> Result<Counts> {
        loop {
            let pause = Duration::from_millis(self.draws.random_range(500..2_500));
            tokio::time::sleep(pause.min(until.saturating_duration_since(Instant::now()))).await;
            self.revive().await?;
            if Instant::now() >= until {
                break;
            }
            if self.stopped.is_some_and(|(_, due)| Instant::now() >= due) {
                self.resume().await?;
            }
            match self.draw(until) {
                Fault::Kill => self.kill().await?,
                Fault::Stop => self.stop().await?,
                Fault::Pause => self.pause().await?,
                Fault::Database => self.restart_database().await?,
            }
        }
        if let Some((_, due)) = self.stopped {
            tokio::time::sleep(due.saturating_duration_since(Instant::now())).await;
            self.resume().await?;
        }
        self.revive().await?;
        Ok(self.counts)
    }

    fn draw(&mut self, until: Instant) -> Fault {
        let fault = self.opening.pop_front().unwrap_or_else(|| match self.draws.random_range(0..10) {
            0..5 => Fault::Kill,
            5 | 6 => Fault::Stop,
            7 | 8 => Fault::Pause,
            _ => Fault::Database,
        });
        let has_time = until.saturating_duration_since(Instant::now()) > Duration::from_millis(LEASE_MS);
        match fault {
            Fault::Database if self.restart_database.is_none() => Fault::Kill,
            Fault::Stop if self.stopped.is_some() || !has_time => Fault::Kill,
            fault => fault,
        }
    }

    /// Returns the place of a host that may fail, so that at least one other is left.
    fn victim(&mut self) -> Option<usize> {
        let stopped = self.stopped.map(|(place, _)| place);
        let mut places = self.hosts.running();
        places.retain(|place| Some(*place) != stopped);
        match places.len() {
            0 | 1 => None,
            count => Some(places[self.draws.random_range(0..count)]),
        }
    }

    async fn kill(&mut self) -> Result<()> {
        let Some(place) = self.victim() else { return Ok(()) };
        let url = self.hosts.url(place).context("the host has an address")?;
        let since = Instant::now();
        self.hosts.kill(place).await?;
        self.world.takeovers.lost(&url, since, Cause::Killed);
        self.counts.kills += 1;
        tokio::time::sleep(Duration::from_millis(self.draws.random_range(0..1_500))).await;
        self.hosts.restart(place).await
    }

    async fn stop(&mut self) -> Result<()> {
        let Some(place) = self.victim() else { return Ok(()) };
        let url = self.hosts.url(place).context("the host has an address")?;
        let since = Instant::now();
        self.hosts.stop(place)?;
        self.world.takeovers.lost(&url, since, Cause::Stopped);
        self.counts.stops += 1;
        let beyond = Duration::from_millis(LEASE_MS + self.draws.random_range(2_000..4_000));
        self.stopped = Some((place, since + beyond));
        // A balancer needs a moment until it notices.
        tokio::time::sleep(Duration::from_millis(500)).await;
        self.hosts.hide(place);
        Ok(())
    }

    /// Lets the stopped host continue, which has been replaced by now, and has to exit.
    async fn resume(&mut self) -> Result<()> {
        let Some((place, _)) = self.stopped.take() else { return Ok(()) };
        self.hosts.resume(place)?;
        let until = Instant::now() + EXIT;
        loop {
            let ended = self.hosts.ended();
            let has_exited = ended.iter().any(|(ended, _)| *ended == place);
            self.restart(ended).await?;
            if has_exited {
                return Ok(());
            }
            if Instant::now() > until {
                let what = format!("a host that was stopped for more than {LEASE_MS} ms was not replaced");
                self.world.trouble(what);
                self.hosts.show(place);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn pause(&mut self) -> Result<()> {
        let Some(place) = self.victim() else { return Ok(()) };
        self.hosts.stop(place)?;
        self.counts.pauses += 1;
        tokio::time::sleep(Duration::from_millis(self.draws.random_range(100..2_000))).await;
        self.hosts.resume(place)
    }

    async fn restart_database(&mut self) -> Result<()> {
        let Some(line) = self.restart_database else { return Ok(()) };
        let mut command = Command::new("sh");
        // The database may keep what it inherits, so its output is not read.
        command
            .args(["-c", line])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let status = tokio::time::timeout(RESTART, command.status()).await;
        let status = status.context("the database does not restart")?.context("cannot run sh")?;
        if !status.success() {
            bail!("`{line}` failed with {status}");
        }
        self.counts.database_restarts += 1;
        Ok(())
    }

    /// Starts the hosts again that have exited.
    async fn revive(&mut self) -> Result<()> {
        let ended = self.hosts.ended();
        self.restart(ended).await
    }

    async fn restart(&mut self, ended: Vec<(usize, Option<i32>)>) -> Result<()> {
        for (place, code) in ended {
            match code {
                Some(REPLACED) => self.counts.replaced += 1,
                code => self.world.trouble(format!("a host exited by itself with the status {code:?}")),
            }
            self.hosts.restart(place).await?;
        }
        Ok(())
    }
}
