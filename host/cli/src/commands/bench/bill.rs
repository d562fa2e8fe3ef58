//! `skep bench bill`: the cost of an agent that reads many tokens, at list prices and on this machine.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_runtime::{Amount, Price, Rate, UsageCounts, UsageDay};

use super::agents::{Plan, drive};
use super::target::{Target, TargetArgs};
use crate::commands::out;
use crate::model_prices::list_price;
use crate::progress::{Progress as _, Terminal};
use crate::server_options::ServerOptions;

const DAY_S: f64 = 86_400.0;

/// Compute the cost of an agent that reads billions of tokens a day, at list prices and on this machine
///
/// The work of `skep bench agents` runs for a short while, which measures the share of the input that the prefix cache
/// holds and the number of tokens a second that this machine reads. From these follow the cost at list prices without a
/// cache, the cost with the measured cache, and the share of the work that this machine does in a day.
///
/// The example is an agent that reads 7 billion tokens a day. The list price is that of Kimi K2.5 in the catalog:
/// 0.60 USD for a million input tokens, 0.10 USD for cached ones, and 3.00 USD for output. How many tokens the agent writes was
/// not published; the default is one for a hundred that it reads. With --machine-per-day, the bill also says what the
/// same tokens cost on machines like this one, which are busy all day.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench bill
  skep bench bill --output-percent 3 --json
  skep bench bill --machine-per-day 4.80                            what this machine costs
  skep bench bill --list llama-3.2-3b                               another model of the catalog
  skep bench bill --input 0.25 --cached-input 0.025 --output 2      another list
  skep bench bill --url http://127.0.0.1:8081/v1                    another server, the same work")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Input tokens of a day
    #[arg(long, value_name = "TOKENS", default_value_t = 7_000_000_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000_000))]
    tokens: u64,
    /// Output tokens, as a percentage of the input tokens
    #[arg(long, value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=1000))]
    output_percent: u64,
    /// Model of the catalog whose list price is taken
    #[arg(long, value_name = "NAME", default_value = "kimi-k2.5")]
    list: String,
    /// Price of a million input tokens [default: that of the list]
    #[arg(long, value_name = "USD")]
    input: Option<String>,
    /// Price of a million cached input tokens [default: that of the list]
    #[arg(long, value_name = "USD")]
    cached_input: Option<String>,
    /// Price of a million output tokens [default: that of the list]
    #[arg(long, value_name = "USD")]
    output: Option<String>,
    /// Cost of this machine for a day, with power
    #[arg(long, value_name = "USD")]
    machine_per_day: Option<String>,
    /// Sessions per round; there is a round with a cold cache, and one with a warm cache
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    sessions: u32,
    /// Turns per session, with two requests each
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// The measured counts.
#[derive(Debug, Clone, Copy, Serialize)]
struct Measured {
    requests: usize,
    wall_s: f64,
    input_tokens: u64,
    cached_input_tokens: u64,
    output_tokens: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    target: String,
    assumptions: Assumptions,
    measured: Measured,
    /// Share of the input tokens that were in the cache.
    cached_share: f64,
    list_without_cache: Bill,
    list_with_cache: Bill,
    /// The same work as a day of this machine, which is busy all day.
    this_machine: Machine,
}

#[derive(Debug, Serialize)]
struct Assumptions {
    input_tokens_per_day: u64,
    output_tokens_per_day: u64,
    input_price: String,
    cached_input_price: String,
    output_price: String,
    currency: &'static str,
}

/// A bill, in exact decimal numbers.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Bill {
    per_day: String,
    per_year: String,
}

#[derive(Debug, PartialEq, Serialize)]
struct Machine {
    input_tokens_per_day: u64,
    output_tokens_per_day: u64,
    /// Share of the example's input.
    share: f64,
    /// Number of such machines that the whole example needs.
    machines: u64,
    /// List price of a day of this machine's work, with the measured cache. A machine that costs less a
    /// day is cheaper than the list.
    worth_per_day: String,
    /// The cost on such machines, if the cost of one is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<MachineCost>,
}

/// The cost of the work on machines like this one.
#[derive(Debug, PartialEq, Serialize)]
struct MachineCost {
    machine_per_day: f64,
    /// Cost of a million input tokens, with the output tokens that belong to them.
    per_million_input_tokens: f64,
    /// Cost of the example, on as many machines as it needs.
    example_per_day: f64,
}

