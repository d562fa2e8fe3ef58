//! Chat templates in the dialect that Hugging Face's use: Jinja with Python's string and dict methods.
//!
//! Invariant: a template is code from a stranger. It gets no file, no clock but `strftime_now`, a bounded number of
//! steps and a bounded output; what it gets wrong is an error that quotes it.

mod clock;
mod json;

pub use clock::civil_date;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};

use crate::error::ModelError;

/// Instructions of a rendering; one message of a usual template takes a few dozen.
const MAX_STEPS: u64 = 20_000_000;
const MAX_SOURCE_BYTES: usize = 1 << 20;
const MAX_OUTPUT_BYTES: usize = 256 << 20;
const NAME: &str = "chat_template";

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
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
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the delimiters are Jinja's own"));
        environment.set_fuel(Some(MAX_STEPS));
        // Errors name the line; without this they would also quote the conversation.
        environment.set_debug(false);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", clock::strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_test("iterable", is_iterable);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| failed(format!("it cannot be compiled: {error}")))?;
        Ok(ChatTemplate { environment, source: source.to_owned(), bos, eos })
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
        let template = self.environment.get_template(NAME).expect("the constructor added it");
        let variables = context! {
            messages => Value::from(Serde(messages)),
            tools => tools.map(|tools| Value::from(Serde(tools))),
            add_generation_prompt,
            bos_token => self.bos.as_deref().unwrap_or(""),
            eos_token => self.eos.as_deref().unwrap_or(""),
        };
        let mut output = Bounded { bytes: Vec::new() };
        template.render_captured_to(variables, &mut output).map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => failed(format!("it did not end within {MAX_STEPS} steps")),
            ErrorKind::WriteFailure => failed(format!("its text is longer than {MAX_OUTPUT_BYTES} bytes")),
            _ => failed(error.to_string()),
        })?;
        String::from_utf8(output.bytes).map_err(|_| failed("its text is not UTF-8".to_owned()))
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

/// A text with a bound.
struct Bounded {
    bytes: Vec<u8>,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// As in Python, where `none` is not: templates ask it before they count.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii_only = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    if options.get::<Option<bool>>("sort_keys")? == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson does not support sort_keys"));
    }
    options.assert_all_used()?;
    let mut layout = json::Layout::new(indent.map(|width| width.min(16)));
    if let Some(separators) = separators {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson takes two separators"))?;
        layout = layout.with_separators(item, key);
    }
    let value = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let text = layout.dump(&value);
    Ok(Value::from_safe_string(if ascii_only { json::ascii(&text) } else { text }))
}

/// `{% generation %}` marks what to train on; it becomes a block that is always taken.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let inner = &rest[begin + 2..begin + length];
        let name = inner.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c));
        text.push_str(&rest[..begin]);
        match name {
            "generation" => text.push_str(&format!("{{%{}%}}", inner.replace(name, "if true"))),
            "endgeneration" => text.push_str(&format!("{{%{}%}}", inner.replace(name, "endif"))),
            _ => text.push_str(&rest[begin..begin + length + 2]),
        }
        rest = &rest[begin + length + 2..];
    }
    text + rest
}

fn failed(problem: String) -> ModelError {
    ModelError::Template { problem }
}

#[cfg(test)]
mod tests;
