//! The OpenAPI document: what all routes have in common is added to what the handlers declare.
//!
//! The handlers declare their parameters, bodies, and the statuses that only they give. The role that a route needs, and the
//! errors that it may give because of it, follow from the table of roles.

use crate::{AccessOptions, access::roles, routes::triggers::__path_run};
use axum::http::Method;
use serde_json::{Map, Value, json};
use skep_api::{AiFailure, ErrorBody};
use std::collections::BTreeMap;
use utoipa::{Path as _, ToSchema, openapi::OpenApi};

const ABOUT: &str = "The HTTP API of a Skep host: agents with sessions, the routes of OpenAI, Anthropic and Workers AI \
    for models, and the host's administration. A host may require a key; then each route needs a role.\n\nTimes are in milliseconds since \
    1970 unless they say otherwise. Objects may gain fields, and enumerations may gain values; clients must ignore those that they do not \
    know. Every answer has an `x-request-id`, and in a cluster `x-skep-host`, the number of the host that gave it. A host with too many connections answers 503 before it reads a request.\n\n\
    An agent may have routes of its own, which `GET /v1/agents` lists; `components.pathItems.AgentRoute` describes them.";

const TAGS: [(&str, &str); 17] = [
    ("agents", "Deployed agents and their versions"),
    ("sessions", "Sessions of agents and their messages"),
    ("turns", "Turns: messages to agents and their results"),
    ("approvals", "Calls that wait for a person"),
    ("logs", "Log lines of agents"),
    ("schedules", "Schedules that wake sessions"),
    ("events", "Events for agents and webhooks"),
    ("webhooks", "URLs that events are sent to"),
    ("models", "Models, in the shapes of OpenAI, Anthropic and Workers AI"),
    ("batches", "Asynchronous batches"),
    ("responses", "Responses of models and agents, which can be stored and continued"),
    ("mcp", "The Model Context Protocol"),
    ("secrets", "Values that agents can send without seeing them"),
    ("keys", "API keys and tenants"),
    ("usage", "The use of models and what it costs"),
    ("requests", "The log of requests to models"),
    ("host", "The host itself"),
];

/// Completes the document of the router.
pub(crate) fn document(declared: OpenApi) -> Value {
    let mut document = serde_json::to_value(&declared).expect("a document of strings and numbers serializes");
    document["info"] = json!({
        "title": "Skep",
        "description": ABOUT,
        "version": env!("CARGO_PKG_VERSION"),
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    });
    document["servers"] = json!([{"url": "/", "description": "The host that serves this document"}]);
    document["security"] = json!([{"bearer": []}, {"header": []}]);
    document["tags"] = TAGS.iter().map(|(name, about)| json!({"name": name, "description": about})).collect();
    let components = &mut document["components"];
    components["securitySchemes"] = json!({
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, such as `skep_…`"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key"},
    });
    let mut schemas = vec![
        (ErrorBody::name().into_owned(), <ErrorBody as utoipa::PartialSchema>::schema()),
        (AiFailure::name().into_owned(), <AiFailure as utoipa::PartialSchema>::schema()),
    ];
    ErrorBody::schemas(&mut schemas);
    AiFailure::schemas(&mut schemas);
    for (name, schema) in schemas {
        components["schemas"][name] = json!(schema);
    }
    let mut of_agent = json!(__path_run::operation());
    of_agent["tags"] = json!(["turns"]);
    complete(&mut of_agent, &Method::POST, None);
    components["pathItems"] = json!({"AgentRoute": {"post": of_agent}});
    let declared = document["paths"].take();
    let mut paths = Map::new();
    for (route, mut methods) in declared.as_object().cloned().unwrap_or_default() {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let method = method.to_uppercase().parse().expect("the router has only methods of HTTP");
            complete(operation, &method, Some(&route));
        }
        // A parameter of OpenAPI cannot contain slashes; the description of this one says that it may.
        paths.insert(route.replace("{*", "{"), methods);
    }
    document["paths"] = paths.into();
    polish(&mut document);
    document
}

/// Adds to an operation what follows from its route. `None` is an agent's own route.
fn complete(operation: &mut Value, method: &Method, route: Option<&str>) {
    let with_keys = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let role = roles::need(method, route, &with_keys);
    let mut about = format!("{}\n{}", text(&operation["summary"]), text(&operation["description"]));
    match role {
        Some(role) => about = format!("{about}\n\nNeeds the role `{role}`, where the host requires keys."),
        None => operation["security"] = json!([]),
    }
    let (summary, description) = summarized(&about);
    operation["summary"] = summary.into();
    operation["description"] = description.into();
    let is_counted = roles::is_counted(method, route, &with_keys);
    let mut responses: BTreeMap<String, Value> = BTreeMap::new();
    for (status, about) in common_errors(operation, role.is_some(), is_counted) {
        responses.insert(status.to_owned(), json!({"description": about}));
    }
    responses.extend(operation["responses"].as_object().cloned().unwrap_or_default());
    for (status, response) in responses.iter_mut().filter(|(status, _)| status.as_str() >= "400") {
        response["content"] = json!({"application/json": {"schema": error_schema(status, route)}});
    }
    operation["responses"] = json!(responses);
}

