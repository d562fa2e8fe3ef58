//! The external tools that a turn may offer to its model: descriptions of the granted tools, with the names and compiled
//! schemas that constrain the model.
//!
//! Descriptions of external tools change without notice. The list that a turn received is in its journal, and everything
//! here is derived from it, so a replayed turn offers its model the same tools.

use crate::{
    ToolDefinition,
    bindings::tools::ToolInfo,
    capability::{
        Turn,
        tools::{HostTools, TurnTools, agents, grant},
    },
    grant::ToolName,
    tool::{Tool, tool_hints, wit_hints},
};
use sha2::{Digest, Sha256};
use skep_outbound::{ServedTool, ToolHints};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Bounds of one list. Tools beyond them are left out, and a warning is logged.
const MAX_LISTED: usize = 256;
const MAX_LISTED_BYTES: usize = 512 << 10;
/// Maximum number of compiled schemas that are cached.
const MAX_KEPT: usize = 2_048;

/// A tool as the model of one turn sees it: the model uses the name of `tool`.
pub(crate) struct Offered {
    /// The name by which the host calls the tool.
    pub(crate) name: String,
    pub(crate) tool: Arc<Tool>,
}

/// Compiled external tools, by a digest of everything that was compiled.
#[derive(Default)]
pub(in crate::capability) struct Catalog {
    compiled: Mutex<HashMap<[u8; 32], Arc<Tool>>>,
    /// Whether decoding can enforce a schema, by a digest of the model and the schema.
    decodable: Mutex<HashMap<[u8; 32], bool>>,
}

impl Catalog {
    /// Returns the compiled form of a server's tool under this name.
    pub(in crate::capability) fn compiled(
        &self,
        name: &str,
        served: &ServedTool,
    ) -> Result<Arc<Tool>, String> {
        let ServedTool { description, input_schema, output_schema, hints, .. } = served.clone();
        self.compile(ToolDefinition {
            name: name.to_owned(),
            description,
            input_schema,
            output_schema,
            hints,
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        })
    }

    /// Returns a listed tool as it may be offered to the model.
    pub(in crate::capability) fn offered(&self, info: &ToolInfo) -> Option<Arc<Offered>> {
        let definition = ToolDefinition {
            name: info.model_name.clone()?,
            description: info.description.clone(),
            input_schema: serde_json::from_str(&info.input_schema).ok()?,
            output_schema: info.output_schema.as_ref().and_then(|schema| serde_json::from_str(schema).ok()),
            hints: tool_hints(info.hints),
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        };
        let tool = self.compile(definition).ok()?;
        Some(Arc::new(Offered { name: info.name.clone(), tool }))
    }

    fn compile(&self, definition: ToolDefinition) -> Result<Arc<Tool>, String> {
        let ToolDefinition { name, description, input_schema, output_schema, hints, .. } = &definition;
        let ToolHints { read_only, destructive, idempotent, open_world } = hints;
        let hints = [read_only, destructive, idempotent, open_world];
        let key = digest(&(name, description, input_schema, output_schema, hints));
        if let Some(tool) = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(tool.clone());
        }
        let tool = Arc::new(Tool::new(definition)?);
        keep(&self.compiled, key, tool.clone());
        Ok(tool)
    }

    /// Returns whether decoding with the model of this turn's agent can enforce the tool's input schema.
    fn is_decodable(&self, turn: &Turn, tool: &Tool) -> bool {
        // A model that is not loaded yet refuses the tool when a generation offers it.
        let Some(model) = turn.own_loaded_model() else { return true };
        let key = digest(&(model.name(), &tool.definition.input_schema));
        if let Some(known) = self.decodable.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return *known;
        }
        let checked = tool.check_decodable(&model);
        if let Err(why) = &checked {
            tracing::warn!(tool = tool.definition.name, "this tool is not offered to models: {why}");
        }
        keep(&self.decodable, key, checked.is_ok());
        checked.is_ok()
    }
}

