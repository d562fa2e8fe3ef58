//! The engine's reports about itself: counters that its handle reads without a lock, and metrics (`metric`).
//! The module decides nothing, except that the number of queued requests bounds the queue.
//!
//! Metric handles are resolved at their first use, and stay silent if no recorder was installed by then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::agent_metrics::AgentMetrics;
use crate::distribution::Distribution;
use crate::queue_shares::QueueShares;
use crate::{AheadStats, EngineStats, EngineTimes, metric};

pub(crate) use crate::agent_metrics::{Outcome, TokenKind};

/// Maximum number of agent labels. Labels stay forever, while agents come and go.
const MAX_AGENT_LABELS: usize = 1024;
/// The label of agents past the bound.
const OTHER_AGENTS: &str = "(other)";

/// Figures that the loop writes and everyone reads.
#[derive(Default)]
pub(crate) struct Telemetry {
    model: String,
    replica: String,
    steps_metrics: OnceLock<StepMetrics>,
    agents: Mutex<HashMap<String, Arc<AgentMetrics>>>,
    queued: QueueShares,
    current: CurrentLoad,
    totals: Totals,
    times: Times,
    /// Moving average of the time from admission to the end, for the estimate in `Busy`.
    service_us: AtomicU64,
}

/// The load after the last step.
#[derive(Default)]
struct CurrentLoad {
    running: AtomicUsize,
    waiting: AtomicUsize,
    pages_total: AtomicUsize,
    pages_free: AtomicUsize,
    pages_cached: AtomicUsize,
}

/// Counts since the start.
#[derive(Default)]
struct Totals {
    steps: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    forced_tokens: AtomicU64,
    accepted_tokens: AtomicU64,
    rejected_tokens: AtomicU64,
    rolled_back_tokens: AtomicU64,
    preemptions: AtomicU64,
    step_sequences: AtomicU64,
    ahead: AheadTotals,
}

/// Counts of steps that were started ahead.
#[derive(Default)]
struct AheadTotals {
    steps: AtomicU64,
    partial_steps: AtomicU64,
    wasted_steps: AtomicU64,
    rows: AtomicU64,
    wasted_rows: AtomicU64,
}

/// Distributions since the start.
#[derive(Default)]
struct Times {
    queue: Distribution,
    first_token: Distribution,
    inter_token: Distribution,
    step: Distribution,
}

/// Metrics that belong to the engine and not to an agent.
struct StepMetrics {
    batch_tokens: Histogram,
    batch_sequences: Histogram,
    step: Histogram,
    running: Gauge,
    waiting: Gauge,
    pages_total: Gauge,
    pages_used: Gauge,
    pages_cached: Gauge,
    continued: Counter,
    expired: Counter,
    ahead: AheadMetrics,
}

/// Metrics of steps that were started ahead.
struct AheadMetrics {
    whole: Counter,
    partial: Counter,
    wasted: Counter,
    kept_rows: Counter,
    wasted_rows: Counter,
}

/// The use of a step that was started ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AheadUse {
    pub rows: usize,
    /// Number of rows whose sequences continued as expected.
    pub kept: usize,
    /// Whether all rows were kept and no other sequence was running.
    pub is_whole: bool,
}

/// The end of the wait for the continuation of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ContinuationOutcome {
    Continued,
    Expired,
}

/// The engine's telemetry as one request sees it.
#[derive(Clone)]
pub(crate) struct RequestTelemetry {
    engine: Arc<Telemetry>,
    agent: Arc<AgentMetrics>,
}

/// One slot in the bounded queue; dropping it frees the slot.
pub(crate) struct QueueSlot {
    telemetry: Arc<Telemetry>,
    tenant: String,
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.telemetry.queued.leave(&self.tenant);
    }
}

impl Telemetry {
    /// Creates the telemetry of a replica whose `pages_total` pages are all free.
    pub fn new(model: &str, replica: usize, pages_total: usize) -> Arc<Self> {
        Arc::new(Telemetry {
            model: model.to_string(),
            replica: replica.to_string(),
            current: CurrentLoad {
                pages_total: AtomicUsize::new(pages_total),
                pages_free: AtomicUsize::new(pages_total),
                ..CurrentLoad::default()
            },
            ..Telemetry::default()
        })
    }

    /// Takes a slot in the queue, or returns how long it is likely to take until one is free.
    pub fn enter_queue(self: &Arc<Self>, tenant: &str, max_queue: usize) -> Result<QueueSlot, Duration> {
        match self.queued.enter(tenant, max_queue) {
            true => Ok(QueueSlot { telemetry: self.clone(), tenant: tenant.to_string() }),
            false => Err(self.time_to_free_slot()),
        }
    }

