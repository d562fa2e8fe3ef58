//! Another host as this one asks it: to run a turn, to let it be followed, to cancel it, and to answer with one of its models.
//!
//! How the question gets there is not known here. An answer that does not come leaves open whether the turn was accepted, so a
//! turn that outlives its caller travels with an idempotency key, under which the question can be repeated.

use super::{GenerationEvents, Member, PeerGeneration};
use crate::{
    Invocation, Json, Origin, Outcome, RunEvent, RuntimeError, error::known_code, invocation::OWN_KEY,
};
use futures::{Stream, future::BoxFuture};
use serde::{Deserialize, Serialize};
use skep_engine::Priority;
use std::{
    pin::Pin,
    time::{Duration, Instant},
};

/// The prefix of the keys of turns without a key of their client that are sent to another host.
pub(crate) const PEER_KEY: &str = "\u{1}peer ";
const _: () = assert!(PEER_KEY.as_bytes()[0] == OWN_KEY as u8, "no client can send such a key");

/// Asks other hosts. Dropping a future, or the events that it returned, gives the question up; a turn that depends on its caller
/// is then cancelled there.
pub trait Peers: Send + Sync + 'static {
    /// Runs a turn as [`crate::AgentHost::invoke_here`] of that host does.
    fn invoke(
        &self,
        member: Member,
        invocation: PeerInvocation,
    ) -> BoxFuture<'static, Result<RemoteRun, PeerError>>;

    /// Follows a turn as [`crate::AgentHost::follow_here`] of that host does.
    fn follow(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<RemoteRun, PeerError>>;

    /// Cancels a turn as [`crate::AgentHost::cancel_here`] of that host does.
    fn cancel(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<(), PeerError>>;

    /// Asks for an answer as [`crate::AgentHost::generate_here`] of that host gives it. Dropping the events cancels the generation
    /// there.
    fn generate(
        &self,
        member: Member,
        generation: PeerGeneration,
    ) -> BoxFuture<'static, Result<GenerationEvents, PeerError>>;
}

/// The events of a turn that runs on another host.
pub type RemoteEvents = Pin<Box<dyn Stream<Item = Result<RemoteEvent, PeerError>> + Send>>;

/// A turn that runs on another host.
pub struct RemoteRun {
    pub turn_id: String,
    pub events: RemoteEvents,
}

/// A message from a host about a turn that it runs. `Ended` and `Failed` are the last ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RemoteEvent {
    Event {
        /// The number of the event, which is the same on every host.
        id: u64,
        event: RunEvent,
    },
    /// The turn, or the one that it waits behind, only waits for people.
    Suspended {
        approval: String,
    },
    Resumed,
    Ended {
        id: u64,
        outcome: Outcome,
    },
    Failed {
        code: String,
        message: String,
        retry_after_ms: Option<u32>,
    },
}

/// The reason why another host gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The session does not belong to that host, or not anymore.
    #[error("the session belongs to another host")]
    Moved,
    /// An error of the other host.
    #[error("{message}")]
    Refused { code: String, message: String, status: u16, retry_after_ms: Option<u32> },
    /// The question did not reach that host, so nothing was done.
    #[error("the other host cannot be reached: {0}")]
    Unreached(String),
    /// The connection broke, so it is not known what was done.
    #[error("the other host cannot be reached: {0}")]
    Broken(String),
}

/// Identifies a turn on any host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnAddress {
    pub agent: String,
    /// The host's id of the session, including its tenant.
    pub session: String,
    /// The turn's id.
    pub turn: String,
}

/// An [`Invocation`] in transit. The clocks of two hosts differ, so its deadline is the time that is left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerInvocation {
    principal: String,
    key: Option<String>,
    agent: String,
    session: String,
    text: String,
    data: Option<Json>,
    origin: Origin,
    is_background: bool,
    left_ms: Option<u64>,
    idempotency_key: Option<String>,
    detached: bool,
}

impl From<&Invocation> for PeerInvocation {
    fn from(invocation: &Invocation) -> Self {
        let Invocation {
            principal,
            key,
            agent,
            session,
            text,
            data,
            origin,
            priority,
            deadline,
            idempotency_key,
            detached,
        } = invocation.clone();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        PeerInvocation {
            principal,
            key,
            agent,
            session,
            text,
            data,
            origin,
            is_background: priority == Priority::Background,
            left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            idempotency_key,
            detached,
        }
    }
}

impl PeerInvocation {
    /// Returns the invocation on the host that has received it.
    pub fn into_invocation(self) -> Invocation {
        let PeerInvocation {
            principal,
            key,
            agent,
            session,
            text,
            data,
            origin,
            is_background,
            left_ms,
            idempotency_key,
            detached,
        } = self;
        Invocation {
            principal,
            key,
            agent,
            session,
            text,
            data,
            origin,
            priority: if is_background { Priority::Background } else { Priority::Interactive },
            // A deadline that is out of range of the clock is none.
            deadline: left_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms))),
            idempotency_key,
            detached,
        }
    }
}

/// Returns the refusal of another host as an error of this one; `None` if that host refuses only because it stops or does not own
/// the session, so that another one has to be asked.
pub(crate) fn refusal(error: &PeerError) -> Option<RuntimeError> {
    let PeerError::Refused { code, message, status, retry_after_ms } = error else { return None };
    if matches!(code.as_str(), "session_elsewhere" | "shutting_down" | "host_replaced") {
        return None;
    }
    Some(RuntimeError::RefusedElsewhere {
        code: known_code(code),
        message: message.clone(),
        status: *status,
        retry_after_ms: *retry_after_ms,
    })
}