fn keep<T>(kept: &Mutex<HashMap<[u8; 32], T>>, key: [u8; 32], value: T) {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.len() >= MAX_KEPT {
        kept.clear();
    }
    kept.insert(key, value);
}

fn digest(of: &impl serde::Serialize) -> [u8; 32] {
    let mut hasher = Sha256::new();
    serde_json::to_writer(&mut hasher, of).expect("strings and JSON always serialize");
    hasher.finalize().into()
}

/// Returns all tools that the agent may call and that are reachable now.
pub(in crate::capability) async fn list(turn: &Arc<Turn>) -> Vec<ToolInfo> {
    let mut listed: Vec<ToolInfo> = Vec::new();
    let mut bytes = 0;
    for (name, tool) in granted(turn).await {
        let info = info(turn, &name, &tool);
        bytes += info.description.len()
            + info.input_schema.len()
            + info.output_schema.as_ref().map_or(0, String::len);
        if listed.len() >= MAX_LISTED || bytes > MAX_LISTED_BYTES {
            let agent = turn.agent.manifest.name.as_str();
            tracing::warn!(
                agent,
                "more tools are granted than fit into one list; {name} and all tools after it are left out"
            );
            break;
        }
        listed.push(info);
    }
    listed
}

/// Returns the granted tools of every agent and server, ordered by agent and server name.
async fn granted(turn: &Arc<Turn>) -> Vec<(ToolName, Arc<Tool>)> {
    let TurnTools { host, servers, rules, .. } = &turn.tools;
    let HostTools { directory, catalog, fetch, client, .. } = &**host;
    let grants = &turn.agent.manifest.grants.tools;
    let mut found = Vec::new();
    if crate::capability::tools::fetch::reaches_anywhere(turn) {
        found.push((ToolName::Host { tool: fetch.definition.name.clone() }, fetch.clone()));
    }
    if turn.client().is_some() {
        for tool in [&client.elicit, &client.sample] {
            found.push((ToolName::Client { tool: tool.definition.name.clone() }, tool.clone()));
        }
    }
    for agent in directory.ready() {
        let name =
            |tool: &str| ToolName::Agent { agent: agent.manifest.name.to_string(), tool: tool.to_owned() };
        if agents::is_callable(&agent) && grants.iter().any(|grant| grant.covers_owner(&name(""))) {
            found.extend(agent.tools.iter().map(|tool| (name(&tool.definition.name), tool.clone())));
        }
    }
    for (server_name, server) in servers.iter() {
        let name = |tool: &str| ToolName::Server { server: server_name.clone(), tool: tool.to_owned() };
        if !grants.iter().any(|grant| grant.covers_owner(&name(""))) {
            continue;
        }
        match server.tools().await {
            Ok(served) => {
                found.extend(served.iter().filter_map(
                    |served| match catalog.compiled(&served.name, served) {
                        Ok(tool) => Some((name(&served.name), tool)),
                        Err(why) => {
                            tracing::warn!("tool {} is left out: {why}", name(&served.name));
                            None
                        }
                    },
                ));
            }
            Err(error) => {
                tracing::warn!(server = server_name, "the tools of an MCP server are not available: {error}")
            }
        }
    }
    found.retain(|(name, _)| grant::check(&turn.agent.manifest, &rules.granted_tools, name).is_ok());
    found
}

fn info(turn: &Turn, name: &ToolName, tool: &Tool) -> ToolInfo {
    let catalog = &turn.tools.host.catalog;
    let is_own = |minted: &str| turn.agent.tools.get(minted).is_some();
    let ToolDefinition { description, input_schema, output_schema, hints, .. } = &tool.definition;
    ToolInfo {
        name: name.to_string(),
        model_name: catalog.is_decodable(turn, tool).then(|| name.for_model(is_own)),
        description: description.clone(),
        input_schema: input_schema.to_string(),
        output_schema: output_schema.as_ref().map(ToString::to_string),
        hints: wit_hints(*hints),
    }
}
