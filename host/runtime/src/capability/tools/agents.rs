//! Tools of other agents: each call is a turn of the agent that owns the tool.
//!
//! The called turn runs in a session that belongs to the caller's session, has the caller's principal, and must finish by the
//! caller's deadline. Its idempotency key is derived from the caller's turn and call, so a replayed caller finds it again.
//! When the caller's turn finishes, the called turns that it no longer waits for are cancelled. While the called turn,
//! or one ahead of it in its session, waits for a person's decision, the caller waits too, and the time limits of both are
//! paused.

use crate::{
    Invocation, Json, Origin, Outcome, RunHandle, RuntimeError, ToolOrigin,
    agent::Agent,
    bindings::tools::ToolError,
    capability::{Turn, tools::HostTools},
    feed::LiveTurns,
    invocation::{CALL_KEY, MAX_DEPTH},
    journal::{Call, Stopped},
    name::{plain_session, session_beside},
    tool::Tool,
};
use sha2::{Digest, Sha256};
use skep_engine::EngineError;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::task::JoinHandle;
use tracing::Instrument as _;

/// Maximum size of a session's id.
const MAX_SESSION_BYTES: usize = 128;

/// The turns of other agents that a turn waits for, by call number.
#[derive(Default)]
pub(crate) struct CalledTurns(Mutex<BTreeMap<u32, String>>);

/// Registers that a called turn is waited for.
struct WaitRegistration<'a> {
    called: &'a CalledTurns,
    call: u32,
}

