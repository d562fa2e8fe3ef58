//! The span of one generation, for the log and for traces, named after OpenTelemetry's conventions for
//! generative AI.
//!
//! The span is created on the caller's thread, below the caller's span, and filled from what the caller reads,
//! so the engine's loop does no work for it. It ends when the generation finishes, or when the caller drops its
//! stream. Numbers are `i64`, because traces have no unsigned numbers.

use tracing::field::Empty;
use tracing::{Span, info_span};

use crate::{EngineError, Finished, GenerateRequest, TokenEvent};

#[derive(Debug)]
pub(crate) struct GenerationSpan {
    span: Span,
    progress: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Running,
    Ended,
}

impl GenerationSpan {
    /// Opens a span below the caller's current one, with the fields that are known from the request.
    pub fn new(model: &str, request: &GenerateRequest) -> Self {
        let span = info_span!(
            "generation",
            otel.name = %format_args!("chat {model}"),
            otel.status_code = Empty,
            gen_ai.operation.name = "chat",
            gen_ai.provider.name = "skep",
            gen_ai.agent.name = request.affinity.agent.as_deref(),
            gen_ai.conversation.id = request.affinity.session.as_deref(),
            gen_ai.request.model = model,
            gen_ai.request.max_tokens = request.max_tokens.map(|tokens| tokens as i64),
            gen_ai.request.temperature = as_written(request.sampling.temperature),
            gen_ai.request.top_p = (request.sampling.top_p < 1.0).then(|| as_written(request.sampling.top_p)),
            gen_ai.request.seed = request.seed.map(u64::cast_signed),
            gen_ai.response.finish_reasons = Empty,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            gen_ai.usage.cache_read.input_tokens = Empty,
            skep.queue_us = Empty,
            skep.first_token_us = Empty,
            error.type = Empty,
        );
        GenerationSpan { span, progress: Progress::Running }
    }

    /// Records what the caller reads.
    pub fn observe(&mut self, event: &Result<TokenEvent, EngineError>) {
        match event {
            Ok(TokenEvent::Finished(finished)) => self.finish(finished),
            Ok(_) => {}
            Err(error) => self.fail(error),
        }
    }

    /// Records that the generation was refused or broke off.
    pub fn fail(&mut self, error: &EngineError) {
        self.progress = Progress::Ended;
        self.span.record("error.type", error.code());
        self.span.record("otel.status_code", "ERROR");
        self.span.in_scope(|| tracing::debug!(code = error.code(), "the generation ended early: {error}"));
    }

    fn finish(&mut self, finished: &Finished) {
        self.progress = Progress::Ended;
        let Finished { reason, usage, timing, .. } = finished;
        self.span.record("gen_ai.response.finish_reasons", reason.as_str());
        self.span.record("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
        self.span.record("gen_ai.usage.output_tokens", i64::from(usage.completion_tokens));
        self.span.record("gen_ai.usage.cache_read.input_tokens", i64::from(usage.cached_tokens));
        self.span.record("skep.queue_us", timing.queue_us.cast_signed());
        self.span.record("skep.first_token_us", timing.first_token_us.cast_signed());
        self.span.in_scope(|| tracing::debug!(total_us = timing.total_us, "the generation ended"));
    }
}

impl Drop for GenerationSpan {
    fn drop(&mut self) {
        if self.progress == Progress::Running {
            self.fail(&EngineError::Cancelled);
        }
    }
}

/// Returns the number that a client wrote: 0.7, not the 0.699999988079071 that is nearest to it in 32 bits.
fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
