//! Tools that the host calls: those of other agents, of MCP servers, and its own.
//!
//! Each has to be granted under `[grants] tools` in `agent.toml`. A turn that goes on after a restart gets the results that
//! it got before, and no call is made twice.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::ToolError;
use crate::host::Host;

/// What the host can call for the agent. See [`Context::host_tools`](crate::Context::host_tools).
#[derive(Clone, Copy)]
pub struct HostTools<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) timeout_ms: Option<u32>,
}

/// A tool that the agent was granted.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTool {
    /// `agent:NAME/TOOL`, `mcp:SERVER/TOOL` or `http/fetch`.
    pub name: String,
    /// Its name for the model; `None` if no model can be held to its schema.
    pub model_name: Option<String>,
    /// What it does, in the words of whoever made it.
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if it has one.
    pub output_schema: Option<Value>,
    /// What it does to the world.
    pub hints: ToolHints,
}

/// What a tool does to the world, as its author says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ToolHints {
    /// It changes nothing.
    pub read_only: bool,
    /// What it changes may be lost by that.
    pub destructive: bool,
    /// Called again with the same arguments it changes nothing more.
    pub idempotent: bool,
    /// It reaches beyond what the agent and its host keep.
    pub open_world: bool,
}

/// Why a call gave no result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostToolError {
    /// There is no such tool.
    Unknown(String),
    /// Not granted. The text names the line that would allow it.
    Denied(String),
    /// The arguments do not validate. The text names the place.
    InvalidArguments(String),
    /// The tool said what went wrong.
    Failed(String),
    /// There was no result in time. Whether the tool did its work is not known.
    TimedOut {
        /// How long the host waited.
        after_ms: u32,
    },
    /// It cannot be reached now; nothing was done.
    Unavailable(String),
    /// The host was started again during the call. Whether the tool did its work is not known.
    Interrupted(String),
    /// A person said no, or nobody decided in time.
    Refused(String),
    /// The turn ran out of its time, or its caller went away.
    Cancelled,
    /// The result, or an argument, is not the Rust type that the agent expects.
    Json(String),
}

impl HostTools<'_> {
    /// What may be called now.
    pub async fn list(&self) -> Vec<HostTool> {
        self.host.tools().await
    }

    /// Bounds how long a call may take.
    pub fn timeout_ms(mut self, timeout_ms: u32) -> Self {
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// Calls a tool with its arguments, an object.
    ///
    /// ```
    /// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
    /// # use skep_sdk::serde_json::{Value, json};
    /// /// Knows where parcels are.
    /// #[agent]
    /// async fn parcels(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     let order: Value = cx.host_tools().call("agent:orders/find_order", &json!({"id": 7})).await?;
    ///     Ok(Reply::text(order["parcel"].as_str().unwrap_or("nowhere")))
    /// }
    /// ```
    pub async fn call<T: DeserializeOwned>(
        &self,
        name: &str,
        arguments: &impl Serialize,
    ) -> Result<T, HostToolError> {
        let arguments =
            serde_json::to_value(arguments).map_err(|error| HostToolError::Json(error.to_string()))?;
        let result = self.host.call_tool(name, &arguments, self.timeout_ms).await?;
        serde_json::from_value(result)
            .map_err(|error| HostToolError::Json(format!("the result of {name} is another type: {error}")))
    }
}

impl HostToolError {
    /// Whether the same call may succeed later and does nothing twice.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

impl fmt::Display for HostToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why)
            | Self::Denied(why)
            | Self::Failed(why)
            | Self::Refused(why)
            | Self::Json(why) => f.write_str(why),
            Self::InvalidArguments(why) => write!(f, "the arguments are not valid: {why}"),
            Self::TimedOut { after_ms } => {
                write!(f, "no result within {after_ms} ms; it may still have been done")
            }
            Self::Unavailable(why) => write!(f, "not available now: {why}"),
            Self::Interrupted(why) => write!(f, "interrupted: {why}"),
            Self::Cancelled => f.write_str("the turn was cancelled or ran out of its time"),
        }
    }
}

impl std::error::Error for HostToolError {}

impl From<HostToolError> for ToolError {
    fn from(error: HostToolError) -> Self {
        ToolError::new(error.to_string())
    }
}

/// Tools of the host that one run of a conversation offers to its model.
#[derive(Default)]
pub(crate) struct OfferedTools {
    tools: Vec<(String, String)>,
}

impl OfferedTools {
    /// Finds the tools of these names; `agent:NAME/*` and `mcp:SERVER/*` stand for all of one owner.
    pub(crate) async fn find(host: &dyn Host, wanted: &[String]) -> Result<Self, HostToolError> {
        let mut offered = Self::default();
        if wanted.is_empty() {
            return Ok(offered);
        }
        let listed = host.tools().await;
        for name in wanted {
            let owner = name.strip_suffix('*').filter(|owner| owner.ends_with('/'));
            let found = listed.iter().filter(|tool| match owner {
                Some(owner) => tool.name.starts_with(owner),
                None => tool.name == *name,
            });
            let found: Vec<_> =
                found.filter_map(|tool| Some((tool.model_name.clone()?, tool.name.clone()))).collect();
            if found.is_empty() {
                let why = match listed.iter().find(|tool| tool.name == *name) {
                    Some(_) => "no model can be held to its input schema; call it from the agent's own code",
                    None => {
                        "the host has none, or it is not in `tools` under [grants] in agent.toml and skep.toml"
                    }
                };
                return Err(HostToolError::Unknown(format!(
                    "no tool `{name}` can be offered to the model: {why}"
                )));
            }
            offered.tools.extend(found);
        }
        Ok(offered)
    }

    pub(crate) fn model_names(&self) -> impl Iterator<Item = &String> {
        self.tools.iter().map(|(model_name, _)| model_name)
    }

    /// The host's name of a tool by the model's.
    pub(crate) fn name(&self, model_name: &str) -> Option<&str> {
        self.tools.iter().find(|(known, _)| known == model_name).map(|(_, name)| name.as_str())
    }
}
