//! Resources: the sessions of the host, and at `/mcp/{agent}` those that the agent declares under `[mcp.resources]`.

use super::{
    call::{self, Client},
    catalog::PAGE,
    content, prompts,
    scope::Scope,
};
use crate::routes::sessions;
use rmcp::{
    ErrorData, RoleServer,
    model::{
        ListResourceTemplatesResult, ListResourcesResult, ReadResourceResult, Resource, ResourceContents,
        ResourceTemplate,
    },
    service::RequestContext,
};
use serde_json::Value;
use skep_runtime::{AgentHost, HOST_SCHEME, ResourceToml, Role, RuntimeError};

const JSON: &str = "application/json";

/// The thing that a URI names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// A session, by the host's id.
    Session { agent: String, session: String },
    /// A resource that the agent of the path declares.
    Declared { agent: String },
}

/// Returns a page of resources: first those that the agent of the path declares, then sessions. The cursor is the agent
/// and the session that the page starts after.
pub(super) async fn page(
    host: &AgentHost,
    scope: &Scope,
    cursor: Option<&str>,
) -> Result<ListResourcesResult, ErrorData> {
    let after = cursor.map(|cursor| cursor.split_once('/').unwrap_or((cursor, "")));
    let mut resources = match after {
        None => declared(host, scope, false, |resource, name, description| {
            let listed = Resource::new(resource.uri.as_str(), name).with_description(description);
            match &resource.mime_type {
                Some(kind) => listed.with_mime_type(kind),
                None => listed,
            }
        }),
        Some(_) => Vec::new(),
    };
    may_read(scope)?;
    for agent in scope.agents(host) {
        let after = match after {
            Some((last, _)) if agent.as_str() < last => continue,
            Some((last, session)) if agent == last => Some(session).filter(|session| !session.is_empty()),
            _ => None,
        };
        let room = PAGE.saturating_sub(resources.len());
        // One more than fits shows whether there is another page.
        let limit = u32::try_from(room + 1).unwrap_or(u32::MAX);
        let sessions = match host.sessions(&scope.caller.tenant, &agent, after, limit).await {
            Ok(sessions) => sessions,
            // The agent has been removed in the meantime.
            Err(RuntimeError::AgentNotFound { .. }) => continue,
            Err(error) => return Err(call::failed(&error)),
        };
        let more = sessions.len() > room;
        let mut last = None;
        for session in sessions.into_iter().take(room) {
            let description =
                format!("Session {} of the agent {agent}: {} turns.", session.id, session.turns);
            let uri = uri_of(&agent, &session.id);
            resources.push(
                Resource::new(uri, session.id.clone()).with_description(description).with_mime_type(JSON),
            );
            last = Some(session.id);
        }
        if more {
            let last = last.as_deref().or(after).unwrap_or_default();
            let next_cursor = Some(format!("{agent}/{last}"));
            return Ok(ListResourcesResult { next_cursor, ..ListResourcesResult::with_all_items(resources) });
        }
    }
    Ok(ListResourcesResult::with_all_items(resources))
}

/// Returns the templates of resources.
pub(super) fn templates(host: &AgentHost, scope: &Scope) -> ListResourceTemplatesResult {
    let mut templates = declared(host, scope, true, |resource, name, description| {
        let listed = ResourceTemplate::new(resource.uri.as_str(), name).with_description(description);
        match &resource.mime_type {
            Some(kind) => listed.with_mime_type(kind),
            None => listed,
        }
    });
    let agent = scope.agent.as_deref().unwrap_or("{agent}");
    let session = ResourceTemplate::new(uri_of(agent, "{session}"), "session")
        .with_description("A session of an agent: its conversations, their messages and its state keys.")
        .with_mime_type(JSON);
    templates.push(session);
    ListResourceTemplatesResult::with_all_items(templates)
}

