//! `skep bench cluster`: several hosts on one PostgreSQL database under load, while hosts are killed and stopped, their
//! connections are cut, and the database is restarted. What clients saw is compared with what the database has at the end.

mod approvals;
mod batches;
mod clients;
mod events;
mod faults;
mod history;
mod hosts;
mod takeovers;
mod ways;
mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::build_agent;
use crate::catalog;
use crate::commands::out;
use crate::database_flag::DatabaseAddress;
use crate::embedded::STORM;
use crate::failure::Usage;
use crate::progress::{Progress as _, Terminal};
use faults::{Counts, Faults};
use history::{Batch, BatchOutcome, Decision, Fault, History, Kind, Outcome, Verdict};
use hosts::{Hosts, Site};
pub use hosts::{write_keys, write_private};
use takeovers::{Cause, Times};
use world::{ANSWER, World};

/// Time after a host was added before turns are counted.
const WARM_UP: Duration = Duration::from_secs(1);
const FAULTS_SHOWN: usize = 20;

/// Run several hosts on one database, kill and stop them under load, and check that nothing is lost or doubled
///
/// Starts `skep up --cluster` in separate processes. Pairs of clients write to one session, each through any host: with
/// and without streams, detached, and cancelled. Agents call other agents, also after an approval, emit events for a webhook
/// and set alarms; other clients queue batches. First counts the turns of one host, two hosts, and so on; then kills hosts
/// (kill -9), stops them for longer than their lease, cuts and freezes their connections to each other and to the database,
/// and restarts the database. A single host is only killed and cut off. At the end, each session has to be one line of turns with every acknowledged message once, in
/// an order that real time allows, and every read has to be a beginning of it; each item of a batch has one result, and one
/// decision about a call counts. The history takes about a kilobyte for each message.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The command needs an empty PostgreSQL database, for example:
  docker run --rm -e POSTGRES_HOST_AUTH_METHOD=trust -p 5432:5432 postgres:17

Examples:
  skep bench cluster --minutes 10 --hosts 3 --database postgres://postgres@127.0.0.1:5432/postgres
  skep bench cluster --minutes 60 --database postgres://postgres@127.0.0.1/postgres \\
    --restart-database 'docker restart db' --json")]
pub struct Args {
    /// Duration of the faults; they last longer if the first one of each kind has not come by then
    #[arg(long, value_name = "M", default_value = "2", value_parser = minutes)]
    minutes: f64,
    /// Number of hosts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    hosts: u32,
    /// Empty database: postgres://USER@HOST/DATABASE
    #[arg(long, value_name = "ADDRESS")]
    database: Option<DatabaseAddress>,
    /// Shell command that restarts PostgreSQL; it runs now and then [default: the database is not restarted]
    #[arg(long, value_name = "COMMAND")]
    restart_database: Option<String>,
    /// Seconds for counting the turns of one host, two hosts, and so on
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    measure_s: u64,
    /// Pairs of clients
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pairs: u32,
    /// Seed of all random choices [default: a different one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Model of the hosts; a tiny one is the best choice
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Folder for the hosts' data, which is kept [default: a temporary one, which is kept if something went wrong]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    wall_s: f64,
    throughput: Vec<Throughput>,
    #[serde(flatten)]
    seen: Seen,
    lost: usize,
    doubled: usize,
    /// Number of violations by their kind, those that are lost or doubled included.
    violations: BTreeMap<Kind, usize>,
    first_violations: Vec<String>,
    #[serde(flatten)]
    counts: Counts,
    /// Starts of hosts after the first one of each.
    restarts: usize,
    /// From the first attempt to send a message to its acknowledgment, whatever failed meanwhile.
    answer_ms: Times,
    /// From the kill of a host to the next acknowledged turn of each of its sessions.
    take_over_ms: Times,
    /// From the stop of a host, whose lease has to run out first.
    take_over_after_stop_ms: Times,
    /// Answers that no client should get, and panics of hosts.
    troubles: usize,
    first_troubles: Vec<String>,
}

/// Committed turns of a number of hosts without faults.
#[derive(Debug, Serialize)]
struct Throughput {
    hosts: u32,
    turns_per_s: f64,
}

/// The size of the history.
#[derive(Debug, Serialize)]
struct Seen {
    sessions: usize,
    acknowledged: usize,
    /// The acknowledged messages by what their agents did.
    acknowledged_by_work: BTreeMap<&'static str, usize>,
    /// Messages whose turn failed, most of which a client had cancelled.
    failed: usize,
    /// Messages whose answer was lost, and that were not sent again.
    unknown: usize,
    reads: usize,
    effects: usize,
    effects_by_kind: BTreeMap<&'static str, usize>,
    batches: usize,
    /// Items of batches that are done, as their results say.
    batch_items: usize,
    /// Decisions about calls that a host accepted.
    decisions: usize,
}