    /// Estimates when a slot is free: a running sequence finishes every (mean service time / running
    /// sequences), and its slot goes to a waiting one.
    fn time_to_free_slot(&self) -> Duration {
        let between_us = self.service_us.load(Relaxed) / self.current.running.load(Relaxed).max(1) as u64;
        Duration::from_micros(between_us).clamp(Duration::from_millis(50), Duration::from_secs(30))
    }

    /// Returns the counters since the start and the current load.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.current.running.load(Relaxed),
            waiting: self.current.waiting.load(Relaxed).max(self.queued.taken()),
            pages_total: self.current.pages_total.load(Relaxed),
            pages_free: self.current.pages_free.load(Relaxed),
            pages_cached: self.current.pages_cached.load(Relaxed),
            steps: self.totals.steps.load(Relaxed),
            prompt_tokens: self.totals.prompt_tokens.load(Relaxed),
            cached_tokens: self.totals.cached_tokens.load(Relaxed),
            generated_tokens: self.totals.generated_tokens.load(Relaxed),
            forced_tokens: self.totals.forced_tokens.load(Relaxed),
            accepted_tokens: self.totals.accepted_tokens.load(Relaxed),
            rejected_tokens: self.totals.rejected_tokens.load(Relaxed),
            rolled_back_tokens: self.totals.rolled_back_tokens.load(Relaxed),
            preemptions: self.totals.preemptions.load(Relaxed),
            step_sequences: self.totals.step_sequences.load(Relaxed),
            ahead: self.totals.ahead.stats(),
        }
    }

    /// Returns the distributions of times since the start.
    pub fn times(&self) -> EngineTimes {
        let Times { queue, first_token, inter_token, step } = &self.times;
        EngineTimes {
            queue: queue.counts(),
            first_token: first_token.counts(),
            inter_token: inter_token.counts(),
            step: step.counts(),
        }
    }

    /// Records the duration of computing and sampling a step, without its plan and its commit.
    pub fn record_step_time(&self, took: Duration) {
        self.times.step.record(took);
        self.step_metrics().step.record(took.as_secs_f64());
    }

    /// Clears the gauges of a replica that has ended.
    pub fn record_end(&self) {
        let metrics = self.step_metrics();
        let load = [&metrics.running, &metrics.waiting];
        let pages = [&metrics.pages_total, &metrics.pages_used, &metrics.pages_cached];
        for gauge in load.into_iter().chain(pages) {
            gauge.set(0.0);
        }
    }

    /// Sets the load that the router and the gauges see. `pages_free` includes pages that could be evicted.
    pub fn record_load(&self, running: usize, waiting: usize, pages_free: usize, pages_cached: usize) {
        self.current.running.store(running, Relaxed);
        self.current.waiting.store(waiting, Relaxed);
        self.current.pages_free.store(pages_free, Relaxed);
        self.current.pages_cached.store(pages_cached, Relaxed);
        self.set_gauges();
    }

    /// Sets the gauges to the current load. An engine of the same name that was replaced may have cleared them when it ended.
    pub fn set_gauges(&self) {
        let (current, metrics) = (&self.current, self.step_metrics());
        let total = current.pages_total.load(Relaxed);
        metrics.running.set(current.running.load(Relaxed) as f64);
        metrics.waiting.set(current.waiting.load(Relaxed) as f64);
        metrics.pages_total.set(total as f64);
        metrics.pages_used.set(total.saturating_sub(current.pages_free.load(Relaxed)) as f64);
        metrics.pages_cached.set(current.pages_cached.load(Relaxed) as f64);
    }

    /// Counts a step with its rows and its sequences.
    pub fn record_step(&self, batch_tokens: usize, sequences: usize) {
        self.totals.steps.fetch_add(1, Relaxed);
        self.totals.step_sequences.fetch_add(sequences as u64, Relaxed);
        let metrics = self.step_metrics();
        metrics.batch_tokens.record(batch_tokens as f64);
        metrics.batch_sequences.record(sequences as f64);
    }

    /// Counts a step that was started ahead, once it is known which of its rows are used.
    pub fn record_ahead(&self, AheadUse { rows, kept, is_whole }: AheadUse) {
        let (totals, metrics) = (&self.totals.ahead, &self.step_metrics().ahead);
        let (rows, kept) = (rows as u64, kept as u64);
        totals.steps.fetch_add(1, Relaxed);
        totals.rows.fetch_add(rows, Relaxed);
        totals.wasted_rows.fetch_add(rows - kept, Relaxed);
        metrics.kept_rows.increment(kept);
        metrics.wasted_rows.increment(rows - kept);
        match (kept, is_whole) {
            (0, _) => {
                totals.wasted_steps.fetch_add(1, Relaxed);
                metrics.wasted.increment(1);
            }
            (_, false) => {
                totals.partial_steps.fetch_add(1, Relaxed);
                metrics.partial.increment(1);
            }
            (_, true) => metrics.whole.increment(1),
        }
    }

    /// Counts sequences whose continuation came, or did not come in time.
    pub fn record_continuations(&self, outcome: ContinuationOutcome, count: usize) {
        if count > 0 {
            let metrics = self.step_metrics();
            let counter = match outcome {
                ContinuationOutcome::Continued => &metrics.continued,
                ContinuationOutcome::Expired => &metrics.expired,
            };
            counter.increment(count as u64);
        }
    }

    /// Records that the router chose this replica for a request.
    pub fn record_routed(&self, reason: &'static str) {
        let (model, replica) = (self.model.clone(), self.replica.clone());
        counter!(metric::ROUTED, "model" => model, "replica" => replica, "reason" => reason).increment(1);
    }

    /// Returns the telemetry for a request of this agent; raw calls have no agent.
    pub fn of_request(self: &Arc<Self>, agent: Option<&str>) -> RequestTelemetry {
        RequestTelemetry { engine: self.clone(), agent: self.agent(agent.unwrap_or_default()) }
    }

    fn agent(&self, name: &str) -> Arc<AgentMetrics> {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = agents.get(name) {
            return known.clone();
        }
        let label = if agents.len() < MAX_AGENT_LABELS { name } else { OTHER_AGENTS };
        let new = || Arc::new(AgentMetrics::new(&self.model, label));
        agents.entry(label.to_owned()).or_insert_with(new).clone()
    }

    fn step_metrics(&self) -> &StepMetrics {
        self.steps_metrics.get_or_init(|| {
            let labels = [("model", self.model.clone()), ("replica", self.replica.clone())];
            let continuations = |outcome: &'static str| {
                let (model, replica) = (self.model.clone(), self.replica.clone());
                counter!(metric::CONTINUATIONS, "model" => model, "replica" => replica, "outcome" => outcome)
            };
            let ahead = |name: &'static str, outcome: &'static str| {
                let (model, replica) = (self.model.clone(), self.replica.clone());
                counter!(name, "model" => model, "replica" => replica, "outcome" => outcome)
            };
            StepMetrics {
                pages_total: gauge!(metric::PAGES_TOTAL, &labels),
                batch_tokens: histogram!(metric::BATCH_TOKEN_COUNT, &labels),
                batch_sequences: histogram!(metric::BATCH_SEQUENCE_COUNT, &labels),
                step: histogram!(metric::STEP, &labels),
                running: gauge!(metric::RUNNING, &labels),
                waiting: gauge!(metric::WAITING, &labels),
                pages_used: gauge!(metric::PAGES_USED, &labels),
                pages_cached: gauge!(metric::PAGES_CACHED, &labels),
                continued: continuations("continued"),
                expired: continuations("expired"),
                ahead: AheadMetrics {
                    whole: ahead(metric::AHEAD_STEPS, "whole"),
                    partial: ahead(metric::AHEAD_STEPS, "partial"),
                    wasted: ahead(metric::AHEAD_STEPS, "wasted"),
                    kept_rows: ahead(metric::AHEAD_ROWS, "kept"),
                    wasted_rows: ahead(metric::AHEAD_ROWS, "wasted"),
                },
            }
        })
    }
}

