//! The faults under load: a host is killed, stopped or cut off from its database for longer than its lease, or paused for
//! less, its connections are cut or frozen, and the database is restarted. A host that has exited is started again.

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
use super::ways::Way;
use super::world::World;

/// Time after which a host that was not heard from is replaced.
const LEASE_MS: u64 = 10_000;
/// Number of leases within which a host that is away has to be replaced. The other faults continue meanwhile, and a host that has just
/// started, or connected to the database again, replaces nobody for six seconds: so most hosts are away for one lease, and some
/// for several.
const LONGEST_LEASES: u64 = 12;
/// Time in which a host that was replaced exits once it runs again, however busy the machine is.
const EXIT: Duration = Duration::from_secs(60);
/// Time in which the database has to restart, however busy the machine is.
const RESTART: Duration = Duration::from_secs(240);
/// Time after the end within which the first faults still come, however busy the machine is.
const OPENING_TIME: Duration = Duration::from_secs(180);
/// Status of a host that exits because it was replaced.
const REPLACED: i32 = 1;
/// Maximum number of bytes after which a connection is cut in the middle of what it carries.
const CUT_WITHIN_BYTES: usize = 32 << 10;
/// The first faults, so that a short run has each kind of them, except for one that lasts as long as a stop.
const OPENING: [Fault; 9] = [
    Fault::Stop,
    Fault::Kill,
    Fault::Cut(Way::Peers),
    Fault::Cut(Way::Database),
    Fault::Database,
    Fault::Freeze(Way::Peers),
    Fault::Freeze(Way::Database),
    Fault::Kill,
    Fault::Pause,
];

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
    /// Connections of a host are cut, all of them or one in the middle of what it carries.
    Cut(Way),
    /// Connections of a host carry nothing for a moment, and stay open.
    Freeze(Way),
    /// The connections of a host to its database carry nothing for longer than the lease.
    Partition,
}

/// How often each fault happened.
#[derive(Debug, Default, Serialize)]
pub struct Counts {
    pub kills: usize,
    pub stops: usize,
    pub pauses: usize,
    pub database_restarts: usize,
    /// Cuts of the connections to a host and to the database of a host.
    pub peer_cuts: usize,
    pub database_cuts: usize,
    /// Moments in which these connections carried nothing.
    pub peer_freezes: usize,
    pub database_freezes: usize,
    /// Hosts that did not reach their database for longer than the lease.
    pub partitions: usize,
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
    away: Option<Away>,
    counts: Counts,
}