/// Runs the command.
pub async fn run(args: Args) -> Result<()> {
    let database = match &args.database {
        Some(DatabaseAddress::Postgres(url)) => url.clone(),
        Some(DatabaseAddress::Sqlite(_)) => bail!(Usage("several hosts need a PostgreSQL database".to_owned())),
        None => bail!(Usage(
            "no database is named\n  hint: start one, `docker run --rm -e POSTGRES_HOST_AUTH_METHOD=trust -p 5432:5432 \
             postgres:17`, and name it: --database postgres://postgres@127.0.0.1:5432/postgres"
                .to_owned()
        )),
    };
    let (folder, temporary) = match &args.folder {
        Some(folder) => (folder.clone(), None),
        None => {
            let temporary = tempfile::Builder::new().prefix("skep-cluster-").tempdir()?;
            (temporary.path().to_owned(), Some(temporary))
        }
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let report = measure(&args, &database, folder).await;
    if !report.as_ref().is_ok_and(Report::is_well) {
        keep(temporary);
    }
    let report = report?;
    if args.json {
        out::json(&report)?;
    } else {
        for_people(&report)?;
    }
    report.verdict()
}

fn keep(temporary: Option<TempDir>) {
    if let Some(temporary) = temporary {
        let kept = temporary.keep();
        eprintln!("  the data folders, the log and the configuration are in {}", kept.display());
    }
}

async fn measure(args: &Args, database: &str, folder: PathBuf) -> Result<Report> {
    let seed = args.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000));
    let component = build_agent(&STORM)?;
    let model = catalog::resolve(&args.model, &Terminal)?.path;
    let model = model.to_str().context("the model's path is not UTF-8")?.to_owned();
    let run = format!("r{:x}", rand::rng().random::<u32>());
    let world = World::new(run).await?;
    let site = Site { folder, model, database: database.to_owned(), outside: world.outside.url.clone() };
    hosts::write_keys(&site.folder)?;
    let began = Instant::now();
    let mut hosts = Hosts::new(site.clone(), Arc::clone(&world.addresses), world.http.clone());
    hosts.add().await?;
    world.set_up(component).await?;
    let clients = world.load(args.pairs as usize, seed);
    let mut deciders = JoinSet::new();
    deciders.spawn(Arc::clone(&world).decide(StdRng::seed_from_u64(seed)));
    let throughput = count(args, &world, &mut hosts).await?;
    let wait = Duration::from_secs_f64(args.minutes * 60.0);
    let step = Terminal.count(&format!("faults, with seed {seed}"), wait.as_secs());
    let faults = Faults::new(
        &mut hosts,
        Arc::clone(&world),
        StdRng::seed_from_u64(seed),
        args.restart_database.as_deref(),
    );
    let counts = faults.run(Instant::now() + wait).await?;
    let cuts = counts.peer_cuts + counts.database_cuts;
    step.finish(&format!("{} kills, {} stops, {cuts} cuts", counts.kills, counts.stops));
    end(&world, clients).await?;
    let history = world.history().await?;
    deciders.shutdown().await;
    let faults = history.faults();
    let (mut troubles, mut first_troubles) = world.troubles();
    let log = std::fs::read_to_string(site.log()).unwrap_or_default();
    let panics: Vec<String> =
        log.lines().filter(|line| line.contains("panicked at")).map(|line| format!("log: {line}")).collect();
    troubles += panics.len();
    first_troubles.extend(panics.into_iter().take(FAULTS_SHOWN));
    let of_kind = |is: fn(Kind) -> bool| faults.iter().filter(|fault| is(fault.kind)).count();
    Ok(Report {
        seed,
        wall_s: began.elapsed().as_secs_f64(),
        throughput,
        seen: Seen::of(&history, world.acknowledged_by_op()),
        lost: of_kind(Kind::is_loss),
        doubled: of_kind(Kind::is_double),
        violations: by_kind(&faults),
        first_violations: faults.iter().take(FAULTS_SHOWN).map(ToString::to_string).collect(),
        counts,
        restarts: hosts.restarts,
        answer_ms: Times::of(history.answer_times_ms()),
        take_over_ms: world.takeovers.times(Cause::Killed),
        take_over_after_stop_ms: world.takeovers.times(Cause::Stopped),
        troubles,
        first_troubles,
    })
}

/// Counts the turns of one host, two hosts, and so on.
async fn count(args: &Args, world: &World, hosts: &mut Hosts) -> Result<Vec<Throughput>> {
    let mut throughput = Vec::new();
    for number in 1..=args.hosts {
        if number > 1 {
            hosts.add().await?;
        }
        tokio::time::sleep(WARM_UP).await;
        let (before, began) = (world.acknowledged(), Instant::now());
        tokio::time::sleep(Duration::from_secs(args.measure_s)).await;
        let turns = world.acknowledged() - before;
        throughput
            .push(Throughput { hosts: number, turns_per_s: turns as f64 / began.elapsed().as_secs_f64() });
    }
    Ok(throughput)
}

/// Waits until the clients have finished.
async fn end(world: &World, mut clients: JoinSet<()>) -> Result<()> {
    world.end();
    let finished = async {
        while clients.join_next().await.transpose()?.is_some() {}
        Ok::<_, anyhow::Error>(())
    };
    tokio::time::timeout(2 * ANSWER, finished).await.context("a client got no answer")?
}