fn declared<T>(
    host: &AgentHost,
    scope: &Scope,
    templates: bool,
    listed: impl Fn(&ResourceToml, String, String) -> T,
) -> Vec<T> {
    let Some(agent) = scope.agent.as_deref().and_then(|agent| host.agent(agent).ok()) else {
        return Vec::new();
    };
    let resources =
        agent.mcp.resources.iter().filter(|(_, resource)| resource.uri.is_template() == templates);
    let resources = resources.map(|(name, resource)| {
        let tool = prompts::tool_of(&agent, &resource.tool).map(|tool| tool.description.clone());
        let description = resource.description.clone().or(tool).unwrap_or_default();
        listed(resource, name.clone(), description)
    });
    resources.collect()
}

/// Reads a resource.
pub(super) async fn read(
    client: Client<'_>,
    scope: &Scope,
    uri: &str,
    context: &RequestContext<RoleServer>,
) -> Result<ReadResourceResult, ErrorData> {
    let host = client.host;
    let contents = match named(host, scope, uri)? {
        Named::Session { agent, session } => {
            let detail = match host.session(&agent, &session).await {
                Ok(detail) => detail,
                Err(RuntimeError::SessionNotFound { .. }) => return Err(not_found(uri)),
                Err(error) => return Err(call::failed(&error)),
            };
            let shown = sessions::described(detail, scope.caller.name_of(&session));
            let text = serde_json::to_string(&shown).expect("strings, numbers and JSON are always JSON");
            vec![ResourceContents::text(text, uri).with_mime_type(JSON)]
        }
        Named::Declared { agent } => {
            let detail = host.agent(&agent).map_err(|error| call::failed(&error))?;
            let (resource, variables) = detail.mcp.resource(uri).ok_or_else(|| not_found(uri))?;
            let tool = prompts::tool_of(&detail, &resource.tool).ok_or_else(|| not_found(uri))?;
            let given = variables.into_iter().chain([("uri".to_owned(), uri.to_owned())]);
            let given = given.filter(|(name, _)| !tool.input_schema["properties"][name].is_null());
            let given = given.map(|(name, text)| (name, Value::String(text))).collect();
            let arguments = prompts::arguments(given, tool);
            let result =
                call::result_of(&client, scope, &agent, tool, arguments, context, "resource").await?;
            content::contents(result, tool, uri, resource.mime_type.as_deref())
                .map_err(|error| call::failed(&error))?
        }
    };
    Ok(ReadResourceResult::new(contents))
}

/// Returns what a URI names. An error means that nothing in the scope has it.
pub(super) fn named(host: &AgentHost, scope: &Scope, uri: &str) -> Result<Named, ErrorData> {
    if uri.starts_with(HOST_SCHEME) {
        may_read(scope)?;
        let path = uri.strip_prefix("skep://agents/").and_then(|rest| rest.split_once("/sessions/"));
        let (agent, session) =
            path.filter(|(agent, _)| scope.includes(agent)).ok_or_else(|| not_found(uri))?;
        let session = scope.caller.tenant.session(session).map_err(|_invalid| not_found(uri))?;
        return Ok(Named::Session { agent: agent.to_owned(), session });
    }
    let Some(agent) = scope.agent.as_deref().and_then(|agent| host.agent(agent).ok()) else {
        return Err(not_found(uri));
    };
    let known = agent.mcp.resource(uri).is_some();
    known.then_some(Named::Declared { agent: agent.summary.name }).ok_or_else(|| not_found(uri))
}

fn uri_of(agent: &str, session: &str) -> String {
    format!("skep://agents/{agent}/sessions/{session}")
}

fn may_read(scope: &Scope) -> Result<(), ErrorData> {
    let allowed = scope.caller.must_be(Role::Read);
    allowed.map_err(|error| ErrorData::invalid_request(error.message, None))
}

fn not_found(uri: &str) -> ErrorData {
    let shown: String = uri.chars().take(160).collect();
    let message = format!(
        "there is no resource {shown:?}; resources/list and resources/templates/list list them, and those that an agent \
         declares are at /mcp/AGENT"
    );
    ErrorData::resource_not_found(message, Some(serde_json::json!({ "uri": shown })))
}
