//! `skep bench store`: committed turns a second with the database in a file and in PostgreSQL, of one host and of two, and how
//! often a turn waits for the server.
//!
//! Everything runs in this process, without HTTP and without inference. Round trips are counted in runs of their own by a proxy
//! between the hosts and the server, because it costs time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::future::BoxFuture;
use rand::RngExt as _;
use serde::Serialize;
use skep_engine::ModelSet;
use skep_runtime::{
    AgentHost, GenerationEvents, HostParts, Member, PeerError, PeerGeneration, PeerInvocation, Peers,
    RemoteRun, RuntimeError, RuntimeOptions, TurnAddress, placement::Placement,
};
use skep_store::{Durability, Store};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::proxy::{Proxy, at, server_of};
use super::{super::out, build_agent, stand};
use crate::catalog;
use crate::database_flag::DatabaseAddress;
use crate::embedded::NOOP;
use crate::failure::Usage;

const AGENT: &str = "bench-noop";
/// Maximum number of turns that run at the same time at one host.
const MAX_INSTANCES: usize = 256;
/// Maximum time before turns are counted.
const WARM_UP: Duration = Duration::from_secs(1);
const DRAIN: Duration = Duration::from_secs(10);

/// Measure committed turns with the database in a file and in PostgreSQL, with one host and with two
///
/// All sessions run an agent that does no inference, one turn after the other, in one process without HTTP. Each database is
/// measured once with commits that wait for the disk and once without: the process may be killed in both cases, but the
/// machine of the database may lose its power only in the first. A host always waits for the disk of PostgreSQL.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
To measure PostgreSQL as well, name an empty database, such as one of this server:
  docker run --rm -e POSTGRES_HOST_AUTH_METHOD=trust -p 5432:5432 postgres:17

Examples:
  skep bench store
  skep bench store --database postgres://postgres@127.0.0.1:5432/postgres --sessions 128 --json")]
pub struct Args {
    /// Empty database: postgres://USER@HOST/DATABASE [default: only a file is measured]
    #[arg(long, value_name = "ADDRESS")]
    database: Option<DatabaseAddress>,
    /// Duration of each measurement
    #[arg(long, value_name = "S", default_value = "5", value_parser = seconds)]
    seconds: f64,
    /// Sessions that run at the same time, at all hosts together
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=1024))]
    sessions: u32,
    /// Folder for the database in a file [default: a temporary one]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Model that the hosts load, although no turn uses it
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    sessions: u32,
    rates: Vec<Rate>,
}

/// The committed turns of hosts on one database.
#[derive(Debug, Serialize)]
struct Rate {
    database: &'static str,
    hosts: usize,
    /// Whether a commit waits for the disk of the database.
    waits_for_disk: bool,
    turns_per_s: f64,
    /// Mean number of times that a turn waits for the server. `null` for a file, and for a server that is not reached through TCP.
    round_trips_per_turn: Option<f64>,
}

/// A database, as it is opened for one measurement.
#[derive(Clone, Copy)]
enum Place<'a> {
    File,
    Server(&'a str),
}

/// Everything that the measurements share.
struct Bench {
    models: ModelSet,
    component: Vec<u8>,
    folder: TempDir,
    sessions: u32,
    duration: Duration,
}

struct Running {
    host: AgentHost,
    store: Store,
}

/// The turns of one measurement.
struct Counted {
    turns: u64,
    elapsed: Duration,
    round_trips: u64,
}

/// Reaches no other host. None is asked for anything, because each host uses sessions of its own.
struct Nobody;

impl Peers for Nobody {
    fn invoke(&self, _: Member, _: PeerInvocation) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        Box::pin(async { Err(unreached()) })
    }

    fn follow(&self, _: Member, _: TurnAddress) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        Box::pin(async { Err(unreached()) })
    }

    fn cancel(&self, _: Member, _: TurnAddress) -> BoxFuture<'static, Result<(), PeerError>> {
        Box::pin(async { Err(unreached()) })
    }

    fn generate(
        &self,
        _: Member,
        _: PeerGeneration,
    ) -> BoxFuture<'static, Result<GenerationEvents, PeerError>> {
        Box::pin(async { Err(unreached()) })
    }
}

fn unreached() -> PeerError {
    PeerError::Unreached("the hosts of a measurement do not ask each other".to_owned())
}

/// Measures all databases, and prints a table.
pub async fn run(args: Args) -> Result<()> {
    let server = match &args.database {
        Some(DatabaseAddress::Postgres(url)) => Some(url.as_str()),
        Some(DatabaseAddress::Sqlite(_)) => {
            bail!(Usage("the database has to be one of PostgreSQL; --folder says where a file is".to_owned()))
        }
        None => None,
    };
    let parent = args.folder.clone().unwrap_or_else(std::env::temp_dir);
    let folder = tempfile::Builder::new().prefix("skep-store-").tempdir_in(&parent);
    let bench = Bench {
        models: stand::models(&args.model)?,
        component: build_agent(&NOOP)?,
        folder: folder.with_context(|| format!("cannot create a folder in {}", parent.display()))?,
        sessions: args.sessions,
        duration: Duration::from_secs_f64(args.seconds),
    };
    let mut rates = Vec::new();
    for durability in [Durability::Process, Durability::Power] {
        rates.push(bench.rate(Place::File, 1, durability).await?);
    }
    if let Some(url) = server {
        for durability in [Durability::Process, Durability::Power] {
            for hosts in [1, 2] {
                rates.push(bench.rate(Place::Server(url), hosts, durability).await?);
            }
        }
    }
    let report = Report { sessions: args.sessions, rates };
    if args.json { out::json(&report) } else { for_people(&report) }
}

