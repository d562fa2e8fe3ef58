//! The options of an upstream, as plain data.

use std::{fmt, sync::Arc, time::Duration};

use reqwest::Url;

use crate::key::KeySource;

/// Maximum length of the name of an upstream, a model or a route.
const MAX_NAME_BYTES: usize = 128;

/// A server that computes models.
#[derive(Clone)]
pub struct UpstreamOptions {
    /// The first part of its models' names: `NAME/model`.
    pub name: String,
    pub kind: UpstreamKind,
    /// The address that the paths of the wire format are appended to, such as `https://api.openai.com/v1`.
    pub url: String,
    /// The key that is sent with every request. A server on the same machine often needs none.
    pub key: Option<Arc<dyn KeySource>>,
    pub models: Vec<UpstreamModelOptions>,
    pub limits: LimitOptions,
    pub timeouts: Timeouts,
    pub retries: RetryOptions,
    pub breaker: BreakerOptions,
    pub bounds: AnswerBounds,
}

/// The wire format of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamKind {
    /// `/chat/completions` of OpenAI, which most servers have.
    OpenAi,
    /// `/v1/messages` of Anthropic.
    Anthropic,
    /// `/ai/run/MODEL` of Cloudflare Workers AI.
    WorkersAi,
}

impl UpstreamKind {
    /// Returns the kind's name, as configuration, metrics and traces have it.
    pub fn as_str(self) -> &'static str {
        match self {
            UpstreamKind::OpenAi => "openai",
            UpstreamKind::Anthropic => "anthropic",
            UpstreamKind::WorkersAi => "workers-ai",
        }
    }
}

/// One model of an upstream.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamModelOptions {
    /// The last part of the name that callers use.
    pub name: String,
    /// The name that the server knows; `name` by default.
    pub remote_name: Option<String>,
    /// Number of tokens that prompt and answer may have together.
    pub context_length: Option<usize>,
    /// Maximum number of tokens of an answer.
    pub max_output: Option<usize>,
    pub capabilities: Capabilities,
    pub reasoning_control: ReasoningControl,
}

impl UpstreamModelOptions {
    /// Creates options for a model that the server knows by the same name, without limits of its own.
    pub fn new(name: impl Into<String>) -> Self {
        UpstreamModelOptions {
            name: name.into(),
            remote_name: None,
            context_length: None,
            max_output: None,
            capabilities: Capabilities::default(),
            reasoning_control: ReasoningControl::default(),
        }
    }

    /// Returns the name that the server knows.
    pub fn remote_name(&self) -> &str {
        self.remote_name.as_deref().unwrap_or(&self.name)
    }
}

/// The abilities of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    pub tools: bool,
    pub structured: StructuredOutput,
    /// Whether the model gets its earlier reasoning again, as some need it between the calls of one turn.
    pub reasoning: bool,
    /// Whether the model sees images.
    pub images: bool,
}

/// The server's means of structured output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StructuredOutput {
    /// `response_format` with a JSON Schema. Anthropic has none, so there it means a tool.
    JsonSchema,
    /// A tool that the model has to call, whose arguments are the answer.
    Tool,
    /// The server has no such means, and requests with a schema are refused.
    None,
}

impl Default for Capabilities {
    fn default() -> Self {
        let structured = StructuredOutput::JsonSchema;
        Capabilities { tools: true, structured, reasoning: false, images: false }
    }
}

/// The fields in which a server takes how much its model reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReasoningControl {
    /// None: the reasoning that a request asks for is ignored, with a warning.
    #[default]
    None,
    /// An effort: `reasoning_effort` of OpenAI, `output_config.effort` of Anthropic.
    Effort,
    /// Anthropic's `thinking` with a number of tokens.
    Budget,
    /// A variable of the chat template, `enable_thinking`, as vLLM, SGLang and Skep take it.
    Template,
}

/// Bounds on what is sent to an upstream, over all its models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitOptions {
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers. They are estimated before a request and settled after it.
    pub tokens_per_minute: Option<u32>,
    pub max_in_flight: usize,
    /// Maximum time that a request waits for the limits.
    pub max_wait: Duration,
}

