//! Generations of models on other servers, which a restart cannot continue token for token.

use crate::{
    CutOffMode, RunEvent,
    bindings::types::Error,
    capability::turn::Turn,
    journal::{Call, Stopped},
};

/// Decides whether a generation that a crash may have cut off is repeated. Returns an error if it must not be: because the agent says so, or because the guest read a text that another answer would not repeat.
pub(in crate::capability) async fn make_again(
    turn: &Turn,
    call: &Call,
    was_read: bool,
) -> Result<Result<(), Error>, Stopped> {
    let mode = turn.agent.manifest.inference.cut_off.unwrap_or_default();
    let interrupted = |why: &str| {
        Err(Error::Internal(format!(
            "interrupted: the host crashed while another server answered, and {why}"
        )))
    };
    if was_read {
        return Ok(interrupted("the agent had read some of the answer; generate again"));
    }
    if mode == CutOffMode::Fail {
        if call.was_dispatched() {
            return Ok(interrupted("`cut_off` under [inference] in agent.toml is \"fail\""));
        }
        turn.journal.dispatched(call).await?;
    }
    if call.shown_bytes() > 0 {
        turn.journal.shown(call, RunEvent::GenerationRestarted);
    }
    Ok(Ok(()))
}
