//! Parts of a turn, separately, for measurements: an instance that is not called, and a turn that
//! is not committed.
//!
//! Both take the same path as a turn with all limits applied, and leave nothing in the store.

use crate::{
    AgentHost, Clock, RuntimeError,
    bindings::handler,
    capability::{ConversationSet, TurnContext, log::TurnLog, state::StateView},
    component::Deployed,
    deadline::Deadline,
    guest::{self, CallEnd, Entry, InstanceSlot},
    name::OPERATOR,
};
use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

/// An instance with its memory. It occupies an instance slot until it is dropped.
pub struct HeldInstance {
    _store: wasmtime::Store<TurnContext>,
    _slot: InstanceSlot,
}

impl AgentHost {
    /// Creates an instance of an agent as a turn does, without calling it.
    pub async fn instantiate(&self, agent: &str) -> Result<HeldInstance, RuntimeError> {
        let host = self.host();
        let agent = host.deployments.deployed(agent)?;
        let slot = host.instances.slot(0, OPERATOR).await;
        let store =
            guest::instantiate(agent.code(&host.instances.wasm), empty_context(&host.clock, &agent)).await?;
        Ok(HeldInstance { _store: store, _slot: slot })
    }

    /// Returns an agent's reply to the first message of a session, without storing anything. No
    /// models are available.
    pub async fn dry_run(&self, agent: &str, text: &str) -> Result<String, RuntimeError> {
        let host = self.host();
        let agent = host.deployments.deployed(agent)?;
        let _slot = host.instances.slot(0, OPERATOR).await;
        let deadline = Instant::now() + Duration::from_millis(agent.limits.turn_ms.into());
        let message = Entry::Message(handler::Message {
            text: text.to_owned(),
            data: None,
            session: "rehearsal".to_owned(),
            turn: 1,
            received_at_ms: host.clock.now_ms(),
            origin: handler::Origin::Direct,
        });
        let context = empty_context(&host.clock, &agent);
        let forever = std::future::pending::<Infallible>();
        let (CallEnd::Returned(reply), _) = guest::take_turn(
            agent.code(&host.instances.wasm),
            Deadline::new(deadline),
            forever,
            context,
            message,
        )
        .await;
        Ok(reply?.into_outcome(deadline)?.0)
    }
}

fn empty_context(clock: &Clock, agent: &Arc<Deployed>) -> TurnContext {
    TurnContext::new(
        None,
        StateView::new(Arc::default(), agent.limits.state_kb),
        ConversationSet::default(),
        TurnLog::new(clock, agent.manifest.name.as_str(), "", 0),
        &agent.limits,
    )
}
