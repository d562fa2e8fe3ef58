//! A scripted model for tests.

use std::collections::VecDeque;

use serde::Serialize;
use serde_json::Value;

use crate::InferenceError;

/// The script of a model: one step per generation, in the order in which they are requested.
///
/// If the agent requests more generations than there are steps, the test panics with a message that says so.
#[derive(Debug, Clone, Default)]
pub struct ScriptedModel {
    pub(super) steps: VecDeque<Step>,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Text { reasoning: Option<String>, text: String },
    Calls(Vec<(String, Value)>),
    Fail(InferenceError),
}

impl ScriptedModel {
    /// Creates a script without steps.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an answer with this text.
    pub fn text(self, text: impl Into<String>) -> Self {
        self.step(Step::Text { reasoning: None, text: text.into() })
    }

    /// Adds an answer with this text that the model gives after this reasoning.
    pub fn reasoned(self, reasoning: impl Into<String>, text: impl Into<String>) -> Self {
        self.step(Step::Text { reasoning: Some(reasoning.into()), text: text.into() })
    }

    /// Adds an answer with this value as JSON, for `extract`.
    pub fn json<T: Serialize + ?Sized>(self, value: &T) -> Self {
        let json = serde_json::to_string(value).expect("a scripted value can be written as JSON");
        self.text(json)
    }

    /// Adds a call of one tool.
    pub fn call(self, tool: impl Into<String>, arguments: Value) -> Self {
        self.step(Step::Calls(vec![(tool.into(), arguments)]))
    }

    /// Adds calls of several tools in one round.
    pub fn calls<N: Into<String>>(self, calls: impl IntoIterator<Item = (N, Value)>) -> Self {
        self.step(Step::Calls(calls.into_iter().map(|(tool, arguments)| (tool.into(), arguments)).collect()))
    }

    /// Adds a generation that fails.
    pub fn fail(self, error: InferenceError) -> Self {
        self.step(Step::Fail(error))
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push_back(step);
        self
    }
}
