//! The harness, which runs turns of one session from the outside.

use std::cell::RefCell;
use std::rc::Rc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::block_on::block_on_or;
use super::examples;
use super::memory_host::{MemoryHost, World};
use super::model::ScriptedModel;
use super::schedule::Emitted;
use super::web::ScriptedWeb;
use crate::context::TurnInfo;
use crate::host::Host;
use crate::{
    Agent, AgentError, Alarm, Entry, Event, FetchRequest, HostTool, HostToolError, HostToolInfo, Level,
    Message, Origin, Reply, ScheduleTiming, Scheduled, ToolError, ToolHints,
};

/// The session's id, unless [`Harness::session`] sets another.
const SESSION: &str = "test";
/// The name of the scripted model, unless the agent names its model.
const MODEL: &str = "scripted";
/// The time base of the turns; each turn is one second later than the one before.
const FIRST_TURN_MS: u64 = 1_750_000_000_000;

/// One session of an agent, with a scripted model.
pub struct Harness {
    agent: Agent,
    world: Rc<RefCell<World>>,
    session: String,
    turn: u64,
}

/// The outcome of a turn that succeeded.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The agent's reply.
    pub reply: Reply,
    /// The model's tool calls of this turn with their outcomes, in order.
    pub tool_calls: Vec<ToolCallRecord>,
    /// Number of generations in the turn.
    pub generations: usize,
}

/// A tool call of the model that has been answered.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCallRecord {
    /// The name of the tool.
    pub name: String,
    /// The arguments of the call.
    pub arguments: Value,
    /// The result, or the error that was given to the model.
    pub outcome: Result<Value, String>,
}

impl Harness {
    /// Creates a fresh session of an agent: `Harness::new(my_agent)`, with the function or struct under
    /// `#[agent]`.
    ///
    /// # Panics
    /// Panics if an example of a tool does not validate against the tool's schema.
    #[track_caller]
    pub fn new(agent: impl FnOnce() -> Agent) -> Self {
        let agent = agent();
        let tools = agent.tools();
        if let Some(why) = tools.iter().find_map(|tool| examples::check(tool).err()) {
            panic!("{why}");
        }
        let world = Rc::new(RefCell::new(World::new(tools, agent.model().unwrap_or(MODEL))));
        Self { agent, world, session: SESSION.to_owned(), turn: 0 }
    }

    /// Sets the model's steps. Steps that are left from before are dropped.
    pub fn model(self, model: ScriptedModel) -> Self {
        self.set_model(model);
        self
    }

    /// Does the same as [`model`](Self::model), for use between turns.
    pub fn set_model(&self, model: ScriptedModel) {
        self.world.borrow_mut().steps = model.steps;
    }

    /// Grants a tool of others, such as `agent:orders/find_order`, that runs `call`. Its name for the model is the one
    /// that a host gives it: `agent_orders_find_order` here, `mcp_files_read` for `mcp:files/read`, and `host_fetch` for
    /// `http/fetch`. A host shortens a name that has other characters or is longer than 64, and adds digits to it.
    pub fn host_tool(
        self,
        name: &str,
        input_schema: Value,
        call: impl Fn(Value) -> Result<Value, HostToolError> + 'static,
    ) -> Self {
        let tool = HostToolInfo {
            name: name.to_owned(),
            model_name: Some(model_name(name)),
            description: format!("{name}, of the test"),
            input_schema,
            output_schema: None,
            hints: ToolHints::default(),
        };
        self.world.borrow_mut().host_tools.push((tool, Rc::new(call)));
        self
    }

