//! The figures of one model in one interval: the difference between its totals at both ends.

use skep_engine::{Counts, Engine, EngineStats, EngineTimes};
use std::time::Duration;

/// The names of the figures. `_s` is a rate for a second.
pub(super) const COLUMNS: [&str; 22] = [
    "generated_tokens_s",
    "prompt_tokens_s",
    "cached_tokens_s",
    "steps_s",
    "running",
    "waiting",
    "batch_sequences",
    "cache_hit",
    "pages_used",
    "pages_cached",
    "pages_total",
    "preemptions_s",
    "step_ms_p50",
    "step_ms_p99",
    "queue_ms_p50",
    "queue_ms_p99",
    "first_token_ms_p50",
    "first_token_ms_p90",
    "first_token_ms_p99",
    "inter_token_ms_p50",
    "inter_token_ms_p90",
    "inter_token_ms_p99",
];

/// The values in the order of [`COLUMNS`]. What did not happen is not a number.
pub(super) type Values = [f32; COLUMNS.len()];

/// The values of a model in one interval.
pub(super) struct ModelValues {
    pub whole: Values,
    /// The values of each replica, if there are several.
    pub replicas: Vec<Values>,
}

/// The totals of a model at the end of an interval.
pub(super) struct ModelTotals {
    whole: Before,
    replicas: Vec<Before>,
}

impl ModelTotals {
    pub(super) fn of(engine: &Engine) -> Self {
        let whole = Before { stats: engine.stats(), times: engine.times() };
        let replicas = engine.replica_stats().into_iter().zip(engine.replica_times());
        let replicas: Vec<Before> = replicas.map(|(stats, times)| Before { stats, times }).collect();
        ModelTotals { whole, replicas: if replicas.len() > 1 { replicas } else { Vec::new() } }
    }

    /// Returns the figures since `before`, which was `took` ago.
    pub(super) fn since(&self, before: &ModelTotals, took: Duration) -> ModelValues {
        let replicas = self.replicas.iter().zip(&before.replicas);
        ModelValues {
            whole: self.whole.since(&before.whole, took),
            replicas: replicas.map(|(now, before)| now.since(before, took)).collect(),
        }
    }
}

/// The totals of a model or of one replica at the end of an interval.
pub(super) struct Before {
    stats: EngineStats,
    times: EngineTimes,
}

impl Before {
    /// Returns the figures since `before`, which was `took` ago.
    pub(super) fn since(&self, before: &Before, took: Duration) -> Values {
        let (stats, then) = (&self.stats, &before.stats);
        let new = |now: u64, then: u64| now.saturating_sub(then) as f64;
        let rate = |now: u64, then: u64| new(now, then) / took.as_secs_f64().max(1e-3);
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { f64::NAN };
        let steps = new(stats.steps, then.steps);
        let prompt = new(stats.prompt_tokens, then.prompt_tokens);
        let [step, queue, first_token, inter_token] = [
            self.times.step.since(&before.times.step),
            self.times.queue.since(&before.times.queue),
            self.times.first_token.since(&before.times.first_token),
            self.times.inter_token.since(&before.times.inter_token),
        ];
        let values = [
            rate(stats.generated_tokens, then.generated_tokens),
            rate(stats.prompt_tokens, then.prompt_tokens),
            rate(stats.cached_tokens, then.cached_tokens),
            rate(stats.steps, then.steps),
            stats.running as f64,
            stats.waiting as f64,
            share(new(stats.step_sequences, then.step_sequences), steps),
            share(new(stats.cached_tokens, then.cached_tokens), prompt),
            stats.pages_total.saturating_sub(stats.pages_free) as f64,
            stats.pages_cached as f64,
            stats.pages_total as f64,
            rate(stats.preemptions, then.preemptions),
            milliseconds(&step, 0.5),
            milliseconds(&step, 0.99),
            milliseconds(&queue, 0.5),
            milliseconds(&queue, 0.99),
            milliseconds(&first_token, 0.5),
            milliseconds(&first_token, 0.9),
            milliseconds(&first_token, 0.99),
            milliseconds(&inter_token, 0.5),
            milliseconds(&inter_token, 0.9),
            milliseconds(&inter_token, 0.99),
        ];
        values.map(|value| value as f32)
    }
}

fn milliseconds(counts: &Counts, quantile: f64) -> f64 {
    counts.quantile(quantile).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_differences_over_the_time_that_passed() {
        let totals = |tokens, steps, step_sequences, prompt_tokens, cached_tokens| Before {
            stats: EngineStats {
                generated_tokens: tokens,
                steps,
                step_sequences,
                prompt_tokens,
                cached_tokens,
                pages_total: 10,
                pages_free: 4,
                ..EngineStats::default()
            },
            times: EngineTimes::default(),
        };
        let values = totals(300, 20, 60, 400, 300).since(&totals(100, 10, 20, 0, 0), Duration::from_secs(2));
        let value = |name| values[COLUMNS.iter().position(|column| *column == name).unwrap()];
        assert_eq!(value("generated_tokens_s"), 100.0);
        assert_eq!(value("batch_sequences"), 4.0);
        assert_eq!(value("cache_hit"), 0.75);
        assert_eq!(value("pages_used"), 6.0);
        assert!(value("step_ms_p50").is_nan());
        let idle = totals(1, 1, 1, 1, 1).since(&totals(1, 1, 1, 1, 1), Duration::from_secs(1));
        assert!(idle[6].is_nan() && idle[7].is_nan(), "without steps there is no batch size");
    }
}