impl AheadTotals {
    fn stats(&self) -> AheadStats {
        AheadStats {
            steps: self.steps.load(Relaxed),
            partial_steps: self.partial_steps.load(Relaxed),
            wasted_steps: self.wasted_steps.load(Relaxed),
            rows: self.rows.load(Relaxed),
            wasted_rows: self.wasted_rows.load(Relaxed),
        }
    }
}

impl RequestTelemetry {
    /// Counts tokens for the replica and for the agent. Forced tokens are also generated tokens.
    pub fn record_tokens(&self, kind: TokenKind, count: usize) {
        let engine = &self.engine;
        let total = match kind {
            TokenKind::Prompt => &engine.totals.prompt_tokens,
            TokenKind::Cached => &engine.totals.cached_tokens,
            TokenKind::Sampled => &engine.totals.generated_tokens,
            TokenKind::Forced => &engine.totals.forced_tokens,
            TokenKind::Accepted => &engine.totals.accepted_tokens,
            TokenKind::Rejected => &engine.totals.rejected_tokens,
            TokenKind::RolledBack => &engine.totals.rolled_back_tokens,
        };
        total.fetch_add(count as u64, Relaxed);
        if matches!(kind, TokenKind::Forced) {
            engine.totals.generated_tokens.fetch_add(count as u64, Relaxed);
        }
        self.agent.count_tokens(kind, count);
    }