/// Returns whether a host refused a message because of something that another host may not lack: the agent has not started there,
/// a limit of that host is reached, or its version is too far from that of this one. It has then accepted nothing, so the message may be given to another one.
pub(crate) fn is_of_one_host(error: &PeerError) -> bool {
    let PeerError::Refused { code, .. } = error else { return false };
    matches!(
        code.as_str(),
        "agent_not_found"
            | "cluster_versions_apart"
            | "host_full"
            | "intake_full"
            | "invalid_component"
            | "mailbox_full"
            | "model_gone"
            | "too_many_turns"
    )
}

/// Returns the failure of a turn on another host as an error of this one, so that its callers treat it as they would treat it
/// here.
pub(crate) fn failure(code: &str, message: String, retry_after_ms: Option<u32>) -> RuntimeError {
    match code {
        "cancelled" => RuntimeError::Cancelled,
        "call_refused" => RuntimeError::CallRefused { message },
        "deadline_exceeded" => RuntimeError::DeadlineExceeded,
        "shutting_down" => RuntimeError::ShuttingDown,
        "tool_failed" => RuntimeError::ToolFailed { message },
        "held_since_restore" | "waiting_for_approval" => {
            RuntimeError::RefusedElsewhere { code: known_code(code), message, status: 409, retry_after_ms }
        }
        _ if retry_after_ms.is_some() => {
            RuntimeError::RefusedElsewhere { code: known_code(code), message, status: 429, retry_after_ms }
        }
        _ => RuntimeError::TurnFailed { code: known_code(code), message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ToolOrigin, tests::fixture::invocation};
    use serde_json::json;

    #[test]
    fn an_invocation_arrives_as_it_was_sent() {
        let sent = Invocation {
            key: Some("key-1".into()),
            data: Some(Json::from(json!({"id": 1}))),
            origin: Origin::Tool(ToolOrigin { name: "find".into(), callers: vec!["desk".into()], hops: 2 }),
            priority: Priority::Background,
            deadline: Some(Instant::now() + Duration::from_secs(60)),
            idempotency_key: Some(format!("{PEER_KEY}x")),
            detached: true,
            ..invocation("orders", "desk~s", "hello")
        };
        let text = serde_json::to_string(&PeerInvocation::from(&sent)).expect("plain data");
        let arrived: PeerInvocation = serde_json::from_str(&text).expect("the same form");
        let arrived = arrived.into_invocation();
        let left = arrived.deadline.expect("a deadline").saturating_duration_since(Instant::now());
        assert!((Duration::from_secs(50)..=Duration::from_secs(60)).contains(&left), "{left:?}");
        let same = Invocation { deadline: sent.deadline, ..arrived };
        assert_eq!(format!("{same:?}"), format!("{sent:?}"));
    }

    #[test]
    fn a_passed_deadline_arrives_as_one_that_passes_now() {
        let sent = Invocation {
            deadline: Instant::now().checked_sub(Duration::from_secs(1)),
            ..invocation("orders", "s", "hello")
        };
        let arrived = PeerInvocation::from(&sent).into_invocation();
        assert!(arrived.deadline.is_none_or(|deadline| deadline <= Instant::now()));
    }

    #[test]
    fn a_failure_keeps_its_code() {
        let errors = [
            RuntimeError::Cancelled,
            RuntimeError::DeadlineExceeded,
            RuntimeError::ToolFailed { message: "no".into() },
            RuntimeError::CallRefused { message: "no".into() },
            RuntimeError::WaitingForApproval { approval: "t-1".into() },
            RuntimeError::MailboxFull { message: "full".into(), retry_after_ms: 5 },
            RuntimeError::Trap { message: "no".into() },
            RuntimeError::TurnLost { turn: "t".into(), losses: 3 },
        ];
        for error in errors {
            let failed = failure(error.code(), error.to_string(), error.retry_after_ms());
            assert_eq!((failed.code(), failed.to_string()), (error.code(), error.to_string()));
            assert_eq!(failed.retry_after_ms(), error.retry_after_ms());
        }
    }

    #[test]
    fn the_refusal_of_a_host_that_stops_is_a_reason_to_ask_another_one() {
        let refused = |code: &str| PeerError::Refused {
            code: code.into(),
            message: "no".into(),
            status: 429,
            retry_after_ms: Some(7),
        };
        for code in ["shutting_down", "host_replaced", "session_elsewhere"] {
            assert!(refusal(&refused(code)).is_none(), "{code}");
        }
        let full = RuntimeError::MailboxFull { message: "full".into(), retry_after_ms: 5 };
        let failed = RuntimeError::Component { agent: "a".into(), message: "no".into() };
        assert!([full, failed].iter().all(|error| is_of_one_host(&refused(error.code()))));
        let everywhere = RuntimeError::InvalidMessage { message: "no".into() };
        assert!(!is_of_one_host(&refused(everywhere.code())) && !is_of_one_host(&PeerError::Moved));
        let error = refusal(&refused("mailbox_full")).expect("an answer");
        assert_eq!((error.code(), error.retry_after_ms()), ("mailbox_full", Some(7)));
        assert!(refusal(&PeerError::Moved).is_none());
    }
}