/// A host that does not renew its lease.
#[derive(Clone, Copy, Debug)]
struct Away {
    place: usize,
    /// The moment at which it continues, if it was replaced by then.
    due: Instant,
    /// The moment at which it continues in any case.
    last: Instant,
    /// Whether its process is stopped. Otherwise it does not reach its database.
    is_stopped: bool,
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
        Self { hosts, world, draws, restart_database, opening, away: None, counts }
    }

    /// Causes one fault after the other until this moment, or until the first ones have come if that takes longer, and leaves all
    /// hosts running.
    pub async fn run(mut self, until: Instant) -> Result<Counts> {
        loop {
            let longest_ms = if self.opening.is_empty() { 2_500 } else { 1_000 };
            let mut pause = Duration::from_millis(self.draws.random_range(300..longest_ms));
            if self.opening.is_empty() {
                pause = pause.min(until.saturating_duration_since(Instant::now()));
            }
            tokio::time::sleep(pause).await;
            self.revive().await?;
            let now = Instant::now();
            if now >= until && (self.opening.is_empty() || now >= until + OPENING_TIME) {
                break;
            }
            if self.is_over().await {
                self.resume().await?;
            }
            // The next fault waits until a host may fail.
            let Some(place) = self.victim() else { continue };
            match self.draw(until) {
                Fault::Kill => self.kill(place).await?,
                Fault::Stop => self.take_away(place, true).await?,
                Fault::Partition => self.take_away(place, false).await?,
                Fault::Pause => self.pause(place).await?,
                Fault::Database => self.restart_database().await?,
                Fault::Cut(way) => self.cut(place, way),
                Fault::Freeze(way) => self.freeze(place, way).await,
            }
        }
        while self.away.is_some() {
            if self.is_over().await {
                self.resume().await?;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.revive().await?;
        Ok(self.counts)
    }

    fn draw(&mut self, until: Instant) -> Fault {
        let fault = self.opening.pop_front().unwrap_or_else(|| match self.draws.random_range(0..18) {
            0..5 => Fault::Kill,
            5 => Fault::Stop,
            6 => Fault::Partition,
            7 | 8 => Fault::Pause,
            9 => Fault::Database,
            10..13 => Fault::Cut(Way::Database),
            13..16 => Fault::Cut(Way::Peers),
            16 => Fault::Freeze(Way::Database),
            _ => Fault::Freeze(Way::Peers),
        });
        let has_time = until.saturating_duration_since(Instant::now()) > Duration::from_millis(LEASE_MS);
        // Nobody replaces the only host.
        let may_be_away = self.away.is_none() && has_time && self.hosts.count() > 1;
        match fault {
            Fault::Database if self.restart_database.is_none() => Fault::Kill,
            Fault::Stop | Fault::Partition if !may_be_away => Fault::Kill,
            fault => fault,
        }
    }

    /// Returns the place of a host that may fail, so that at least one other is left if there are several.
    fn victim(&mut self) -> Option<usize> {
        let is_only = self.hosts.count() == 1;
        let away = self.away.map(|away| away.place);
        let mut places = self.hosts.running();
        places.retain(|place| Some(*place) != away);
        match places.len() {
            0 => None,
            1 if !is_only => None,
            count => Some(places[self.draws.random_range(0..count)]),
        }
    }

    async fn kill(&mut self, place: usize) -> Result<()> {
        let url = self.hosts.url(place).context("the host has an address")?;
        let since = Instant::now();
        self.hosts.kill(place).await?;
        self.world.takeovers.lost(&url, since, Cause::Killed);
        self.counts.kills += 1;
        tokio::time::sleep(Duration::from_millis(self.draws.random_range(0..1_500))).await;
        self.hosts.restart(place).await
    }

    /// Keeps a host from renewing its lease until it was replaced: it is stopped, or does not reach its database.
    async fn take_away(&mut self, place: usize, is_stopped: bool) -> Result<()> {
        let url = self.hosts.url(place).context("the host has an address")?;
        let since = Instant::now();
        match (is_stopped, self.hosts.way(place, Way::Database)) {
            (false, Some(proxy)) => {
                proxy.freeze();
                self.counts.partitions += 1;
            }
            (false, None) => return Ok(()),
            (true, _) => {
                self.hosts.stop(place)?;
                self.counts.stops += 1;
            }
        }
        self.world.takeovers.lost(&url, since, Cause::Stopped);
        let beyond = Duration::from_millis(LEASE_MS + self.draws.random_range(2_000..4_000));
        let last = since + Duration::from_millis(LONGEST_LEASES * LEASE_MS);
        self.away = Some(Away { place, due: since + beyond, last, is_stopped });
        // A balancer needs a moment until it notices.
        tokio::time::sleep(Duration::from_millis(500)).await;
        self.hosts.hide(place);
        Ok(())
    }

    /// Returns whether a host has been away for long enough.
    async fn is_over(&self) -> bool {
        let Some(Away { place, due, last, .. }) = self.away else { return false };
        let now = Instant::now();
        now >= last || now >= due && self.hosts.is_replaced(place).await
    }

    /// Lets the host continue that was away, which has been replaced by now, and has to exit.
    async fn resume(&mut self) -> Result<()> {
        let Some(Away { place, is_stopped, .. }) = self.away.take() else { return Ok(()) };
        self.hosts.thaw(place);
        if is_stopped {
            self.hosts.resume(place)?;
        }
        let until = Instant::now() + EXIT;
        loop {
            // Starting other hosts again may take longer than the time, so the last look comes after it.
            let is_late = Instant::now() > until;
            let ended = self.hosts.ended();
            let has_exited = ended.iter().any(|(ended, _)| *ended == place);
            self.restart(ended).await?;
            if has_exited {
                return Ok(());
            }
            if is_late {
                let what = match self.hosts.is_replaced(place).await {
                    true => format!("a host that was replaced did not exit within {} s", EXIT.as_secs()),
                    false => format!("a host that was away was not replaced for {LONGEST_LEASES} leases"),
                };
                self.world.trouble(what);
                self.hosts.show(place);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn pause(&mut self, place: usize) -> Result<()> {
        self.hosts.stop(place)?;
        self.counts.pauses += 1;
        tokio::time::sleep(Duration::from_millis(self.draws.random_range(100..2_000))).await;
        self.hosts.resume(place)
    }

    fn cut(&mut self, place: usize, way: Way) {
        let Some(proxy) = self.hosts.way(place, way) else { return };
        match self.draws.random_ratio(1, 2) {
            true => proxy.cut(),
            false => proxy.cut_after(self.draws.random_range(1..CUT_WITHIN_BYTES)),
        }
        match way {
            Way::Peers => self.counts.peer_cuts += 1,
            Way::Database => self.counts.database_cuts += 1,
        }
    }

    async fn freeze(&mut self, place: usize, way: Way) {
        let Some(proxy) = self.hosts.way(place, way) else { return };
        proxy.freeze();
        let longest_ms = if self.opening.is_empty() { 4_000 } else { 1_500 };
        tokio::time::sleep(Duration::from_millis(self.draws.random_range(200..longest_ms))).await;
        proxy.thaw();
        match way {
            Way::Peers => self.counts.peer_freezes += 1,
            Way::Database => self.counts.database_freezes += 1,
        }
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
            // One that does not reach its database may end before it reaches it again.
            if self.away.is_some_and(|away| away.place == place) {
                self.away = None;
            }
            self.hosts.thaw(place);
            self.hosts.restart(place).await?;
        }
        Ok(())
    }
}
