//! Tests the OpenAPI document: that it is one, that it describes every route, and that responses are what it says.

use super::{
    access::guarded,
    described::{compare, valid},
    fixture::{Server, TestResponse},
    turns::echo,
};
use axum::{
    body::Body,
    http::{HeaderMap, Method, Request, StatusCode},
};
use serde_json::{Value, json};
use skep_api::{Schedule, ScheduleState, ScheduleTiming};
use skep_runtime::Manifest;
use std::collections::{BTreeMap, BTreeSet};

/// Returns each operation of the document with its method and its path.
fn operations(document: &Value) -> Vec<(Method, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap().iter();
    let operations = paths.flat_map(|(path, methods)| {
        let methods = methods.as_object().unwrap().iter();
        methods.map(move |(method, operation)| {
            (method.to_uppercase().parse().unwrap(), path.as_str(), operation)
        })
    });
    operations.collect()
}

/// Calls `found` with each `$ref` of a value.
fn references<'a>(value: &'a Value, found: &mut impl FnMut(&'a str)) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(target)) = members.get("$ref") {
                found(target);
            }
            members.values().for_each(|member| references(member, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}

#[test]
fn the_document_is_consistent() {
    let document = crate::openapi_document();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1."), "{}", document["openapi"]);
    let mut used = BTreeSet::new();
    references(&document, &mut |target| {
        let pointer = target.strip_prefix('#').expect(target);
        assert!(document.pointer(pointer).is_some(), "{target} does not exist");
        used.insert(target.rsplit('/').next().unwrap().to_owned());
    });
    for name in document["components"]["schemas"].as_object().unwrap().keys() {
        assert!(used.contains(name), "nothing refers to the schema {name}");
        let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric());
        assert!(is_plain, "{name} does not become a good name in other languages");
    }
    let tags: BTreeSet<&str> =
        document["tags"].as_array().unwrap().iter().map(|tag| tag["name"].as_str().unwrap()).collect();
    let of_agent = &document["components"]["pathItems"]["AgentRoute"]["post"];
    let mut ids = BTreeSet::new();
    let all = operations(&document);
    for (method, path, operation) in all.into_iter().chain([(Method::POST, "/{route}", of_agent)]) {
        let id = operation["operationId"].as_str().unwrap_or_else(|| panic!("{method} {path} has no id"));
        assert!(ids.insert(id), "{id} is the id of two operations");
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let declared: BTreeMap<&str, &Value> = parameters
            .iter()
            .filter(|parameter| parameter["in"] == "path")
            .map(|parameter| (parameter["name"].as_str().unwrap(), &parameter["required"]))
            .collect();
        let named: BTreeSet<&str> =
            path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')).collect();
        assert_eq!(declared.keys().copied().collect::<BTreeSet<_>>(), named, "{method} {path}");
        assert!(declared.values().all(|required| **required == true), "{method} {path}");
        for parameter in &parameters {
            assert!(parameter["description"].is_string(), "{} of {id} is not described", parameter["name"]);
        }
        assert!(!operation["summary"].as_str().unwrap_or_default().is_empty(), "{id} has no summary");
        let of_tags = operation["tags"].as_array().unwrap();
        assert!(of_tags.len() == 1 && tags.contains(of_tags[0].as_str().unwrap()), "{id}: {of_tags:?}");
        let responses = operation["responses"].as_object().unwrap();
        assert!(responses.keys().any(|status| status.starts_with('2')), "{id} never succeeds");
        for (status, response) in responses {
            assert!(response["description"].is_string(), "{status} of {id} is not described");
            let has_body = response["content"].is_object();
            assert!(has_body || ["202", "204"].contains(&&**status), "{status} of {id} has no body");
        }
    }
    assert!(ids.len() > 50, "{}", ids.len());
}

#[tokio::test]
async fn every_documented_operation_is_a_route_and_every_route_is_documented() {
    let server = Server::start().await;
    let document = crate::openapi_document();
    for (method, path, _) in operations(&document) {
        let filled: Vec<&str> =
            path.split('/').map(|part| if part.starts_with('{') { "7" } else { part }).collect();
        let request = Request::builder().method(&method).uri(filled.join("/"));
        let answer = server.send(request.body(Body::from("{}")).unwrap()).await;
        let code = answer.text.parse::<Value>().map(|body| body["error"]["code"].clone()).unwrap_or_default();
        assert!(
            code != "route_not_found" && code != "method_not_allowed" && answer.status != 405,
            "{method} {path}: {}",
            answer.text
        );
    }
    // Only `routes` adds a route together with its description.
    // The console's pages are not part of the API.
    let source = include_str!("../lib.rs").replacen(".merge(console::pages(", "", 1);
    assert!(!source.contains(".route(") && !source.contains(".nest(") && !source.contains(".merge("));
    assert_eq!(source.matches(".routes(").count(), source.matches(".routes(routes!(").count());
}

