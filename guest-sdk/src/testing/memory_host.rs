//! The host of a test, with everything in memory and a scripted model.
//!
//! A mistake in the script is kept as a fault and fails the turn with an internal error. The harness reports
//! the fault even if the agent handles the error, so no agent can hide it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::task::Poll;

use serde_json::Value;

use super::examples;
use super::harness::ToolCallRecord;
use super::memory_conversation::MemoryConversation;
use super::model::Step;
use super::schedule::{self, Emitted};
use super::validate::validate;
use super::web::ScriptedWeb;
use crate::host::{Host, HostConversation, Level, ScheduleOptions, Task, When};
use crate::{
    EmitError, Entry, FetchRequest, Finish, GenerateOptions, Generation, HostToolError, HostToolInfo,
    HttpError, HttpResponse, InferenceError, ModelInfo, Output, ScheduleError, Scheduled, StateError, Timing,
    ToolCall, ToolChoice, ToolDefinition, Usage,
};

/// Maximum length of a key in bytes, as in the WIT interface.
const MAX_KEY_BYTES: usize = 256;
/// Maximum length of a value in bytes, as in the host.
const MAX_VALUE_BYTES: usize = 256 << 10;

/// Everything that a session keeps between turns.
#[derive(Clone, Default)]
pub struct Saved {
    pub state: BTreeMap<String, Vec<u8>>,
    pub conversations: BTreeMap<String, Vec<Entry>>,
    /// The reasoning of each conversation's last assistant message.
    pub reasoning: BTreeMap<String, String>,
    pub schedules: BTreeMap<String, Scheduled>,
    pub emitted: Vec<Emitted>,
}

/// The function that a test provides for a tool of others.
pub type HostToolFunction = Rc<dyn Fn(Value) -> Result<Value, HostToolError>>;

/// Everything on the host's side of one session.
pub struct World {
    pub saved: Saved,
    pub steps: VecDeque<Step>,
    pub prompts: Vec<Vec<Entry>>,
    pub tool_calls: Vec<ToolCallRecord>,
    pub logs: Vec<(Level, String)>,
    pub web: ScriptedWeb,
    pub requests: Vec<FetchRequest>,
    pub fault: Option<String>,
    /// The time of the turn.
    pub now_ms: u64,
    pub host_tools: Vec<(HostToolInfo, HostToolFunction)>,
    /// A person's decision on calls that need approval.
    pub approval_decision: Result<(), String>,
    /// The state of the random number generator.
    pub random: u64,
    tools: Vec<ToolDefinition>,
    /// The name of the scripted model.
    model: &'static str,
    calls_made: u64,
    timer: Timer,
}

/// The time that turns have waited. It advances only when nothing else can make progress.
#[derive(Default)]
struct Timer {
    waited_ms: u64,
    /// The time at which the next waiting future resolves.
    next_ms: Option<u64>,
}

impl World {
    /// Creates the world of a new session at time 0, with an empty script. `tools` are the agent's own.
    pub fn new(tools: Vec<ToolDefinition>, model: &'static str) -> Self {
        Self {
            saved: Saved::default(),
            steps: VecDeque::new(),
            prompts: Vec::new(),
            tool_calls: Vec::new(),
            logs: Vec::new(),
            web: ScriptedWeb::new(),
            requests: Vec::new(),
            fault: None,
            now_ms: 0,
            host_tools: Vec::new(),
            approval_decision: Ok(()),
            random: 0,
            tools,
            model,
            calls_made: 0,
            timer: Timer::default(),
        }
    }

    /// Advances the clock to the next waiting future. Returns whether one was waiting.
    pub fn advance_clock(&mut self) -> bool {
        let next_ms = self.timer.next_ms.take();
        self.timer.waited_ms = next_ms.unwrap_or(self.timer.waited_ms);
        next_ms.is_some()
    }

    fn fail(&mut self, fault: String) -> InferenceError {
        self.fault.get_or_insert(fault.clone());
        InferenceError::Internal(fault)
    }

