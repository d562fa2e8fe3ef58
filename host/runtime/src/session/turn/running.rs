//! Running: the guest is called, until it replies or is stopped.

use super::{
    Run, State,
    closing::{Closing, FailedReply, Replied},
    opened::Opened,
    suspended::Suspended,
};
use crate::{
    Json, RuntimeError,
    bindings::tool_handler,
    capability::{Turn, TurnContext},
    guest::{self, CallEnd, Entry},
    journal::{Identity, Journal, Stopped},
};
use std::{pin::pin, sync::Arc, time::Instant};

/// A turn that runs its guest.
///
/// Durable: the running row, and the journal up to everything that the followers were shown. A
/// crash costs at most the work since the last record.
pub(super) struct Running {
    pub(super) opened: Opened,
    pub(super) context: Box<TurnContext>,
    /// The call into the guest.
    pub(super) entry: Entry,
}

/// Why the turn stops its guest.
enum Stop {
    /// The turn was cancelled.
    Abandoned,
    /// Nobody wants the session anymore, because the host shuts down or the agent was deleted.
    Gone,
    /// The turn can make no progress until a person decides.
    OnlyWaits,
}

type Reply = (String, Option<Json>);

impl Running {
    /// Goes to `Closing` with the guest's reply, or with the reason why there is none. If the turn
    /// only waits for people, the guest is dropped and the turn is `Suspended`.
    pub(super) async fn call_guest(self, run: &Run<'_>) -> State {
        let Running { opened, context, entry } = self;
        let (left, context) = call(run, &opened, context, entry).await;
        let answer = match left {
            CallEnd::Stopped(Stop::OnlyWaits) => {
                drop(context);
                run.end.feed().timeline().used().pause();
                // Earlier questions to the person at the client do not count, either.
                let since = Instant::now() - opened.turn.deadline.paused();
                return State::Suspended(Suspended { opened, since });
            }
            CallEnd::Stopped(Stop::Abandoned | Stop::Gone) => {
                Err(FailedReply { error: RuntimeError::Cancelled, context: Some(context) })
            }
            CallEnd::Returned(Ok((text, data))) => Ok(Replied { text, data, context }),
            CallEnd::Returned(Err(error)) => Err(FailedReply { error, context: Some(context) }),
        };
        State::Closing(Closing { opened, answer })
    }
}

async fn call(
    run: &Run<'_>,
    opened: &Opened,
    context: Box<TurnContext>,
    entry: Entry,
) -> (CallEnd<Reply, Stop>, Box<TurnContext>) {
    let Opened { agent, turn, journal, .. } = opened;
    let host = &run.actor.host;
    let mut stop = pin!(stopped(run, journal));
    let approved = tokio::select! {
        approved = approved(&entry, turn) => approved,
        why = &mut stop => return (CallEnd::Stopped(why), context),
    };
    let refused = match approved {
        Ok(Ok(())) => None,
        Ok(Err(message)) => Some(RuntimeError::CallRefused { message }),
        // The journal holds the reason.
        Err(Stopped) => Some(RuntimeError::Cancelled),
    };
    if let Some(error) = refused {
        return (CallEnd::Returned(Err(error)), context);
    }
    let instance = host.instances.slot(turn.tools.callers.len(), &turn.affinity.tenant);
    let instance = tokio::select! {
        instance = tokio::time::timeout_at(turn.deadline.at().into(), instance) => instance,
        why = &mut stop => return (CallEnd::Stopped(why), context),
    };
    let Ok(_instance) = instance else {
        return (CallEnd::Returned(Err(RuntimeError::DeadlineExceeded)), context);
    };
    run.end.feed().timeline().guest_called();
    let (left, context) =
        guest::take_turn(agent.code(&host.instances.wasm), turn.deadline.clone(), stop, *context, entry)
            .await;
    let left = match left {
        CallEnd::Returned(reply) => {
            run.end.feed().timeline().guest_returned();
            let reply = reply.and_then(|reply| reply.into_outcome(turn.deadline.at()));
            CallEnd::Returned(reply.map_err(|error| turn.explain(error)))
        }
        CallEnd::Stopped(why) => CallEnd::Stopped(why),
    };
    (left, Box::new(context))
}

/// Resolves when the turn has to stop its guest.
async fn stopped(run: &Run<'_>, journal: &Journal) -> Stop {
    let mut gone = run.actor.gone.clone();
    tokio::select! {
        () = run.end.abandoned() => Stop::Abandoned,
        _ = gone.changed() => Stop::Gone,
        () = journal.only_waits() => Stop::OnlyWaits,
    }
}

/// Obtains a person's decision on an external tool call, if the tool requires approval. A call made
/// by another agent has already been approved in that agent's turn.
async fn approved(entry: &Entry, turn: &Arc<Turn>) -> Result<Result<(), String>, Stopped> {
    let Entry::Tool(tool_handler::Invocation { name, arguments, .. }) = entry else { return Ok(Ok(())) };
    if !turn.tools.callers.is_empty() || !turn.needs_approval(name) {
        return Ok(Ok(()));
    }
    turn.approvals.decision(Identity::new("tool.entry", &(name, arguments)), name, arguments).await
}
