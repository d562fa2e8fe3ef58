//! Usage over all answers of a conversation, as it is stored with it.

use serde::{Deserialize, Serialize};

use crate::Usage;

/// What was stored before a count existed has none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct UsageSum {
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    forced_tokens: u32,
    accepted_tokens: u32,
    rejected_tokens: u32,
    taken_back_tokens: u32,
}

impl From<UsageSum> for Usage {
    fn from(sum: UsageSum) -> Self {
        let UsageSum {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            forced_tokens,
            accepted_tokens,
            rejected_tokens,
            taken_back_tokens,
        } = sum;
        Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            forced_tokens,
            accepted_tokens,
            rejected_tokens,
            taken_back_tokens,
        }
    }
}

impl From<Usage> for UsageSum {
    fn from(usage: Usage) -> Self {
        let Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            forced_tokens,
            accepted_tokens,
            rejected_tokens,
            taken_back_tokens,
        } = usage;
        UsageSum {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            forced_tokens,
            accepted_tokens,
            rejected_tokens,
            taken_back_tokens,
        }
    }
}