    pub(super) fn generate(
        &mut self,
        prompt: Vec<Entry>,
        options: &GenerateOptions,
    ) -> Result<Generation, InferenceError> {
        self.check_options(options)?;
        let prompt = examples::shown(prompt, &self.tools, options).map_err(InferenceError::SchemaInvalid)?;
        self.prompts.push(prompt);
        let number = self.prompts.len();
        let Some(step) = self.steps.pop_front() else {
            return Err(self
                .fail(format!("the agent requested generation {number}, but the script has no step left")));
        };
        match step {
            Step::Fail(error) => Err(error),
            Step::Text { reasoning, text } => {
                let generation = self.text(text, options)?;
                Ok(Generation { reasoning, ..generation })
            }
            Step::Calls(calls) => self.calls(calls, options),
        }
    }

    /// Returns the schemas of the arguments and of the result of a tool that can be offered to the model.
    fn schemas(&self, name: &str) -> Option<(&Value, Option<&Value>)> {
        if let Some(tool) = self.tools.iter().find(|tool| tool.name == name) {
            return Some((&tool.input_schema, Some(&tool.output_schema)));
        }
        let mut offered = self.host_tools.iter().map(|(tool, _)| tool);
        let tool = offered.find(|tool| tool.model_name.as_deref() == Some(name))?;
        Some((&tool.input_schema, tool.output_schema.as_ref()))
    }