#[tokio::test]
async fn the_document_is_served_without_a_key_and_says_which_routes_need_one() {
    let server = guarded().await;
    let answer = server.get("/openapi.json").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["content-type"]),
        (200, &"application/json".parse().unwrap())
    );
    let document = answer.json();
    assert_eq!(document, crate::openapi_document());
    let mut open = Vec::new();
    for (method, path, operation) in operations(&document) {
        let filled: Vec<&str> =
            path.split('/').map(|part| if part.starts_with('{') { "7" } else { part }).collect();
        let request = Request::builder().method(&method).uri(filled.join("/"));
        let answer = server.send(request.body(Body::from("{}")).unwrap()).await;
        let needs_key = operation["security"] != json!([]);
        assert_eq!(answer.status == 401, needs_key, "{method} {path}: {}", answer.text);
        // Signing in needs no key beside the one that it brings, which may be wrong.
        let may_be_refused = needs_key || operation["operationId"] == "sign_in";
        assert_eq!(operation["responses"]["401"].is_object(), may_be_refused, "{method} {path}");
        if !needs_key {
            open.push(path.to_owned());
        }
    }
    assert_eq!(open, ["/ui/session", "/ui/session", "/healthz", "/readyz", "/openapi.json"]);
}

/// Makes one of everything. The fixture compares each response with the document.
#[tokio::test]
async fn responses_with_content_match_their_schemas() {
    let server = Server::start().await;
    let manifest = "name = \"echo\"\n[[trigger.http]]\nroute = \"/echo/{session}\"";
    server.host.deploy(Manifest::from_toml(manifest).unwrap(), echo(), "tester").await.unwrap();
    let messages = "/v1/agents/echo/sessions/s/messages";
    let turn = server.ok(messages, &json!({"text": "hello", "data": {"a": [1.0]}})).await.json();
    assert_eq!(server.post(messages, &json!({"text": "!"})).await.status, 500, "a trap is logged");
    assert_eq!(server.ok("/echo/s", &json!({"text": "by its route"})).await.json()["turn"], 2);
    server
        .ok(
            "/v1/chat/completions",
            &json!({"model": "agent:echo", "user": "t", "stream": true,
        "messages": [{"role": "user", "content": "as a model"}]}),
        )
        .await;
    for (path, body, status) in [
        ("/v1/events", json!({"topic": "order.paid", "data": {"n": 1}}), 202),
        ("/v1/webhooks", json!({"url": "https://example.com/hook", "topics": ["order.*"]}), 201),
        ("/v1/keys", json!({"tenant": "acme", "role": "read", "requests_per_minute": 6}), 201),
        ("/v1/held", json!({"decision": "resume"}), 409),
        ("/ai/run/tiny?queueRequest=true", json!({"prompt": "hello"}), 200),
        ("/v1/agents/echo/sessions/s/fork", json!({"session": "copy"}), 201),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text);
    }
    let secret = json!({"value": "a value of a secret", "hosts": ["https://example.com"]}).to_string();
    let set = server.send(Request::put("/v1/secrets/TOKEN").body(Body::from(secret)).unwrap()).await;
    assert_eq!(set.status, 204, "{}", set.text);
    let of_turn = format!("/v1/agents/echo/sessions/s/turns/{}", turn["turn_id"].as_str().unwrap());
    assert_eq!(server.get(&of_turn).await.json()["data"], Value::Null);
    let events = server.get(&format!("{of_turn}/events")).await;
    assert!(events.text.contains("event: turn") && events.text.contains("event: done"), "{}", events.text);
    for listing in [
        "/v1/agents",
        "/v1/agents/echo/versions",
        "/v1/agents/echo/sessions",
        "/v1/agents/echo/logs",
        "/v1/logs",
        "/v1/events",
        "/v1/webhooks",
        "/v1/secrets",
        "/v1/keys",
        "/v1/models",
    ] {
        let listed = server.get(listing).await.json();
        assert!(!listed["data"].as_array().unwrap().is_empty(), "{listing} is empty");
    }
    for one in [
        "/v1/agents/echo",
        "/v1/agents/echo/sessions/s",
        "/v1/models/agent:echo",
        "/v1/held",
        "/readyz",
        "/metrics",
    ] {
        assert_eq!(server.get(one).await.status, 200, "{one}");
    }
    let missing = server.get("/v1/agents/nobody").await;
    assert_eq!((missing.status.as_u16(), &missing.error()["code"]), (404, &json!("agent_not_found")));
}

