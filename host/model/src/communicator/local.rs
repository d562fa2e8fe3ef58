//! Ranks that are threads of one process and communicate through memory.
//!
//! A collective is one meeting: each rank posts its values together with a description of its call, waits until all
//! ranks have posted, compares the calls and reads the other ranks' values. Invariant: a posting is overwritten two
//! meetings later at the earliest. No rank gets there before every rank has joined the meeting in between, and every
//! rank that joined it has finished reading.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::{Communicator, Links, World};
use crate::error::{ModelError, RankFault};

/// Maximum number of messages in flight between two ranks.
const IN_FLIGHT: usize = 2;
const POSTINGS: usize = 2;

/// A rank's endpoint in a group of threads. Dropping it makes the other ranks see this rank as terminated.
pub(crate) struct Local {
    world: Arc<World>,
    group: Arc<Group>,
    rank: usize,
    meetings: u64,
}

struct Group {
    /// The number in the world of each rank of the group.
    members: Vec<usize>,
    desks: Vec<Desk>,
    /// One mailbox for each pair of ranks, at index `from * ranks + to`.
    mailboxes: Vec<Mailbox>,
}

/// The slots in which a rank posts for meetings.
#[derive(Default)]
struct Desk {
    /// Number of the last meeting that the rank has posted for.
    arrived: AtomicU64,
    postings: [RwLock<Posting>; POSTINGS],
}

#[derive(Default)]
struct Mailbox {
    sent: AtomicU64,
    taken: AtomicU64,
    letters: [Mutex<Posting>; IN_FLIGHT],
}

#[derive(Default)]
struct Posting {
    call: Option<Call>,
    values: Vec<f32>,
}

/// A description of the call that a rank makes. It is equal on all ranks that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    op: Op,
    length: usize,
    sequence: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    AllReduce,
    AllGather,
    Send,
}

impl Local {
    /// Connects `stages` × `tensor` ranks. The number of a rank is `stage * tensor` plus its position in the stage.
    pub(crate) fn connect(
        tensor: usize,
        stages: usize,
        deadline: Duration,
    ) -> (Arc<World>, Vec<Links<Local>>) {
        let world = Arc::new(World::new(tensor * stages, deadline));
        let group = |members: Vec<usize>| Arc::new(Group::new(members));
        let rows: Vec<_> =
            (0..stages).map(|stage| group((stage * tensor..(stage + 1) * tensor).collect())).collect();
        let columns: Vec<_> =
            (0..tensor).map(|rank| group((0..stages).map(|stage| stage * tensor + rank).collect())).collect();
        let end = |group: &Arc<Group>, rank| Local {
            world: world.clone(),
            group: group.clone(),
            rank,
            meetings: 0,
        };
        let links = (0..tensor * stages).map(|rank| {
            let (stage, rank) = (rank / tensor, rank % tensor);
            Links { tensor: end(&rows[stage], rank), pipeline: end(&columns[rank], stage) }
        });
        let links = links.collect();
        (world, links)
    }

    /// Posts a call and its values, and waits until every rank has posted the same call.
    fn meet(&mut self, op: Op, length: usize, values: &[f32]) -> Result<(), ModelError> {
        self.world.check()?;
        self.meetings += 1;
        let call = Call { op, length, sequence: self.meetings };
        let desk = &self.group.desks[self.rank];
        {
            let posting = desk.postings[self.meetings as usize % POSTINGS].write();
            posting.unwrap_or_else(PoisonError::into_inner).fill(call, values);
        }
        desk.arrived.store(self.meetings, Ordering::SeqCst);
        self.world.advance();
        for other in 0..self.ranks() {
            let desk = &self.group.desks[other];
            self.wait(other, || desk.arrived.load(Ordering::SeqCst) >= self.meetings)?;
            let found = self.posting(other).call;
            self.agree(other, call, found)?;
        }
        Ok(())
    }

    /// Returns a rank's posting for the current meeting.
    fn posting(&self, rank: usize) -> RwLockReadGuard<'_, Posting> {
        let posting = &self.group.desks[rank].postings[self.meetings as usize % POSTINGS];
        posting.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn agree(&self, other: usize, call: Call, found: Option<Call>) -> Result<(), ModelError> {
        if found == Some(call) {
            return Ok(());
        }
        let found = found.map_or_else(|| "nothing".to_owned(), |found| found.to_string());
        let fault =
            RankFault::CallMismatch { other: self.number(self.rank), expected: call.to_string(), found };
        Err(self.world.fail(self.number(other), fault))
    }

    fn wait(&self, other: usize, ready: impl Fn() -> bool) -> Result<(), ModelError> {
        self.world.wait(self.number(self.rank), self.number(other), ready)
    }