impl Bench {
    async fn rate(&self, place: Place<'_>, hosts: usize, durability: Durability) -> Result<Rate> {
        let Counted { turns, elapsed, .. } = self.count(place, hosts, durability, None).await?;
        let turns_per_s = turns as f64 / elapsed.as_secs_f64();
        let (database, server) = match place {
            Place::File => ("SQLite", None),
            Place::Server(url) => ("PostgreSQL", server_of(url).map(|server| (url, server))),
        };
        let round_trips_per_turn = match server {
            Some((url, server)) => {
                let proxy = Proxy::start(server).await?;
                let url = at(url, proxy.address)?;
                let counted = self.count(Place::Server(&url), hosts, durability, Some(&proxy)).await?;
                Some(counted.round_trips as f64 / counted.turns.max(1) as f64)
            }
            None => None,
        };
        let waits_for_disk = durability == Durability::Power;
        Ok(Rate { database, hosts, waits_for_disk, turns_per_s, round_trips_per_turn })
    }

    /// Runs turns in all sessions, and counts them after a while.
    async fn count(
        &self,
        place: Place<'_>,
        hosts: usize,
        durability: Durability,
        proxy: Option<&Proxy>,
    ) -> Result<Counted> {
        let running = self.start(place, hosts, durability).await?;
        let (committed, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        // Sessions of other runs are in the same database.
        let run = format!("{:x}", rand::rng().random::<u64>());
        let mut load = JoinSet::new();
        for number in 0..self.sessions {
            let host = running[number as usize % hosts].host.clone();
            let (committed, ends, session) = (committed.clone(), ends.clone(), format!("{run}-{number}"));
            load.spawn(async move {
                while !ends.load(Ordering::Acquire) {
                    stand::turn(&host, AGENT, &session, "ping").await?;
                    committed.fetch_add(1, Ordering::AcqRel);
                }
                Ok::<_, RuntimeError>(())
            });
        }
        tokio::time::sleep(WARM_UP.min(self.duration)).await;
        let now = || (committed.load(Ordering::Acquire), proxy.map_or(0, Proxy::round_trips));
        let (before, began) = (now(), Instant::now());
        tokio::time::sleep(self.duration).await;
        let (after, elapsed) = (now(), began.elapsed());
        ends.store(true, Ordering::Release);
        for ended in load.join_all().await {
            ended.context("a turn failed")?;
        }
        for Running { host, store } in running {
            host.drain(DRAIN).await;
            store.close().await;
        }
        Ok(Counted { turns: after.0 - before.0, elapsed, round_trips: after.1 - before.1 })
    }

    async fn start(&self, place: Place<'_>, hosts: usize, durability: Durability) -> Result<Vec<Running>> {
        let mut running = Vec::new();
        for number in 1..=hosts {
            let store = match place {
                Place::File => {
                    let file = format!("{durability:?}.db");
                    Store::open(&self.folder.path().join(file), durability).await?
                }
                Place::Server(url) => {
                    // Nobody asks for anything there.
                    let own = (hosts > 1).then(|| format!("http://127.0.0.1:{number}"));
                    Store::connect_to_measure(url, own.as_deref(), durability).await?
                }
            };
            let peers = store.is_clustered().then(|| Arc::new(Nobody) as Arc<dyn Peers>);
            let parts = HostParts { peers, ..HostParts::new(store.clone(), self.models.clone()) };
            let options = RuntimeOptions {
                artifact_dir: Some(self.folder.path().join("artifacts")),
                max_instances: MAX_INSTANCES,
                placement: Placement::Here,
                ..RuntimeOptions::default()
            };
            running.push(Running { host: AgentHost::start(parts, options).await?, store });
        }
        stand::deploy(&running[0].host, &format!("name = \"{AGENT}\""), &self.component).await?;
        Ok(running)
    }
}

fn for_people(report: &Report) -> Result<()> {
    out::line(&format!(
        "turns of an agent without inference, in {} sessions at the same time",
        report.sessions
    ))?;
    let rows: Vec<[String; 5]> = report
        .rates
        .iter()
        .map(|rate| {
            let waits = if rate.waits_for_disk { "waits for the disk" } else { "does not wait" };
            let trips = rate.round_trips_per_turn;
            let trips = trips.map_or_else(|| "-".to_owned(), |trips| format!("{trips:.2}"));
            let (hosts, turns) = (rate.hosts.to_string(), format!("{:.0}", rate.turns_per_s));
            [rate.database.to_owned(), hosts, waits.to_owned(), turns, trips]
        })
        .collect();
    out::table(["DATABASE", "HOSTS", "COMMIT", "TURNS/S", "ROUND TRIPS/TURN"], &rows)
}

/// Parses a time in seconds, which may have a fraction.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=600.0).contains(&seconds) => Ok(seconds),
        _ => Err("it must be between 0.1 and 600 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_in_seconds_is_bounded() {
        assert_eq!(["0.1", "600"].map(seconds), [Ok(0.1), Ok(600.0)]);
        for wrong in ["0", "-1", "601", "NaN", "inf", "ten"] {
            assert!(seconds(wrong).is_err_and(|error| error.contains("between 0.1 and 600")), "{wrong}");
        }
    }
}