#[test]
fn a_response_that_is_not_described_is_found() {
    let answer = |status: u16, body: Value| {
        let headers: HeaderMap =
            [("content-type".parse().unwrap(), "application/json".parse().unwrap())].into_iter().collect();
        TestResponse { status: StatusCode::from_u16(status).unwrap(), headers, text: body.to_string() }
    };
    let session = json!({"object": "session", "id": "s", "turns": 1, "created_at_ms": 2, "updated_at_ms": 3});
    let page = |session: Value| json!({"object": "list", "data": [session], "has_more": false});
    let changed = |name: &str, value: Value| {
        let mut session = session.clone();
        session[name] = value;
        page(session)
    };
    let of = |answer| compare(&Method::GET, "/v1/agents/a/sessions", &answer);
    assert_eq!(of(answer(200, page(session.clone()))), Ok(()));
    for (wrong, why) in [
        (answer(418, json!({})), "has no response"),
        (answer(200, json!({"object": "list", "data": []})), "has_more"),
        (answer(200, changed("turns", json!("1"))), "/data/0/turns"),
        (answer(200, changed("surprise", json!(1))), "surprise"),
        (answer(404, json!({"message": "no"})), "error"),
    ] {
        let text = wrong.text.clone();
        let error = of(wrong).expect_err(&text);
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn responses_that_are_hard_to_provoke_match_their_schemas() {
    let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let approval = skep_api::Approval {
        object: skep_api::marker::Approval,
        id: "a".to_owned(),
        agent: "b".to_owned(),
        session: "c".to_owned(),
        turn_id: "d".to_owned(),
        tool: "e".to_owned(),
        arguments: json!({}),
        created_at_ms: 1,
        expires_at_ms: 2,
        decision: None,
    };
    let decided = skep_api::Approval { decision: Some(skep_api::Decision::Deny), ..approval.clone() };
    let dead = skep_api::DeadLetter {
        object: skep_api::marker::DeadLetter,
        id: 1,
        event_id: "a".to_owned(),
        topic: "b".to_owned(),
        at_ms: 1,
        agent: None,
        session: None,
        webhook: Some("c".to_owned()),
        attempts: 3,
        error: "d".to_owned(),
    };
    for (name, value) in
        [("Approval", json!(approval)), ("Approval", json!(decided)), ("DeadLetter", json!(dead))]
    {
        assert_eq!(valid(&schema(name), &value), Ok(()), "{name}");
    }
    for timing in [
        ScheduleTiming::At { at_ms: 1 },
        ScheduleTiming::Every { every_ms: 2 },
        ScheduleTiming::Cron { cron: "0 3 * * *".to_owned(), time_zone: "UTC".to_owned() },
    ] {
        let schedule = Schedule {
            object: skep_api::marker::Schedule,
            id: "a".to_owned(),
            agent: "b".to_owned(),
            session: "c".to_owned(),
            name: "d".to_owned(),
            manifest: true,
            timing,
            data: None::<Value>,
            state: ScheduleState::Held,
            due_at_ms: 1,
            attempt: 0,
            tries: 3,
            last_error: None,
        };
        assert_eq!(valid(&schema("Schedule"), &json!(schedule)), Ok(()), "{schedule:?}");
    }
    let event = json!({"event": "approval_required", "data": {"id": "a", "tool": "b", "arguments": [], "expires_at_ms": 1}});
    assert_eq!(valid(&schema("TurnEvent"), &event), Ok(()));
}

#[tokio::test]
async fn a_route_of_openai_that_does_not_exist_here_is_named_as_such() {
    let server = Server::start().await;
    for (method, path) in [
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/v1/responses/compact/now"),
        (Method::GET, "/v1/fine_tuning/jobs/ftjob-1"),
        (Method::POST, "/v1/audio/transcriptions"),
        (Method::GET, "/v1/chat/completions/chatcmpl-1"),
    ] {
        let request = Request::builder().method(&method).uri(path).body(Body::from("{}")).unwrap();
        let answer = server.send(request).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!("route_not_implemented")));
        let message = answer.error()["message"].to_string();
        assert!(message.contains("Skep does not implement") && message.contains(path), "{message}");
        assert!(
            message.contains("POST /v1/chat/completions, POST /v1/completions, GET /v1/models"),
            "{message}"
        );
    }
    for path in ["/v1/nothing", "/nothing/here", "/v1/filesystem"] {
        let answer = server.get(path).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["code"]),
            (404, &json!("route_not_found")),
            "{path}"
        );
    }
}
