//! A request on its way from the caller's handle to a replica's loop.
//!
//! Everything that can be refused has been checked by then. The submission holds a slot in the replica's queue and
//! a share of its load, which are released wherever it is dropped.

use std::sync::Arc;
use std::time::Instant;

use crate::constraint::OutputConstraint;
use crate::draft::GrammarDrafter;
use crate::rollback::Checks;
use crate::router::LoadShare;
use crate::stream::{EventSender, SpentTokens};
use crate::telemetry::QueueSlot;
use crate::{GenerateRequest, PageSink};

/// A checked request with its constraint compiled.
pub(crate) struct Submission {
    pub request: GenerateRequest,
    pub max_tokens: usize,
    pub matcher: Option<OutputConstraint>,
    /// Drafter for the constraint of `matcher`.
    pub drafter: Option<GrammarDrafter>,
    pub checks: Option<Arc<Checks>>,
    /// Gets the pages of the prompt.
    pub pages: Option<Arc<dyn PageSink>>,
    pub events: EventSender,
    pub spent: SpentTokens,
    pub submitted: Instant,
    pub deadline: Instant,
    pub slot: QueueSlot,
    pub load: LoadShare,
}
