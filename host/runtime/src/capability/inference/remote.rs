//! Generations of models on other servers, whose answers cannot be continued token for token: what happens to one that a
//! crash of this host, or the server itself, cuts off. The agent's manifest decides in both cases alike.

use crate::{
    CutOffMode, RunEvent,
    bindings::types::Error,
    capability::turn::Turn,
    journal::{Call, Stopped},
};
use skep_engine::{EngineError, UpstreamFault};

/// Maximum number of times that a generation requests an answer whose server keeps breaking it off. Attempts that crashes of the
/// host cut off count, too.
const MAX_ATTEMPTS: u32 = 3;

/// The reasons why an answer that was cut off is not requested again.
const IS_READ: &str = "the agent had read some of the answer; generate again";
const MUST_FAIL: &str = "`cut_off` under [inference] in agent.toml is \"fail\"";

/// Decides whether a generation that a crash may have cut off is repeated. Returns an error if it must not be: because the agent says so, or because the guest read a text that another answer would not repeat.
pub(in crate::capability) async fn make_again(
    turn: &Turn,
    call: &Call,
    was_read: bool,
) -> Result<Result<(), Error>, Stopped> {
    let crashed =
        |why: &str| Err(interrupted(&format!("the host crashed while another server answered, and {why}")));
    if was_read {
        return Ok(crashed(IS_READ));
    }
    if mode(turn) == CutOffMode::Fail {
        if call.was_dispatched() {
            return Ok(crashed(MUST_FAIL));
        }
        turn.journal.dispatched(call).await?;
    }
    notify(turn, call);
    Ok(Ok(()))
}

/// Returns whether a server broke its answer off after a part of it had arrived here.
pub(super) fn is_broken_off(error: &EngineError) -> bool {
    matches!(error, EngineError::Upstream { fault: UpstreamFault::CutOff, .. })
}

/// Decides whether an answer that its server broke off with this error is requested again. `discard` discards the text that a
/// streaming guest could read, and returns whether it had read none of it. Returns an error if the request must not be
/// repeated: for the same reasons as after a crash, or because it was repeated often enough.
pub(super) fn request_again(
    turn: &Turn,
    call: &Call,
    error: &EngineError,
    discard: impl FnOnce() -> bool,
) -> Result<(), Error> {
    let broken_off = |why: &str| Err(interrupted(&format!("{error}; {why}")));
    if mode(turn) == CutOffMode::Fail {
        return broken_off(MUST_FAIL);
    }
    let attempts = call.attempt() + 1;
    if attempts >= MAX_ATTEMPTS {
        return broken_off(&format!("this was attempt {attempts} of at most {MAX_ATTEMPTS}; generate again"));
    }
    if !discard() {
        return broken_off(IS_READ);
    }
    Ok(())
}

/// Notifies the caller that a generation begins again, if it was shown some of the answer that is void now.
pub(super) fn notify(turn: &Turn, call: &Call) {
    if call.shows_answer() {
        turn.journal.shown(call, RunEvent::GenerationRestarted);
    }
}

fn mode(turn: &Turn) -> CutOffMode {
    turn.agent.manifest.inference.cut_off.unwrap_or_default()
}

fn interrupted(why: &str) -> Error {
    Error::Internal(format!("interrupted: {why}"))
}
