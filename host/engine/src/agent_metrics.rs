//! The metrics of one agent's requests to one model, as handles. Resolving a name and labels takes a lock and
//! allocates, so it is done once for an agent and not for each token.

use metrics::{Counter, Histogram, counter, histogram};

use crate::metric;

/// Tokens by origin.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenKind {
    Prompt,
    Cached,
    Sampled,
    Forced,
    /// Sampled tokens that had been drafted.
    Accepted,
    /// Drafted tokens that were rejected.
    Rejected,
    /// Tokens that were produced and rolled back, because a value did not satisfy its schema.
    RolledBack,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Outcome {
    Eos,
    Stop,
    Length,
    ConstraintDone,
    Cancelled,
    Deadline,
    Shutdown,
    Failed,
    /// The queue was full.
    Busy,
}

pub(crate) struct AgentMetrics {
    requests: [Counter; Outcome::ALL.len()],
    tokens: [Counter; TokenKind::ALL.len()],
    pub preemptions: Counter,
    pub queue: Histogram,
    pub first_token: Histogram,
    pub inter_token: Histogram,
    pub kv_pages: Histogram,
}

impl AgentMetrics {
    /// Creates all series at once, so that a rate over them is right from the first event.
    pub fn new(model: &str, agent: &str) -> Self {
        let labels = [("model", model.to_owned()), ("agent", agent.to_owned())];
        let with = |key: &'static str, value: &'static str| {
            let [model, agent] = labels.clone();
            [model, agent, (key, value.to_owned())]
        };
        AgentMetrics {
            requests: Outcome::ALL
                .map(|outcome| counter!(metric::REQUESTS, &with("outcome", outcome.label()))),
            tokens: TokenKind::ALL.map(|kind| match kind {
                TokenKind::RolledBack => counter!(metric::ROLLED_BACK, &labels),
                kind => counter!(metric::TOKENS, &with("kind", kind.label())),
            }),
            preemptions: counter!(metric::PREEMPTIONS, &labels),
            queue: histogram!(metric::QUEUE, &labels),
            first_token: histogram!(metric::FIRST_TOKEN, &labels),
            inter_token: histogram!(metric::INTER_TOKEN, &labels),
            kv_pages: histogram!(metric::REQUEST_PAGES, &labels),
        }
    }

    /// Counts one request by its outcome. Refused requests count too.
    pub fn count_request(&self, outcome: Outcome) {
        self.requests[outcome as usize].increment(1);
    }

    /// Adds tokens of one kind to the agent's counter.
    pub fn count_tokens(&self, kind: TokenKind, tokens: usize) {
        self.tokens[kind as usize].increment(tokens as u64);
    }
}

impl TokenKind {
    const ALL: [Self; 7] = [
        Self::Prompt,
        Self::Cached,
        Self::Sampled,
        Self::Forced,
        Self::Accepted,
        Self::Rejected,
        Self::RolledBack,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Cached => "cached",
            Self::Sampled => "sampled",
            Self::Forced => "forced",
            Self::Accepted => "accepted",
            Self::Rejected => "rejected",
            Self::RolledBack => "taken_back",
        }
    }
}

impl Outcome {
    const ALL: [Self; 9] = [
        Self::Eos,
        Self::Stop,
        Self::Length,
        Self::ConstraintDone,
        Self::Cancelled,
        Self::Deadline,
        Self::Shutdown,
        Self::Failed,
        Self::Busy,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ConstraintDone => "constraint_done",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Shutdown => "shutdown",
            Self::Failed => "failed",
            Self::Busy => "busy",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_at_its_own_index() {
        for (place, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, place, "{outcome:?}");
        }
        for (place, kind) in TokenKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place, "{kind:?}");
        }
    }
}
