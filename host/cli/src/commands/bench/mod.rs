//! `skep bench`: benchmarks of this machine, with commands that anyone can run again.

mod agents;
mod bill;
#[cfg(unix)]
mod cluster;
mod context;
mod crash;
mod determinism;
mod engine;
mod fleet;
mod health;
mod interference;
mod invoke;
mod kernels;
mod kv;
mod load;
mod neighbors;
mod pages;
#[cfg(unix)]
mod proxy;
mod routing;
mod runtime;
mod soak;
#[cfg(unix)]
mod split;
mod stand;
#[cfg(unix)]
mod store;
mod storm;
mod target;
mod tools;
#[cfg(target_os = "linux")]
mod weights;

use std::time::{Duration, SystemTime};

use anyhow::Result;
use skep_model::chat_template::civil_date;

use crate::embedded::{self, BenchAgent, SourceTree};
use crate::guest_build::{self, BuildRequest, GuestTarget};
use crate::progress::Terminal;

/// Measure the engine, the kernels of GPUs, loads of weights, long prompts, KV pages on disk, the cost of calling
/// an agent, servers under agents' work, load and kills, and structured output; simulate a fleet of hosts
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Engine(engine::Args),
    Kernels(kernels::Args),
    Invoke(invoke::Args),
    Context(context::Args),
    Kv(kv::Args),
    Pages(pages::Args),
    Runtime(runtime::Args),
    #[command(alias = "neighbours")]
    Neighbors(neighbors::Args),
    Health(health::Args),
    Agents(agents::Args),
    Bill(bill::Args),
    Interference(interference::Args),
    Routing(routing::Args),
    Load(load::Args),
    Tools(tools::Args),
    Determinism(determinism::Args),
    Crash(crash::Args),
    Fleet(fleet::Args),
    Soak(soak::Args),
    #[cfg(target_os = "linux")]
    Weights(weights::Args),
    #[cfg(unix)]
    Cluster(cluster::Args),
    #[cfg(unix)]
    Store(store::Args),
    #[cfg(unix)]
    Split(split::Args),
}

/// Runs the chosen benchmark.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Engine(args) => tokio::task::block_in_place(|| engine::run(&args)),
        Command::Kernels(args) => tokio::task::block_in_place(|| kernels::run(&args)),
        Command::Invoke(args) => invoke::run(args).await,
        Command::Context(args) => context::run(args).await,
        Command::Kv(args) => kv::run(args).await,
        Command::Pages(args) => tokio::task::block_in_place(|| pages::run(&args)),
        Command::Runtime(args) => runtime::run(args).await,
        Command::Neighbors(args) => neighbors::run(args).await,
        Command::Health(args) => health::run(args).await,
        Command::Agents(args) => agents::run(args).await,
        Command::Bill(args) => bill::run(args).await,
        Command::Interference(args) => interference::run(args).await,
        Command::Routing(args) => routing::run(args).await,
        Command::Load(args) => load::run(args).await,
        Command::Tools(args) => tools::run(args).await,
        Command::Determinism(args) => determinism::run(args).await,
        Command::Crash(args) => crash::run(args).await,
        Command::Fleet(args) => tokio::task::block_in_place(|| fleet::run(&args)),
        Command::Soak(args) => soak::run(args).await,
        #[cfg(target_os = "linux")]
        Command::Weights(args) => tokio::task::block_in_place(|| weights::run(&args)),
        #[cfg(unix)]
        Command::Cluster(args) => cluster::run(args).await,
        #[cfg(unix)]
        Command::Store(args) => store::run(args).await,
        #[cfg(unix)]
        Command::Split(args) => split::run(args).await,
    }
}

/// Builds the component of an agent for a benchmark.
fn build_agent(agent: &BenchAgent) -> Result<Vec<u8>> {
    tokio::task::block_in_place(|| {
        let dir = embedded::unpack_bench_agent(agent, &SourceTree::locate()?)?;
        let built = guest_build::build(&BuildRequest { dir, target: GuestTarget::Library }, &Terminal)?;
        Ok(built.component)
    })
}

/// Returns the date in UTC, as in 2026-01-31.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil_date(seconds / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

/// Returns the command line of this process, under the name by which users know the program.
fn command_line() -> String {
    std::env::args().skip(1).fold("skep".to_owned(), |line, word| line + " " + &word)
}

/// Converts times to microseconds and sorts them.
fn sorted_us(times: Vec<Duration>) -> Vec<f64> {
    let mut us: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
    us.sort_by(f64::total_cmp);
    us
}

/// Returns the value below which `share` of the sorted `values` lie (nearest rank).
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 if middle > 0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values.get(middle).copied().unwrap_or(f64::NAN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([0.5, 0.9, 0.99, 1.0].map(|share| percentile(&values, share)), [50.0, 90.0, 99.0, 100.0]);
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn median_of_an_even_number_lies_between() {
        assert_eq!(median(&mut [4.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
