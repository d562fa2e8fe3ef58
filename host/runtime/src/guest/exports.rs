//! The exports of a component that the host calls: those of an agent, or the single export of a plain WASI command.
//!
//! A component that exports `skep:agent/handler` or `skep:agent/handler-sync` is an agent; its other handlers are optional.
//! A component that exports only `wasi:cli/run` is a command: a message is its standard input, and its standard output is
//! the reply.

use crate::{
    agent,
    bindings::{alarm_handler, event_handler, handler, handler_sync, tool_handler, types},
    capability::TurnContext,
};
use wasmtime::{
    StoreContextMut,
    component::{Accessor, Component, ComponentExportIndex, Instance, InstancePre},
};

const HANDLER: &str = "skep:agent/handler@0.1.1";
const HANDLER_SYNC: &str = "skep:agent/handler-sync@0.1.1";
const HANDLER_FUNCTIONS: [&str; 2] = ["describe", "on-message"];
/// Also matches the export of any later 0.2 release.
const COMMAND: &str = "wasi:cli/run@0.2.0";

/// A linked component.
#[derive(Clone)]
pub(crate) struct AgentPre {
    pre: InstancePre<TurnContext>,
    exports: Exports,
}

#[derive(Clone)]
enum Exports {
    Agent(Handlers),
    /// The index of the `run` function.
    Command(ComponentExportIndex),
}

/// The handlers of an agent. Only `messages` is required.
#[derive(Clone)]
struct Handlers {
    messages: Messages,
    alarms: Option<alarm_handler::GuestIndices>,
    events: Option<event_handler::GuestIndices>,
    tools: Option<tool_handler::GuestIndices>,
}

/// The message handler, as an asynchronous export or, for toolchains without asynchronous functions, a synchronous one.
#[derive(Clone)]
enum Messages {
    Async(handler::GuestIndices),
    Sync(handler_sync::GuestIndices),
}

/// An instance of an agent.
pub(crate) struct GuestInstance<'a> {
    exports: &'a Exports,
    instance: Instance,
}

/// The error for an export that the agent does not have.
#[derive(Debug, thiserror::Error)]
#[error("the agent does not export {0}")]
pub(crate) struct NoExport(&'static str);

impl AgentPre {
    pub(crate) fn new(pre: InstancePre<TurnContext>) -> Result<Self, String> {
        let component = pre.component();
        let handler = [HANDLER, HANDLER_SYNC]
            .into_iter()
            .find_map(|name| Some((name, component.get_export_index(None, name)?)));
        let exports = match (handler, command(component)) {
            (Some((name, handler)), _) => {
                check_handler(component, name, &handler)?;
                let handlers = Handlers::find(&pre, name);
                Exports::Agent(handlers.map_err(|error| {
                    format!("it does not export {name} as this host defines it: {error:#}")
                })?)
            }
            (None, Some(run)) => Exports::Command(run),
            (None, None) => {
                return Err(format!(
                    "it exports neither {HANDLER} nor wasi:cli/run of WASI 0.2; build it with skep-sdk, for the WIT \
                     world skep:agent/agent, or as a WASI command"
                ));
            }
        };
        Ok(AgentPre { pre, exports })
    }

    /// Returns the optional handlers that the component exports.
    pub(crate) fn handlers(&self) -> agent::Handlers {
        let Exports::Agent(Handlers { messages: _, alarms, events, tools }) = &self.exports else {
            return agent::Handlers { alarms: false, events: false, tool_calls: false };
        };
        agent::Handlers { alarms: alarms.is_some(), events: events.is_some(), tool_calls: tools.is_some() }
    }

    /// Returns whether the component is a WASI command, which reads its message from standard input.
    pub(crate) fn is_command(&self) -> bool {
        matches!(self.exports, Exports::Command(_))
    }

    pub(crate) async fn instantiate(
        &self,
        store: StoreContextMut<'_, TurnContext>,
    ) -> wasmtime::Result<GuestInstance<'_>> {
        Ok(GuestInstance { exports: &self.exports, instance: self.pre.instantiate_async(store).await? })
    }
}

fn command(component: &Component) -> Option<ComponentExportIndex> {
    let interface = component.get_export_index(None, COMMAND)?;
    component.get_export_index(Some(&interface), "run")
}

fn check_handler(component: &Component, export: &str, handler: &ComponentExportIndex) -> Result<(), String> {
    match HANDLER_FUNCTIONS.iter().find(|name| component.get_export_index(Some(handler), **name).is_none()) {
        Some(function) => Err(format!("its export {export} lacks the function {function}")),
        None => Ok(()),
    }
}

