//! Chat templates in the Hugging Face dialect: Jinja with Python's string and dict methods.
//!
//! Invariant: a template is untrusted code. It has no access to files or to any clock but `strftime_now`, and its
//! number of steps and its memory are limited. An error in it names the line.

mod clock;
mod jinja;
mod json;

pub use clock::civil_date;

use crate::error::ModelError;
use jinja::{Fault, Meter, Template, Value};

/// Maximum number of steps of a rendering. One message of a usual template takes a few dozen.
const MAX_STEPS: u64 = 20_000_000;
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Limit on the bytes of all texts and lists that a rendering creates, including those that it drops. A template may
/// create this many bytes from nothing, plus [`MADE_PER_BYTE`] for each byte of its input. Usual templates create
/// fewer than ten per byte.
const MAX_MADE_BYTES: u64 = 64 << 20;
const MADE_PER_BYTE: u64 = 32;

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Template,
    source: String,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the values of `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, ModelError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(failed(format!("it has {} bytes; the limit is {MAX_SOURCE_BYTES}", source.len())));
        }
        let template =
            Template::parse(source).map_err(|fault| failed(format!("it cannot be compiled: {fault}")))?;
        Ok(ChatTemplate { template, source: source.to_owned(), bos, eos })
    }

    /// Returns the ChatML template, for models without a template.
    pub fn chatml_default() -> Self {
        Self::new(CHATML, None, None).expect("the built-in template must compile")
    }

    /// Renders the text of a conversation. `messages` are objects with `role`, `content` and any other fields that
    /// the template reads.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        self.render_with(messages, tools, add_generation_prompt, &[])
    }

    /// Renders the text of a conversation with further variables, which the template finds undefined otherwise.
    pub fn render_with(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
        further: &[(&str, serde_json::Value)],
    ) -> Result<String, ModelError> {
        let render = || {
            let given = Meter::unbounded();
            let messages =
                messages.iter().map(|message| Value::of_json(message, &given)).collect::<Result<_, _>>()?;
            let text = |text: &Option<String>| Value::text(text.as_deref().unwrap_or_default(), &given);
            let mut variables = vec![
                ("messages", Value::list(messages, &given)?),
                ("tools", tools.map_or(Ok(Value::None), |tools| Value::of_json(tools, &given))?),
                ("add_generation_prompt", Value::Boolean(add_generation_prompt)),
                ("bos_token", text(&self.bos)?),
                ("eos_token", text(&self.eos)?),
            ];
            for (name, value) in further {
                variables.push((name, Value::of_json(value, &given)?));
            }
            let max_bytes = MAX_MADE_BYTES.saturating_add(given.made().saturating_mul(MADE_PER_BYTE));
            self.template.render(variables, &Meter::new(MAX_STEPS, max_bytes))
        };
        render().map_err(|fault: Fault| failed(fault.to_string()))
    }

    /// Returns whether the template itself presents tools to the model.
    pub fn knows_tools(&self) -> bool {
        self.source.contains("tools")
    }

    /// Returns the template's source, which identifies it.
    pub fn source(&self) -> &str {
        &self.source
    }
}

/// Formats JSON on one line the way templates do, and therefore the way models have mostly seen it: with a space
/// after `,` and `:`.
pub fn spelled_json(value: &serde_json::Value) -> String {
    json::Layout::new(None).dump(value)
}

fn failed(problem: String) -> ModelError {
    ModelError::Template { problem }
}

#[cfg(test)]
mod tests;
