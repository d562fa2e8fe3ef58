//! Converts what a model generated to the guest's types.

use crate::bindings::{inference, types};
use skep_engine::{
    Usage,
    chat::{ChatFinish, ChatOutcome, ToolCall},
};

/// Converts a generated message to the guest's result.
pub(in crate::capability) fn generation_of(outcome: ChatOutcome) -> inference::Generation {
    inference::Generation {
        text: outcome.text,
        tool_calls: outcome.tool_calls.into_iter().map(tool_call).collect(),
        finish: match outcome.finish {
            ChatFinish::Stop => inference::FinishReason::Stop,
            ChatFinish::Length => inference::FinishReason::Length,
            ChatFinish::ToolCalls => inference::FinishReason::ToolCalls,
        },
        usage: usage(&outcome.usage),
        timing: timing(&outcome.timing),
    }
}

pub(crate) fn usage(usage: &Usage) -> types::Usage {
    types::Usage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
    }
}

pub(crate) fn tool_call(call: ToolCall) -> types::ToolCall {
    types::ToolCall { id: call.id, name: call.name, arguments: call.arguments }
}

pub(in crate::capability) fn timing(timing: &skep_engine::Timing) -> types::Timing {
    types::Timing {
        queue_us: timing.queue_us,
        first_token_us: timing.first_token_us,
        total_us: timing.total_us,
    }
}
