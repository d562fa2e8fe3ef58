//! Rust types of the WIT package `skep:agent`, generated from the one source in `wit/`. They stay in this crate.

wasmtime::component::bindgen!({
    path: "../../wit/skep-agent",
    world: "full-agent",
    imports: { default: trappable },
    exports: { default: async | store },
    // What the guest asks for and what it gets is written into the turn's journal.
    additional_derives: [PartialEq, serde::Serialize, serde::Deserialize],
    with: {
        "skep:agent/inference.conversation": crate::capability::inference::Conversation,
    },
});

pub(crate) use exports::skep::agent::{alarm_handler, event_handler, handler, tool_handler};
pub(crate) use skep::agent::{inference, log, state, types};

use crate::capability::TurnContext;
use wasmtime::{
    StoreContextMut,
    component::{Instance, InstancePre},
};

/// A linked agent. Of the exports, only `handler` has to be there.
#[derive(Clone)]
pub(crate) struct AgentPre {
    pre: InstancePre<TurnContext>,
    handler: handler::GuestIndices,
    alarms: Option<alarm_handler::GuestIndices>,
    events: Option<event_handler::GuestIndices>,
    tools: Option<tool_handler::GuestIndices>,
}

/// An instance of an agent.
pub(crate) struct Agent<'a> {
    pre: &'a AgentPre,
    instance: Instance,
}

/// An export that the agent does not have.
#[derive(Debug, thiserror::Error)]
#[error("the agent does not export skep:agent/{0}")]
pub(crate) struct NoExport(pub(crate) &'static str);

impl AgentPre {
    pub(crate) fn new(pre: InstancePre<TurnContext>) -> wasmtime::Result<Self> {
        let handler = handler::GuestIndices::new(&pre)?;
        let has = |name: &str| pre.component().get_export_index(None, name).is_some();
        let alarms = has("skep:agent/alarm-handler@0.1.0")
            .then(|| alarm_handler::GuestIndices::new(&pre))
            .transpose()?;
        let events = has("skep:agent/event-handler@0.1.0")
            .then(|| event_handler::GuestIndices::new(&pre))
            .transpose()?;
        let tools = has("skep:agent/tool-handler@0.1.0")
            .then(|| tool_handler::GuestIndices::new(&pre))
            .transpose()?;
        Ok(AgentPre { pre, handler, alarms, events, tools })
    }

    pub(crate) async fn instantiate(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<Agent<'_>> {
        Ok(Agent { pre: self, instance: self.pre.instantiate_async(store).await? })
    }
}

impl Agent<'_> {
    pub(crate) fn handler(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<handler::Guest> {
        self.pre.handler.load(store, &self.instance)
    }

    pub(crate) fn alarms(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<alarm_handler::Guest> {
        self.pre.alarms.as_ref().ok_or(NoExport("alarm-handler"))?.load(store, &self.instance)
    }

    pub(crate) fn events(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<event_handler::Guest> {
        self.pre.events.as_ref().ok_or(NoExport("event-handler"))?.load(store, &self.instance)
    }

    pub(crate) fn tools(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<tool_handler::Guest> {
        self.pre.tools.as_ref().ok_or(NoExport("tool-handler"))?.load(store, &self.instance)
    }
}