    /// Returns the number in the world of a rank of the group.
    fn number(&self, rank: usize) -> usize {
        self.group.members[rank]
    }

    fn mailbox(&self, from: usize, to: usize) -> Result<&Mailbox, ModelError> {
        let ranks = self.ranks();
        if from.max(to) >= ranks || from == to {
            let rank = if from == self.rank { to } else { from };
            return Err(ModelError::Rank { rank, fault: RankFault::NoSuchRank { ranks } });
        }
        Ok(&self.group.mailboxes[from * ranks + to])
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.group.members.len()
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), ModelError> {
        if self.ranks() == 1 {
            self.world.advance();
            return self.world.check();
        }
        self.meet(Op::AllReduce, values.len(), values)?;
        values.copy_from_slice(&self.posting(0).values);
        for rank in 1..self.ranks() {
            for (sum, value) in values.iter_mut().zip(&self.posting(rank).values) {
                *sum += value;
            }
        }
        Ok(())
    }

    fn all_gather(
        &mut self,
        part: &[f32],
        total: usize,
        mut see: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.meet(Op::AllGather, total, part)?;
        let gathered: usize = (0..self.ranks()).map(|rank| self.posting(rank).values.len()).sum();
        if gathered != total {
            let (expected, found) = (format!("{total} gathered values"), format!("{gathered}"));
            let fault = RankFault::CallMismatch { other: self.number(0), expected, found };
            return Err(self.world.fail(self.number(self.rank), fault));
        }
        (0..self.ranks()).for_each(|rank| see(rank, &self.posting(rank).values));
        Ok(())
    }

    fn send(&mut self, to: usize, values: &[f32]) -> Result<(), ModelError> {
        self.world.check()?;
        let mailbox = self.mailbox(self.rank, to)?;
        let sequence = mailbox.sent.load(Ordering::SeqCst);
        self.wait(to, || sequence - mailbox.taken.load(Ordering::SeqCst) < IN_FLIGHT as u64)?;
        let call = Call { op: Op::Send, length: values.len(), sequence };
        mailbox.letter(sequence).fill(call, values);
        mailbox.sent.store(sequence + 1, Ordering::SeqCst);
        self.world.advance();
        Ok(())
    }

    fn receive(&mut self, from: usize, values: &mut [f32]) -> Result<(), ModelError> {
        let mailbox = self.mailbox(from, self.rank)?;
        let sequence = mailbox.taken.load(Ordering::SeqCst);
        self.wait(from, || mailbox.sent.load(Ordering::SeqCst) > sequence)?;
        let letter = mailbox.letter(sequence);
        self.agree(from, Call { op: Op::Send, length: values.len(), sequence }, letter.call)?;
        values.copy_from_slice(&letter.values);
        drop(letter);
        mailbox.taken.store(sequence + 1, Ordering::SeqCst);
        self.world.advance();
        Ok(())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.world.fail(self.number(self.rank), RankFault::Terminated);
    }
}

impl Group {
    fn new(members: Vec<usize>) -> Self {
        let ranks = members.len();
        Group {
            members,
            desks: (0..ranks).map(|_| Desk::default()).collect(),
            mailboxes: (0..ranks * ranks).map(|_| Mailbox::default()).collect(),
        }
    }
}

impl Mailbox {
    fn letter(&self, sequence: u64) -> MutexGuard<'_, Posting> {
        self.letters[sequence as usize % IN_FLIGHT].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Posting {
    fn fill(&mut self, call: Call, values: &[f32]) {
        self.call = Some(call);
        self.values.clear();
        self.values.reserve_exact(values.len());
        self.values.extend_from_slice(values);
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Call { op, length, sequence } = self;
        write!(f, "{op:?} of {length} values, number {sequence}")
    }
}

/// Returns the size of the buffers that the groups of `stages` × `tensor` ranks keep, in bytes, for steps whose
/// hidden rows have `hidden` values and whose logits have `logits` values.
pub(crate) fn buffer_bytes(tensor: usize, stages: usize, hidden: usize, logits: usize) -> u64 {
    let posted = |rank_values: usize| tensor.saturating_mul(rank_values).saturating_mul(POSTINGS);
    // A rank posts its hidden rows or, in the last stage, its part of the logits. The parts of all ranks together are
    // the logits.
    let meetings = if tensor == 1 {
        0
    } else {
        posted(hidden).saturating_mul(stages).saturating_add(logits.saturating_mul(POSTINGS))
    };
    let letters = (stages - 1).saturating_mul(tensor).saturating_mul(IN_FLIGHT).saturating_mul(hidden);
    meetings.saturating_add(letters).saturating_mul(4) as u64
}