/// Measures the share of cached tokens, and prints what the work would cost.
pub async fn run(args: Args) -> Result<()> {
    let price = price(&args)?;
    machine_per_day(&args)?;
    let target = Arc::new(Target::start(&args.target, ServerOptions::default()).await?);
    let mut measured =
        Measured { requests: 0, wall_s: 0.0, input_tokens: 0, cached_input_tokens: 0, output_tokens: 0 };
    for round in 1..=2 {
        let plan = Plan {
            round,
            sessions: args.sessions,
            turns: args.turns,
            concurrency: args.sessions.min(4),
            answer_tokens: 48,
            affinity: true,
            mix: false,
        };
        let step = Terminal.begin(&format!("round {round} of 2"), None);
        let outcome = drive(&target, plan, step).await?;
        if let Some(failure) = outcome.failures.first() {
            bail!("{} sessions broke off; the first one: {failure}", outcome.failures.len());
        }
        measured.requests += outcome.exchanges.len();
        measured.wall_s += outcome.wall.as_secs_f64();
        for exchange in &outcome.exchanges {
            measured.input_tokens += exchange.usage.prompt_tokens;
            measured.cached_input_tokens += exchange.usage.cached_tokens();
            measured.output_tokens += exchange.usage.completion_tokens;
        }
    }
    let label = target.label.clone();
    if let Some(target) = Arc::into_inner(target) {
        target.stop().await;
    }
    let report = report(label, &args, &price, measured)?;
    if args.json { out::json(&report) } else { for_people(&report) }
}

fn price(args: &Args) -> Result<Price> {
    let wrong = |flag: &str, problem: String| crate::failure::Usage(format!("--{flag}: {problem}"));
    let list = list_price(&args.list, UsageDay::default()).map_err(|problem| wrong("list", problem))?;
    let rate = |flag: &str, text: &Option<String>, listed: Rate| match text {
        Some(text) => text.parse().map_err(|problem| wrong(flag, problem)),
        None => Ok(listed),
    };
    Ok(Price {
        input: rate("input", &args.input, list.input)?,
        cached_input: rate("cached-input", &args.cached_input, list.cached_input)?,
        output: rate("output", &args.output, list.output)?,
        ..list
    })
}

/// Returns the cost of this machine for a day.
fn machine_per_day(args: &Args) -> Result<Option<f64>> {
    let Some(text) = &args.machine_per_day else { return Ok(None) };
    let cost: Result<Amount, String> = text.parse();
    cost.map_err(|problem| crate::failure::Usage(format!("--machine-per-day: {problem}")))?;
    Ok(Some(text.parse()?))
}

fn report(target: String, args: &Args, price: &Price, measured: Measured) -> Result<Report> {
    if measured.input_tokens == 0 || measured.wall_s <= 0.0 {
        bail!("nothing was measured, because the server reported no input tokens");
    }
    let input = args.tokens;
    let output = input.checked_mul(args.output_percent).context("too many output tokens")? / 100;
    let scaled =
        |tokens: u64| (u128::from(input) * u128::from(tokens) / u128::from(measured.input_tokens)) as u64;
    let day = |input_tokens: u64, cached_tokens: u64, output_tokens: u64| {
        price.cost(&UsageCounts { input_tokens, cached_tokens, output_tokens, ..UsageCounts::default() })
    };
    let per_day = |tokens: u64| (tokens as f64 / measured.wall_s * DAY_S) as u64;
    let (read, written) = (per_day(measured.input_tokens), per_day(measured.output_tokens));
    let worth = day(read, per_day(measured.cached_input_tokens), written);
    let machines = input.div_ceil(read.max(1));
    let cost = machine_per_day(args)?.map(|machine_per_day| MachineCost {
        machine_per_day,
        per_million_input_tokens: machine_per_day * 1e6 / read.max(1) as f64,
        example_per_day: machine_per_day * machines as f64,
    });
    Ok(Report {
        target,
        assumptions: Assumptions {
            input_tokens_per_day: input,
            output_tokens_per_day: output,
            input_price: price.input.to_string(),
            cached_input_price: price.cached_input.to_string(),
            output_price: price.output.to_string(),
            currency: "USD",
        },
        measured,
        cached_share: measured.cached_input_tokens as f64 / measured.input_tokens as f64,
        list_without_cache: Bill::of(day(input, 0, output)),
        list_with_cache: Bill::of(day(input, scaled(measured.cached_input_tokens), output)),
        this_machine: Machine {
            input_tokens_per_day: read,
            output_tokens_per_day: written,
            share: read as f64 / input as f64,
            machines,
            worth_per_day: worth.rounded(2),
            cost,
        },
    })
}