    /// Records the time from the submission to the admission.
    pub fn record_queue_time(&self, time: Duration) {
        self.engine.times.queue.record(time);
        self.agent.queue.record(time.as_secs_f64());
    }

    /// Records the time from the submission to the first token.
    pub fn record_first_token(&self, time: Duration) {
        self.engine.times.first_token.record(time);
        self.agent.first_token.record(time.as_secs_f64());
    }

    /// Records the time between two tokens of the answer.
    pub fn record_inter_token(&self, time: Duration) {
        self.engine.times.inter_token.record(time);
        self.agent.inter_token.record(time.as_secs_f64());
    }

    /// Records that the request finished `service` after its admission and held `kv_pages`.
    pub fn record_end(&self, outcome: Outcome, service: Duration, kv_pages: usize) {
        let new = u64::try_from(service.as_micros()).unwrap_or(u64::MAX);
        let old = self.engine.service_us.load(Relaxed);
        self.engine.service_us.store(if old == 0 { new } else { old - old / 8 + new / 8 }, Relaxed);
        self.agent.kv_pages.record(kv_pages as f64);
        self.agent.count_request(outcome);
    }

    /// Records that the request found the queue full.
    pub fn record_refusal(&self) {
        self.agent.count_request(Outcome::Busy);
    }

    /// Counts a preemption for the replica and for the agent.
    pub fn record_preemption(&self) {
        self.engine.totals.preemptions.fetch_add(1, Relaxed);
        self.agent.preemptions.increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::{Key, KeyName, Metadata, Recorder, SharedString, Unit, with_local_recorder};
    use std::collections::BTreeMap;

    /// The gauges of one thread by name.
    #[derive(Default)]
    struct Gauges(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

    impl Gauges {
        fn values(&self) -> BTreeMap<String, f64> {
            let gauges = self.0.lock().expect("not poisoned");
            gauges.iter().map(|(name, bits)| (name.clone(), f64::from_bits(bits.load(Relaxed)))).collect()
        }
    }

    impl Recorder for Gauges {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::noop()
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            let mut gauges = self.0.lock().expect("not poisoned");
            Gauge::from_arc(gauges.entry(key.name().to_owned()).or_default().clone())
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn a_replica_that_has_ended_has_no_load() {
        let gauges = Gauges::default();
        with_local_recorder(&gauges, || {
            let (old, new) = (Telemetry::new("tiny", 0, 10), Telemetry::new("tiny", 0, 20));
            old.record_load(3, 2, 4, 1);
            let loaded = gauges.values();
            assert_eq!((loaded[metric::RUNNING], loaded[metric::PAGES_USED]), (3.0, 6.0));
            assert_eq!(loaded[metric::PAGES_TOTAL], 10.0);
            new.record_load(1, 0, 19, 0);
            old.record_end();
            assert_eq!(gauges.values().len(), 5);
            assert!(gauges.values().values().all(|value| *value == 0.0), "{:?}", gauges.values());
            // The engine that has replaced it says what it does when the metrics are read.
            new.set_gauges();
            let replaced = gauges.values();
            assert_eq!((replaced[metric::RUNNING], replaced[metric::PAGES_TOTAL]), (1.0, 20.0));
        });
    }

    #[test]
    fn agents_past_the_bound_share_one_label() {
        let telemetry = Telemetry::new("tiny", 0, 1);
        let first = telemetry.agent("agent-0");
        for number in 0..2 * MAX_AGENT_LABELS {
            telemetry.agent(&format!("agent-{number}"));
        }
        assert!(Arc::ptr_eq(&first, &telemetry.agent("agent-0")), "a known agent keeps its label");
        assert!(Arc::ptr_eq(&telemetry.agent("new"), &telemetry.agent("newer")));
        assert_eq!(telemetry.agents.lock().expect("not poisoned").len(), MAX_AGENT_LABELS + 1);
    }
}
