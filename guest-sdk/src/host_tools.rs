//! Tools that the host calls: tools of other agents, of MCP servers, and of the host itself.
//!
//! Each tool has to be granted under `[grants] tools` in `agent.toml`. A turn that is resumed after a restart
//! gets the results that it got before, and no call is made twice.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::ToolError;
use crate::host::Host;

/// Access to the tools that the host can call for the agent. See
/// [`Context::host_tools`](crate::Context::host_tools).
#[derive(Clone, Copy)]
pub struct HostTools<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) timeout_ms: Option<u32>,
}

/// A tool that the agent was granted.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTool {
    /// The name: `agent:NAME/TOOL`, `mcp:SERVER/TOOL` or `http/fetch`.
    pub name: String,
    /// The name that the model uses; `None` if the tool's schema cannot be enforced on a model.
    pub model_name: Option<String>,
    /// The description that the tool's provider wrote.
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if the tool has one.
    pub output_schema: Option<Value>,
    /// Effects of the tool.
    pub hints: ToolHints,
}

/// Effects of a tool, as declared by its author.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ToolHints {
    /// The tool changes nothing.
    pub read_only: bool,
    /// The tool may destroy what it changes.
    pub destructive: bool,
    /// Repeating a call with the same arguments has no further effect.
    pub idempotent: bool,
    /// The tool reaches beyond the agent and its host.
    pub open_world: bool,
}

/// Why a call returned no result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostToolError {
    /// The tool does not exist.
    Unknown(String),
    /// The tool is not granted. The text names the line that would allow it.
    Denied(String),
    /// The arguments do not validate. The text names the position of the error.
    InvalidArguments(String),
    /// The tool failed. The text is the tool's own error.
    Failed(String),
    /// The tool returned no result in time. It is unknown whether it did its work.
    TimedOut {
        /// The time that the host waited, in milliseconds.
        after_ms: u32,
    },
    /// The tool cannot be reached at present. Nothing was done.
    Unavailable(String),
    /// The host was restarted during the call. It is unknown whether the tool did its work.
    Interrupted(String),
    /// A person rejected the call, or nobody decided in time.
    Refused(String),
    /// The turn ran out of time, or its caller disconnected.
    Cancelled,
    /// The result or an argument does not fit the Rust type that the agent expects.
    Json(String),
}

impl HostTools<'_> {
    /// Returns the tools that the agent may call now.
    pub async fn list(&self) -> Vec<HostTool> {
        self.host.tools().await
    }

    /// Sets the timeout of a call.
    pub fn timeout_ms(mut self, timeout_ms: u32) -> Self {
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// Calls a tool with its arguments, which must be an object.
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
        serde_json::from_value(result).map_err(|error| {
            HostToolError::Json(format!("the result of {name} does not fit its type: {error}"))
        })
    }
}

impl HostToolError {
    /// Whether the same call may succeed later without doing anything twice.
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
                write!(f, "no result within {after_ms} ms; the tool may still have done its work")
            }
            Self::Unavailable(why) => write!(f, "not available at present: {why}"),
            Self::Interrupted(why) => write!(f, "interrupted: {why}"),
            Self::Cancelled => f.write_str("the turn was cancelled or ran out of time"),
        }
    }
}

impl std::error::Error for HostToolError {}

impl From<HostToolError> for ToolError {
    fn from(error: HostToolError) -> Self {
        ToolError::new(error.to_string())
    }
}

/// Host tools that one run of a conversation offers to its model.
#[derive(Default)]
pub(crate) struct OfferedTools {
    tools: Vec<(String, String)>,
}

impl OfferedTools {
    /// Finds the tools with these names. `agent:NAME/*` and `mcp:SERVER/*` match all tools of one owner.
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
                    Some(_) => {
                        "its input schema cannot be enforced on a model; call it from the agent's own code"
                    }
                    None => {
                        "it does not exist, or it is missing from `tools` under [grants] in agent.toml or skep.toml"
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

    /// Returns the host's name of a tool, given the model's name.
    pub(crate) fn name(&self, model_name: &str) -> Option<&str> {
        self.tools.iter().find(|(known, _)| known == model_name).map(|(_, name)| name.as_str())
    }
}