    /// Does the same as [`host_tool`](Self::host_tool), for a typed reference. The tool accepts every object that
    /// deserializes into the arguments.
    ///
    /// ```
    /// # use skep_sdk::testing::{Harness, ScriptedModel};
    /// # use skep_sdk::{AgentError, Context, HostTool, HostToolError, Message, Reply, agent};
    /// # use skep_sdk::serde_json::{Value, json};
    /// const PRICE: HostTool<Value, u32> = HostTool::new("agent:shop/price");
    ///
    /// /// Knows prices.
    /// #[agent]
    /// async fn prices(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     cx.conversation().user(message.text).host_tools([PRICE]).run().await
    /// }
    ///
    /// let model = ScriptedModel::new().call("agent_shop_price", json!({"of": "tea"})).text("4 euros.");
    /// let mut harness = Harness::new(prices).model(model).typed_host_tool(PRICE, |asked| {
    ///     if asked["of"] == "tea" { Ok(4) } else { Err(HostToolError::Failed("sold out".into())) }
    /// });
    /// assert_eq!(harness.send("How much is tea?").unwrap().tool_calls[0].outcome, Ok(json!(4)));
    /// ```
    pub fn typed_host_tool<A: DeserializeOwned, O: Serialize>(
        self,
        tool: HostTool<A, O>,
        call: impl Fn(A) -> Result<O, HostToolError> + 'static,
    ) -> Self {
        let json_error = |error: serde_json::Error| HostToolError::Failed(error.to_string());
        self.host_tool(tool.name(), json!({"type": "object"}), move |arguments| {
            // Unit arguments are sent as an empty object.
            let arguments = serde_json::from_value(arguments.clone()).or_else(|error| {
                let is_empty = arguments.as_object().is_some_and(Map::is_empty);
                if is_empty { serde_json::from_value(Value::Null) } else { Err(error) }
            });
            let arguments = arguments.map_err(|error| HostToolError::InvalidArguments(error.to_string()))?;
            serde_json::to_value(call(arguments)?).map_err(json_error)
        })
    }

    /// Sets the web's responses. Responses that are left from before are dropped.
    pub fn web(self, web: ScriptedWeb) -> Self {
        self.set_web(web);
        self
    }

    /// Does the same as [`web`](Self::web), for use between turns.
    pub fn set_web(&self, web: ScriptedWeb) {
        self.world.borrow_mut().web = web;
    }

    /// Sets a person's decision on calls of tools with `needs_approval`: approval (the default), or rejection
    /// with a reason.
    pub fn approval_decision(self, decision: Result<(), &str>) -> Self {
        let denied = |why| format!("a person refused this call: {why}");
        self.world.borrow_mut().approval_decision = decision.map_err(denied);
        self
    }

    /// Does the same as [`approval_decision`](Self::approval_decision).
    #[deprecated(since = "0.1.0", note = "renamed to `approval_decision`")]
    pub fn verdict(self, verdict: Result<(), &str>) -> Self {
        self.approval_decision(verdict)
    }

    /// Sets the seed of the random numbers. The same seed gives the same numbers in every run of the test.
    pub fn random(self, seed: u64) -> Self {
        self.world.borrow_mut().random = seed;
        self
    }

    /// Sets the session's id.
    pub fn session(mut self, session: impl Into<String>) -> Self {
        self.session = session.into();
        self
    }

    /// Runs a turn with a text.
    ///
    /// # Panics
    /// Panics if the script requires something that no model could do, or has no step left.
    #[track_caller]
    pub fn send(&mut self, text: impl Into<String>) -> Result<Outcome, AgentError> {
        self.run_turn(text.into(), None)
    }

    /// Runs a turn with a text and a JSON value.
    ///
    /// # Panics
    /// Panics in the same cases as [`send`](Self::send).
    #[track_caller]
    pub fn send_json(&mut self, text: impl Into<String>, data: Value) -> Result<Outcome, AgentError> {
        self.run_turn(text.into(), Some(data))
    }

