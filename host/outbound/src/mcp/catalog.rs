//! Reads the list of a server's tools, within bounds.

use super::{McpOptions, outcome};
use crate::{ServedTool, ToolHints};
use rmcp::{
    Peer, RoleClient,
    model::{PaginatedRequestParams, Tool, ToolAnnotations},
};
use serde_json::Value;
use std::{collections::HashSet, sync::Arc};

/// Maximum number of pages of a list.
const MAX_PAGES: usize = 64;
const MAX_NAME_BYTES: usize = 128;

pub(super) async fn list(
    server: &str,
    peer: &Peer<RoleClient>,
    options: &McpOptions,
) -> Result<Arc<[ServedTool]>, String> {
    let mut taken = Taken { server, options, tools: Vec::new(), names: HashSet::new() };
    let mut params = None;
    for _ in 0..MAX_PAGES {
        let page = peer.list_tools(params).await.map_err(|error| outcome::cut(&error.to_string()))?;
        if !taken.take(page.tools) {
            break;
        }
        let Some(cursor) = page.next_cursor else { break };
        let mut next = PaginatedRequestParams::default();
        next.cursor = Some(cursor);
        params = Some(next);
    }
    Ok(taken.tools.into())
}

struct Taken<'a> {
    server: &'a str,
    options: &'a McpOptions,
    tools: Vec<ServedTool>,
    names: HashSet<String>,
}

impl Taken<'_> {
    /// Adds the valid tools of a page. Returns whether there is room for more.
    fn take(&mut self, page: Vec<Tool>) -> bool {
        for tool in page {
            let is_wanted =
                self.options.tools.as_ref().is_none_or(|wanted| wanted.iter().any(|name| *name == tool.name));
            if !is_wanted {
                continue;
            }
            if self.tools.len() >= self.options.bounds.tools {
                let (server, limit) = (self.server, self.options.bounds.tools);
                tracing::warn!(
                    server,
                    "an MCP server offers more than {limit} tools and the rest are ignored; select the tools to use with \
                     `tools` under [mcp.{server}] in skep.toml"
                );
                return false;
            }
            let name = tool.name.chars().take(MAX_NAME_BYTES).collect::<String>();
            match self.check(tool) {
                Ok(tool) => {
                    self.names.insert(name);
                    self.tools.push(tool);
                }
                Err(why) => tracing::warn!(server = self.server, "the tool {name:?} is ignored: {why}"),
            }
        }
        true
    }

    fn check(&self, tool: Tool) -> Result<ServedTool, String> {
        let character = |b: u8| b.is_ascii_alphanumeric() || b"_-./".contains(&b);
        let name = tool.name.into_owned();
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(character) {
            return Err(format!(
                "a name must have 1 to {MAX_NAME_BYTES} of the characters a-z, A-Z, 0-9, _, -, . and /"
            ));
        }
        if self.names.contains(&name) {
            return Err("another tool has the same name".to_owned());
        }
        let description = tool.description.map(String::from).unwrap_or_default();
        let input_schema = Value::Object(tool.input_schema.as_ref().clone());
        let output_schema = tool.output_schema.map(|schema| Value::Object(schema.as_ref().clone()));
        let bytes = description.len()
            + input_schema.to_string().len()
            + output_schema.as_ref().map_or(0, |schema| schema.to_string().len());
        let limit = self.options.bounds.tool_bytes;
        if bytes > limit {
            return Err(format!("its description and schemas have {bytes} bytes; the limit is {limit}"));
        }
        Ok(ServedTool { name, description, input_schema, output_schema, hints: hints(tool.annotations) })
    }
}

/// Returns the hints of a tool. A missing hint gets the less safe value, as the protocol specifies.
fn hints(annotations: Option<ToolAnnotations>) -> ToolHints {
    let annotations = annotations.unwrap_or_default();
    ToolHints {
        read_only: annotations.read_only_hint.unwrap_or(false),
        destructive: annotations.destructive_hint.unwrap_or(true),
        idempotent: annotations.idempotent_hint.unwrap_or(false),
        open_world: annotations.open_world_hint.unwrap_or(true),
    }
}
