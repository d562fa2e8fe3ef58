//! `skep bench fleet`: a simulation of many hosts and sessions, with the policies that hosts and engines use.

mod balance;
mod cache;
mod costs;
mod host;
mod policy;
mod report;
mod simulation;
mod times;
mod trace;
mod workload;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::commands::out;
use crate::failure::Usage;
use costs::Costs;
use policy::Policy;
use report::{PolicyReport, Report};
use simulation::Plan;
use trace::TraceReader;
use workload::{Drawn, Sizes, Workload};

/// Share of the turns after which hosts die.
const DEATHS_AFTER: f64 = 0.6;

/// Simulate a fleet of hosts: what their caches hit, how long first tokens take, and what happens when hosts die
///
/// No model runs: the hosts are queues with the measured costs that the flags name. The code that chooses among them is
/// the one that hosts and engines use. `affinity` and `round-robin` are the router of an engine's replicas over all hosts,
/// which sees them as they are; `least-loaded` takes the host with the fewest turns; `placement` is a cluster: sessions
/// stay at one host, and begin where half a second old reports say that their agent is warm or that there is room. The
/// sessions' activity follows Zipf's law. All policies get the same turns, which depend on the seed alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench fleet
  skep bench fleet --hosts 1000 --sessions 10000000
  skep bench fleet --policy placement --load 0.9 --json
  skep bench fleet --hosts 50 --sessions 100000 --write-trace turns.jsonl
  skep bench fleet --hosts 50 --trace turns.jsonl")]
pub struct Args {
    /// Number of hosts
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: u32,
    /// Number of sessions; each takes 16 bytes
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    sessions: u32,
    /// Number of turns [default: four for each session, at most 1,000,000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    turns: Option<u64>,
    /// Number of agents
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    agents: u32,
    /// Share of the hosts' capacity that the turns use, if three quarters of their prompts are cached
    #[arg(long, value_name = "SHARE", default_value_t = 0.6, value_parser = load)]
    load: f64,
    /// Way of choosing hosts
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = Chosen::All)]
    policy: Chosen,
    /// Percentage of the hosts that die at once after 60 % of the turns
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=90))]
    deaths: u32,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    costs: Costs,
    /// Take the turns from this file: JSON lines with at_ms, agent, session, prompt_tokens and output_tokens
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sessions", "turns", "agents", "load", "write_trace"])]
    trace: Option<PathBuf>,
    /// Write the turns to this file, and simulate nothing
    #[arg(long, value_name = "FILE")]
    write_trace: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// A policy on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Chosen {
    /// The router of an engine's replicas
    Affinity,
    /// The same router, in turn
    RoundRobin,
    /// The host with the fewest turns
    LeastLoaded,
    /// The placement of sessions in a cluster
    Placement,
    /// One after the other, side by side
    All,
}

impl Chosen {
    fn policies(self) -> Vec<Policy> {
        match self {
            Chosen::Affinity => vec![Policy::Affinity],
            Chosen::RoundRobin => vec![Policy::RoundRobin],
            Chosen::LeastLoaded => vec![Policy::LeastLoaded],
            Chosen::Placement => vec![Policy::Placement],
            Chosen::All => Policy::ALL.to_vec(),
        }
    }
}

/// Runs the simulation with each policy, and prints the figures side by side.
pub fn run(args: &Args) -> Result<()> {
    if let Some(file) = &args.write_trace {
        let turns = trace::write(file, &mut workload(args)?)?;
        return out::line(&format!("{}: {}", file.display(), out::count(turns, "turn")));
    }
    let turns = match &args.trace {
        Some(_) => counted(&mut workload(args)?)?,
        None => args.turns(),
    };
    let deaths = (u64::from(args.hosts) * u64::from(args.deaths)).div_ceil(100) as u32;
    if deaths >= args.hosts {
        bail!(Usage(format!(
            "{} % of {} are all of them\n  hint: fewer --deaths, or more --hosts",
            args.deaths,
            out::count(u64::from(args.hosts), "host")
        )));
    }
    let mut policies = Vec::new();
    for policy in args.policy.policies() {
        let began = Instant::now();
        let plan = Plan {
            policy,
            hosts: args.hosts,
            costs: &args.costs,
            seed: args.seed,
            deaths,
            deaths_after: ((turns as f64 * DEATHS_AFTER) as u64).max(1),
        };
        let figures = simulation::run(plan, &mut workload(args)?)?;
        policies.push(PolicyReport::new(&plan, &figures, began.elapsed()));
    }
    let sessions = args.trace.is_none().then_some(args.sessions);
    let costs = args.costs.clone();
    let report = Report { hosts: args.hosts, sessions, turns, seed: args.seed, deaths, costs, policies };
    if args.json { out::json(&report) } else { report.print() }
}

impl Args {
    fn turns(&self) -> u64 {
        self.turns.unwrap_or_else(|| (u64::from(self.sessions) * 4).min(1_000_000))
    }
}

/// Returns the turns from their beginning.
fn workload(args: &Args) -> Result<Workload> {
    if let Some(file) = &args.trace {
        return Ok(Workload::Trace(TraceReader::open(file)?));
    }
    let sizes = Sizes {
        hosts: args.hosts,
        sessions: args.sessions,
        turns: args.turns(),
        agents: args.agents,
        load: args.load,
        seed: args.seed,
    };
    Ok(Workload::Drawn(Box::new(Drawn::new(sizes, &args.costs))))
}

fn counted(workload: &mut Workload) -> Result<u64> {
    let mut turns = 0;
    while workload.next()?.is_some() {
        turns += 1;
    }
    Ok(turns)
}

fn load(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(load) if (0.01..=10.0).contains(&load) => Ok(load),
        _ => Err("it must be a number from 0.01 to 10".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn all_policies_are_the_default_and_the_turns_follow_from_the_sessions() {
        let parse = |arguments: &[&str]| Line::try_parse_from(std::iter::once(&"fleet").chain(arguments));
        let args = parse(&["--sessions", "100"]).expect("valid").args;
        assert_eq!((args.turns(), args.policy.policies().len()), (400, 4));
        let args = parse(&["--policy", "round-robin"]).expect("valid").args;
        assert_eq!((args.turns(), args.policy.policies()), (1_000_000, vec![Policy::RoundRobin]));
        for wrong in [
            &["--policy", "random"][..],
            &["--load", "0"],
            &["--trace", "a", "--sessions", "3"],
            &["--prefill-tokens-per-s", "-1"],
            &["--hosts", "0"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_fleet_that_dies_completely_is_refused() {
        let line = Line::try_parse_from(["fleet", "--hosts", "1", "--sessions", "5"]).expect("valid");
        let error = run(&line.args).expect_err("one host is all of them").to_string();
        assert!(error.contains("--deaths"), "{error}");
    }
}
