//! The value of an agent: what `#[agent]` generates from a function, and what a host or a harness runs.

use std::rc::Rc;

use crate::context::{Context, Tool, TurnInfo};
use crate::error::{AgentError, ToolError};
use crate::host::{Host, Task};
use crate::instructions::Instructions;
use crate::message::{Message, Reply};
use crate::tool::ToolDefinition;
use crate::trigger::{Alarm, Event};
use serde_json::Value;

/// The function that handles a turn. `#[agent]` wraps the author's function in one.
#[doc(hidden)]
pub type TurnFunction = for<'a> fn(&'a mut Context, Message) -> Task<'a, Result<Reply, AgentError>>;

/// The way in which an agent handles a turn.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub enum Turn {
    /// The author's function handles the turn.
    Function(TurnFunction),
    /// The model answers.
    Instructions(Instructions),
}

/// The function that handles an alarm.
#[doc(hidden)]
pub type AlarmFunction = for<'a> fn(&'a mut Context, Alarm) -> Task<'a, Result<(), AgentError>>;

/// The function that handles an event.
#[doc(hidden)]
pub type EventFunction = for<'a> fn(&'a mut Context, Event) -> Task<'a, Result<(), AgentError>>;

/// An agent: its description, its tools, and how it handles a turn. `#[agent]` creates it.
#[derive(Clone, Copy)]
pub struct Agent {
    name: &'static str,
    description: &'static str,
    tools: &'static [Tool],
    turn: Turn,
    model: Option<&'static str>,
    alarm: Option<AlarmFunction>,
    event: Option<EventFunction>,
}

impl Agent {
    /// Creates an agent on the default model, without handlers for alarms and events. `#[agent]` calls it.
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        description: &'static str,
        tools: &'static [Tool],
        turn: Turn,
    ) -> Self {
        Self { name, description, tools, turn, model: None, alarm: None, event: None }
    }

    /// Sets the model that the agent uses where it names none.
    #[doc(hidden)]
    pub const fn with_model(mut self, model: &'static str) -> Self {
        self.model = Some(model);
        self
    }

    /// Sets the handler of alarms.
    #[doc(hidden)]
    pub const fn on_alarm(mut self, alarm: AlarmFunction) -> Self {
        self.alarm = Some(alarm);
        self
    }

    /// Sets the handler of events.
    #[doc(hidden)]
    pub const fn on_event(mut self, event: EventFunction) -> Self {
        self.event = Some(event);
        self
    }

    /// Returns the name of the function or struct under `#[agent]`. The agent is deployed under the name in its manifest.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the doc comment of the function or struct.
    pub fn description(&self) -> &'static str {
        self.description
    }

    /// Returns the model of `#[agent(model = …)]`. `None` means the agent's own model: `model` in `agent.toml`,
    /// or the host's default.
    pub fn model(&self) -> Option<&'static str> {
        self.model
    }

    /// Returns the definitions of the tools, as given to the model and the host.
    pub fn tools(&self) -> Vec<ToolDefinition> {
        self.tools.iter().map(Tool::definition).collect()
    }

    pub(crate) async fn run_turn(&self, host: Rc<dyn Host>, message: Message) -> Result<Reply, AgentError> {
        let info = TurnInfo::new(&message.session, message.turn, message.received_at_ms);
        let mut cx = self.context(host, info);
        match self.turn {
            Turn::Function(function) => function(&mut cx, message).await,
            Turn::Instructions(instructions) => instructions.answer(&cx, &message).await,
        }
    }

    pub(crate) async fn run_alarm(&self, host: Rc<dyn Host>, alarm: Alarm) -> Result<(), AgentError> {
        let function = self.alarm.ok_or_else(|| missing_handler("on_alarm = …"))?;
        let info = TurnInfo::new(&alarm.session, alarm.turn, alarm.received_at_ms);
        let mut cx = self.context(host, info);
        function(&mut cx, alarm).await
    }

    pub(crate) async fn run_event(&self, host: Rc<dyn Host>, event: Event) -> Result<(), AgentError> {
        let function = self.event.ok_or_else(|| missing_handler("on_event = …"))?;
        let info = TurnInfo::new(&event.session, event.turn, event.received_at_ms);
        let mut cx = self.context(host, info);
        function(&mut cx, event).await
    }

    /// Calls one of the tools on behalf of a caller other than the agent's own model.
    pub(crate) async fn call_tool(
        &self,
        host: Rc<dyn Host>,
        info: TurnInfo,
        name: &str,
        arguments: Value,
    ) -> Result<Value, ToolError> {
        let tool = self.tools.iter().find(|tool| tool.name == name);
        let tool = tool.ok_or_else(|| ToolError::new(format!("there is no tool `{name}`")))?;
        let cx = self.context(host, info);
        (tool.call)(&cx, arguments).await
    }

    fn context(&self, host: Rc<dyn Host>, info: TurnInfo) -> Context {
        Context::new(host, self.tools, self.model, info)
    }
}

fn missing_handler(option: &str) -> AgentError {
    AgentError::Failed(format!("the agent has no handler for this; add one with #[agent({option})]"))
}
