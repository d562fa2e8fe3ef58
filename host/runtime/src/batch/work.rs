//! Runs an item, and decides what its failure means.

use super::{
    AGENT_MODEL, BatchAnswer, BatchRequest,
    choices::Choices,
    queue::{QueueShared, is_response},
    response,
    stored::StoredRequest,
};
use crate::{
    Invocation, NewResponse, Origin, Outcome, RequestOrigin, ResponseTurn, RunHandle, RuntimeError, Surface,
    TenantBudget,
    batch::Context,
    dispatch::{Asks, Dispatch},
    invocation::OWN_KEY,
    name::session_in,
};
use skep_engine::{Affinity, EngineError, Priority, ServedModel, chat::ChatOptions};
use skep_store::{ItemKey, TakenItem};
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
    queue: &QueueShared,
    dispatch: &Arc<Dispatch>,
    item: &TakenItem,
    begun: oneshot::Sender<()>,
) -> Result<BatchAnswer, RuntimeError> {
    let context = &queue.context;
    let StoredRequest { form, request, key, session, keep } = StoredRequest::decode(&item.request)?;
    // An earlier process may have stopped between the two writes that end the item.
    if let Some(keep) = &keep
        && let Some(row) = context.store.response(&item.principal, &keep.id).await?
        && let Some(answer) = response::answer(&row)?
    {
        return Ok(answer);
    }
    let (answer, turn) = match request {
        BatchRequest::Chat { messages, options, choices } => {
            let chats = begin(context, item, key.as_deref(), begun).await?;
            let options = of_item(context, item, key.as_deref(), session, *options);
            (chats.chat(form, messages, options, choices).await?, None)
        }
        BatchRequest::Texts { prompts, options, choices, echo } => {
            let texts = begin(context, item, key.as_deref(), begun).await?;
            let options = of_item(context, item, key.as_deref(), session, *options);
            (texts.texts(form, prompts, options, (choices, echo)).await?, None)
        }
        BatchRequest::Turn { text, data } => {
            let invocation = Invocation { text, data, key, ..invocation(item) };
            let (agent, session) = (invocation.agent.clone(), invocation.session.clone());
            // A turn with this key that an earlier process started is found again, not started
            // twice. Each host takes the items that it has room for.
            let run = dispatch.invoke_taken(invocation).await?;
            let _ = begun.send(());
            let turn = ResponseTurn { agent, session, turn: run.turn_id().to_owned() };
            (BatchAnswer::of_turn(form, outcome(queue, item.key, run).await?), Some(turn))
        }
        #[cfg(test)]
        BatchRequest::Panics { times } => {
            use skep_engine::chat::{ChatFinish, ChatOutcome};
            assert!(item.failures >= times, "simulated host fault");
            (BatchAnswer::of_chat(form, &ChatOutcome::remote("at last".to_owned(), ChatFinish::Stop)), None)
        }
    };
    if let Some(keep) = keep {
        let new = NewResponse { turn, ..keep };
        response::put(context, new, Some(&answer)).await?;
    }
    Ok(answer)
}

/// Waits for the end of an item's turn. While the turn only waits for people, the item is idle. No other turn is ahead of it,
/// because the item has a separate session.
async fn outcome(queue: &QueueShared, key: ItemKey, run: RunHandle) -> Result<Outcome, RuntimeError> {
    let mut suspension = run.suspension();
    let outcome = run.outcome();
    tokio::pin!(outcome);
    loop {
        tokio::select! {
            biased;
            ended = &mut outcome => return ended,
            () = suspension.begins() => {}
        }
        let _idle = queue.idle(key);
        tokio::select! {
            biased;
            ended = &mut outcome => return ended,
            () = suspension.ends() => {}
        }
    }
}

/// Returns what the choices of an item share, once its model is ready. Fails if the tenant may not use the model anymore.
async fn begin<'a>(
    context: &'a Context,
    item: &'a TakenItem,
    key: Option<&str>,
    begun: oneshot::Sender<()>,
) -> Result<Choices<'a>, RuntimeError> {
    // The model that is checked is the one that answers.
    let models = context.models.pinned();
    check_grant(context, item, key, &models.find(Some(&item.model))?).await?;
    // Items of other models do not wait for a load.
    let begun = models.get(Some(&item.model)).is_ok().then_some(begun);
    let model = models.ready(Some(&item.model)).await?;
    if model.engine().is_none() && context.store.is_clustered() {
        // Another host that has taken over runs the item itself.
        context.store.until_certain().await;
    }
    Ok(Choices {
        compute: &context.compute,
        principal: &item.principal,
        model,
        budget: TenantBudget::open(&context.tokens, &context.uses, &item.principal, key)?,
        live: is_response(&item.batch).then(|| context.live.of(&item.batch)),
        begun,
    })
}

/// Checks that the tenant of an item may use the model now. The settings may have changed since the item was queued: a
/// grant may be gone, and a route may have got a member on another server.
async fn check_grant(
    context: &Context,
    item: &TakenItem,
    key: Option<&str>,
    model: &ServedModel,
) -> Result<(), RuntimeError> {
    let Err(message) = context.granted.check_direct(&item.principal, false, model) else { return Ok(()) };
    // The keys are read only for models that not everyone may use.
    let may_operator = context.granted.check_direct(&item.principal, true, model).is_ok();
    if may_operator && context.keys.is_operator(&item.principal, key).await? {
        return Ok(());
    }
    Err(RuntimeError::ModelNotGranted { message })
}

/// Returns the options of an item with those of its place in the host.
fn of_item(
    context: &Context,
    item: &TakenItem,
    key: Option<&str>,
    session: Option<String>,
    options: ChatOptions,
) -> ChatOptions {
    let surface = if is_response(&item.batch) { Surface::Responses } else { Surface::Batch };
    let origin = RequestOrigin::of_client(&item.principal, key, surface);
    ChatOptions {
        priority: Priority::Background,
        affinity: Affinity { tenant: item.principal.clone(), session, ..Affinity::default() },
        deadline: Instant::now().checked_add(DEADLINE),
        observer: context.requests.observer(origin.asking(Some(&item.model))),
        ..options
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
        let _ = dispatch.cancel_turn(&agent, &session, &row.id, Asks::Others).await;
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
        | RuntimeError::ModelNotGranted { .. }
        | RuntimeError::PriceUnknown(_)
        // The answer was produced and cannot be stored. Another one would be paid for again.
        | RuntimeError::ResponsesFull { .. } => Retry::Never,
        RuntimeError::Engine(EngineError::ModelLoading { retry_after_ms, .. }) => {
            Retry::After(Duration::from_millis((*retry_after_ms).into()))
        }
        RuntimeError::Engine(EngineError::ModelUnloaded { .. }) => Retry::After(UNLOADED_INTERVAL),
        RuntimeError::Engine(EngineError::Busy { .. } | EngineError::ShuttingDown)
        | RuntimeError::MailboxFull { .. }
        | RuntimeError::IntakeFull { .. }
        | RuntimeError::TooManyTurns { .. }
        | RuntimeError::SessionElsewhere { .. }
        | RuntimeError::ShuttingDown => Retry::Soon,
        RuntimeError::RefusedElsewhere { retry_after_ms: Some(ms), .. } => {
            Retry::After(Duration::from_millis((*ms).into()))
        }
        RuntimeError::RefusedElsewhere {
            code: "agent_not_found" | "invalid_message" | "invalid_name",
            ..
        } => Retry::Never,
        RuntimeError::BudgetUsedUp(used_up) => {
            Retry::After(Duration::from_millis(used_up.retry_after_ms.into()))
        }
        _ => Retry::Later,
    }
}
