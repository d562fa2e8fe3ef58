//! Results of a round, as JSON and as text.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::sessions::{Exchange, Outcome};
use super::timeline::StepShares;
use crate::client::ChatUsage;
use crate::commands::bench::percentile;
use crate::commands::out;

/// Results of one round. Times are measured by the client.
#[derive(Debug, Serialize)]
pub struct RoundReport {
    pub wall_s: f64,
    pub requests: usize,
    pub turns_per_s: f64,
    pub output_tok_per_s: f64,
    pub first_token_ms: Percentiles,
    /// Time between chunks of free-text answers.
    pub inter_token_ms: Percentiles,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub cached_share: f64,
    pub output_tokens: u64,
    /// Tokens of the output that a grammar forced; `null` if the server does not report them, as with the
    /// next two.
    pub forced_tokens: Option<u64>,
    pub accepted_tokens: Option<u64>,
    pub rejected_tokens: Option<u64>,
    pub schema_failures: usize,
    /// Shares of the engine's time, if a timeline was recorded.
    pub engine: Option<StepShares>,
    /// Errors of sessions that broke off, and the first call that its schema does not allow.
    pub failures: Vec<String>,
}

/// Percentiles of times in milliseconds.
#[derive(Debug, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl RoundReport {
    /// Returns the results, and the exchanges that they come from.
    pub fn new(outcome: Outcome, engine: Option<StepShares>) -> (Self, Vec<Exchange>) {
        let Outcome { wall, exchanges, mut failures, .. } = outcome;
        let violation = exchanges.iter().find_map(|exchange| exchange.violation.as_ref());
        failures.extend(violation.map(|call| format!("its schema does not allow the call {call:?}")));
        let sum =
            |of: fn(&ChatUsage) -> u64| exchanges.iter().map(|exchange| of(&exchange.usage)).sum::<u64>();
        let reported = |of: fn(&ChatUsage) -> Option<u64>| {
            exchanges.iter().filter_map(|exchange| of(&exchange.usage)).reduce(|sum, more| sum + more)
        };
        let (prompt_tokens, cached_tokens) =
            (sum(|usage| usage.prompt_tokens), sum(ChatUsage::cached_tokens));
        let output_tokens = sum(|usage| usage.completion_tokens);
        let wall_s = wall.as_secs_f64();
        let report = Self {
            wall_s,
            requests: exchanges.len(),
            turns_per_s: exchanges.len() as f64 / 2.0 / wall_s,
            output_tok_per_s: output_tokens as f64 / wall_s,
            first_token_ms: Percentiles::of(exchanges.iter().map(|exchange| exchange.first_token)),
            inter_token_ms: Percentiles::of(
                exchanges.iter().flat_map(|exchange| exchange.gaps.iter().copied()),
            ),
            prompt_tokens,
            cached_tokens,
            cached_share: cached_tokens as f64 / prompt_tokens.max(1) as f64,
            output_tokens,
            forced_tokens: reported(ChatUsage::forced_tokens),
            accepted_tokens: reported(ChatUsage::accepted_tokens),
            rejected_tokens: reported(ChatUsage::rejected_tokens),
            schema_failures: exchanges.iter().filter(|exchange| exchange.violation.is_some()).count(),
            engine,
            failures,
        };
        (report, exchanges)
    }

    /// Returns whether a session failed, or a call violates its schema.
    pub fn failed(&self) -> bool {
        self.schema_failures > 0 || !self.failures.is_empty()
    }

    /// Prints the results as text for people, under a name.
    pub fn print(&self, name: &str) -> Result<()> {
        let Self { wall_s, requests, turns_per_s, output_tok_per_s, .. } = self;
        out::line(&format!(
            "{name}: {requests} requests in {wall_s:.2} s, {turns_per_s:.2} turns/s, {output_tok_per_s:.1} tok/s"
        ))?;
        for (what, times) in [("first token", &self.first_token_ms), ("inter-token", &self.inter_token_ms)] {
            let Percentiles { p50, p90, p99 } = times;
            out::line(&format!("  {what}   p50 {p50:.1} ms   p90 {p90:.1} ms   p99 {p99:.1} ms"))?;
        }
        let Self { prompt_tokens, cached_tokens, cached_share, output_tokens, .. } = self;
        let of_output = [
            ("forced", self.forced_tokens),
            ("draft tokens accepted", self.accepted_tokens),
            ("draft tokens rejected", self.rejected_tokens),
        ];
        let of_output =
            of_output.iter().filter_map(|(what, tokens)| Some(format!(", {} {what}", (*tokens)?)));
        out::line(&format!(
            "  tokens        {prompt_tokens} in, {cached_tokens} of them cached ({:.1} %); {output_tokens} out{}",
            cached_share * 100.0,
            of_output.collect::<String>()
        ))?;
        if let Some(engine) = &self.engine {
            engine.print()?;
        }
        out::line(&format!("  calls that violate their schema: {}", self.schema_failures))?;
        self.failures.iter().try_for_each(|failure| out::line(&format!("  failed: {failure}")))
    }
}

impl Percentiles {
    fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut ms: Vec<f64> = times.map(|time| time.as_secs_f64() * 1000.0).collect();
        ms.sort_by(f64::total_cmp);
        Self { p50: percentile(&ms, 0.5), p90: percentile(&ms, 0.9), p99: percentile(&ms, 0.99) }
    }
}
