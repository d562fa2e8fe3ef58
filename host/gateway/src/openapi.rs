//! The OpenAPI document: what all routes have in common is added to what the handlers declare.
//!
//! The handlers declare their parameters, bodies, and the statuses that only they give. The role that a route needs, and the
//! errors that it may give because of it, follow from the table of roles.

use crate::{AccessOptions, access::roles, routes::triggers::__path_run};
use axum::http::Method;
use serde_json::{Map, Value, json};
use skep_api::{AiFailure, ErrorBody};
use utoipa::{Path as _, ToSchema, openapi::OpenApi};

const ABOUT: &str = "The HTTP API of a Skep host: agents with sessions, OpenAI's and Workers AI's routes for models, and \
    the host's administration. A host may require a key; then each route needs a role.\n\nTimes are in milliseconds since \
    1970 unless they say otherwise. Objects may get further fields, and words further values; a client ignores those that it does not \
    know. Every answer has an `x-request-id`. A host with too many connections answers 503 before it reads a request.\n\n\
    An agent may have routes of its own, which `GET /v1/agents` lists; `components.pathItems.AgentRoute` describes them.";

const TAGS: [(&str, &str); 14] = [
    ("agents", "Deployed agents and their versions"),
    ("sessions", "Sessions of agents and their messages"),
    ("turns", "Messages to agents and what becomes of them"),
    ("approvals", "Calls that wait for a person"),
    ("logs", "Log lines of agents"),
    ("schedules", "Schedules that wake sessions"),
    ("events", "Events for agents and webhooks"),
    ("webhooks", "URLs that events are sent to"),
    ("models", "Models, in the shapes of OpenAI and Workers AI"),
    ("batches", "Asynchronous batches"),
    ("mcp", "The Model Context Protocol"),
    ("secrets", "Values that agents can send without seeing them"),
    ("keys", "API keys"),
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
    reflow(&mut document);
    document
}

/// Adds to an operation what follows from its route. `None` is an agent's own route.
fn complete(operation: &mut Value, method: &Method, route: Option<&str>) {
    let is_open_to_all = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let mut about = text(&operation["summary"]);
    for more in [text(&operation["description"])].into_iter().filter(|more| !more.is_empty()) {
        about = format!("{about}\n{more}");
    }
    let has_parameters = operation["parameters"].as_array().is_some_and(|given| !given.is_empty());
    let has_body = operation["requestBody"].is_object();
    let mut common = vec![
        ("403", "`origin_not_allowed`: the request comes from a web page that the operator has not granted."),
        ("421", "`host_not_allowed`: a host without keys answers only to names of its own machine."),
        (
            "500",
            "`internal`, `store_failed` or another error of the host; for a turn also an error of the agent.",
        ),
    ];
    if has_parameters || has_body {
        common.push(("400", "`invalid_value`, `invalid_name`, `invalid_json` or another error in the request; `param` names the field."));
    }
    if has_body {
        common.push(("408", "`body_timeout`"));
        common.push(("413", "`body_too_large`"));
    }
    match roles::need(method, route, &is_open_to_all) {
        None => operation["security"] = json!([]),
        Some(role) => {
            about = format!("{about}\n\nNeeds the role `{role}`, where the host requires keys.");
            common[0].1 = "`role_missing`; `key_is_for_agents`; or `origin_not_allowed`, for a request of a web page that the \
                           operator has not granted.";
            common.push(("401", "`missing_api_key` or `invalid_api_key`, where the host requires keys."));
            common.push(("503", "`shutting_down`, `store_full` or `store_stalled`."));
        }
    }
    if roles::is_counted(method, route, &is_open_to_all) {
        common.push(("429", "`rate_limit_exceeded`, `tokens_used_up`, `busy` or another limit; `retry-after` says when to try again."));
    }
    let (summary, description) = summarized(&about);
    operation["summary"] = summary.into();
    operation["description"] = description.into();
    for (status, about) in common {
        let response = &mut operation["responses"][status];
        if response.is_null() {
            *response = json!({"description": about});
        }
    }
    let is_of_workers_ai = route.is_some_and(|route| route.contains("/ai/"));
    let mut responses: Vec<(String, Value)> = Vec::new();
    for (status, mut response) in operation["responses"].as_object().cloned().unwrap_or_default() {
        if status.as_str() >= "400" {
            let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
            let body = match &*status {
                // These are decided before a handler of Workers AI sees the request.
                "401" | "403" | "421" => schema("ErrorBody"),
                "500" if is_of_workers_ai => json!({"anyOf": [schema("AiFailure"), schema("ErrorBody")]}),
                _ if is_of_workers_ai => schema("AiFailure"),
                // Errors of the protocol are JSON-RPC or text, and the others have the shape of all errors.
                _ if route == Some("/mcp") => json!({}),
                _ => schema("ErrorBody"),
            };
            response["content"] = json!({"application/json": {"schema": body}});
        }
        responses.push((status, response));
    }
    responses.sort_by(|(one, _), (other, _)| one.cmp(other));
    operation["responses"] = Value::Object(responses.into_iter().collect());
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

/// Joins the lines of all descriptions, which are as long as the lines of the sources.
fn reflow(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                match member {
                    Value::String(text) if name == "description" => *text = joined(text),
                    member => reflow(member),
                }
            }
            members.retain(|name, member| name != "description" || *member != "");
        }
        Value::Array(items) => items.iter_mut().for_each(reflow),
        _ => {}
    }
}
