//! Runs an item, and decides what its failure means.

use super::{AGENT_MODEL, BatchAnswer, BatchRequest, queue::is_response, stored::StoredRequest};
use crate::{
    Invocation, Origin, RequestOrigin, RuntimeError, Surface, TenantBudget, WorstCase, batch::Context,
    dispatch::Dispatch, invocation::OWN_KEY, name::session_in,
};
use skep_engine::{
    Affinity, Cancel, EngineError, Priority,
    chat::{ChatEvent, ChatOptions},
};
use skep_store::TakenItem;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// Time limit of an item, from its start. It is long because continuous interactive work may delay
/// the item.
const DEADLINE: Duration = Duration::from_secs(3600);

/// Delay before retrying an item whose model could not be loaded.
const UNLOADED_INTERVAL: Duration = Duration::from_secs(30);

/// Whether an item is retried.
pub(super) enum Retry {
    /// The item would fail every time.
    Never,
    /// The item failed, which counts against its maximum number of attempts.
    Later,
    /// The item never started.
    Soon,
    /// The item is valid but cannot succeed before this delay has passed.
    After(Duration),
}

/// Runs an item to completion. `begun` is signaled once the engine or the agent has accepted it and
/// counts it.
pub(super) async fn run(
    context: &Context,
    dispatch: &Arc<Dispatch>,
    item: &TakenItem,
    begun: oneshot::Sender<()>,
) -> Result<BatchAnswer, RuntimeError> {
    let StoredRequest { form, request, key } = StoredRequest::decode(&item.request)?;
    match request {
        BatchRequest::Chat { messages, options } => {
            // Items of other models do not wait for a load.
            let begun = context.models.get(Some(&item.model)).is_ok().then_some(begun);
            let model = context.models.ready(Some(&item.model)).await?;
            let worst = WorstCase::of_chat(&messages, &options, model.sequence_limit());
            let budget =
                TenantBudget::open(&context.tokens, &context.store, &item.principal, key.as_deref())?;
            let tokens = budget.meter(model.name(), worst)?;
            let surface = if is_response(&item.batch) { Surface::Responses } else { Surface::Batch };
            let origin = RequestOrigin::of_client(&item.principal, key.as_deref(), surface);
            let origin = origin.asking(Some(&item.model));
            let options = ChatOptions {
                priority: Priority::Background,
                affinity: Affinity { tenant: item.principal.clone(), ..Affinity::default() },
                deadline: Instant::now().checked_add(DEADLINE),
                observer: context.requests.observer(origin),
                ..*options
            };
            // Rendering and encoding a long prompt takes long.
            let begin = move |cancel: &Cancel| {
                model.chat(&messages, ChatOptions { cancel: cancel.clone(), ..options })
            };
            let chat = context.compute.run(&item.principal, begin).await?;
            let _ = begun.map(|begun| begun.send(()));
            let live = is_response(&item.batch).then(|| context.live.of(&item.batch));
            live.iter().for_each(|live| live.begin());
            let note = |event: &ChatEvent| live.iter().for_each(|live| live.note(event));
            Ok(BatchAnswer::of_chat(form, &tokens.follow(chat, note).await?))
        }
        BatchRequest::Turn { text, data } => {
            let invocation = Invocation { text, data, key, ..invocation(item) };
            // A turn with this key that an earlier process started is found again, not started
            // twice.
            let run = dispatch.invoke_as_host(invocation).await?;
            let _ = begun.send(());
            Ok(BatchAnswer::of_turn(form, run.outcome().await?))
        }
        #[cfg(test)]
        BatchRequest::Panics { times } => {
            use skep_engine::chat::{ChatFinish, ChatOutcome};
            assert!(item.failures >= times, "simulated host fault");
            Ok(BatchAnswer::of_chat(form, &ChatOutcome::remote("at last".to_owned(), ChatFinish::Stop)))
        }
    }
}

/// Cancels the turn that an item started, if any.
pub(super) async fn abandon(context: &Context, dispatch: &Arc<Dispatch>, item: &TakenItem) {
    if !item.model.starts_with(AGENT_MODEL) {
        return;
    }
    let Invocation { agent, session, idempotency_key, .. } = invocation(item);
    let key = idempotency_key.unwrap_or_default();
    let known = context.store.turn_with_idempotency_key(&agent, &session, &key).await;
    if let Ok(Some(row)) = known {
        // If the agent was deleted meanwhile, it has no turns.
        let _ = dispatch.cancel_turn(&agent, &session, &row.id).await;
    }
}

/// Returns the SQLite GLOB pattern that matches the session names of batch items. No other client
/// is expected to choose such a name.
pub(crate) fn batch_session_pattern() -> String {
    format!("batch-{}-[0-9]*", "[0-9a-f]".repeat(32))
}

/// Builds the turn of an item, without its message. Every item has a separate session.
fn invocation(item: &TakenItem) -> Invocation {
    let name = format!("batch-{}-{}", item.batch, item.position);
    Invocation {
        principal: item.principal.clone(),
        key: None,
        agent: item.model.strip_prefix(AGENT_MODEL).unwrap_or_default().to_owned(),
        session: session_in(&item.principal, &name),
        text: String::new(),
        data: None,
        origin: Origin::Direct,
        priority: Priority::Background,
        deadline: None,
        idempotency_key: Some(format!("{OWN_KEY}{name}")),
        detached: true,
    }
}

pub(super) fn retry(error: &RuntimeError) -> Retry {
    match error {
        RuntimeError::Engine(
            EngineError::ContextOverflow { .. }
            | EngineError::InvalidRequest { .. }
            | EngineError::Constraint { .. }
            | EngineError::SchemaUnsatisfied { .. }
            | EngineError::ModelUnknown { .. },
        )
        | RuntimeError::AgentNotFound { .. }
        | RuntimeError::InvalidMessage { .. }
        | RuntimeError::InvalidName { .. }
        | RuntimeError::PriceUnknown(_) => Retry::Never,
        RuntimeError::Engine(EngineError::ModelLoading { retry_after_ms, .. }) => {
            Retry::After(Duration::from_millis((*retry_after_ms).into()))
        }
        RuntimeError::Engine(EngineError::ModelUnloaded { .. }) => Retry::After(UNLOADED_INTERVAL),
        RuntimeError::Engine(EngineError::Busy { .. } | EngineError::ShuttingDown)
        | RuntimeError::MailboxFull { .. }
        | RuntimeError::IntakeFull { .. }
        | RuntimeError::TooManyTurns { .. }
        | RuntimeError::ShuttingDown => Retry::Soon,
        RuntimeError::BudgetUsedUp(used_up) => {
            Retry::After(Duration::from_millis(used_up.retry_after_ms.into()))
        }
        _ => Retry::Later,
    }
}
