//! Metering of a guest's CPU time.
//!
//! Time counts only while the instance is being polled, and is the CPU time of the polling thread: waiting for the
//! model, for other turns or for the operating system's scheduler costs a guest nothing.

use crate::limits::{Counted, TurnUse};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

/// The CPU time of one guest, shared by the polled future and the epoch interrupt that checks the time. Both run on one
/// thread at a time.
pub(super) struct CpuMeter {
    limit_ns: u64,
    spent_ns: AtomicU64,
    polled_at_ns: AtomicU64,
    used: Arc<TurnUse>,
}

/// A future whose polls are metered.
pub(super) struct Metered<F> {
    run: Pin<Box<F>>,
    meter: Arc<CpuMeter>,
}

impl CpuMeter {
    pub(super) fn new(limit_ms: u32, used: Arc<TurnUse>) -> Self {
        CpuMeter {
            limit_ns: u64::from(limit_ms) * 1_000_000,
            spent_ns: AtomicU64::new(0),
            polled_at_ns: AtomicU64::new(0),
            used,
        }
    }

    /// Returns whether the guest has used up its CPU time. Must be called on the polling thread.
    pub(super) fn is_over(&self) -> bool {
        let now = thread_cpu_ns().saturating_sub(self.polled_at_ns.load(Ordering::Relaxed));
        self.spent_ns.load(Ordering::Relaxed) + now > self.limit_ns
    }
}

impl<F> Metered<F> {
    pub(super) fn new(run: F, meter: Arc<CpuMeter>) -> Self {
        Metered { run: Box::pin(run), meter }
    }
}

impl<F: Future> Future for Metered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let start = thread_cpu_ns();
        self.meter.polled_at_ns.store(start, Ordering::Relaxed);
        let poll = self.run.as_mut().poll(cx);
        let took = thread_cpu_ns().saturating_sub(start);
        self.meter.spent_ns.fetch_add(took, Ordering::Relaxed);
        self.meter.used.add(Counted::CpuNs, took);
        poll
    }
}

#[cfg(unix)]
fn thread_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Returns wall time, because the CPU time of a thread is not available on this platform.
#[cfg(not(unix))]
fn thread_cpu_ns() -> u64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_nanos() as u64
}