    fn check_options(&self, options: &GenerateOptions) -> Result<(), InferenceError> {
        for name in &options.tools {
            if self.schemas(name).is_none() {
                return Err(InferenceError::InvalidArgument(format!("the agent has no tool `{name}`")));
            }
        }
        match &options.tool_choice {
            ToolChoice::Named(name) if !options.tools.contains(name) => Err(InferenceError::InvalidArgument(
                format!("the tool choice names `{name}`, which is not among the tools of this generation"),
            )),
            ToolChoice::Required if options.tools.is_empty() => Err(InferenceError::InvalidArgument(
                "the tool choice is `required`, but this generation has no tools".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    fn text(&mut self, text: String, options: &GenerateOptions) -> Result<Generation, InferenceError> {
        if matches!(options.tool_choice, ToolChoice::Required | ToolChoice::Named(_)) {
            return Err(self.fail(format!("it answers {text:?}, but the agent requires a tool call")));
        }
        if let Output::JsonSchema(schema) = &options.output {
            let checked = serde_json::from_str(&text)
                .map_err(|error| error.to_string())
                .and_then(|value: Value| validate(schema, &value));
            if let Err(why) = checked {
                return Err(self.fail(format!("the answer {text} breaks the output's schema: {why}")));
            }
        }
        Ok(generation(text, Vec::new()))
    }

    fn calls(
        &mut self,
        calls: Vec<(String, Value)>,
        options: &GenerateOptions,
    ) -> Result<Generation, InferenceError> {
        let mut made = Vec::new();
        for (name, arguments) in calls {
            if let Err(why) = self.check_call(&name, &arguments, options) {
                return Err(self.fail(why));
            }
            self.calls_made += 1;
            made.push(ToolCall { id: format!("call_{}", self.calls_made), name, arguments });
        }
        Ok(generation(String::new(), made))
    }

    fn check_call(&self, name: &str, arguments: &Value, options: &GenerateOptions) -> Result<(), String> {
        let offered = || options.tools.join(", ");
        let schemas = self.schemas(name).filter(|_| options.tools.iter().any(|offered| offered == name));
        let Some((input_schema, _)) = schemas else {
            return Err(format!("it calls `{name}`, but this generation offers: [{}]", offered()));
        };
        match &options.tool_choice {
            ToolChoice::None => Err(format!("it calls `{name}`, but the agent allows no tool call")),
            ToolChoice::Named(other) if other != name => {
                Err(format!("it calls `{name}`, but the agent requires `{other}`"))
            }
            _ => validate(input_schema, arguments)
                .map_err(|why| format!("it calls `{name}` with arguments that break its schema: {why}")),
        }
    }

    pub(super) fn answer(
        &mut self,
        conversation: &str,
        call_id: &str,
        outcome: &Result<Value, String>,
    ) -> Result<(), InferenceError> {
        let entries = self.saved.conversations.get(conversation).map(Vec::as_slice).unwrap_or_default();
        let Some(call) = unanswered(entries).find(|call| call.id == call_id).cloned() else {
            return Err(InferenceError::InvalidArgument(format!(
                "no tool call `{call_id}` is waiting for a result"
            )));
        };
        if let (Some((_, Some(schema))), Ok(value)) = (self.schemas(&call.name), outcome)
            && let Err(why) = validate(schema, value)
        {
            let why = format!("the result of `{}` breaks its output schema: {why}", call.name);
            return Err(InferenceError::SchemaInvalid(why));
        }
        let outcome = outcome.clone();
        self.tool_calls.push(ToolCallRecord {
            name: call.name,
            arguments: call.arguments,
            outcome: outcome.clone(),
        });
        self.entries(conversation).push(Entry::Tool { call_id: call_id.to_owned(), outcome });
        Ok(())
    }

    pub(super) fn entries(&mut self, conversation: &str) -> &mut Vec<Entry> {
        self.saved.conversations.entry(conversation.to_owned()).or_default()
    }
}

/// Returns the calls of the last assistant message that have no result yet.
pub(super) fn unanswered(entries: &[Entry]) -> impl Iterator<Item = &ToolCall> {
    let last = entries.iter().rposition(|entry| matches!(entry, Entry::Assistant { .. }));
    let (calls, after): (&[ToolCall], &[Entry]) = match last.map(|at| (&entries[at], &entries[at + 1..])) {
        Some((Entry::Assistant { tool_calls, .. }, after)) => (tool_calls, after),
        _ => (&[], &[]),
    };
    calls.iter().filter(move |call| {
        !after.iter().any(|entry| matches!(entry, Entry::Tool { call_id, .. } if *call_id == call.id))
    })
}

fn generation(text: String, tool_calls: Vec<ToolCall>) -> Generation {
    let finish = if tool_calls.is_empty() { Finish::Stop } else { Finish::ToolCalls };
    let (usage, timing) = (Usage::default(), Timing::default());
    Generation { text, reasoning: None, tool_calls, finish, usage, timing }
}

/// The host, as seen by one turn.
pub struct MemoryHost {
    world: Rc<RefCell<World>>,
}

impl MemoryHost {
    /// Creates a host whose turn changes `world`.
    pub fn new(world: Rc<RefCell<World>>) -> Self {
        Self { world }
    }

    fn check_model(&self, model: Option<&str>) -> Result<(), InferenceError> {
        let known = self.world.borrow().model;
        match model.filter(|model| *model != known) {
            None => Ok(()),
            Some(other) => Err(InferenceError::ModelUnknown(format!("`{other}`; known models: {known}"))),
        }
    }
}

impl Host for MemoryHost {
    fn open(&self, name: &str, model: Option<&str>) -> Result<Rc<dyn HostConversation>, InferenceError> {
        self.check_model(model)?;
        if name.is_empty() {
            return Err(InferenceError::InvalidArgument("a conversation's name is empty".to_owned()));
        }
        self.world.borrow_mut().entries(name);
        Ok(Rc::new(MemoryConversation { world: self.world.clone(), name: name.to_owned() }))
    }

    fn complete<'a>(
        &'a self,
        model: Option<&'a str>,
        prompt: &'a str,
        options: GenerateOptions,
    ) -> Task<'a, Result<Generation, InferenceError>> {
        Box::pin(async move {
            self.check_model(model)?;
            self.world.borrow_mut().generate(vec![Entry::User(prompt.to_owned())], &options)
        })
    }

    fn models(&self) -> Vec<ModelInfo> {
        vec![ModelInfo { name: self.world.borrow().model.to_owned(), context_length: 8192, is_default: true }]
    }

    fn state_get(&self, key: &str) -> Option<Vec<u8>> {
        self.world.borrow().saved.state.get(key).cloned()
    }

    fn state_set(&self, key: &str, value: &[u8]) -> Result<(), StateError> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(StateError::InvalidKey(format!(
                "the key has {} bytes; 1 to {MAX_KEY_BYTES} are allowed",
                key.len()
            )));
        }
        if value.len() > MAX_VALUE_BYTES {
            let why = format!(
                "the value of {key:?} has {} bytes; at most {MAX_VALUE_BYTES} are allowed",
                value.len()
            );
            return Err(StateError::QuotaExceeded(why));
        }
        self.world.borrow_mut().saved.state.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn state_delete(&self, key: &str) -> bool {
        self.world.borrow_mut().saved.state.remove(key).is_some()
    }

    fn state_keys(&self, prefix: &str, after: Option<&str>, limit: u32) -> Vec<String> {
        let world = self.world.borrow();
        let keys = world.saved.state.keys().filter(|key| key.starts_with(prefix));
        keys.filter(|key| after.is_none_or(|after| key.as_str() > after))
            .take(limit as usize)
            .cloned()
            .collect()
    }

    fn state_compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<bool, StateError> {
        if self.state_get(key).as_deref() != expected {
            return Ok(false);
        }
        self.state_set(key, value).map(|()| true)
    }

    fn sleep(&self, ms: u32) -> Task<'_, ()> {
        let until_ms = self.world.borrow().timer.waited_ms + u64::from(ms);
        Box::pin(std::future::poll_fn(move |_| {
            let mut world = self.world.borrow_mut();
            if world.timer.waited_ms >= until_ms {
                return Poll::Ready(());
            }
            world.timer.next_ms = Some(world.timer.next_ms.map_or(until_ms, |next_ms| next_ms.min(until_ms)));
            Poll::Pending
        }))
    }

