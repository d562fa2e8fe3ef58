//! The launches of a step that is not recorded: each rank of a stage has a thread, if it also has a device of its own.
//!
//! Invariant: all launches of a stage have returned before the executor queues anything else. Ranks that share a device are
//! launched by one thread, part by part: a driver may block a launch until the device has finished earlier work, and a rank
//! that waits for another one on the same device would then block the other's launches forever.

use std::sync::Arc;
#[cfg(test)]
use std::sync::Barrier;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::rank::{Peers, Rank};
use super::step::Step;
use crate::error::{ModelError, RankFault};

/// The ranks of each stage, which the threads share.
pub(super) type Stages = Arc<Vec<Vec<Rank>>>;

/// The threads of ranks. The first rank of each stage is launched by the thread that asks.
pub(super) struct Launchers {
    stages: Stages,
    threads: Vec<Launcher>,
    /// The launches of all ranks of a stage meet here, so that a test fails unless they overlap.
    #[cfg(test)]
    pub(super) meeting: Option<Arc<Barrier>>,
}

/// The thread of one rank. It ends when the channel of its jobs is closed.
struct Launcher {
    stage: usize,
    own: usize,
    jobs: Option<SyncSender<Job>>,
    outcomes: Receiver<Result<(), ModelError>>,
    thread: Option<JoinHandle<()>>,
}

/// A step to launch. Its logits start at row `first`.
#[derive(Clone)]
struct Job {
    step: Arc<Step>,
    first: usize,
    #[cfg(test)]
    meeting: Option<Arc<Barrier>>,
}

impl Launchers {
    /// Starts the threads.
    pub(super) fn start(stages: &Stages) -> Result<Self, ModelError> {
        let mut threads = Vec::new();
        for (stage, ranks) in stages.iter().enumerate() {
            if ranks_have_devices(ranks) {
                for own in 1..ranks.len() {
                    threads.push(Launcher::start(stages, stage, own)?);
                }
            }
        }
        let stages = stages.clone();
        Ok(Launchers {
            stages,
            threads,
            #[cfg(test)]
            meeting: None,
        })
    }

    /// Launches all operations of a stage, and returns when all ranks have. If several ranks fail, the error is that of a lost
    /// device if there is one.
    pub(super) fn launch(&self, stage: usize, step: &Step, first: usize) -> Result<(), ModelError> {
        let others = || self.threads.iter().filter(|launcher| launcher.stage == stage);
        if others().next().is_none() {
            return launch_in_turn(&self.stages, stage, step, first);
        }
        let job = Job {
            step: Arc::new(step.clone()),
            first,
            #[cfg(test)]
            meeting: self.meeting.clone(),
        };
        let mut failed: Option<ModelError> = None;
        let mut note = |outcome: Result<(), ModelError>| {
            if let Err(error) = outcome
                && failed.as_ref().is_none_or(|known| error.is_fault() && !known.is_fault())
            {
                failed = Some(error);
            }
        };
        // A thread that takes no job has ended, and reports that instead of an outcome.
        others().for_each(|launcher| launcher.begin(&job));
        note(launch_rank(&self.stages, stage, 0, &job));
        others().for_each(|launcher| note(launcher.outcome()));
        failed.map_or(Ok(()), Err)
    }

    /// Launches all ranks on the thread that asks.
    #[cfg(test)]
    pub(super) fn in_turn(stages: &Stages) -> Self {
        Launchers { stages: stages.clone(), threads: Vec::new(), meeting: None }
    }

    /// Returns the number of threads.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for Launchers {
    fn drop(&mut self) {
        for launcher in &mut self.threads {
            launcher.jobs = None;
        }
        for launcher in &mut self.threads {
            // A panic was reported as the outcome of its step.
            let _ = launcher.thread.take().map(JoinHandle::join);
        }
    }
}

impl Launcher {
    fn start(stages: &Stages, stage: usize, own: usize) -> Result<Self, ModelError> {
        let (jobs, queue) = sync_channel::<Job>(1);
        let (outcome, outcomes) = sync_channel(1);
        let stages = stages.clone();
        let work = move || {
            for job in queue {
                if outcome.send(launch_rank(&stages, stage, own, &job)).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name(format!("skep-launch-{stage}-{own}")).spawn(work);
        let thread = thread.map_err(|error| {
            let reason = format!("cannot start the thread that launches its kernels: {error}");
            ModelError::Rank { rank: own, fault: RankFault::Failed { reason } }
        })?;
        Ok(Launcher { stage, own, jobs: Some(jobs), outcomes, thread: Some(thread) })
    }

    fn begin(&self, job: &Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job.clone());
        }
    }

    fn outcome(&self) -> Result<(), ModelError> {
        let ended = |_| ModelError::Rank { rank: self.own, fault: RankFault::Terminated };
        self.outcomes.recv().map_err(ended)?
    }
}

/// Returns whether no two ranks share a device.
fn ranks_have_devices(ranks: &[Rank]) -> bool {
    let is_alone =
        |own: usize| !ranks[..own].iter().any(|other| ranks[own].device.shares_memory_with(&other.device));
    (0..ranks.len()).all(is_alone)
}

/// Launches all operations of one rank.
fn launch_rank(stages: &[Vec<Rank>], stage: usize, own: usize, job: &Job) -> Result<(), ModelError> {
    let peers = Peers { ranks: &stages[stage], own };
    #[cfg(test)]
    if let Some(meeting) = &job.meeting {
        meeting.wait();
    }
    for part in peers.parts(stage > 0) {
        peers.compute(part, &job.step)?;
        peers.add_up(part, &job.step)?;
    }
    exit(stages, peers, &job.step, job.first)
}

/// Launches all operations of a stage on one thread. For each part, every rank's products are enqueued before any rank's sum. A
/// rank whose queue waits for another rank therefore never prevents the other rank's launches.
fn launch_in_turn(stages: &[Vec<Rank>], stage: usize, step: &Step, first: usize) -> Result<(), ModelError> {
    let ranks = &stages[stage];
    let each = || (0..ranks.len()).map(|own| Peers { ranks, own });
    for part in (Peers { ranks, own: 0 }).parts(stage > 0) {
        each().try_for_each(|peers| peers.compute(part, step))?;
        each().try_for_each(|peers| peers.add_up(part, step))?;
    }
    each().try_for_each(|peers| exit(stages, peers, step, first))
}

/// Computes a rank's part of the logits, if the ranks have the last layer.
pub(super) fn exit(
    stages: &[Vec<Rank>],
    peers: Peers<'_>,
    step: &Step,
    first: usize,
) -> Result<(), ModelError> {
    let leader = stages.last().and_then(|ranks| ranks.first());
    match leader.and_then(|leader| leader.logits.as_ref()) {
        Some(logits) => peers.exit(step, logits.slice(), first),
        None => Ok(()),
    }
}
