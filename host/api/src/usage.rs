//! Numbers of tokens.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Numbers of tokens in OpenAI's shape.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    #[serde(default)]
    #[schema(required)]
    pub prompt_tokens_details: PromptTokens,
    #[serde(default)]
    #[schema(required)]
    pub completion_tokens_details: CompletionTokens,
}

/// Parts of the prompt tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromptTokens {
    /// Prompt tokens that did not have to be computed.
    pub cached_tokens: u64,
    /// Prompt tokens that an upstream wrote to its cache, which are not part of `cached_tokens`. It is missing if there
    /// are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cache_write_tokens: u64,
    /// Prompt tokens that a prefill host of the cluster computed, which are not part of `cached_tokens`. It is missing if there
    /// are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prefilled_tokens: u64,
    /// Milliseconds for which prefill hosts computed them. It is missing if there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prefill_ms: u64,
}

/// Parts of the generated tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct CompletionTokens {
    /// Generated tokens of the reasoning.
    pub reasoning_tokens: u64,
    /// Generated tokens that had been drafted.
    pub accepted_prediction_tokens: u64,
    /// Drafted tokens that were not used.
    pub rejected_prediction_tokens: u64,
    /// Tokens that were generated and rolled back because a value did not satisfy its schema. It is missing if there
    /// are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub taken_back_tokens: u64,
}

fn is_zero(tokens: &u64) -> bool {
    *tokens == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn taken_back_tokens_are_written_only_if_there_are_some() {
        for (tokens, written) in [(0, None), (7, Some(json!(7)))] {
            let details = CompletionTokens { taken_back_tokens: tokens, ..CompletionTokens::default() };
            let details = serde_json::to_value(&details).unwrap();
            assert_eq!(details.get("taken_back_tokens").cloned(), written);
        }
    }

    #[test]
    fn details_may_be_missing() {
        let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
        let usage: Usage = serde_json::from_value(usage).unwrap();
        assert_eq!((usage.total_tokens, usage.prompt_tokens_details.cached_tokens), (7, 0));
    }
}
