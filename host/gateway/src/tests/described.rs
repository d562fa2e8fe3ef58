//! Compares responses with the OpenAPI document: the status, the type and the body must be described, and a body must not have
//! a field that its schema lacks.

use super::fixture::TestResponse;
use axum::http::Method;
use jsonschema::Validator;
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, LazyLock, Mutex},
};

static DOCUMENT: LazyLock<Value> = LazyLock::new(crate::openapi_document);
/// Schemas that refuse fields they do not name.
static STRICT: LazyLock<Value> = LazyLock::new(|| strict(&DOCUMENT["components"]["schemas"]));
static VALIDATORS: LazyLock<Mutex<HashMap<String, Arc<Validator>>>> = LazyLock::new(Mutex::default);

/// Fails unless the response is one that the document describes.
pub fn check(method: &Method, path: &str, answer: &TestResponse) {
    if let Err(wrong) = compare(method, path, answer) {
        panic!(
            "{method} {path} answers {}, which the OpenAPI document does not describe: {wrong}\n{}",
            answer.status, answer.text
        );
    }
}

pub fn compare(method: &Method, path: &str, answer: &TestResponse) -> Result<(), String> {
    if method == Method::OPTIONS {
        return Ok(());
    }
    let method = if method == Method::HEAD { "get".to_owned() } else { method.as_str().to_lowercase() };
    // A method that the path does not support has no operation.
    let operation = match template(path) {
        Some(template) => &DOCUMENT["paths"][template][&method],
        None => &DOCUMENT["components"]["pathItems"]["AgentRoute"]["post"],
    };
    if operation.is_null() {
        return Ok(());
    }
    let response = &operation["responses"][answer.status.as_str()];
    if response.is_null() {
        return Err(format!("{} has no response {}", operation["operationId"], answer.status));
    }
    if answer.text.is_empty() {
        return Ok(());
    }
    let kind = answer.headers.get("content-type").map(|kind| kind.to_str().unwrap()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default();
    if path.starts_with("/mcp") && answer.status.is_client_error() {
        return Ok(());
    }
    let schema = &response["content"][kind]["schema"];
    if !response["content"][kind].is_object() {
        return Err(format!("the type {kind} is not described"));
    }
    match kind {
        "application/json" => {
            valid(schema, &serde_json::from_str(&answer.text).map_err(|error| error.to_string())?)
        }
        "text/event-stream" => {
            let is_of_turn = schema["$ref"].as_str().is_some_and(|name| name.ends_with("/TurnEvent"));
            for (name, data) in
                events(&answer.text).filter(|(_, data)| !["", "[DONE]"].contains(&data.as_str()))
            {
                let data: Value = serde_json::from_str(&data).map_err(|error| error.to_string())?;
                let event = if is_of_turn { json!({"event": name, "data": data}) } else { data };
                valid(schema, &event)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns the names and the data of the events of a stream.
fn events(text: &str) -> impl Iterator<Item = (String, String)> {
    let field = |event: &str, name: &str| {
        event.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
    };
    text.split("\n\n")
        .filter_map(move |event| Some((field(event, "event:").unwrap_or_default(), field(event, "data:")?)))
}

/// Returns the path of the document that matches a path.
fn template(path: &str) -> Option<&'static str> {
    let given: Vec<&str> = path.split('/').collect();
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let matches = paths.keys().filter(|template| {
        let parts: Vec<&str> = template.split('/').collect();
        let takes_rest = template.ends_with("/{model}") && given.len() > parts.len();
        (takes_rest || parts.len() == given.len())
            && parts
                .iter()
                .zip(&given)
                .all(|(part, given)| part == given || part.starts_with('{') && !given.is_empty())
    });
    // A fixed segment takes precedence over a parameter.
    matches.min_by_key(|template| template.matches('{').count()).map(String::as_str)
}

/// Checks a value against a schema of the document.
pub fn valid(schema: &Value, value: &Value) -> Result<(), String> {
    let validator = validator(schema);
    validator.validate(value).map_err(|error| format!("{error} at {:?}", error.instance_path().to_string()))
}

/// Returns the validator of a schema of the document.
fn validator(schema: &Value) -> Arc<Validator> {
    let text = schema.to_string();
    let known = VALIDATORS.lock().unwrap().get(&text).cloned();
    if let Some(validator) = known {
        return validator;
    }
    // Compiling takes long. The lock is not held meanwhile, because a response would wait for the schemas of other tests. Two
    // tests may compile the same schema.
    let mut whole = schema.clone();
    whole["components"] = json!({"schemas": *STRICT});
    let validator = Arc::new(jsonschema::validator_for(&whole).unwrap());
    VALIDATORS.lock().unwrap().insert(text, validator.clone());
    validator
}

/// Makes every schema refuse fields that it does not name. A schema that is a part of others has a copy that does not, because
/// it does not know their fields.
fn strict(schemas: &Value) -> Value {
    let mut parts = BTreeSet::new();
    let mut strict = Map::new();
    for (name, schema) in schemas.as_object().unwrap() {
        let mut schema = schema.clone();
        for part in schema["allOf"].as_array_mut().into_iter().flatten() {
            if let Some(of) = part["$ref"].as_str().map(|path| path.rsplit('/').next().unwrap().to_owned()) {
                part["$ref"] = json!(format!("#/components/schemas/{of}~part").replace('~', "-"));
                parts.insert(of);
            }
        }
        let refuse = |schema: &mut Value| {
            let is_closed = schema.get("additionalProperties").is_some();
            if !is_closed && (schema["properties"].is_object() || schema["allOf"].is_array()) {
                schema["unevaluatedProperties"] = json!(false);
            }
        };
        refuse(&mut schema);
        schema["oneOf"].as_array_mut().into_iter().flatten().for_each(refuse);
        strict.insert(name.clone(), schema);
    }
    for part in parts {
        strict.insert(format!("{part}-part"), schemas[&part].clone());
    }
    // Indexing a missing key of a value adds it as null, which is not a schema's keyword.
    for schema in strict.values_mut() {
        schema.as_object_mut().unwrap().retain(|_, member| !member.is_null());
    }
    Value::Object(strict)
}
