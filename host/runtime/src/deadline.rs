//! The time at which a turn has to finish. Its clock stops while a person at the turn's client is asked.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// The deadline of one turn. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Deadline(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    clock: Mutex<Clock>,
    changed: Notify,
}

#[derive(Debug)]
struct Clock {
    /// The deadline if nobody is asked anymore.
    at: Instant,
    /// Number of questions that people have before them, and when the first of them was asked.
    asked: usize,
    since: Instant,
    paused: Duration,
}

/// Stops the clock of a turn until it is dropped.
pub(crate) struct ClockStop(Deadline);

impl Deadline {
    pub(crate) fn new(at: Instant) -> Self {
        let clock = Clock { at, asked: 0, since: at, paused: Duration::ZERO };
        Deadline(Arc::new(Shared { clock: Mutex::new(clock), changed: Notify::new() }))
    }

    /// Returns the time at which the turn has to finish, as far as it is known.
    pub(crate) fn at(&self) -> Instant {
        let clock = self.clock();
        if clock.asked > 0 { clock.at + clock.since.elapsed() } else { clock.at }
    }

    /// Returns how long the clock has been stopped.
    pub(crate) fn paused(&self) -> Duration {
        let clock = self.clock();
        if clock.asked > 0 { clock.paused + clock.since.elapsed() } else { clock.paused }
    }

    pub(crate) fn stop(&self) -> ClockStop {
        let mut clock = self.clock();
        if clock.asked == 0 {
            clock.since = Instant::now();
        }
        clock.asked += 1;
        drop(clock);
        self.0.changed.notify_waiters();
        ClockStop(self.clone())
    }

    /// Resolves when the time is over.
    pub(crate) async fn passed(&self) {
        loop {
            let changed = self.0.changed.notified();
            let at = {
                let clock = self.clock();
                (clock.asked == 0).then_some(clock.at)
            };
            match at {
                None => changed.await,
                Some(at) if Instant::now() >= at => return,
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => {}
                    () = changed => {}
                },
            }
        }
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.0.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ClockStop {
    fn drop(&mut self) {
        let ClockStop(deadline) = self;
        let mut clock = deadline.clock();
        clock.asked -= 1;
        if clock.asked == 0 {
            let paused = clock.since.elapsed();
            clock.at += paused;
            clock.paused += paused;
        }
        drop(clock);
        deadline.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_deadline_passes_only_while_its_clock_runs() {
        let began = Instant::now();
        let deadline = Deadline::new(began + SHORT);
        let (first, second) = (deadline.stop(), deadline.stop());
        assert!(tokio::time::timeout(SHORT * 3, deadline.passed()).await.is_err(), "it stands still");
        drop(first);
        assert!(tokio::time::timeout(SHORT, deadline.passed()).await.is_err(), "another question is open");
        let waiting = tokio::spawn({
            let deadline = deadline.clone();
            async move { deadline.passed().await }
        });
        drop(second);
        waiting.await.expect("it passes");
        assert!(began.elapsed() >= SHORT * 5, "{:?}", began.elapsed());
        assert!(deadline.paused() >= SHORT * 4 && deadline.at() >= began + SHORT * 5);
    }
}