impl CalledTurns {
    fn wait(&self, call: u32, turn_id: &str) -> WaitRegistration<'_> {
        self.lock().insert(call, turn_id.to_owned());
        WaitRegistration { called: self, call }
    }

    /// Cancels the called turns that nobody waits for anymore, because the caller's turn has finished.
    pub(crate) fn cancel(&self, live: &LiveTurns) {
        for turn_id in std::mem::take(&mut *self.lock()).values() {
            live.cancel(turn_id);
        }
    }

    /// Cancels the called turn of one call, whose result nobody will read.
    pub(in crate::capability) fn cancel_one(&self, live: &LiveTurns, call: u32) {
        let turn_id = self.lock().remove(&call);
        if let Some(turn_id) = turn_id {
            live.cancel(&turn_id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitRegistration<'_> {
    /// Records that the called turn has finished.
    fn ended(self) {
        self.called.lock().remove(&self.call);
    }
}

/// Returns the active version of an agent whose tools others may call.
pub(in crate::capability) fn callable(host: &HostTools, agent: &str) -> Result<Arc<Agent>, String> {
    let agent = host.directory.agent(agent).map_err(|error| error.to_string())?;
    if !is_callable(&agent) {
        let name = &agent.manifest.name;
        return Err(format!(
            "agent {name} does not let others call its tools: it lacks the export skep:agent/tool-handler; rebuild it \
             with skep-sdk"
        ));
    }
    Ok(agent)
}

pub(in crate::capability) fn is_callable(agent: &Agent) -> bool {
    agent.handlers.tool_calls
}

/// Runs the called turn, or finds it again.
pub(in crate::capability) async fn call(
    turn: &Arc<Turn>,
    call: &Call,
    attempt: u32,
    agent: &Arc<Agent>,
    tool: &Tool,
    arguments: Json,
    timeout: Option<Duration>,
) -> Result<Result<Json, ToolError>, Stopped> {
    let callee = agent.manifest.name.to_string();
    let callers = match chain(turn, &callee) {
        Ok(callers) => callers,
        Err(circle) => return Ok(Err(circle)),
    };
    let host = &turn.tools.host;
    let Some(invoke) = host.invoke.upgrade() else { return Err(stop_until_restart(turn)) };
    let invocation = Invocation {
        principal: turn.affinity.tenant.clone(),
        key: turn.source.key.clone(),
        agent: callee.clone(),
        session: session_of(turn),
        text: String::new(),
        data: Some(arguments),
        origin: Origin::Tool(ToolOrigin {
            name: tool.definition.name.clone(),
            callers,
            hops: turn.tools.hops,
        }),
        priority: turn.priority,
        deadline: Some(turn.deadline.at()),
        idempotency_key: Some(format!("{CALL_KEY}{} {} {attempt}", turn.tools.turn_id, call.number())),
        detached: true,
    };
    // The host shuts down when its last handle is dropped, so a waiting turn must not hold one.
    let sending = invoke.invoke(invocation);
    let (invoked, timeout) = match timeout.filter(|_| turn.egress.is_clustered()) {
        None => (sending.await, timeout),
        // The session of the called turn may belong to a host that does not answer.
        Some(timeout) => {
            let began = Instant::now();
            let mut sending = tokio::spawn(sending.in_current_span());
            let Ok(sent) = tokio::time::timeout(timeout, &mut sending).await else {
                cancel_once_sent(host.live.clone(), sending);
                return Ok(Err(crate::capability::tools::call::timed_out(timeout)));
            };
            let sent = sent.unwrap_or_else(|error| {
                Err(RuntimeError::Internal { message: format!("a call could not be sent: {error}") })
            });
            (sent, Some(timeout.saturating_sub(began.elapsed())))
        }
    };
    let ended = match invoked {
        Err(error) => Err(error),
        Ok(handle) => {
            let waited = turn.tools.called.wait(call.number(), handle.turn_id());
            let ended = wait(turn, call, handle, timeout).await;
            if let (None, Some(timeout)) = (&ended, timeout) {
                turn.tools.called.cancel_one(&host.live, call.number());
                return Ok(Err(crate::capability::tools::call::timed_out(timeout)));
            }
            waited.ended();
            ended.unwrap_or(Err(RuntimeError::Cancelled))
        }
    };
    match ended {
        Ok(outcome) => {
            Ok(outcome.data.ok_or_else(|| ToolError::Failed(format!("agent {callee} returned no result"))))
        }
        // The called turn may still end, on this host or on another one.
        Err(error) if matches!(error.code(), "shutting_down" | "host_gone") => Err(stop_until_restart(turn)),
        Err(error) => Ok(Err(refusal(&callee, error))),
    }
}

/// Cancels a called turn, whose result nobody will read, once its host has accepted it.
fn cancel_once_sent(live: Arc<LiveTurns>, sending: JoinHandle<Result<RunHandle, RuntimeError>>) {
    tokio::spawn(async move {
        if let Ok(Ok(handle)) = sending.await {
            live.cancel(handle.turn_id());
        }
    });
}

/// Stops this turn without an answer for the guest: when the host restarts, or finds that nobody runs them, the called turn and
/// this one are both resumed.
fn stop_until_restart(turn: &Turn) -> Stopped {
    turn.journal.fail(RuntimeError::ShuttingDown);
    Stopped
}

/// Waits for the outcome of the called turn. Returns `None` after the timeout. While the called turn, or one ahead of it in
/// its session, waits for a person's decision, this call waits too, and its timeout is paused.
async fn wait(
    turn: &Turn,
    call: &Call,
    handle: RunHandle,
    timeout: Option<Duration>,
) -> Option<Result<Outcome, RuntimeError>> {
    turn.lets_others_resume();
    // Calls of one turn to the same agent run one after the other in one session.
    let mut idle = handle.idle_watch();
    let outcome = handle.outcome();
    tokio::pin!(outcome);
    let mut left = timeout;
    loop {
        let began = Instant::now();
        tokio::select! {
            ended = &mut outcome => return Some(ended),
            () = elapsed(left) => return None,
            () = idle.begins() => {}
        }
        left = left.map(|left| left.saturating_sub(began.elapsed()));
        // The turn is suspended here, unless something else in it continues.
        turn.approvals.wait_for_called(call, &idle);
        let _waits = turn.journal.waits();
        idle.ends().await;
        turn.approvals.called_turn_resumed(call);
    }
}

async fn elapsed(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Returns the chain of agents above the called one, the caller last. Fails if the call would create a cycle or exceed the
/// maximum depth.
fn chain(turn: &Turn, callee: &str) -> Result<Vec<String>, ToolError> {
    let mut callers = turn.tools.callers.clone();
    callers.push(turn.agent.manifest.name.to_string());
    if callers.iter().any(|caller| caller == callee) {
        let way = callers.join(" → ");
        let message = format!("agent {callee} would wait for itself: {way} → {callee}; break the cycle");
        return Err(ToolError::Denied(message));
    }
    if callers.len() > MAX_DEPTH {
        let message =
            format!("agents may call each other at most {MAX_DEPTH} levels deep: {}", callers.join(" → "));
        return Err(ToolError::Denied(message));
    }
    Ok(callers)
}

/// Returns the called agent's session for the calling session. Each calling session has its own.
fn session_of(turn: &Turn) -> String {
    let caller = turn.agent.manifest.name.as_str();
    let callers = turn.affinity.session.as_deref().unwrap_or_default();
    let session = plain_session(callers);
    let readable = format!("{caller}~{session}");
    if readable.len() <= MAX_SESSION_BYTES {
        return session_beside(callers, &readable);
    }
    let digest = Sha256::digest(session);
    session_beside(callers, &format!("{caller}~{}", &crate::text::hex(&digest)[..40]))
}

/// Converts the error of the called turn to an error for its caller.
fn refusal(callee: &str, error: RuntimeError) -> ToolError {
    match error {
        RuntimeError::ToolFailed { message } => ToolError::Failed(message),
        RuntimeError::TurnFailed { code: "tool_failed", message } => ToolError::Failed(message),
        RuntimeError::MailboxFull { .. }
        | RuntimeError::IntakeFull { .. }
        | RuntimeError::TooManyTurns { .. }
        | RuntimeError::BudgetUsedUp(_)
        | RuntimeError::PriceUnknown(_)
        | RuntimeError::Engine(EngineError::Busy { .. } | EngineError::ModelLoading { .. })
        | RuntimeError::SessionElsewhere { .. }
        | RuntimeError::RefusedElsewhere { code: "agent_not_found", .. }
        | RuntimeError::RefusedElsewhere { retry_after_ms: Some(_), .. }
        | RuntimeError::AgentNotFound { .. } => ToolError::Unavailable(error.to_string()),
        error => ToolError::Failed(format!("agent {callee} did not answer: {error}")),
    }
}
