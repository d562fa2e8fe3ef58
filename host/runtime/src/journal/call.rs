//! One host call, and what the journal recorded of it before a restart.

use super::{
    Journal,
    flight::CallInFlight,
    record::Identity,
    replay::{Attempt, Read, ReplayPosition},
};
use crate::Json;
use skep_engine::{ModelDigest, RolledBack};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

/// A call that has its number among the guest's calls but no identity yet. If it is dropped in this
/// state, its recorded results no longer hold up other calls.
pub(crate) struct Made {
    pub(super) journal: Arc<Journal>,
    pub(super) number: u32,
    /// `None` once the call is identified.
    pub(super) in_flight: Option<CallInFlight>,
}

impl Drop for Made {
    fn drop(&mut self) {
        if self.in_flight.take().is_some() {
            self.journal.forget(self.number);
        }
    }
}

/// The calls that the host makes on behalf of one guest call. When that call is over, recorded
/// children that were not repeated no longer hold up other calls.
pub(super) struct Children {
    pub(super) journal: Arc<Journal>,
    pub(super) parent: u32,
}

impl Drop for Children {
    fn drop(&mut self) {
        self.journal.forget_children(self.parent);
    }
}

/// A host call made by the guest.
pub(crate) struct Call {
    pub(super) number: u32,
    pub(super) identity: Identity,
    pub(super) recorded: RecordedCall,
    /// The guest's reads of the call's text before a restart.
    pub(super) reads: Vec<Read>,
    /// The attempts at a generation before a restart.
    pub(super) attempts: Vec<Attempt>,
    /// Number of attempts since then that were cut off and repeated.
    pub(super) repeats: AtomicU32,
    /// Number of events of this call that the caller has been shown.
    pub(super) shown: AtomicU32,
    /// Whether the caller has been shown some of the answer since the generation last began.
    pub(super) shows_answer: AtomicBool,
    /// Whether the journal contains tokens of this call.
    pub(super) is_journaled: AtomicBool,
    /// Whether reads are not replayed, because an early version did not record them.
    pub(super) reads_freely: bool,
    pub(super) _in_flight: CallInFlight,
    pub(super) _children: Children,
}

/// The recorded state of a call from before a restart.
pub(super) enum RecordedCall {
    /// The journal has no record of the call; it is made now.
    None,
    /// The call was interrupted.
    Interrupted {
        tokens: Vec<u32>,
        taken_back: RolledBack,
        model: Option<ModelDigest>,
        shown_bytes: usize,
        dispatched: bool,
    },
    Finished {
        result: Json,
        position: ReplayPosition,
    },
}

impl Call {
    /// Returns whether the caller was shown text before a restart of which the journal has no tokens: a remote model produced it.
    /// Another host of the cluster may have, with a model that this host computes itself.
    pub(crate) fn was_shown_by_remote(&self) -> bool {
        self.tokens().is_empty() && self.shown_bytes() > 0
    }

    /// Returns the tokens that the generation had produced when it was interrupted.
    pub(crate) fn tokens(&self) -> &[u32] {
        match &self.recorded {
            RecordedCall::Interrupted { tokens, .. } => tokens,
            RecordedCall::None | RecordedCall::Finished { .. } => &[],
        }
    }

    /// Returns how much the generation had taken back by the last of these tokens.
    pub(crate) fn taken_back(&self) -> RolledBack {
        match self.recorded {
            RecordedCall::Interrupted { taken_back, .. } => taken_back,
            RecordedCall::None | RecordedCall::Finished { .. } => RolledBack::default(),
        }
    }

    /// Returns whether the interrupted generation used a different model, in which case its tokens
    /// are meaningless to this one.
    pub(crate) fn is_of_another(&self, model: &ModelDigest) -> bool {
        matches!(&self.recorded, RecordedCall::Interrupted { model: Some(before), .. } if before != model)
    }

    /// Returns the call's number in the turn, which is the same in every rerun.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns how many events of the call the caller was shown, before and after a restart.
    pub(crate) fn shown(&self) -> u32 {
        self.shown.load(Ordering::Relaxed)
    }

    /// Returns whether the call was made before a restart, or was about to be, and its result is
    /// unknown.
    pub(crate) fn was_dispatched(&self) -> bool {
        matches!(self.recorded, RecordedCall::Interrupted { dispatched: true, .. })
    }

    /// Returns whether the guest read some of the call's text before a restart.
    pub(crate) fn was_read(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Returns the attempts at the generation before a restart.
    pub(crate) fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// Returns the number of the current attempt at a generation of a remote model, from 0. A crash and a server that breaks
    /// an answer off end an attempt alike.
    pub(crate) fn attempt(&self) -> u32 {
        let before = self.attempts.last().map_or(0, |before| before.number + 1);
        before + self.repeats.load(Ordering::Relaxed)
    }

    /// Begins the next attempt at a generation, because its answer was cut off.
    pub(crate) fn begin_again(&self) {
        self.repeats.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the caller has been shown some of the answer, before a restart or after it, since the generation last
    /// began.
    pub(crate) fn shows_answer(&self) -> bool {
        self.shows_answer.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of text the caller was shown before a restart.
    pub(crate) fn shown_bytes(&self) -> usize {
        match self.recorded {
            RecordedCall::Interrupted { shown_bytes, .. } => shown_bytes,
            RecordedCall::None | RecordedCall::Finished { .. } => 0,
        }
    }
}
