//! The parts of a sequence's state, each with one subject.
//!
//! The parts hold values and decide nothing; the sequence around them keeps them consistent.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::thinking::ThinkingState;
use crate::constraint::OutputConstraint;
use crate::detokenize::Detokenizer;
use crate::draft::GrammarDrafter;
use crate::kv::SequencePages;
use crate::rollback::CheckedOutput;
use crate::router::LoadShare;
use crate::service::Service;
use crate::stream::{EventSender, SpentTokens};
use crate::telemetry::QueueSlot;
use crate::{PageSink, Timing, TokenLogprob};

/// The keys and values of a sequence that have been computed.
#[derive(Default)]
pub(crate) struct Computed {
    /// Number of tokens whose keys and values are in the pages.
    pub tokens: usize,
    pub pages: SequencePages,
    /// Set when tokens were rolled back: computed tokens count only up to this position.
    pub recompute_from: Option<usize>,
    /// Number of pages that the sequence held when they were last taken from it.
    pub released_pages: usize,
}

/// The form that the output must have.
pub(super) struct Form {
    pub constraint: Constrained,
    /// The reasoning before the answer, if something depends on it.
    pub thinking: Option<ThinkingState>,
    /// Predicts the next tokens from the form of the output.
    pub drafter: Option<GrammarDrafter>,
    /// Checks values that the constraint's masks cannot enforce; `None` if they enforce everything.
    pub checked: Option<Box<CheckedOutput>>,
}

/// The constraint on the output.
pub(super) enum Constrained {
    No,
    By(Box<OutputConstraint>),
    /// The masks of the constraint are being computed elsewhere. It comes back before anything is appended.
    Lent,
}

/// The results that the caller receives.
pub(super) struct Delivery {
    pub text: Detokenizer,
    pub events: EventSender,
    pub spent: SpentTokens,
    /// Scores of the prompt so far, if they were requested. The first entry exists from the start.
    pub scores: Option<Vec<Option<TokenLogprob>>>,
    /// Gets the pages of the prompt, for another host.
    pub pages: Option<Arc<dyn PageSink>>,
    /// Number of pages that it has got, or did not want.
    pub given_pages: usize,
}

/// The counts of a sequence's tokens by kind.
#[derive(Default)]
pub(super) struct TokenCounts {
    pub cached: usize,
    /// Tokens that another host has computed.
    pub prefilled: usize,
    /// Positions that the sequence computed before it was admitted.
    pub head_start: Range<usize>,
    pub forced: usize,
    pub accepted: usize,
    pub rejected: usize,
    /// Service reported by the last call of `Sequence::take_service`.
    pub billed: Service,
}

/// The times of a sequence's progress.
pub(super) struct Times {
    pub submitted: Instant,
    pub deadline: Instant,
    pub admitted: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    /// Time for which another host computed a part of the prompt.
    pub prefill: Duration,
}

/// The sequence's share of its replica, which is released as soon as it is not needed.
pub(super) struct Reservation {
    /// `None` once the sequence has been admitted.
    pub slot: Option<QueueSlot>,
    /// `None` once the sequence has ended.
    pub load: Option<LoadShare>,
}

impl Times {
    /// Returns the time from the submission to `at`, zero if `at` is earlier.
    pub fn since_submission(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.submitted)
    }

    /// Returns the timing of a sequence that ends `now`.
    pub fn timing(&self, now: Instant) -> Timing {
        let since_submission_us = |at: Instant| micros(self.since_submission(at));
        Timing {
            queue_us: since_submission_us(self.admitted.unwrap_or(now)),
            first_token_us: since_submission_us(self.first_token.unwrap_or(now)),
            total_us: since_submission_us(now),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
