//! The replacement of an executor that has failed.
//!
//! ```text
//! Working --fault--> Waiting --pause--> Starting --> Working
//!                       ^                  |
//!                       +----- failed -----+
//! ```
//!
//! Invariant: the failed executor is freed before the first attempt, so that its memory can be planned with again. Pauses grow
//! while attempts fail, and while replacements fail soon.

use std::collections::BTreeSet;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use skep_model::{Executor, ExecutorLimits, ModelError, Restart};

use crate::sequence_id::SequenceId;

/// Pause before the second attempt. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time for which a replacement must work until the next fault counts as a new one.
const STABLE: Duration = Duration::from_secs(300);
/// Time for which requests wait for a replacement before they are ended with an error that says when to try again.
const PATIENCE: Duration = Duration::from_secs(60);

type Started = Result<Box<dyn Executor>, ModelError>;

/// Starts another executor in the place of one that has failed.
pub(crate) struct Recovery {
    /// Starts an executor like the first one. Without it, a failed executor is not replaced.
    restart: Option<Restart>,
    state: State,
    /// Number of attempts since the executor last worked for a while.
    attempts: u32,
    /// The sequences of the step that met the last fault.
    suspects: BTreeSet<SequenceId>,
}

enum State {
    /// `since` is when the executor took the place of another one.
    Working {
        since: Option<Instant>,
    },
    Waiting {
        fault: String,
        since: Instant,
        next: Instant,
    },
    Starting {
        fault: String,
        since: Instant,
        thread: JoinHandle<Started>,
    },
}

/// The outcome of looking at an attempt.
pub(crate) enum Progress {
    Nothing,
    /// There is a new executor.
    Replaced(Box<dyn Executor>),
    /// The attempt failed, for this reason, and another one follows.
    Failed(String),
}

impl Recovery {
    /// Creates the recovery of a working executor.
    pub fn new(restart: Option<Restart>) -> Self {
        let state = State::Working { since: None };
        Recovery { restart, state, attempts: 0, suspects: BTreeSet::new() }
    }

    /// Begins to replace the executor, which has been freed. `step` contains the sequences of the step that met the fault.
    /// Returns those of them that met the last fault as well, and may be its cause.
    pub fn begin(&mut self, fault: &str, step: impl IntoIterator<Item = SequenceId>) -> Vec<SequenceId> {
        let now = Instant::now();
        if matches!(self.state, State::Working { since: Some(since) } if since.elapsed() >= STABLE) {
            self.attempts = 0;
        }
        let step: BTreeSet<SequenceId> = step.into_iter().collect();
        let again = step.intersection(&self.suspects).copied().collect();
        self.suspects = step;
        let next = now + pause(self.attempts);
        self.state = State::Waiting { fault: fault.to_owned(), since: now, next };
        again
    }

    /// Returns whether there is no working executor.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.state, State::Working { .. })
    }

    /// Returns the fault if requests should not wait any longer.
    pub fn given_up(&self) -> Option<&str> {
        let has_restart = self.restart.is_some();
        match &self.state {
            State::Waiting { fault, since, .. } | State::Starting { fault, since, .. } => {
                (!has_restart || since.elapsed() >= PATIENCE).then_some(fault.as_str())
            }
            State::Working { .. } => None,
        }
    }

    /// Starts an attempt when it is time, or takes the result of one that has ended. A replacement must have `limits`.
    pub fn advance(&mut self, limits: &ExecutorLimits) -> Progress {
        let working = State::Working { since: Some(Instant::now()) };
        match std::mem::replace(&mut self.state, working) {
            State::Waiting { fault, since, next } => match &self.restart {
                Some(restart) if next <= Instant::now() => {
                    self.attempts = self.attempts.saturating_add(1);
                    match start(restart.clone()) {
                        Ok(thread) => {
                            self.state = State::Starting { fault, since, thread };
                            Progress::Nothing
                        }
                        Err(error) => self.wait(fault, since, &error),
                    }
                }
                _ => {
                    self.state = State::Waiting { fault, since, next };
                    Progress::Nothing
                }
            },
            State::Starting { fault, since, thread } if thread.is_finished() => match joined(thread) {
                Ok(executor) if executor.limits() == limits => Progress::Replaced(executor),
                Ok(_) => self.wait(fault, since, "the new executor has other limits"),
                Err(error) => self.wait(fault, since, &error),
            },
            state => {
                self.state = state;
                Progress::Nothing
            }
        }
    }

    /// Waits for an attempt that has not ended, and frees what it has started.
    pub fn end(&mut self) {
        let state = std::mem::replace(&mut self.state, State::Working { since: None });
        if let State::Starting { thread, .. } = state {
            drop(thread.join());
        }
    }

    fn wait(&mut self, fault: String, since: Instant, error: &str) -> Progress {
        let pause = pause(self.attempts);
        let text = format!(
            "{fault}; attempt {} to start it again failed, and the next one is in {} s: {error}",
            self.attempts,
            pause.as_secs()
        );
        self.state = State::Waiting { fault, since, next: Instant::now() + pause };
        Progress::Failed(text)
    }
}

/// Returns the pause after this many attempts.
fn pause(attempts: u32) -> Duration {
    match attempts {
        0 => Duration::ZERO,
        attempts => FIRST_PAUSE.saturating_mul(1 << (attempts - 1).min(16)).min(LONGEST_PAUSE),
    }
}

fn start(restart: Restart) -> Result<JoinHandle<Started>, String> {
    let thread = std::thread::Builder::new().name("skep-restart".to_owned());
    thread.spawn(move || restart()).map_err(|error| format!("a thread cannot be started: {error}"))
}

fn joined(thread: JoinHandle<Started>) -> Result<Box<dyn Executor>, String> {
    match thread.join() {
        Ok(started) => started.map_err(|error| error.to_string()),
        Err(_) => Err("starting it panicked".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_minute() {
        let seconds = [0, 1, 2, 3, 7, 8, 40].map(|attempts| pause(attempts).as_secs());
        assert_eq!(seconds, [0, 1, 2, 4, 60, 60, 60]);
    }

    #[test]
    fn a_sequence_that_meets_two_faults_in_a_row_is_named() {
        let mut recovery = Recovery::new(None);
        let ids = |numbers: [u64; 2]| numbers.map(SequenceId);
        assert!(recovery.begin("a", ids([1, 2])).is_empty());
        assert_eq!(recovery.begin("b", ids([2, 3])), [SequenceId(2)]);
        assert!(recovery.begin("c", []).is_empty());
        assert!(recovery.begin("d", ids([2, 3])).is_empty());
        assert_eq!(recovery.given_up(), Some("d"), "nobody replaces it");
    }
}
