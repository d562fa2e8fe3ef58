//! Sequences that have ended, and whose clients are expected to continue them soon: the output calls a tool, and the next
//! request has its result.
//!
//! Their cached pages are evicted after those that nobody is known to need, and before those that waiting requests begin
//! with. The pages stay evictable, so no other request waits for them. A prefix is kept in this way for [`KEPT_TIME`] at
//! most, and all of them together are at most one part in [`KEPT_SHARE`] of the pages; what exceeds a bound has the place in
//! the order of eviction that it would have had anyway.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use skep_model::{PAGE_TOKENS, PageId};

use super::{Ending, Scheduler, is_background};
use crate::Affinity;
use crate::kv::{KvCache, PrefixOwner, UseMark};
use crate::sequence::Sequence;
use crate::telemetry::ContinuationOutcome;

/// Maximum time for which pages are kept for a continuation.
const KEPT_TIME: Duration = Duration::from_secs(2);
/// The fraction of the pages, as a divisor, that continuations keep.
const KEPT_SHARE: usize = 2;
/// Maximum number of expected continuations. The oldest one is dropped to make room.
const MAX_EXPECTED: usize = 256;

/// The sequences that are expected to be continued.
pub(super) struct Continuations {
    /// The oldest first.
    expected: VecDeque<Continuation>,
    /// The time at the beginning of the step.
    now: Instant,
}

struct Continuation {
    affinity: Affinity,
    /// The tokens of whole computed pages.
    tokens: Vec<u32>,
    ended: Instant,
    /// The mark in the prefix tree, if the pages are kept.
    mark: Option<UseMark>,
}

impl Continuations {
    /// Creates an empty list.
    pub fn new(now: Instant) -> Self {
        Continuations { expected: VecDeque::new(), now }
    }

    /// Returns the number of expected continuations.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.expected.len()
    }

    fn tokens(&self) -> usize {
        self.expected.iter().map(|continuation| continuation.tokens.len()).sum()
    }
}

impl Continuation {
    /// Returns whether a request is the expected one: of the same session or, without a session, with the same beginning.
    fn is_continued_by(&self, next: &Sequence) -> bool {
        let (expected, came) = (&self.affinity, &next.request.affinity);
        let is_same = match (&expected.session, &came.session) {
            (Some(session), Some(other)) => expected.agent == came.agent && session == other,
            _ => next.tokens.starts_with(&self.tokens),
        };
        expected.tenant == came.tenant && is_same
    }

    fn pages(&self, kv: &KvCache) -> Vec<PageId> {
        kv.peek_prefix(&self.affinity.tenant, &self.tokens)
    }

    fn keep(&mut self, kv: &mut KvCache) {
        self.release(kv);
        self.mark = kv.mark_prefix(&self.affinity.tenant, &self.tokens);
    }

    fn release(&mut self, kv: &mut KvCache) {
        if let Some(mark) = self.mark.take() {
            kv.unmark_prefix(&self.affinity.tenant, &self.tokens, mark);
        }
    }
}

impl Scheduler {
    /// Forgets the expected continuations of the matching clients.
    pub fn forget_continuations(&mut self, matches: impl Fn(&PrefixOwner) -> bool) {
        self.drop_continuations(|continuation| matches(&PrefixOwner::of(&continuation.affinity)));
    }

    /// Records a sequence that ends and still has its pages, if its client is expected to continue it soon.
    pub(super) fn expect_continuation(&mut self, sequence: &Sequence, ending: &Ending) {
        let Ok(reason) = ending else { return };
        let whole = sequence.settled() / PAGE_TOKENS * PAGE_TOKENS;
        let is_forgotten = self.disk.forgotten.contains(&sequence.id);
        if whole == 0 || is_forgotten || is_background(sequence) || !sequence.expects_continuation(reason) {
            return;
        }
        self.continuations.expected.push_back(Continuation {
            affinity: sequence.request.affinity.clone(),
            tokens: sequence.tokens[..whole].to_vec(),
            ended: self.continuations.now,
            mark: None,
        });
        let most = self.limits.page_count * PAGE_TOKENS;
        while self.continuations.expected.len() > MAX_EXPECTED || self.continuations.tokens() > most {
            let Some(mut oldest) = self.continuations.expected.pop_front() else { return };
            oldest.release(&mut self.kv);
        }
    }

    /// Ends the wait for the sequences that a new request continues.
    pub(super) fn end_continuations(&mut self, next: &Sequence) {
        let came = self.drop_continuations(|continuation| continuation.is_continued_by(next));
        self.telemetry.record_continuations(ContinuationOutcome::Continued, came);
    }

    /// Begins a step at `now`, and ends the wait for continuations that are overdue.
    pub(super) fn expire_continuations(&mut self, now: Instant) {
        self.continuations.now = now;
        let is_overdue =
            |continuation: &Continuation| now.saturating_duration_since(continuation.ended) >= KEPT_TIME;
        let overdue = self.drop_continuations(is_overdue);
        self.telemetry.record_continuations(ContinuationOutcome::Expired, overdue);
    }

    /// Marks the prefixes of expected continuations as used, the newest last, as far as they fit their share of the pages.
    pub(super) fn keep_continuations(&mut self) {
        let most = self.limits.page_count / KEPT_SHARE;
        let mut kept: HashSet<PageId> = HashSet::new();
        let fits = |continuation: &Continuation| {
            let pages = continuation.pages(&self.kv);
            let added = pages.iter().filter(|page| !kept.contains(*page)).count();
            let fits = kept.len() + added <= most;
            if fits {
                kept.extend(pages);
            }
            fits
        };
        let fits: Vec<bool> = self.continuations.expected.iter().rev().map(fits).collect();
        for (continuation, fits) in self.continuations.expected.iter_mut().zip(fits.into_iter().rev()) {
            match fits {
                true => continuation.keep(&mut self.kv),
                false => continuation.release(&mut self.kv),
            }
        }
    }

    /// Removes expected continuations, and returns their number.
    fn drop_continuations(&mut self, is_dropped: impl Fn(&Continuation) -> bool) -> usize {
        let before = self.continuations.expected.len();
        let kv = &mut self.kv;
        self.continuations.expected.retain_mut(|continuation| {
            let is_dropped = is_dropped(continuation);
            if is_dropped {
                continuation.release(kv);
            }
            !is_dropped
        });
        before - self.continuations.expected.len()
    }
}
