//! One turn: admit, run the guest, commit, and only then tell the caller.
//!
//! The output gate: `Done` is sent after the commit. A turn that fails, or whose commit fails, changed nothing.

use super::{SessionKey, actor::Actor, outcome};
use crate::{
    Invocation, Origin, Outcome, RunEvent, RuntimeError,
    agent_host::{Active, Services},
    bindings::{handler, types},
    capability::{
        ConversationSet, Turn, TurnContext,
        log::{TurnLog, now_ms},
        state::{StateView, apply},
    },
    component::Deployed,
    events::TurnEnd,
    instance, metric,
};
use skep_engine::{Affinity, EngineError};
use skep_store::{ConversationRow, TurnCommit};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::Instrument;

/// Of the text and the data of a reply, each.
const MAX_REPLY_BYTES: usize = 8 << 20;

/// A message on its way to its turn.
pub(crate) struct TurnRequest {
    pub(crate) invocation: Invocation,
    pub(crate) received_at_ms: u64,
    pub(crate) end: TurnEnd,
    /// Held until the turn has ended, so that a drain waits for it.
    pub(crate) _active: Active,
}

/// A turn that ended well, before its commit.
struct Answer {
    outcome: Outcome,
    context: TurnContext,
}

impl Actor {
    pub(super) async fn turn(&mut self, request: TurnRequest) {
        let TurnRequest { invocation, received_at_ms, end, _active } = request;
        let SessionKey { agent, session } = &self.key;
        let span =
            tracing::info_span!("turn", agent = %agent, session = %session, turn = tracing::field::Empty);
        let started = Instant::now();
        let result = self.run_turn(invocation, received_at_ms, &end, started).instrument(span.clone()).await;

        let label = result.as_ref().map_or_else(RuntimeError::code, |_| "ok");
        let agent = self.key.agent.clone();
        metrics::counter!(metric::TURNS, "agent" => agent.clone(), "outcome" => label).increment(1);
        metrics::histogram!(metric::TURN_TIME, "agent" => agent).record(started.elapsed());
        if let Err(error) = &result {
            tracing::warn!(parent: &span, code = error.code(), "the turn failed: {error}");
        }
        end.finish(result);
    }

    async fn run_turn(
        &mut self,
        invocation: Invocation,
        received_at_ms: u64,
        end: &TurnEnd,
        started: Instant,
    ) -> Result<Outcome, RuntimeError> {
        if end.is_abandoned() {
            return Err(RuntimeError::Cancelled);
        }
        let services = self.services.clone();
        let agent = services.agent(&self.key.agent)?;
        let SessionKey { agent: agent_name, session } = self.key.clone();
        let key = invocation.idempotency_key.clone();
        if let Some(key) = &key
            && let Some(body) = services.store.outcome(&agent_name, &session, key).await?
        {
            return outcome::decode(&body).map_err(|error| RuntimeError::Internal {
                message: format!("the outcome of idempotency key {key:?} is unreadable: {error}"),
            });
        }
        let memory = self.memory().await?;
        let number = memory.turns + 1;
        let state = StateView::new(memory.state.clone(), agent.limits.state_kb);
        let conversations = ConversationSet::new(memory.conversations.clone());
        tracing::Span::current().record("turn", number);

        let mut deadline = started + Duration::from_millis(agent.limits.turn_ms.into());
        if let Some(asked) = invocation.deadline {
            deadline = deadline.min(asked);
        }
        let affinity = Affinity {
            tenant: invocation.principal.clone(),
            agent: Some(agent_name.clone()),
            session: Some(session.clone()),
            parent: None,
        };
        let turn =
            Turn::new(agent.clone(), services.models.clone(), affinity, deadline, end.events().clone());
        let turn = Arc::new(turn);
        let context = TurnContext::new(
            Some(turn.clone()),
            state,
            conversations,
            TurnLog::new(&agent_name, &session, number),
            &agent.limits,
        );
        end.events().push(RunEvent::Started { turn: number });

        let message = message(invocation, number, received_at_ms);
        let (result, mut context) = self.call_guest(&services, &agent, &turn, end, context, message).await;
        let (text, data) = match result {
            Ok(reply) => reply,
            Err(error) => {
                let lines = context.log.take();
                services.keep_logs(&agent_name, &session, number, &lines).await;
                return Err(error);
            }
        };
        let outcome =
            Outcome { text, data, turn: number, usage: turn.usage(), elapsed_us: elapsed_us(started) };
        drop(turn);
        self.commit(Answer { outcome, context }, key, started).await
    }

