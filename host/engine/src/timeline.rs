//! A record of an engine's steps: how long each phase of a step took, and how much it computed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of steps that a timeline keeps; it drops later ones.
const MAX_STEPS: usize = 1_000_000;

/// A phase of the loop of an engine, in the order in which a step passes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The loop waits for requests and takes them.
    Wait,
    /// The scheduler admits sequences, plans the step and drafts.
    Plan,
    /// The executor computes.
    Forward,
    /// The loop waits for token masks that are not ready when the forward pass ends.
    Masks,
    /// Tokens are drawn from the logits.
    Sample,
    /// The tokens are handed to their sequences and streams.
    Commit,
}

impl Phase {
    /// All phases in the order in which a step goes through them.
    pub const ALL: [Phase; 6] =
        [Phase::Wait, Phase::Plan, Phase::Forward, Phase::Masks, Phase::Sample, Phase::Commit];

    /// Returns the name of the phase in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Wait => "wait",
            Phase::Plan => "plan",
            Phase::Forward => "forward",
            Phase::Masks => "masks",
            Phase::Sample => "sample",
            Phase::Commit => "commit",
        }
    }
}

/// One step of a replica.
#[derive(Clone, Copy, Debug)]
pub struct StepRecord {
    pub replica: usize,
    pub began: Instant,
    pub work: StepWork,
    phases: [Duration; Phase::ALL.len()],
}

/// Amounts that a step computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    pub sequences: usize,
    pub tokens: usize,
    /// Number of tokens whose logits are computed.
    pub logit_rows: usize,
    /// Number of the tokens that are drafts.
    pub drafted: usize,
    /// Number of KV pages that were taken from the disk or other hosts since the step before.
    pub read_pages: usize,
}

impl StepRecord {
    /// Returns the duration of a phase.
    pub fn took(&self, phase: Phase) -> Duration {
        self.phases[phase as usize]
    }

    /// Returns the end of the step.
    pub fn ended(&self) -> Instant {
        self.began + self.phases.iter().sum::<Duration>()
    }
}

/// The steps of all replicas of the engines that share it.
#[derive(Debug, Default)]
pub struct Timeline {
    steps: Mutex<Vec<StepRecord>>,
}

impl Timeline {
    /// Returns the steps so far, in the order in which they ended.
    pub fn steps(&self) -> Vec<StepRecord> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, step: StepRecord) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if steps.len() < MAX_STEPS {
            steps.push(step);
        }
    }
}

/// Times the phases of the steps of one replica. Without a timeline it does nothing.
pub(crate) struct StepTimer {
    timeline: Option<Arc<Timeline>>,
    replica: usize,
    began: Instant,
    since: Instant,
    phases: [Duration; Phase::ALL.len()],
}

impl StepTimer {
    /// Creates a timer whose first step begins now.
    pub fn new(timeline: Option<Arc<Timeline>>, replica: usize) -> Self {
        let now = Instant::now();
        StepTimer { timeline, replica, began: now, since: now, phases: Default::default() }
    }

    /// Adds the time since the last call to a phase.
    pub fn lap(&mut self, phase: Phase) {
        if self.timeline.is_some() {
            let now = Instant::now();
            self.phases[phase as usize] += now - self.since;
            self.since = now;
        }
    }

    /// Ends a step.
    pub fn end(&mut self, work: StepWork) {
        let Some(timeline) = &self.timeline else { return };
        let phases = std::mem::take(&mut self.phases);
        timeline.push(StepRecord { replica: self.replica, began: self.began, work, phases });
        self.began = self.since;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_phases_of_a_step_add_up_to_its_time() {
        let timeline = Arc::new(Timeline::default());
        let mut timer = StepTimer::new(Some(timeline.clone()), 3);
        for sequences in [1, 2] {
            for phase in Phase::ALL {
                std::thread::sleep(Duration::from_millis(1));
                timer.lap(phase);
            }
            timer.end(StepWork { sequences, ..StepWork::default() });
        }
        let steps = timeline.steps();
        assert_eq!(
            steps.iter().map(|step| (step.replica, step.work.sequences)).collect::<Vec<_>>(),
            [(3, 1), (3, 2)]
        );
        for step in &steps {
            assert!(Phase::ALL.iter().all(|phase| step.took(*phase) >= Duration::from_millis(1)), "{step:?}");
        }
        assert_eq!(steps[0].ended(), steps[1].began);
        assert!(steps[1].ended() <= Instant::now());
    }

    #[test]
    fn without_a_timeline_nothing_is_timed() {
        let mut timer = StepTimer::new(None, 0);
        timer.lap(Phase::Plan);
        timer.end(StepWork::default());
        assert_eq!(timer.phases, [Duration::ZERO; 6]);
    }
}