    /// Runs a turn with an alarm that is due. If the schedule with this name is due only once, it is removed.
    ///
    /// # Panics
    /// Panics in the same cases as [`send`](Self::send).
    #[track_caller]
    pub fn alarm(&mut self, name: impl Into<String>, data: Option<Value>) -> Result<(), AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let (name, id, due_at_ms) = (name.into(), format!("alarm-{turn}"), received_at_ms);
        let (attempt, missed) = (1, 0);
        let alarm = Alarm { id, name, data, session, turn, due_at_ms, received_at_ms, attempt, missed };
        let is_over = self.world.borrow().saved.schedules.get(&alarm.name).cloned();
        let is_over = is_over.filter(|set| matches!(set.timing, ScheduleTiming::At(_)));
        let name = alarm.name.clone();
        self.run(async |agent, host| agent.run_alarm(host, alarm).await)?;
        // Keep the schedule if the turn set it again.
        let schedules = &mut self.world.borrow_mut().saved.schedules;
        if is_over.is_some() && schedules.get(&name) == is_over.as_ref() {
            schedules.remove(&name);
        }
        Ok(())
    }

    /// Runs a turn with an event.
    ///
    /// # Panics
    /// Panics in the same cases as [`send`](Self::send).
    #[track_caller]
    pub fn event(&mut self, topic: impl Into<String>, data: Option<Value>) -> Result<(), AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let (topic, id, at_ms, attempt) = (topic.into(), format!("event-{turn}"), received_at_ms, 1);
        let event = Event { id, topic, data, session, turn, at_ms, received_at_ms, attempt };
        self.run(async |agent, host| agent.run_event(host, event).await)
    }

    /// Runs a turn in which another agent or a client calls one of the tools.
    ///
    /// # Panics
    /// Panics in the same cases as [`send`](Self::send).
    #[track_caller]
    pub fn call_tool(&mut self, name: &str, arguments: Value) -> Result<Value, ToolError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let info = TurnInfo::new(&session, turn, received_at_ms);
        self.run(async |agent, host| agent.call_tool(host, info, name, arguments).await)
    }

    /// Returns a value of the session's state, or `None` if it does not exist.
    ///
    /// # Panics
    /// Panics if the value is not a `T`.
    #[track_caller]
    pub fn state<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let world = self.world.borrow();
        let bytes = world.saved.state.get(key)?;
        match serde_json::from_slice(bytes) {
            Ok(value) => Some(value),
            Err(error) => panic!("state `{key}` is {}: {error}", String::from_utf8_lossy(bytes)),
        }
    }

    /// Returns the session's schedules, by name.
    pub fn schedules(&self) -> Vec<Scheduled> {
        self.world.borrow().saved.schedules.values().cloned().collect()
    }

    /// Returns the events that the agent emitted so far, in turns that succeeded.
    pub fn emitted(&self) -> Vec<Emitted> {
        self.world.borrow().saved.emitted.clone()
    }

    /// Returns the messages of the conversation with this name; `main` is the one of `cx.conversation()`.
    pub fn conversation(&self, name: &str) -> Vec<Entry> {
        self.world.borrow().saved.conversations.get(name).cloned().unwrap_or_default()
    }

    /// Returns the prompt of each generation so far, with examples, including those of failed turns. A
    /// completion is one user entry.
    pub fn prompts(&self) -> Vec<Vec<Entry>> {
        self.world.borrow().prompts.clone()
    }

    /// Returns the HTTP requests that the agent made so far, including those of failed turns.
    pub fn requests(&self) -> Vec<FetchRequest> {
        self.world.borrow().requests.clone()
    }

    /// Returns the lines that the agent logged so far, including those of failed turns.
    pub fn logs(&self) -> Vec<(Level, String)> {
        self.world.borrow().logs.clone()
    }

    /// Returns the number of script steps that the model has not taken yet.
    pub fn steps_left(&self) -> usize {
        self.world.borrow().steps.len()
    }

    #[track_caller]
    fn run_turn(&mut self, text: String, data: Option<Value>) -> Result<Outcome, AgentError> {
        let (session, turn, received_at_ms) = self.next_turn();
        let message = Message { text, data, session, turn, received_at_ms, origin: Origin::Direct };
        let generations = self.world.borrow().prompts.len();
        let reply = self.run(async |agent, host| agent.run_turn(host, message).await)?;
        let mut world = self.world.borrow_mut();
        let tool_calls = std::mem::take(&mut world.tool_calls);
        Ok(Outcome { reply, tool_calls, generations: world.prompts.len() - generations })
    }

    /// Returns the session, the number and the time of the next turn.
    fn next_turn(&self) -> (String, u64, u64) {
        let turn = self.turn + 1;
        (self.session.clone(), turn, FIRST_TURN_MS + 1_000 * turn)
    }

    /// Runs a turn, and keeps its changes if it succeeded.
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
        let result = block_on_or(turn(self.agent, host), || self.world.borrow_mut().advance_clock());
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

/// Returns the name of a host tool for the model, with its kind first: `http/fetch` is a tool of the host itself.
fn model_name(name: &str) -> String {
    let name = match name.strip_prefix("http/") {
        Some(tool) => format!("host_{tool}"),
        None => name.to_owned(),
    };
    name.replace([':', '/', '.'], "_")
}
