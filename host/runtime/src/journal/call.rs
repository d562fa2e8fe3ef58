//! One host call, and what is known of it from before a restart.

use super::{
    Journal,
    flight::Flying,
    record::Identity,
    replay::{Place, Read},
};
use crate::Json;
use skep_engine::{ModelDigest, TakenBack};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

/// The place of a call among the guest's calls, before all of it is known. If it is given up before that, nothing that was
/// recorded of it holds up the others.
pub(crate) struct Made {
    pub(super) journal: Arc<Journal>,
    pub(super) number: u32,
    /// `None` once the call is known.
    pub(super) flying: Option<Flying>,
}

impl Drop for Made {
    fn drop(&mut self) {
        if self.flying.take().is_some() {
            self.journal.forget(self.number);
        }
    }
}

/// The calls that the host makes for one of the guest's. When that one is over, those that were recorded and are not made
/// this time hold up nothing.
pub(super) struct Children {
    pub(super) journal: Arc<Journal>,
    pub(super) parent: u32,
}

impl Drop for Children {
    fn drop(&mut self) {
        self.journal.forget_children(self.parent);
    }
}

/// A host call that the guest makes.
pub(crate) struct Call {
    pub(super) number: u32,
    pub(super) identity: Identity,
    pub(super) past: Past,
    /// What the guest read of its text before a restart.
    pub(super) reads: Vec<Read>,
    /// Events that the caller was shown while it goes on.
    pub(super) shown: AtomicU32,
    /// Whether the journal has tokens of it.
    pub(super) is_journalled: AtomicBool,
    /// What it read before a restart came at its own time, of which an early version recorded nothing.
    pub(super) reads_freely: bool,
    pub(super) _flying: Flying,
    pub(super) _children: Children,
}

/// What is known of a call from before a restart.
pub(super) enum Past {
    /// Nothing: it is made now.
    None,
    /// It was cut off.
    Begun {
        tokens: Vec<u32>,
        taken_back: TakenBack,
        model: Option<ModelDigest>,
        shown_bytes: usize,
        dispatched: bool,
    },
    Ended {
        result: Json,
        place: Place,
    },
}

impl Call {
    /// Tokens that the generation had produced when it was cut off.
    pub(crate) fn tokens(&self) -> &[u32] {
        match &self.past {
            Past::Begun { tokens, .. } => tokens,
            Past::None | Past::Ended { .. } => &[],
        }
    }

    /// What the generation had taken back by the last of these tokens.
    pub(crate) fn taken_back(&self) -> TakenBack {
        match self.past {
            Past::Begun { taken_back, .. } => taken_back,
            Past::None | Past::Ended { .. } => TakenBack::default(),
        }
    }

    /// Whether it was cut off while another model than this one generated: its tokens mean nothing to this one.
    pub(crate) fn is_of_another(&self, model: &ModelDigest) -> bool {
        matches!(&self.past, Past::Begun { model: Some(before), .. } if before != model)
    }

    /// The call in the turn; the same when the turn is run again.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// How many events of it the caller was shown, before a restart and since.
    pub(crate) fn shown(&self) -> u32 {
        self.shown.load(Ordering::Relaxed)
    }

    /// Whether it was made before a restart, or was about to be, and nobody knows what became of it.
    pub(crate) fn was_dispatched(&self) -> bool {
        matches!(self.past, Past::Begun { dispatched: true, .. })
    }

    /// Bytes of text that the caller was shown before.
    pub(crate) fn shown_bytes(&self) -> usize {
        match self.past {
            Past::Begun { shown_bytes, .. } => shown_bytes,
            Past::None | Past::Ended { .. } => 0,
        }
    }
}