impl Default for LimitOptions {
    fn default() -> Self {
        LimitOptions {
            requests_per_minute: None,
            tokens_per_minute: None,
            max_in_flight: 256,
            max_wait: Duration::from_secs(30),
        }
    }
}

/// Maximum times of the parts of a request. Exceeding one fails the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Time of establishing a connection.
    pub connect: Duration,
    /// Time from sending a request to the first part of its answer.
    pub first_token: Duration,
    /// Time between two parts of an answer. Comments that only keep the connection open are not parts.
    pub idle: Duration,
    /// Time of a request that has no deadline of its own, retries included.
    pub total: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(10),
            first_token: Duration::from_secs(60),
            idle: Duration::from_secs(60),
            total: Duration::from_secs(600),
        }
    }
}

/// How often and when a failed request is sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryOptions {
    /// Maximum number of attempts for a request, all before any part of an answer was sent.
    pub attempts: u32,
    /// Mean wait before the second attempt; each further wait is twice as long.
    pub first_wait: Duration,
    /// Maximum wait before an attempt. A server that asks for a longer one is given up.
    pub max_wait: Duration,
    /// Number of retries for an answer that does not match its schema.
    pub form_attempts: u32,
}

impl Default for RetryOptions {
    fn default() -> Self {
        RetryOptions {
            attempts: 3,
            first_wait: Duration::from_millis(250),
            max_wait: Duration::from_secs(10),
            form_attempts: 2,
        }
    }
}

/// When a circuit breaker stops requests to an upstream, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerOptions {
    /// Number of failures in a row after which nothing is sent for a while.
    pub failures: u32,
    /// Time for which nothing is sent, before a single trial.
    pub cool_down: Duration,
    /// Each failed trial doubles the cool-down, up to this.
    pub max_cool_down: Duration,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        BreakerOptions {
            failures: 5,
            cool_down: Duration::from_secs(5),
            max_cool_down: Duration::from_secs(120),
        }
    }
}

/// Bounds on sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerBounds {
    pub request: usize,
    /// One event of a stream, and one line of it.
    pub event: usize,
    /// Everything that a server sends as one answer.
    pub answer: usize,
}

impl Default for AnswerBounds {
    fn default() -> Self {
        AnswerBounds { request: 32 << 20, event: 4 << 20, answer: 64 << 20 }
    }
}

/// An option that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{option}`: {message}")]
pub struct OptionsError {
    pub option: &'static str,
    pub message: String,
}

impl OptionsError {
    pub(crate) fn new(option: &'static str, message: impl Into<String>) -> Self {
        OptionsError { option, message: message.into() }
    }
}

impl UpstreamOptions {
    /// Returns the options of an upstream without models.
    pub fn new(name: impl Into<String>, kind: UpstreamKind, url: impl Into<String>) -> Self {
        UpstreamOptions {
            name: name.into(),
            kind,
            url: url.into(),
            key: None,
            models: Vec::new(),
            limits: LimitOptions::default(),
            timeouts: Timeouts::default(),
            retries: RetryOptions::default(),
            breaker: BreakerOptions::default(),
            bounds: AnswerBounds::default(),
        }
    }

    /// Checks everything that can be checked without the server, and returns the address.
    pub fn check(&self) -> Result<Url, OptionsError> {
        check_name("name", &self.name)?;
        if self.name.contains('/') {
            return Err(OptionsError::new("name", "an upstream's name must not contain `/`"));
        }
        let url = &self.url;
        let parsed: Url =
            url.parse().map_err(|_| OptionsError::new("url", format!("{url:?} is not a valid address")))?;
        if !matches!(parsed.scheme(), "http" | "https") || !parsed.has_host() {
            return Err(OptionsError::new(
                "url",
                format!("{url:?} begins with neither https:// nor http://"),
            ));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(OptionsError::new(
                "url",
                "an address must not contain a user or a password; use `key`",
            ));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(OptionsError::new("url", "an address must have neither a query nor a fragment"));
        }
        if self.models.is_empty() {
            return Err(OptionsError::new("models", "an upstream must have at least one model"));
        }
        for (index, model) in self.models.iter().enumerate() {
            check_name("models", &model.name)?;
            check_name("models", model.remote_name())?;
            self.check_reasoning(model)?;
            if self.models[..index].iter().any(|other| other.name == model.name) {
                return Err(OptionsError::new("models", format!("two models are called {:?}", model.name)));
            }
        }
        self.check_numbers()?;
        Ok(parsed)
    }

