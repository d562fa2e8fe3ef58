//! `skep bench split`: one host that computes prompts and answers, beside a prefill host and a decode host on the same CPUs.

mod load;
mod stand;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::percentile;
use crate::catalog;
use crate::commands::out;
use crate::database_flag::DatabaseAddress;
use crate::failure::Usage;
use crate::progress::{Progress as _, Terminal};
use load::{Load, Seen};
use stand::{Stand, allowed_cpus};

/// Largest share of the single host's time between tokens that the divided hosts should need.
const GAP_GOAL: f64 = 1.0 / 3.0;
/// Smallest share of the single host's throughput that they should have.
const THROUGHPUT_GOAL: f64 = 0.9;

/// Measure one host beside a prefill host and a decode host on the same CPUs, while long prompts arrive
///
/// Agents get answers without a pause, and long prompts arrive at fixed times. First, one host does everything on N CPUs; then, a
/// prefill host has some of these CPUs and a decode host the others. The hosts are processes that are pinned with taskset, in a
/// cluster on the given database. Times between tokens are those that the agents see, from the first prompt to the last answer.
/// Throughput counts the tokens of the prompts and of all answers. More than one CPU is needed, and both arrangements compute the
/// same prompts, so the processes should be the only ones on the machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The command needs an empty PostgreSQL database, for example:
  docker run --rm -e POSTGRES_HOST_AUTH_METHOD=trust -p 5432:5432 postgres:17

Examples:
  skep bench split --database postgres://postgres@127.0.0.1:5432/postgres
  skep bench split --threads 16 --prefill-threads 10 --agents 16 --prompts 40 --interval-ms 500 \\
    --database postgres://postgres@127.0.0.1:5432/postgres --json")]
pub struct Args {
    /// Empty database: postgres://USER@HOST/DATABASE
    #[arg(long, value_name = "ADDRESS")]
    database: Option<DatabaseAddress>,
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// CPUs that each arrangement has [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..))]
    threads: Option<u16>,
    /// How many of them the prefill host has [default: half]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    prefill_threads: Option<u16>,
    /// Number of agents that get answers without a pause
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    agents: u16,
    /// Number of long prompts
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    prompts: u16,
    /// Words of each long prompt, of about a token each
    #[arg(long, value_name = "N", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    words: u32,
    /// Time between two long prompts
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    interval_ms: u64,
    /// Tokens of a prompt from which on the decode host orders it at the prefill host
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    prefill_tokens: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    threads: usize,
    prefill_threads: usize,
    agents: u16,
    prompts: u16,
    single: Figures,
    split: Figures,
    /// Prompts that the decode host ordered, by the outcome.
    prefills: BTreeMap<String, u64>,
    ratios: Ratios,
}

