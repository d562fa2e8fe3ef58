//! The tracing span of one turn, for the log and for traces, named after OpenTelemetry's semantic
//! conventions for generative AI. Everything the turn does happens inside it, so spans of
//! generations are its children.

use super::ended::Ended;
use crate::{RuntimeError, name::SessionKey};
use tracing::{Span, field::Empty};

/// Starts the span of a turn. `parent` is the span of whoever sent the message or had the turn
/// rerun.
pub(super) fn begin(parent: &Span, key: &SessionKey, turn_id: &str) -> Span {
    let SessionKey { agent, session } = key;
    tracing::info_span!(
        parent: parent,
        "turn",
        otel.name = %format_args!("invoke_agent {agent}"),
        otel.status_code = Empty,
        gen_ai.operation.name = "invoke_agent",
        gen_ai.provider.name = "skep",
        gen_ai.agent.name = agent.as_str(),
        gen_ai.conversation.id = session.as_str(),
        skep.turn.id = turn_id,
        skep.turn.number = Empty,
        error.type = Empty,
    )
}

/// Records the turn's number in its session on the current span.
pub(super) fn set_number(number: u64) {
    Span::current().record("skep.turn.number", number.cast_signed());
}

/// Records how the turn ended.
pub(super) fn end(span: &Span, ended: &Ended) {
    match ended {
        Ended::Done { .. } => span.in_scope(|| tracing::debug!("the turn ended")),
        Ended::LeftOpen(RuntimeError::ShuttingDown) => {
            span.in_scope(|| {
                tracing::info!("the turn is suspended, and resumes at the next start of the host")
            });
        }
        Ended::Failed(error) | Ended::LeftOpen(error) => {
            span.record("error.type", error.code());
            span.record("otel.status_code", "ERROR");
            span.in_scope(|| tracing::warn!(code = error.code(), "the turn failed: {error}"));
        }
    }
}