    async fn call_guest(
        &self,
        services: &Services,
        agent: &Arc<Deployed>,
        turn: &Turn,
        end: &TurnEnd,
        context: TurnContext,
        message: handler::Message,
    ) -> (Result<(String, Option<serde_json::Value>), RuntimeError>, TurnContext) {
        let mut gone = self.gone.clone();
        let stop = async {
            tokio::select! {
                () = end.abandoned() => {}
                _ = gone.changed() => {}
            }
        };
        tokio::pin!(stop);
        let instance = tokio::select! {
            instance = tokio::time::timeout_at(turn.deadline.into(), services.instance()) => instance,
            () = &mut stop => return (Err(RuntimeError::Cancelled), context),
        };
        let Ok(_instance) = instance else { return (Err(RuntimeError::DeadlineExceeded), context) };
        let (result, context) =
            instance::on_message(services.wasm(), agent, turn.deadline, stop, context, message).await;
        let result = result.and_then(|reply| match reply {
            Ok(reply) => check_reply(reply),
            Err(error) => Err(agent_error(error, turn)),
        });
        (result, context)
    }

    /// Writes what the turn changed, and remembers it.
    async fn commit(
        &mut self,
        answer: Answer,
        idempotency_key: Option<String>,
        started: Instant,
    ) -> Result<Outcome, RuntimeError> {
        let Answer { mut outcome, mut context } = answer;
        let conversations = context.conversations.changed();
        let mut rows = Vec::with_capacity(conversations.len());
        for (name, conversation) in &conversations {
            let body = serde_json::to_vec(conversation).map_err(|error| RuntimeError::Internal {
                message: format!("conversation {name:?} cannot be written: {error}"),
            })?;
            rows.push(ConversationRow { name: name.clone(), body });
        }
        let commit = TurnCommit {
            agent: self.key.agent.clone(),
            session: self.key.session.clone(),
            turn: outcome.turn,
            at_ms: now_ms(),
            state: context.state.changes(),
            conversations: rows,
            logs: context.log.take(),
            outcome: idempotency_key.map(|idempotency_key| skep_store::Outcome {
                idempotency_key,
                body: outcome::encode(&outcome),
            }),
        };
        drop(context);
        if let Err(error) = self.services.store.commit_turn(&commit).await {
            self.memory = None;
            return Err(error.into());
        }
        let memory = self.memory().await?;
        memory.turns = outcome.turn;
        apply(Arc::make_mut(&mut memory.state), commit.state);
        memory
            .conversation_bytes
            .extend(commit.conversations.iter().map(|row| (row.name.clone(), row.body.len())));
        if !conversations.is_empty() {
            Arc::make_mut(&mut memory.conversations).extend(conversations);
        }
        outcome.elapsed_us = elapsed_us(started);
        Ok(outcome)
    }
}

fn message(invocation: Invocation, turn: u64, received_at_ms: u64) -> handler::Message {
    handler::Message {
        text: invocation.text,
        data: invocation.data.map(|data| data.to_string()),
        session: invocation.session,
        turn,
        received_at_ms,
        origin: match invocation.origin {
            Origin::Direct => handler::Origin::Direct,
            Origin::Chat => handler::Origin::Chat,
            Origin::Http(http) => handler::Origin::Http(handler::HttpRequest {
                method: http.method,
                path: http.path,
                query: http.query,
                parameters: http.parameters,
                content_type: http.content_type,
            }),
        },
    }
}

fn check_reply(reply: handler::Reply) -> Result<(String, Option<serde_json::Value>), RuntimeError> {
    let bytes = reply.text.len().max(reply.data.as_ref().map_or(0, String::len));
    if bytes > MAX_REPLY_BYTES {
        let message = format!("the reply has {bytes} bytes; {MAX_REPLY_BYTES} are allowed");
        return Err(RuntimeError::LimitExceeded { limit: "reply_bytes", message });
    }
    let data = reply.data.map(|data| serde_json::from_str(&data)).transpose();
    let data = data.map_err(|error| RuntimeError::AgentFailed {
        message: format!("the data of its reply is not JSON: {error}"),
    })?;
    Ok((reply.text, data))
}

/// What the agent's own error means to its caller.
fn agent_error(error: handler::AgentError, turn: &Turn) -> RuntimeError {
    let failed = |message| RuntimeError::AgentFailed { message };
    match error {
        handler::AgentError::InvalidMessage(message) => RuntimeError::InvalidMessage { message },
        handler::AgentError::Failed(message) => failed(message),
        handler::AgentError::Inference(error) => match error {
            types::Error::Busy(retry_after_ms) => EngineError::Busy { retry_after_ms }.into(),
            types::Error::Truncated => EngineError::Truncated.into(),
            types::Error::ContextOverflow(limit) => RuntimeError::LimitExceeded {
                limit: "tokens_per_turn or context",
                message: format!("prompt and output do not fit into {limit} tokens"),
            },
            types::Error::Cancelled if Instant::now() >= turn.deadline => RuntimeError::DeadlineExceeded,
            types::Error::Cancelled => RuntimeError::Cancelled,
            types::Error::SchemaInvalid(message)
            | types::Error::ModelUnknown(message)
            | types::Error::Denied(message)
            | types::Error::InvalidArgument(message)
            | types::Error::Internal(message) => failed(message),
        },
    }
}

fn elapsed_us(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)
}