/// The figures that clients of one arrangement saw.
#[derive(Debug, Serialize)]
struct Figures {
    between_tokens_ms: Quantiles,
    first_token_ms: Quantiles,
    tokens_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Quantiles {
    count: usize,
    p50: f64,
    p90: f64,
    p99: f64,
}

/// The figures of the divided hosts as shares of those of the single one, with the goals.
#[derive(Debug, Serialize)]
struct Ratios {
    p90_between_tokens: f64,
    p90_between_tokens_goal: f64,
    tokens_per_s: f64,
    tokens_per_s_goal: f64,
    p50_first_token: f64,
    meets_goals: bool,
}

/// Measures both arrangements.
pub async fn run(args: Args) -> Result<()> {
    let database = match &args.database {
        Some(DatabaseAddress::Postgres(address)) => address.clone(),
        _ => bail!(Usage(
            "the hosts need a PostgreSQL database\n  hint: --database postgres://USER@HOST:5432/DATABASE, one without tables"
                .to_owned()
        )),
    };
    let (all, prefill) = cpus(&args)?;
    let model = catalog::resolve(&args.model, &Terminal)?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut stand = Stand::new(folder.path().to_owned(), model.path.clone(), &database, args.prefill_tokens)?;
    let load = Load {
        agents: args.agents,
        prompts: args.prompts,
        words: args.words,
        interval: Duration::from_millis(args.interval_ms),
    };
    let step = Terminal.begin(&format!("one host on {} CPUs", all.len()), None);
    let host = stand.start("all", &all).await?;
    let single = Figures::of(load::send(host.url(), &load).await?);
    host.stop().await?;
    step.finish(&format!("{:.1} tok/s", single.tokens_per_s));

    let (of_prefill, of_decode) = all.split_at(prefill);
    let what =
        format!("a prefill host on {} and a decode host on {} CPUs", of_prefill.len(), of_decode.len());
    let step = Terminal.begin(&what, None);
    let prefill_host = stand.start("prefill", of_prefill).await?;
    let host = stand.start("decode", of_decode).await?;
    host.knows("prefill").await?;
    let split = Figures::of(load::send(host.url(), &load).await?);
    let prefills = host.prefills().await?.into_iter().collect();
    host.stop().await?;
    prefill_host.stop().await?;
    step.finish(&format!("{:.1} tok/s", split.tokens_per_s));
    let report = Report {
        model: model.name,
        threads: all.len(),
        prefill_threads: prefill,
        agents: args.agents,
        prompts: args.prompts,
        ratios: Ratios::of(&single, &split),
        single,
        split,
        prefills,
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

/// Returns the CPUs of an arrangement, and how many of them the prefill host has.
fn cpus(args: &Args) -> Result<(Vec<usize>, usize)> {
    let mut all = allowed_cpus()?;
    let wanted = args.threads.map_or(all.len(), usize::from);
    if wanted < 2 || wanted > all.len() {
        let allowed = all.len();
        bail!(
            "{wanted} CPUs cannot be divided: this process may use {allowed}, and two hosts need at least two"
        );
    }
    all.truncate(wanted);
    let prefill = args.prefill_threads.map_or(wanted / 2, usize::from);
    if prefill >= wanted {
        bail!(
            "of {wanted} CPUs, the prefill host can have at most {}\n  hint: --prefill-threads",
            wanted - 1
        );
    }
    Ok((all, prefill))
}

impl Figures {
    fn of(seen: Seen) -> Self {
        let tokens_per_s = seen.tokens as f64 / seen.wall.as_secs_f64().max(1e-9);
        Figures {
            between_tokens_ms: Quantiles::of(seen.gaps_ms),
            first_token_ms: Quantiles::of(seen.first_ms),
            tokens_per_s,
        }
    }
}

impl Quantiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let of = |share| percentile(&values, share);
        Quantiles { count: values.len(), p50: of(0.5), p90: of(0.9), p99: of(0.99) }
    }

    fn for_people(&self) -> [String; 3] {
        [self.p50, self.p90, self.p99].map(|ms| format!("{ms:.1} ms"))
    }
}

impl Ratios {
    fn of(single: &Figures, split: &Figures) -> Self {
        let p90_between_tokens = split.between_tokens_ms.p90 / single.between_tokens_ms.p90;
        let tokens_per_s = split.tokens_per_s / single.tokens_per_s;
        Ratios {
            p90_between_tokens,
            p90_between_tokens_goal: GAP_GOAL,
            tokens_per_s,
            tokens_per_s_goal: THROUGHPUT_GOAL,
            p50_first_token: split.first_token_ms.p50 / single.first_token_ms.p50,
            meets_goals: p90_between_tokens <= GAP_GOAL && tokens_per_s >= THROUGHPUT_GOAL,
        }
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { model, threads, prefill_threads, agents, prompts, ratios, .. } = report;
    out::line(&format!("{model}: {agents} agents, and {prompts} long prompts, on {threads} CPUs"))?;
    let row = |name: &str, figures: &Figures| {
        let [p50, p90, p99] = figures.between_tokens_ms.for_people();
        let [first_p50, first_p90, _] = figures.first_token_ms.for_people();
        [name.to_owned(), p50, p90, p99, first_p50, first_p90, format!("{:.1}", figures.tokens_per_s)]
    };
    let divided = format!("{prefill_threads} + {}", threads - prefill_threads);
    let header = ["CPUS", "BETWEEN P50", "P90", "P99", "FIRST P50", "P90", "TOK/S"];
    out::table(header, &[row(&threads.to_string(), &report.single), row(&divided, &report.split)])?;
    let Ratios { p90_between_tokens, tokens_per_s, p50_first_token, .. } = ratios;
    out::line(&format!(
        "p90 between tokens {p90_between_tokens:.2} of the single host's (goal {GAP_GOAL:.2}), tokens/s {tokens_per_s:.2} (goal \
         {THROUGHPUT_GOAL}), first token {p50_first_token:.2}"
    ))?;
    let outcomes: Vec<String> =
        report.prefills.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
    out::line(&format!("prompts at the prefill host: {}", outcomes.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(p90: f64, tokens_per_s: f64) -> Figures {
        let quantiles = |value| Quantiles { count: 1, p50: value, p90: value, p99: value };
        Figures { between_tokens_ms: quantiles(p90), first_token_ms: quantiles(100.0), tokens_per_s }
    }

    #[test]
    fn goals_need_both_shorter_gaps_and_the_throughput() {
        let single = figures(30.0, 100.0);
        for (p90, rate, expected) in [(10.0, 90.0, true), (10.1, 95.0, false), (5.0, 89.0, false)] {
            assert_eq!(Ratios::of(&single, &figures(p90, rate)).meets_goals, expected, "{p90} {rate}");
        }
    }

    #[test]
    fn figures_are_those_that_clients_saw() {
        let seen = Seen {
            gaps_ms: vec![3.0, 1.0, 2.0],
            first_ms: vec![50.0],
            tokens: 40,
            wall: Duration::from_secs(2),
        };
        let Figures { between_tokens_ms, first_token_ms, tokens_per_s } = Figures::of(seen);
        assert_eq!((between_tokens_ms.count, between_tokens_ms.p50, between_tokens_ms.p90), (3, 2.0, 3.0));
        assert_eq!((first_token_ms.p50, tokens_per_s), (50.0, 20.0));
    }
}
