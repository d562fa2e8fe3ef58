//! Turns of one session, from outside.

use std::cell::RefCell;
use std::rc::Rc;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::block_on::block_on_or;
use super::examples;
use super::memory_host::{MemoryHost, World};
use super::model::ScriptedModel;
use super::schedule::Emitted;
use super::web::ScriptedWeb;
use crate::context::TurnInfo;
use crate::host::Host;
use crate::{
    Agent, AgentError, Alarm, Entry, Event, FetchRequest, HostTool, HostToolError, Level, Message, Origin,
    Reply, ScheduleTiming, Scheduled, ToolError, ToolHints,
};

/// The session's id unless [`Harness::session`] names one.
const SESSION: &str = "test";
/// The time of the first turn; each turn is a second later.
const FIRST_TURN_MS: u64 = 1_750_000_000_000;

/// One session of an agent, with a scripted model.
pub struct Harness {
    agent: Agent,
    world: Rc<RefCell<World>>,
    session: String,
    turn: u64,
}

/// What came of a turn that ended well.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The agent's answer.
    pub reply: Reply,
    /// The model's tool calls of this turn and what came of them, in order.
    pub tool_calls: Vec<ToolCallRecord>,
    /// How many generations it took.
    pub generations: usize,
}

/// A tool call of the model, answered.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCallRecord {
    /// The tool.
    pub name: String,
    /// What it was called with.
    pub arguments: Value,
    /// What it returned, or what the model was told instead.
    pub outcome: Result<Value, String>,
}

impl Harness {
    /// A fresh session of an agent: `Harness::new(my_agent)`, with the function under `#[agent]`.
    ///
    /// # Panics
    /// If an example of a tool breaks the tool's schema.
    #[track_caller]
    pub fn new(agent: impl FnOnce() -> Agent) -> Self {
        let agent = agent();
        let tools = agent.tools();
        if let Some(why) = tools.iter().find_map(|tool| examples::check(tool).err()) {
            panic!("{why}");
        }
        let world = Rc::new(RefCell::new(World::new(tools)));
        Self { agent, world, session: SESSION.to_owned(), turn: 0 }
    }

    /// Gives the model its steps; those that are left from before are dropped.
    pub fn model(self, model: ScriptedModel) -> Self {
        self.set_model(model);
        self
    }

    /// As [`model`](Self::model), between turns.
    pub fn set_model(&self, model: ScriptedModel) {
        self.world.borrow_mut().steps = model.steps;
    }

    /// Grants a tool of others, such as `agent:orders/find_order`, that does what `call` does. The model knows it by a name
    /// with `_` for every `:`, `/` and `.`: `agent_orders_find_order`.
    pub fn host_tool(
        self,
        name: &str,
        input_schema: Value,
        call: impl Fn(Value) -> Result<Value, HostToolError> + 'static,
    ) -> Self {
        let tool = HostTool {
            name: name.to_owned(),
            model_name: Some(name.replace([':', '/', '.'], "_")),
            description: format!("{name}, of the test"),
            input_schema,
            output_schema: None,
            hints: ToolHints::default(),
        };
        self.world.borrow_mut().host_tools.push((tool, Rc::new(call)));
        self
    }

    /// Gives the web its answers; those that are left from before are dropped.
    pub fn web(self, web: ScriptedWeb) -> Self {
        self.set_web(web);
        self
    }

    /// As [`web`](Self::web), between turns.
    pub fn set_web(&self, web: ScriptedWeb) {
        self.world.borrow_mut().web = web;
    }

    /// What a person says of calls of tools with `needs_approval`: yes without this, or no and why.
    pub fn verdict(self, verdict: Result<(), &str>) -> Self {
        let denied = |why| format!("a person refused this call: {why}");
        self.world.borrow_mut().verdict = verdict.map_err(denied);
        self
    }

    /// Has the agent draw other random numbers: the same ones for the same seed, in every run of the test.
    pub fn random(self, seed: u64) -> Self {
        self.world.borrow_mut().random = seed;
        self
    }

    /// Names the session.
    pub fn session(mut self, session: impl Into<String>) -> Self {
        self.session = session.into();
        self
    }

    /// Takes a turn with a text.
    ///
    /// # Panics
    /// If the script asks for what no model could do, or has no step left.
    #[track_caller]
    pub fn send(&mut self, text: impl Into<String>) -> Result<Outcome, AgentError> {
        self.take_turn(text.into(), None)
    }

    /// Takes a turn with a text and a JSON value beside it.
    ///
    /// # Panics
    /// As [`send`](Self::send).
    #[track_caller]
    pub fn send_json(&mut self, text: impl Into<String>, data: Value) -> Result<Outcome, AgentError> {
        self.take_turn(text.into(), Some(data))
    }