impl Bill {
    fn of(day: Amount) -> Self {
        let mut year = day;
        (1..365).for_each(|_| year += day);
        Bill { per_day: day.rounded(2), per_year: year.rounded(2) }
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report {
        target,
        assumptions,
        measured,
        cached_share,
        list_without_cache,
        list_with_cache,
        this_machine,
    } = report;
    let Assumptions { input_tokens_per_day, output_tokens_per_day, .. } = assumptions;
    out::line(&format!(
        "measured on {target}: {} requests in {:.1} s, {} input tokens, {:.1} % of them cached, {} output tokens",
        measured.requests,
        measured.wall_s,
        measured.input_tokens,
        cached_share * 100.0,
        measured.output_tokens
    ))?;
    out::line(&format!(
        "assumed: {input_tokens_per_day} input and {output_tokens_per_day} output tokens a day; a million costs {} USD as \
         input, {} USD as cached input, {} USD as output; the cache has the measured share",
        assumptions.input_price, assumptions.cached_input_price, assumptions.output_price
    ))?;
    for (what, bill) in [("list price, no cache", list_without_cache), ("list price, cache", list_with_cache)]
    {
        out::line(&format!("{what:<22} {} USD a day, {} USD a year", bill.per_day, bill.per_year))?;
    }
    let Machine { input_tokens_per_day: read, share, machines, worth_per_day, cost, .. } = this_machine;
    out::line(&format!(
        "{:<22} {read} input tokens a day, {:.4} % of the example, so {machines} such machines do all of it",
        "this machine",
        share * 100.0
    ))?;
    out::line(&format!(
        "{:<22} one day of this machine is worth {worth_per_day} USD at list price (for a different model)",
        ""
    ))?;
    let Some(MachineCost { machine_per_day, per_million_input_tokens, example_per_day }) = cost else {
        return Ok(());
    };
    out::line(&format!(
        "{:<22} at {machine_per_day:.2} USD a day, a million input tokens with their output cost {per_million_input_tokens:.2} \
         USD, and the example {example_per_day:.2} USD a day",
        ""
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    fn args(flags: &[&str]) -> Args {
        Wrapper::parse_from(["bill"].iter().chain(flags)).args
    }

    #[test]
    fn the_published_example_is_summed_up_by_hand() {
        let args = args(&[]);
        let measured = Measured {
            requests: 10,
            wall_s: 100.0,
            input_tokens: 8_000,
            cached_input_tokens: 6_000,
            output_tokens: 400,
        };
        let report = report("test".into(), &args, &price(&args).expect("prices"), measured).expect("a bill");
        // 7,000 million × 0.60 + 70 million × 3.00 = 4,200 + 210
        let bill = |day: &str, year: &str| Bill { per_day: day.into(), per_year: year.into() };
        assert_eq!(report.list_without_cache, bill("4410.00", "1609650.00"));
        // 75 % cached: 1,750 million × 0.60 + 5,250 million × 0.10 + 70 million × 3.00 = 1,050 + 525 + 210
        assert_eq!(report.list_with_cache, bill("1785.00", "651525.00"));
        // 80 tokens a second are 6,912,000 a day, of which 5,184,000 are cached; 4 a second are 345,600 a day:
        // 1,728,000 × 0.60 + 5,184,000 × 0.10 + 345,600 × 3.00 millionths = 1.0368 + 0.5184 + 1.0368 = 2.592
        assert_eq!(
            report.this_machine,
            Machine {
                input_tokens_per_day: 6_912_000,
                output_tokens_per_day: 345_600,
                share: 6_912_000.0 / 7e9,
                machines: 1_013,
                worth_per_day: "2.59".into(),
                cost: None,
            }
        );
    }

    #[test]
    fn the_cost_of_the_machine_is_spread_over_what_it_reads() {
        let args = args(&["--machine-per-day", "4.32", "--tokens", "10000000"]);
        let measured = Measured {
            requests: 10,
            wall_s: 100.0,
            input_tokens: 5_000,
            cached_input_tokens: 0,
            output_tokens: 400,
        };
        let report = report("test".into(), &args, &price(&args).expect("prices"), measured).expect("a bill");
        // 50 tokens a second are 4.32 million a day, so a million costs 1 USD, and 10 million need three machines.
        let cost = report.this_machine.cost.expect("the machine has a cost");
        assert_eq!((report.this_machine.machines, cost.machine_per_day), (3, 4.32));
        assert!((cost.per_million_input_tokens - 1.0).abs() < 1e-9, "{cost:?}");
        assert!((cost.example_per_day - 12.96).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn a_wrong_price_names_its_flag() {
        let error = price(&args(&["--cached-input", "cheap"])).expect_err("not a price").to_string();
        assert!(error.contains("--cached-input") && error.contains("not a decimal number"), "{error}");
        let error =
            machine_per_day(&args(&["--machine-per-day", "much"])).expect_err("not a cost").to_string();
        assert!(error.contains("--machine-per-day"), "{error}");
    }
}
