//! Chat templates in the dialect that Hugging Face's use: Jinja with Python's string and dict methods.
//!
//! Invariant: a template is code from a stranger. It gets no file, no clock but `strftime_now`, a bounded number of
//! steps and a bounded memory; what it gets wrong is an error that names the line.

mod clock;
mod jinja;
mod json;

pub use clock::civil_date;

use crate::error::ModelError;
use jinja::{Fault, Meter, Template, Value};

/// Steps of a rendering; one message of a usual template takes a few dozen.
const MAX_STEPS: u64 = 20_000_000;
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Of all texts and lists that a rendering makes, also of those that it drops. A template may make so much of nothing,
/// and for each byte that it is given so many more: usual ones make less than ten.
const MAX_MADE_BYTES: u64 = 64 << 20;
const MADE_PER_BYTE: u64 = 32;

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Template,
    source: String,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the texts of `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, ModelError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(failed(format!(
                "it has {} bytes; at most {MAX_SOURCE_BYTES} are supported",
                source.len()
            )));
        }
        let template =
            Template::parse(source).map_err(|fault| failed(format!("it cannot be compiled: {fault}")))?;
        Ok(ChatTemplate { template, source: source.to_owned(), bos, eos })
    }

    /// ChatML, for models that bring no template.
    pub fn chatml_default() -> Self {
        Self::new(CHATML, None, None).expect("the built-in template compiles")
    }

    /// The text of a conversation. `messages` are objects with `role`, `content` and whatever else the template reads.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        let render = || {
            let given = Meter::unbounded();
            let messages =
                messages.iter().map(|message| Value::of_json(message, &given)).collect::<Result<_, _>>()?;
            let text = |text: &Option<String>| Value::text(text.as_deref().unwrap_or_default(), &given);
            let variables = vec![
                ("messages", Value::list(messages, &given)?),
                ("tools", tools.map_or(Ok(Value::None), |tools| Value::of_json(tools, &given))?),
                ("add_generation_prompt", Value::Boolean(add_generation_prompt)),
                ("bos_token", text(&self.bos)?),
                ("eos_token", text(&self.eos)?),
            ];
            let max_bytes = MAX_MADE_BYTES.saturating_add(given.made().saturating_mul(MADE_PER_BYTE));
            self.template.render(variables, &Meter::new(MAX_STEPS, max_bytes))
        };
        render().map_err(|fault: Fault| failed(fault.to_string()))
    }

    /// Whether the template shows tools to the model by itself.
    pub fn knows_tools(&self) -> bool {
        self.source.contains("tools")
    }

    pub fn source(&self) -> &str {
        &self.source
    }
}

/// JSON on one line as templates spell it, and so as models have mostly seen it: with a space after `,` and `:`.
pub fn spelled_json(value: &serde_json::Value) -> String {
    json::Layout::new(None).dump(value)
}

fn failed(problem: String) -> ModelError {
    ModelError::Template { problem }
}

#[cfg(test)]
mod tests;