    /// Takes a turn with an alarm that is due. A schedule of this name that is due once is over with it.
    ///
    /// # Panics
    /// As [`send`](Self::send).
    #[track_caller]
    pub fn alarm(&mut self, name: impl Into<String>, data: Option<Value>) -> Result<(), AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let (name, id, due_at_ms) = (name.into(), format!("alarm-{turn}"), received_at_ms);
        let (attempt, missed) = (1, 0);
        let alarm = Alarm { id, name, data, session, turn, due_at_ms, received_at_ms, attempt, missed };
        let is_over = self.world.borrow().saved.schedules.get(&alarm.name).cloned();
        let is_over = is_over.filter(|set| matches!(set.timing, ScheduleTiming::At(_)));
        let name = alarm.name.clone();
        self.run(async |agent, host| agent.take_alarm(host, alarm).await)?;
        // Unless the turn set it anew.
        let schedules = &mut self.world.borrow_mut().saved.schedules;
        if is_over.is_some() && schedules.get(&name) == is_over.as_ref() {
            schedules.remove(&name);
        }
        Ok(())
    }

    /// Takes a turn with an event.
    ///
    /// # Panics
    /// As [`send`](Self::send).
    #[track_caller]
    pub fn event(&mut self, topic: impl Into<String>, data: Option<Value>) -> Result<(), AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let (topic, id, at_ms, attempt) = (topic.into(), format!("event-{turn}"), received_at_ms, 1);
        let event = Event { id, topic, data, session, turn, at_ms, received_at_ms, attempt };
        self.run(async |agent, host| agent.take_event(host, event).await)
    }

    /// Takes a turn in which another agent or a client calls one of the tools.
    ///
    /// # Panics
    /// As [`send`](Self::send).
    #[track_caller]
    pub fn call_tool(&mut self, name: &str, arguments: Value) -> Result<Value, ToolError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let info = TurnInfo::new(&session, turn, received_at_ms);
        self.run(async |agent, host| agent.call_tool(host, info, name, arguments).await)
    }

    /// A value of the session's state. `None` if there is none.
    ///
    /// # Panics
    /// If it is not a `T`.
    #[track_caller]
    pub fn state<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let world = self.world.borrow();
        let bytes = world.saved.state.get(key)?;
        match serde_json::from_slice(bytes) {
            Ok(value) => Some(value),
            Err(error) => panic!("state `{key}` is {}: {error}", String::from_utf8_lossy(bytes)),
        }
    }

    /// The session's schedules, by name.
    pub fn schedules(&self) -> Vec<Scheduled> {
        self.world.borrow().saved.schedules.values().cloned().collect()
    }

    /// What the agent emitted so far, in turns that ended well.
    pub fn emitted(&self) -> Vec<Emitted> {
        self.world.borrow().saved.emitted.clone()
    }

    /// The messages of the conversation of this name; `main` is the one of `cx.conversation()`.
    pub fn conversation(&self, name: &str) -> Vec<Entry> {
        self.world.borrow().saved.conversations.get(name).cloned().unwrap_or_default()
    }

    /// What the model was given at each generation so far, failed turns and examples included. A completion is one user entry.
    pub fn prompts(&self) -> Vec<Vec<Entry>> {
        self.world.borrow().prompts.clone()
    }

    /// The HTTP requests that the agent made so far, failed turns included.
    pub fn requests(&self) -> Vec<FetchRequest> {
        self.world.borrow().requests.clone()
    }

    /// What the agent logged so far, failed turns included.
    pub fn logs(&self) -> Vec<(Level, String)> {
        self.world.borrow().logs.clone()
    }

    /// How many steps of the script the model has not taken yet.
    pub fn steps_left(&self) -> usize {
        self.world.borrow().steps.len()
    }

    #[track_caller]
    fn take_turn(&mut self, text: String, data: Option<Value>) -> Result<Outcome, AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let message = Message { text, data, session, turn, received_at_ms, origin: Origin::Direct };
        let generations = self.world.borrow().prompts.len();
        let reply = self.run(async |agent, host| agent.take_turn(host, message).await)?;
        let mut world = self.world.borrow_mut();
        let tool_calls = std::mem::take(&mut world.tool_calls);
        Ok(Outcome { reply, tool_calls, generations: world.prompts.len() - generations })
    }

    /// The session, the number and the time of the turn that comes.
    fn next_turn(&self) -> (String, u64, u64) {
        let turn = self.turn + 1;
        (self.session.clone(), turn, FIRST_TURN_MS + 1_000 * turn)
    }

    /// Runs a turn, and keeps what it changed if it ended well.
    #[track_caller]
    fn run<T, E>(&mut self, turn: impl AsyncFnOnce(Agent, Rc<dyn Host>) -> Result<T, E>) -> Result<T, E> {
        let (_, _, now_ms) = self.next_turn();
        let before = {
            let mut world = self.world.borrow_mut();
            world.tool_calls.clear();
            world.now_ms = now_ms;
            world.saved.clone()
        };
        let host = Rc::new(MemoryHost::new(self.world.clone()));
        let result = block_on_or(turn(self.agent, host), || self.world.borrow_mut().pass_time());
        let mut world = self.world.borrow_mut();
        if let Some(fault) = world.fault.take() {
            panic!("the script does not fit the agent: {fault}");
        }
        match &result {
            Ok(_) => self.turn += 1,
            Err(_) => world.saved = before,
        }
        result
    }
}
