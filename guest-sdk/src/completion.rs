//! Continuation of a text, without a conversation or a chat template.

use crate::context::Context;
use crate::error::InferenceError;
use crate::generation::{GenerateOptions, Generation};
use crate::options::option_methods;

/// A text to continue. See [`Context::complete`].
#[must_use = "a completion does nothing until generate is called"]
#[derive(Clone)]
pub struct Completion<'a> {
    cx: &'a Context,
    prompt: String,
    model: Option<String>,
    options: GenerateOptions,
}

impl Context {
    /// Continues a text, without a conversation or a chat template.
    pub fn complete(&self, prompt: impl Into<String>) -> Completion<'_> {
        Completion::new(self, prompt.into(), self.model())
    }
}

impl<'a> Completion<'a> {
    fn new(cx: &'a Context, prompt: String, model: Option<&str>) -> Self {
        Self { cx, prompt, model: model.map(str::to_owned), options: GenerateOptions::default() }
    }

    /// Sets the model. If not set, the model of `#[agent(model = …)]` or the agent's
    /// own model is used.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.model = Some(name.into());
        self
    }

    option_methods!();

    /// Generates the continuation.
    pub async fn generate(self) -> Result<Generation, InferenceError> {
        self.cx.host().complete(self.model.as_deref(), &self.prompt, self.options).await
    }
}
