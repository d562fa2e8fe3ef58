//! What the engine tells of itself: counters that its handle reads without a lock, and metrics under `skep_engine_*`
//! labelled by model. Histograms are in seconds. Nothing here decides anything, except that the number of queued
//! requests is what bounds the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use metrics::{SharedString, counter, gauge, histogram};

use crate::EngineStats;

/// Written by the loop, read by everyone.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    model: String,
    replica: String,
    queued: AtomicUsize,
    running: AtomicUsize,
    waiting: AtomicUsize,
    pages_total: AtomicUsize,
    pages_free: AtomicUsize,
    pages_cached: AtomicUsize,
    steps: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    forced_tokens: AtomicU64,
    accepted_tokens: AtomicU64,
    rejected_tokens: AtomicU64,
    preemptions: AtomicU64,
    /// Moving average of the time from admission to the end, for the estimate in `Busy`.
    service_us: AtomicU64,
}

/// Tokens by where they came from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenKind {
    Prompt,
    Cached,
    Sampled,
    Forced,
    /// Sampled ones that had been drafted.
    Accepted,
    /// Drafted in vain.
    Rejected,
}

/// One place in the bounded queue; dropping it gives the place back.
#[derive(Debug)]
pub(crate) struct QueuePlace(Arc<Telemetry>);

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Relaxed);
    }
}

impl Telemetry {
    pub fn new(model: &str, replica: usize, pages_total: usize) -> Arc<Self> {
        Arc::new(Telemetry {
            model: model.to_string(),
            replica: replica.to_string(),
            pages_total: AtomicUsize::new(pages_total),
            pages_free: AtomicUsize::new(pages_total),
            ..Telemetry::default()
        })
    }

    /// A place in the queue, or how long it is likely to take until one is free.
    pub fn enter_queue(self: &Arc<Self>, max_queue: usize) -> Result<QueuePlace, Duration> {
        let entered = self.queued.fetch_update(Relaxed, Relaxed, |n| (n < max_queue).then_some(n + 1));
        match entered {
            Ok(_) => Ok(QueuePlace(self.clone())),
            Err(_) => Err(self.time_to_free_place()),
        }
    }

    /// A running sequence ends every (mean service time / running sequences), and its place goes to one that waits.
    fn time_to_free_place(&self) -> Duration {
        let between_us = self.service_us.load(Relaxed) / self.running.load(Relaxed).max(1) as u64;
        Duration::from_micros(between_us).clamp(Duration::from_millis(50), Duration::from_secs(30))
    }

    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed).max(self.queued.load(Relaxed)),
            pages_total: self.pages_total.load(Relaxed),
            pages_free: self.pages_free.load(Relaxed),
            pages_cached: self.pages_cached.load(Relaxed),
            steps: self.steps.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
            forced_tokens: self.forced_tokens.load(Relaxed),
            accepted_tokens: self.accepted_tokens.load(Relaxed),
            rejected_tokens: self.rejected_tokens.load(Relaxed),
            preemptions: self.preemptions.load(Relaxed),
        }
    }

    pub fn record_load(&self, running: usize, waiting: usize, pages_free: usize, pages_cached: usize) {
        self.running.store(running, Relaxed);
        self.waiting.store(waiting, Relaxed);
        self.pages_free.store(pages_free, Relaxed);
        self.pages_cached.store(pages_cached, Relaxed);
        let used = self.pages_total.load(Relaxed) - pages_free;
        let gauges = [
            ("skep_engine_running", running),
            ("skep_engine_waiting", waiting),
            ("skep_engine_kv_pages_used", used),
            ("skep_engine_kv_pages_cached", pages_cached),
        ];
        for (name, value) in gauges {
            gauge!(name, "model" => self.label(), "replica" => self.replica.clone()).set(value as f64);
        }
    }

    pub fn record_step(&self, batch_tokens: usize) {
        self.steps.fetch_add(1, Relaxed);
        histogram!("skep_engine_batch_tokens", "model" => self.label()).record(batch_tokens as f64);
    }

    pub fn record_tokens(&self, kind: TokenKind, count: usize) {
        let (total, name) = match kind {
            TokenKind::Prompt => (&self.prompt_tokens, "prompt"),
            TokenKind::Cached => (&self.cached_tokens, "cached"),
            TokenKind::Sampled => (&self.generated_tokens, "sampled"),
            TokenKind::Forced => (&self.forced_tokens, "forced"),
            TokenKind::Accepted => (&self.accepted_tokens, "accepted"),
            TokenKind::Rejected => (&self.rejected_tokens, "rejected"),
        };
        total.fetch_add(count as u64, Relaxed);
        if matches!(kind, TokenKind::Forced) {
            self.generated_tokens.fetch_add(count as u64, Relaxed);
        }
        counter!("skep_engine_tokens_total", "model" => self.label(), "kind" => name).increment(count as u64);
    }

    pub fn record_queue_time(&self, time: Duration) {
        histogram!("skep_engine_queue_seconds", "model" => self.label()).record(time.as_secs_f64());
    }

    pub fn record_first_token(&self, time: Duration) {
        histogram!("skep_engine_first_token_seconds", "model" => self.label()).record(time.as_secs_f64());
    }

    pub fn record_inter_token(&self, time: Duration) {
        histogram!("skep_engine_inter_token_seconds", "model" => self.label()).record(time.as_secs_f64());
    }

    pub fn record_end(&self, outcome: &'static str, service: Duration) {
        let new = u64::try_from(service.as_micros()).unwrap_or(u64::MAX);
        let old = self.service_us.load(Relaxed);
        self.service_us.store(if old == 0 { new } else { old - old / 8 + new / 8 }, Relaxed);
        counter!("skep_engine_requests_total", "model" => self.label(), "outcome" => outcome).increment(1);
    }

    pub fn record_preemption(&self) {
        self.preemptions.fetch_add(1, Relaxed);
        counter!("skep_engine_preemptions_total", "model" => self.label()).increment(1);
    }

    /// The router chose this replica for a request.
    pub fn record_routed(&self, reason: &'static str) {
        let (model, replica) = (self.label(), self.replica.clone());
        counter!("skep_engine_routed_total", "model" => model, "replica" => replica, "reason" => reason)
            .increment(1);
    }

    fn label(&self) -> SharedString {
        SharedString::from(self.model.clone())
    }
}