impl Handlers {
    /// Finds the handlers of a component. `messages` is the name of the message handler that it exports.
    fn find(pre: &InstancePre<TurnContext>, messages: &str) -> wasmtime::Result<Self> {
        let has = |name: &str| pre.component().get_export_index(None, name).is_some();
        Ok(Handlers {
            messages: match messages {
                HANDLER_SYNC => Messages::Sync(handler_sync::GuestIndices::new(pre)?),
                _ => Messages::Async(handler::GuestIndices::new(pre)?),
            },
            alarms: has("skep:agent/alarm-handler@0.1.1")
                .then(|| alarm_handler::GuestIndices::new(pre))
                .transpose()?,
            events: has("skep:agent/event-handler@0.1.1")
                .then(|| event_handler::GuestIndices::new(pre))
                .transpose()?,
            tools: has("skep:agent/tool-handler@0.1.1")
                .then(|| tool_handler::GuestIndices::new(pre))
                .transpose()?,
        })
    }
}

impl GuestInstance<'_> {
    pub(crate) async fn describe(
        &self,
        accessor: &Accessor<TurnContext>,
    ) -> wasmtime::Result<handler::Description> {
        match self.exports {
            Exports::Agent(Handlers { messages: Messages::Async(indices), .. }) => {
                let guest = accessor.with(|store| indices.load(store, &self.instance))?;
                guest.call_describe(accessor).await
            }
            Exports::Agent(Handlers { messages: Messages::Sync(indices), .. }) => {
                let guest = accessor.with(|store| indices.load(store, &self.instance))?;
                guest.call_describe(accessor).await
            }
            Exports::Command(_) => Ok(handler::Description {
                description:
                    "A WASI command: a message is its standard input, and its standard output is the reply."
                        .to_owned(),
                tools: Vec::new(),
            }),
        }
    }

    pub(crate) async fn on_message(
        &self,
        accessor: &Accessor<TurnContext>,
        message: handler::Message,
    ) -> wasmtime::Result<Result<handler::Reply, types::AgentError>> {
        match &self.handlers(HANDLER)?.messages {
            Messages::Async(indices) => {
                let guest = accessor.with(|store| indices.load(store, &self.instance))?;
                guest.call_on_message(accessor, message).await
            }
            Messages::Sync(indices) => {
                let guest = accessor.with(|store| indices.load(store, &self.instance))?;
                guest.call_on_message(accessor, message).await
            }
        }
    }

    pub(crate) async fn on_alarm(
        &self,
        accessor: &Accessor<TurnContext>,
        alarm: alarm_handler::Alarm,
    ) -> wasmtime::Result<Result<(), types::AgentError>> {
        const NAME: &str = "skep:agent/alarm-handler";
        let indices = self.handlers(NAME)?.alarms.as_ref().ok_or(NoExport(NAME))?;
        let guest = accessor.with(|store| indices.load(store, &self.instance))?;
        guest.call_on_alarm(accessor, alarm).await
    }

    pub(crate) async fn on_event(
        &self,
        accessor: &Accessor<TurnContext>,
        event: event_handler::Event,
    ) -> wasmtime::Result<Result<(), types::AgentError>> {
        const NAME: &str = "skep:agent/event-handler";
        let indices = self.handlers(NAME)?.events.as_ref().ok_or(NoExport(NAME))?;
        let guest = accessor.with(|store| indices.load(store, &self.instance))?;
        guest.call_on_event(accessor, event).await
    }

    pub(crate) async fn call_tool(
        &self,
        accessor: &Accessor<TurnContext>,
        invocation: tool_handler::Invocation,
    ) -> wasmtime::Result<Result<String, String>> {
        const NAME: &str = "skep:agent/tool-handler";
        let indices = self.handlers(NAME)?.tools.as_ref().ok_or(NoExport(NAME))?;
        let guest = accessor.with(|store| indices.load(store, &self.instance))?;
        guest.call_call_tool(accessor, invocation).await
    }

    /// Runs the command. An explicit exit with a status is returned as a trap.
    pub(crate) async fn run(&self, accessor: &Accessor<TurnContext>) -> wasmtime::Result<Result<(), ()>> {
        let Exports::Command(run) = self.exports else { return Err(NoExport("wasi:cli/run").into()) };
        let run = accessor.with(|store| self.instance.get_typed_func::<(), (Result<(), ()>,)>(store, run))?;
        let (result,) = run.call_concurrent(accessor, ()).await?;
        Ok(result)
    }

    fn handlers(&self, wanted: &'static str) -> Result<&Handlers, NoExport> {
        match self.exports {
            Exports::Agent(handlers) => Ok(handlers),
            Exports::Command(_) => Err(NoExport(wanted)),
        }
    }
}