/// Returns the errors that an operation gives because of what all operations have in common, with their codes.
fn common_errors(operation: &Value, needs_key: bool, is_counted: bool) -> Vec<(&'static str, &'static str)> {
    let mut errors = vec![
        ("403", "`origin_not_allowed`: the request comes from a web page that the operator has not granted."),
        ("421", "`host_not_allowed`: a host without keys answers only to names of its own machine."),
        (
            "500",
            "`internal`, `store_failed` or another error of the host; for a turn also an error of the agent.",
        ),
    ];
    if needs_key {
        errors[0].1 = "`role_missing`, `key_is_for_agents`; or `origin_not_allowed`, for a request of a web page that the \
                       operator has not granted.";
        errors.push(("401", "`missing_api_key` or `invalid_api_key`, where the host requires keys."));
        errors.push((
            "503",
            "`shutting_down`, `store_full`, `store_stalled`, `store_away` or `host_replaced`; in a cluster also `host_gone`, \
             `session_elsewhere` or `cluster_versions_apart`.",
        ));
    }
    let has_body = operation["requestBody"].is_object();
    if needs_key || has_body || operation["parameters"].is_array() {
        errors.push((
            "400",
            "`invalid_value`, `invalid_name`, `invalid_json` or another error in the request; `param` names the field.",
        ));
    }
    if has_body {
        errors.extend([("408", "`body_timeout`"), ("413", "`body_too_large`")]);
    }
    if is_counted {
        errors[0].1 = "`role_missing`, `key_is_for_agents`, `model_not_granted`; `price_unknown`, if the tenant has a budget in money and the model no \
                       price; or `origin_not_allowed`, for a request of a web page that the operator has not granted.";
        errors.push((
            "429",
            "`rate_limit_exceeded`, `tokens_used_up`, `money_used_up`, `busy` or another limit; `retry-after` says when to try again.",
        ));
    }
    errors
}

/// Returns the schema of an error.
fn error_schema(status: &str, route: Option<&str>) -> Value {
    let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let is_of_workers_ai = route.is_some_and(|route| route.contains("/ai/"));
    match status {
        _ if route.is_some_and(|route| route.starts_with("/v1/messages")) => schema("AnthropicError"),
        // These are decided before a handler sees the request.
        "401" | "421" => schema("ErrorBody"),
        "403" if !is_of_workers_ai => schema("ErrorBody"),
        "403" | "500" if is_of_workers_ai => json!({"anyOf": [schema("AiFailure"), schema("ErrorBody")]}),
        _ if is_of_workers_ai => schema("AiFailure"),
        // Errors of the protocol are JSON-RPC, and the others have the shape of all errors.
        _ if matches!(route, Some("/mcp" | "/mcp/{agent}")) => json!({}),
        _ => schema("ErrorBody"),
    }
}

/// Splits a description after its first sentence.
fn summarized(about: &str) -> (String, String) {
    let about = joined(about);
    match about.split_once(". ").or_else(|| about.split_once(".\n\n")) {
        Some((first, rest)) if !first.contains('\n') => (format!("{first}."), rest.trim().to_owned()),
        _ => match about.split_once("\n\n") {
            Some((first, rest)) => (first.to_owned(), rest.to_owned()),
            None => (about, String::new()),
        },
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Joins the lines of each paragraph.
fn joined(text: &str) -> String {
    let paragraphs =
        text.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

fn is_reference(shape: &Value) -> bool {
    shape["$ref"].is_string() || shape["type"] == "null"
}

/// Joins the lines of all descriptions, which are as long as the lines of the sources, and lets untagged values have any of
/// their shapes.
fn polish(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                match member {
                    Value::String(text) if name == "description" => *text = joined(text),
                    member => polish(member),
                }
            }
            members.retain(|name, member| name != "description" || *member != "");
            // The shapes of an untagged value may overlap.
            if members
                .get("oneOf")
                .and_then(Value::as_array)
                .is_some_and(|shapes| shapes.iter().all(is_reference))
                && let Some(shapes) = members.remove("oneOf")
            {
                members.insert("anyOf".to_owned(), shapes);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(polish),
        _ => {}
    }
}
