//! A deployed version of an agent, without its code: its manifest, its tools and its limits.

use crate::{
    Json, Limits, Manifest, RuntimeError,
    summary::{AgentDetail, AgentSummary},
    text::excerpt,
    tool::{MAX_ARGUMENT_BYTES, Tool, Tools},
};
use serde_json::Value;
use std::sync::Arc;

/// A deployed version of an agent. A turn keeps the version with which it started.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) version: u64,
    pub(crate) deployed_at_ms: u64,
    pub(crate) manifest: Manifest,
    pub(crate) description: String,
    pub(crate) digest: String,
    pub(crate) model: String,
    pub(crate) limits: Limits,
    pub(crate) tools: Tools,
    pub(crate) handlers: Handlers,
}

/// The optional handlers that an agent's component exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handlers {
    pub(crate) alarms: bool,
    pub(crate) events: bool,
    /// Whether other agents and clients may call the agent's tools.
    pub(crate) tool_calls: bool,
}

impl Agent {
    pub(crate) fn summary(&self) -> AgentSummary {
        let routes = self.manifest.trigger.http.iter();
        AgentSummary {
            name: self.manifest.name.to_string(),
            version: self.version,
            description: self.description.clone(),
            digest: self.digest.clone(),
            model: self.model.clone(),
            deployed_at_ms: self.deployed_at_ms,
            tools: self.tools.names(),
            routes: routes.map(|trigger| format!("{} {}", trigger.method, trigger.route)).collect(),
        }
    }

    /// Returns a tool that others may call.
    pub(crate) fn callable(&self, tool: &str) -> Result<&Arc<Tool>, RuntimeError> {
        let invalid = |message| RuntimeError::InvalidMessage { message };
        let agent = &self.manifest.name;
        if !self.handlers.tool_calls {
            return Err(invalid(format!(
                "agent {agent} does not let others call its tools: its component does not export \
                 skep:agent/tool-handler@0.1.1"
            )));
        }
        self.tools.get(tool).ok_or_else(|| {
            let tool = excerpt(tool);
            let known = match self.tools.names() {
                none if none.is_empty() => "it has no tools".to_owned(),
                names => format!("it has: {}", names.join(", ")),
            };
            invalid(format!("agent {agent} has no tool {tool:?}; {known}"))
        })
    }

    /// Checks that a tool can be called with these arguments.
    pub(crate) fn check_call(&self, tool: &str, arguments: Option<&Json>) -> Result<(), RuntimeError> {
        let tool = self.callable(tool)?;
        let bytes = arguments.map_or(0, |arguments| arguments.get().len());
        if bytes > MAX_ARGUMENT_BYTES {
            let message =
                format!("the arguments have {bytes} bytes; at most {MAX_ARGUMENT_BYTES} are allowed");
            return Err(RuntimeError::InvalidMessage { message });
        }
        let arguments = arguments.map_or_else(|| Value::Object(Default::default()), Json::value);
        let checked = tool.check_arguments(&arguments);
        checked.map_err(|message| RuntimeError::InvalidMessage { message })
    }

    /// Checks the result of a tool against the tool's output schema.
    pub(crate) fn check_result(&self, tool: &str, result: Option<&Json>) -> Result<(), RuntimeError> {
        let checked = self.tools.get(tool).map(|tool| tool.check_reply(result));
        checked.unwrap_or(Ok(())).map_err(|message| RuntimeError::AgentFailed { message })
    }

    pub(crate) fn detail(&self) -> AgentDetail {
        AgentDetail {
            summary: self.summary(),
            manifest_toml: self.manifest.to_toml(),
            tools: self.tools.definitions(),
            takes_tool_calls: self.handlers.tool_calls,
            mcp: self.manifest.mcp.clone(),
            limits: self.limits,
        }
    }
}