fn by_kind(faults: &[Fault]) -> BTreeMap<Kind, usize> {
    let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
    for fault in faults {
        *kinds.entry(fault.kind).or_default() += 1;
    }
    kinds
}

impl Seen {
    fn of(history: &History, acknowledged_by_work: BTreeMap<&'static str, usize>) -> Self {
        let outcomes =
            |is: fn(&Outcome) -> bool| history.messages.iter().filter(|message| is(&message.outcome)).count();
        let mut effects_by_kind: BTreeMap<&'static str, usize> = BTreeMap::new();
        for effect in &history.effects {
            *effects_by_kind.entry(effect.kind).or_default() += effect.seen;
        }
        let done = |batch: &Batch| match &batch.outcome {
            BatchOutcome::Ended(rows) => rows.iter().filter(|row| row.is_done).count(),
            BatchOutcome::Unknown | BatchOutcome::Gone => 0,
        };
        let is_accepted = |decision: &&Decision| decision.verdict == Verdict::Accepted;
        Self {
            sessions: history.lines.len(),
            acknowledged: outcomes(|outcome| matches!(outcome, Outcome::Acknowledged { .. })),
            failed: outcomes(|outcome| *outcome == Outcome::Failed),
            unknown: outcomes(|outcome| *outcome == Outcome::Unknown),
            reads: history.reads.len(),
            effects: effects_by_kind.values().sum(),
            acknowledged_by_work,
            effects_by_kind,
            batches: history.batches.len(),
            batch_items: history.batches.iter().map(done).sum(),
            decisions: history.decisions.iter().filter(is_accepted).count(),
        }
    }
}

impl Report {
    fn is_well(&self) -> bool {
        self.violations.is_empty() && self.troubles == 0
    }

    fn verdict(&self) -> Result<()> {
        let Self { lost, doubled, violations, troubles, seed, .. } = self;
        if self.is_well() {
            return Ok(());
        }
        bail!(
            "{lost} lost, {doubled} doubled, violations: {violations:?}, {troubles} other faults, with seed {seed}"
        )
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { seed, wall_s, seen, lost, doubled, counts, restarts, .. } = report;
    let Seen { sessions, acknowledged, failed, unknown, reads, batches, batch_items, decisions, .. } = seen;
    out::line(&format!(
        "{acknowledged} turns acknowledged in {wall_s:.0} s with seed {seed}: {lost} lost, {doubled} doubled"
    ))?;
    out::line(&format!(
        "  {sessions} sessions, {failed} messages failed, {unknown} with an unknown outcome, {reads} reads, \
         {batches} batches with {batch_items} items done, {decisions} decisions"
    ))?;
    let (turns, effects) = (listed(&seen.acknowledged_by_work), listed(&seen.effects_by_kind));
    out::line(&format!("  turns: {turns}; effects: {effects}"))?;
    let Counts { kills, stops, partitions, pauses, database_restarts, replaced, .. } = counts;
    let Counts { peer_cuts, database_cuts, peer_freezes, database_freezes, .. } = counts;
    out::line(&format!(
        "  {kills} kills, {stops} stops, {partitions} partitions, {pauses} pauses, {database_restarts} restarts of the \
         database; {replaced} hosts replaced, {restarts} restarted"
    ))?;
    out::line(&format!(
        "  connections: {peer_cuts} cuts and {peer_freezes} freezes between hosts, {database_cuts} and \
         {database_freezes} to the database"
    ))?;
    let Times { p50, p99, longest, .. } = &report.answer_ms;
    out::line(&format!("  time to an answer: p50 {p50:.0} ms, p99 {p99:.0} ms, longest {longest:.0} ms"))?;
    for (what, times) in [("a kill", &report.take_over_ms), ("a stop", &report.take_over_after_stop_ms)] {
        let Times { count, p50, p99, longest } = times;
        if *count > 0 {
            out::line(&format!(
                "  take-over after {what}: p50 {p50:.0} ms, p99 {p99:.0} ms, longest {longest:.0} ms of {count} sessions"
            ))?;
        }
    }
    let rows: Vec<_> = report
        .throughput
        .iter()
        .map(|Throughput { hosts, turns_per_s }| [hosts.to_string(), format!("{turns_per_s:.1}")])
        .collect();
    out::table(["HOSTS", "TURNS/S"], &rows)?;
    for fault in report.first_violations.iter().chain(&report.first_troubles) {
        out::line(&format!("  {fault}"))?;
    }
    Ok(())
}

/// Returns counts as "3 calls" and so on.
fn listed(counts: &BTreeMap<&'static str, usize>) -> String {
    let counts: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    counts.join(", ")
}

/// Parses a time in minutes, which may have a fraction.
fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.05..=240.0).contains(&minutes) => Ok(minutes),
        _ => Err("it must be between 0.05 and 240 minutes".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_in_minutes_is_bounded() {
        assert_eq!(["0.5", "240"].map(minutes), [Ok(0.5), Ok(240.0)]);
        for wrong in ["0", "-1", "241", "NaN", "inf", "ten"] {
            assert!(minutes(wrong).is_err_and(|error| error.contains("between 0.05 and 240")), "{wrong}");
        }
    }
}
