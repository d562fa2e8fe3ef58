//! The figures that an engine reports about its work, for one replica or for all of them together.

use crate::Counts;

/// Totals since the start, and the current load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    pub pages_total: usize,
    /// Pages that are free, or cached and evictable. Where layers with a window have fewer pages, no larger part of all pages
    /// than of theirs.
    pub pages_free: usize,
    pub pages_cached: usize,
    pub steps: u64,
    /// Prompt tokens of admitted requests, cached ones included.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Sampled and forced tokens.
    pub generated_tokens: u64,
    pub forced_tokens: u64,
    /// Sampled tokens that had been drafted.
    pub accepted_tokens: u64,
    /// Drafted tokens that were not sampled.
    pub rejected_tokens: u64,
    /// Tokens that were produced and rolled back, because a value did not satisfy its schema.
    pub rolled_back_tokens: u64,
    /// Sequences that gave up their pages to older ones and were resumed later.
    pub preemptions: u64,
    /// Sequences of all steps.
    pub step_sequences: u64,
    pub ahead: AheadStats,
}

/// Steps that a device started before the tokens of the step before were known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AheadStats {
    pub steps: u64,
    /// Steps that were used, although a sequence in them had not continued as expected, or another one was running.
    pub partial_steps: u64,
    /// Steps none of whose sequences continued as expected.
    pub wasted_steps: u64,
    /// Sequences in all of these steps.
    pub rows: u64,
    /// Sequences that did not continue as expected.
    pub wasted_rows: u64,
}

/// Distributions of durations since the start.
#[derive(Debug, Clone, Default)]
pub struct EngineTimes {
    /// Time from submission to admission.
    pub queue: Counts,
    /// Time from submission to the first sampled token.
    pub first_token: Counts,
    /// Time between sampled tokens of one sequence.
    pub inter_token: Counts,
    /// Time of a step.
    pub step: Counts,
}

/// KV pages that one owner holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageOwner {
    pub tenant: String,
    /// The agent and the session that have them; `None` if several have them, or a client without an agent.
    pub agent: Option<String>,
    pub session: Option<String>,
    /// Whether a running sequence holds the pages. Otherwise they are cached prefixes.
    pub is_running: bool,
    pub pages: usize,
}

impl EngineTimes {
    pub(crate) fn plus(self, other: EngineTimes) -> EngineTimes {
        EngineTimes {
            queue: self.queue.plus(other.queue),
            first_token: self.first_token.plus(other.first_token),
            inter_token: self.inter_token.plus(other.inter_token),
            step: self.step.plus(other.step),
        }
    }
}

impl EngineStats {
    pub(crate) fn plus(self, other: EngineStats) -> EngineStats {
        EngineStats {
            running: self.running + other.running,
            waiting: self.waiting + other.waiting,
            pages_total: self.pages_total + other.pages_total,
            pages_free: self.pages_free + other.pages_free,
            pages_cached: self.pages_cached + other.pages_cached,
            steps: self.steps + other.steps,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            generated_tokens: self.generated_tokens + other.generated_tokens,
            forced_tokens: self.forced_tokens + other.forced_tokens,
            accepted_tokens: self.accepted_tokens + other.accepted_tokens,
            rejected_tokens: self.rejected_tokens + other.rejected_tokens,
            rolled_back_tokens: self.rolled_back_tokens + other.rolled_back_tokens,
            preemptions: self.preemptions + other.preemptions,
            step_sequences: self.step_sequences + other.step_sequences,
            ahead: self.ahead.plus(other.ahead),
        }
    }
}

impl AheadStats {
    fn plus(self, other: AheadStats) -> AheadStats {
        AheadStats {
            steps: self.steps + other.steps,
            partial_steps: self.partial_steps + other.partial_steps,
            wasted_steps: self.wasted_steps + other.wasted_steps,
            rows: self.rows + other.rows,
            wasted_rows: self.wasted_rows + other.wasted_rows,
        }
    }
}