    fn tools(&self) -> Task<'_, Vec<HostToolInfo>> {
        let tools = self.world.borrow().host_tools.iter().map(|(tool, _)| tool.clone()).collect();
        Box::pin(async { tools })
    }

    fn approve<'a>(&'a self, call_id: &'a str) -> Task<'a, Result<(), String>> {
        let world = self.world.borrow();
        let mut calls = world.saved.conversations.values().flat_map(|entries| unanswered(entries));
        let name = calls.find(|call| call.id == call_id).map(|call| call.name.clone());
        let asks = world.tools.iter().any(|tool| Some(&tool.name) == name.as_ref() && tool.needs_approval);
        let decision = if asks { world.approval_decision.clone() } else { Ok(()) };
        Box::pin(async { decision })
    }

    fn call_tool<'a>(
        &'a self,
        name: &'a str,
        arguments: &'a Value,
        _timeout_ms: Option<u32>,
    ) -> Task<'a, Result<Value, HostToolError>> {
        Box::pin(async move {
            let found = self.world.borrow().host_tools.iter().find(|(tool, _)| tool.name == name).cloned();
            let Some((tool, function)) = found else {
                let why = format!("the test has no `{name}`; add it with Harness::host_tool");
                return Err(HostToolError::Denied(why));
            };
            validate(&tool.input_schema, arguments).map_err(HostToolError::InvalidArguments)?;
            let result = function(arguments.clone())?;
            match tool.output_schema.as_ref().map(|schema| validate(schema, &result)) {
                Some(Err(why)) => {
                    Err(HostToolError::Failed(format!("the result of `{name}` is invalid: {why}")))
                }
                _ => Ok(result),
            }
        })
    }

    fn secret(&self, name: &str) -> Result<String, HttpError> {
        Ok(format!("secret.{name}.test"))
    }

    fn fetch(&self, request: FetchRequest) -> Task<'_, Result<HttpResponse, HttpError>> {
        Box::pin(async move {
            let mut world = self.world.borrow_mut();
            let answer = world.web.take(&request);
            world.requests.push(request);
            answer.unwrap_or_else(|fault| {
                world.fault.get_or_insert(fault.clone());
                Err(HttpError::Failed(fault))
            })
        })
    }

    fn schedule_set(
        &self,
        name: &str,
        when: &When<'_>,
        options: ScheduleOptions,
    ) -> Result<(), ScheduleError> {
        let mut world = self.world.borrow_mut();
        let scheduled = schedule::scheduled(name, when, options, world.now_ms)?;
        world.saved.schedules.insert(name.to_owned(), scheduled);
        Ok(())
    }

    fn schedule_cancel(&self, name: &str) -> bool {
        self.world.borrow_mut().saved.schedules.remove(name).is_some()
    }

    fn schedule_list(&self) -> Vec<Scheduled> {
        self.world.borrow().saved.schedules.values().cloned().collect()
    }

    fn emit(&self, topic: &str, data: Option<Value>) -> Result<(), EmitError> {
        schedule::check_topic(topic)?;
        self.world.borrow_mut().saved.emitted.push(Emitted { topic: topic.to_owned(), data });
        Ok(())
    }

    /// Draws the next number of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    fn random(&self) -> u64 {
        let mut world = self.world.borrow_mut();
        world.random = world.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = world.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn log(&self, level: Level, message: &str) {
        self.world.borrow_mut().logs.push((level, message.to_owned()));
    }
}
