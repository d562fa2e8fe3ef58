//! Tools that the host calls: tools of other agents, of MCP servers, and of the host itself.
//!
//! Each tool has to be granted under `[grants] tools` in `agent.toml`. A turn that is resumed after a restart
//! gets the results that it got before. A call that the restart cut off is repeated only if the tool is read-only or
//! idempotent, or if it continues as the turn of another agent.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::HostToolError;
use crate::host::{Host, HostToolInfo};

/// Access to the tools that the host can call for the agent. See
/// [`Context::host_tools`](crate::Context::host_tools).
#[derive(Clone, Copy)]
pub struct HostTools<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) timeout_ms: Option<u32>,
}

impl HostTools<'_> {
    /// Returns the tools that the agent may call now.
    pub async fn list(&self) -> Vec<HostToolInfo> {
        self.host.tools().await
    }

    /// Sets the timeout of a call.
    pub fn timeout_ms(mut self, timeout_ms: u32) -> Self {
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// Calls a tool whose name is known only at run time. Its arguments are an object, or `()` for none. For
    /// other tools, see [`HostTool`](crate::HostTool).
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
        let arguments = match serde_json::to_value(arguments) {
            Ok(Value::Null) => Value::Object(Map::new()),
            Ok(arguments) => arguments,
            Err(error) => {
                let why = format!("the arguments of {name} cannot be written as JSON: {error}");
                return Err(HostToolError::Json(why));
            }
        };
        let result = self.host.call_tool(name, &arguments, self.timeout_ms).await?;
        serde_json::from_value(result).map_err(|error| {
            HostToolError::Json(format!("the result of {name} does not fit its type: {error}"))
        })
    }
}

/// A tool of another agent or server that the model may call: its name, such as `agent:orders/find_order`, a pattern
/// such as `mcp:files/*`, or a [`HostTool`](crate::HostTool).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferedTool {
    pub(crate) name: String,
    pub(crate) timeout_ms: Option<u32>,
}

impl From<String> for OfferedTool {
    fn from(name: String) -> Self {
        Self { name, timeout_ms: None }
    }
}

impl From<&String> for OfferedTool {
    fn from(name: &String) -> Self {
        name.clone().into()
    }
}

impl From<&str> for OfferedTool {
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

/// Host tools that one run of a conversation offers to its model.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct OfferedTools(Vec<Offered>);

/// A tool that the model may call, under the name that the model uses.
#[derive(Debug, PartialEq)]
pub(crate) struct Offered {
    model_name: String,
    pub(crate) name: String,
    pub(crate) timeout_ms: Option<u32>,
}

impl OfferedTools {
    /// Finds the tools with these names. `agent:NAME/*` and `mcp:SERVER/*` match all tools of one owner.
    pub(crate) async fn find(host: &dyn Host, wanted: &[OfferedTool]) -> Result<Self, HostToolError> {
        match wanted {
            [] => Ok(Self::default()),
            wanted => Self::among(&host.tools().await, wanted),
        }
    }

    fn among(listed: &[HostToolInfo], wanted: &[OfferedTool]) -> Result<Self, HostToolError> {
        let mut offered = Vec::new();
        for OfferedTool { name, timeout_ms } in wanted {
            let owner = name.strip_suffix('*').filter(|owner| owner.ends_with('/'));
            let found = listed.iter().filter(|tool| match owner {
                Some(owner) => tool.name.starts_with(owner),
                None => tool.name == *name,
            });
            let before = offered.len();
            offered.extend(found.filter_map(|tool| {
                let (model_name, name) = (tool.model_name.clone()?, tool.name.clone());
                Some(Offered { model_name, name, timeout_ms: *timeout_ms })
            }));
            if offered.len() == before {
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
        }
        Ok(Self(offered))
    }

    pub(crate) fn model_names(&self) -> impl Iterator<Item = &String> {
        self.0.iter().map(|tool| &tool.model_name)
    }

    /// Returns the tool that the model calls by this name.
    pub(crate) fn get(&self, model_name: &str) -> Option<&Offered> {
        self.0.iter().find(|tool| tool.model_name == model_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostTool, ToolHints};
    use std::time::Duration;

    fn listed(name: &str, model_name: Option<&str>) -> HostToolInfo {
        HostToolInfo {
            name: name.to_owned(),
            model_name: model_name.map(str::to_owned),
            description: String::new(),
            input_schema: Value::Bool(true),
            output_schema: None,
            hints: ToolHints::default(),
        }
    }

    #[test]
    fn an_offered_tool_keeps_its_timeout() {
        const TRACK: HostTool = HostTool::new("mcp:post/track").timeout(Duration::from_secs(5));
        let listed = [listed("mcp:post/track", Some("track")), listed("agent:a/b", Some("b"))];
        let offered = OfferedTools::among(&listed, &["agent:a/*".into(), TRACK.into()]).unwrap();
        assert_eq!(offered.model_names().collect::<Vec<_>>(), ["b", "track"]);
        let track = offered.get("track").unwrap();
        assert_eq!((track.name.as_str(), track.timeout_ms), ("mcp:post/track", Some(5_000)));
        assert_eq!(offered.get("b").unwrap().timeout_ms, None);
    }

    #[test]
    fn a_tool_without_a_name_for_the_model_cannot_be_offered() {
        let listed = [listed("mcp:post/track", None)];
        let error = OfferedTools::among(&listed, &["mcp:post/track".into()]).unwrap_err();
        assert!(error.to_string().contains("call it from the agent's own code"), "{error}");
    }
}