    fn check_reasoning(&self, model: &UpstreamModelOptions) -> Result<(), OptionsError> {
        use ReasoningControl::{Budget, Effort, None, Template};
        let possible: &[ReasoningControl] = match self.kind {
            UpstreamKind::OpenAi => &[None, Effort, Template],
            UpstreamKind::Anthropic => &[None, Effort, Budget],
            UpstreamKind::WorkersAi => &[None],
        };
        if possible.contains(&model.reasoning_control) {
            return Ok(());
        }
        let kind = self.kind.as_str();
        let message =
            format!("upstreams of the kind {kind} do not take the reasoning of {:?} in this way", model.name);
        Err(OptionsError::new("reasoning_control", message))
    }

    fn check_numbers(&self) -> Result<(), OptionsError> {
        let limits = &self.limits;
        for (option, value) in [
            ("requests_per_minute", limits.requests_per_minute.map_or(1, |limit| limit as usize)),
            ("tokens_per_minute", limits.tokens_per_minute.map_or(1, |limit| limit as usize)),
            ("max_in_flight", limits.max_in_flight),
            ("attempts", self.retries.attempts as usize),
            ("failures", self.breaker.failures as usize),
        ] {
            if value == 0 {
                return Err(OptionsError::new(option, "must be at least 1"));
            }
        }
        if limits.max_in_flight > tokio::sync::Semaphore::MAX_PERMITS {
            return Err(OptionsError::new("max_in_flight", "is too large"));
        }
        Ok(())
    }
}

/// Checks the name of an upstream, a model or a route.
pub(crate) fn check_name(option: &'static str, name: &str) -> Result<(), OptionsError> {
    let allowed = |c: char| c.is_ascii_graphic();
    if (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(());
    }
    let message = format!("{name:?} is not a valid name; use 1 to {MAX_NAME_BYTES} visible ASCII characters");
    Err(OptionsError::new(option, message))
}

/// Leaves out the key.
impl fmt::Debug for UpstreamOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamOptions")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("url", &self.url)
            .field("has_key", &self.key.is_some())
            .field("models", &self.models)
            .field("limits", &self.limits)
            .field("timeouts", &self.timeouts)
            .field("retries", &self.retries)
            .field("breaker", &self.breaker)
            .field("bounds", &self.bounds)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_cannot_work_are_refused_with_their_reason() {
        let good = || UpstreamOptions {
            models: vec![UpstreamModelOptions::new("m")],
            ..UpstreamOptions::new("a", UpstreamKind::OpenAi, "https://a.example/v1")
        };
        good().check().expect("valid");
        type Case = (fn(&mut UpstreamOptions), &'static str);
        let cases: [Case; 10] = [
            (|o| o.name.clear(), "`name`: \"\" is not a valid name"),
            (|o| o.name = "a/b".into(), "must not contain `/`"),
            (|o| o.url = "nowhere".into(), "is not a valid address"),
            (|o| o.url = "file:///etc".into(), "neither https:// nor http://"),
            (|o| o.url = "https://me:word@a".into(), "use `key`"),
            (|o| o.url = "https://a/?key=1".into(), "neither a query"),
            (|o| o.models.clear(), "at least one model"),
            (|o| o.models.push(UpstreamModelOptions::new("m")), "two models are called \"m\""),
            (
                |o| o.models[0].reasoning_control = ReasoningControl::Budget,
                "do not take the reasoning of \"m\"",
            ),
            (|o| o.limits.max_in_flight = 0, "`max_in_flight`: must be at least 1"),
        ];
        for (spoil, why) in cases {
            let mut options = good();
            spoil(&mut options);
            let error = options.check().expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
