//! The span of one answer, named after OpenTelemetry's conventions for generative AI, as the engine's own spans are.

use skep_engine::{
    EngineError,
    chat::{ChatOptions, ChatOutcome, Input},
};
use tracing::{Span, field::Empty, info_span};

/// Opens the span of an answer of `model`.
pub(crate) fn open(provider: &str, model: &str, input: &Input, options: &ChatOptions) -> Span {
    let operation = match input {
        Input::Messages(_) => "chat",
        Input::Text(_) => "text_completion",
    };
    info_span!(
        "generation",
        otel.name = %format_args!("{operation} {model}"),
        otel.status_code = Empty,
        gen_ai.operation.name = operation,
        gen_ai.provider.name = provider,
        gen_ai.agent.name = options.affinity.agent.as_deref(),
        gen_ai.conversation.id = options.affinity.session.as_deref(),
        gen_ai.request.model = model,
        gen_ai.request.max_tokens = options.max_tokens.map(|tokens| tokens as i64),
        gen_ai.response.finish_reasons = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        skep.attempts = Empty,
        error.type = Empty,
    )
}

/// Records how the answer ended.
pub(crate) fn close(span: &Span, result: &Result<ChatOutcome, EngineError>) {
    match result {
        Ok(outcome) => {
            span.record("gen_ai.response.finish_reasons", outcome.finish.as_str());
            span.record("gen_ai.usage.input_tokens", i64::from(outcome.usage.prompt_tokens));
            span.record("gen_ai.usage.output_tokens", i64::from(outcome.usage.completion_tokens));
            span.record("gen_ai.usage.cache_read.input_tokens", i64::from(outcome.usage.cached_tokens));
            if outcome.usage.cache_write_tokens > 0 {
                let written = i64::from(outcome.usage.cache_write_tokens);
                span.record("gen_ai.usage.cache_creation.input_tokens", written);
            }
        }
        Err(error) => {
            span.record("error.type", error.code());
            span.record("otel.status_code", "ERROR");
            span.in_scope(|| tracing::debug!(code = error.code(), "the answer ended early: {error}"));
        }
    }
}
