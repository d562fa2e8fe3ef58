//! Sessions over HTTP: pages of messages, copies, exports and imports.

use super::{
    fixture::{Server, TestResponse},
    turns::echo,
};
use axum::{body::Body, http::Request};
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, Transcript};
use skep_runtime::{Manifest, PortableConversation, PortableSession, SessionSummary};

const SESSION: &str = "/v1/agents/echo/sessions/s";

/// Starts a server whose agent has the session `s`, with a state value and a conversation.
async fn server() -> Server {
    let server = Server::start().await;
    let manifest = Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
    let mut transcript = Transcript::new();
    transcript.set_system("Be brief.");
    for text in ["one", "two", "three"] {
        transcript.push(ChatMessage::user(text));
    }
    let session = PortableSession {
        summary: SessionSummary { id: "s".into(), turns: 3, created_at_ms: 5, updated_at_ms: 6 },
        state: [("key".to_owned(), vec![0, 255, 7])].into(),
        conversations: vec![PortableConversation {
            name: "main".into(),
            model: "tiny".into(),
            digest: None,
            transcript,
        }],
    };
    server.host.import_session("echo", session, false).await.unwrap();
    server
}

async fn put(server: &Server, path: &str, body: &Value) -> TestResponse {
    server.send(Request::put(path).body(Body::from(body.to_string())).unwrap()).await
}

#[tokio::test]
async fn messages_are_returned_in_pages_with_their_numbers() {
    let server = server().await;
    let page = async |query: &str| server.get(&format!("{SESSION}/messages{query}")).await;
    let first = page("?limit=3").await.json();
    assert_eq!((&first["has_more"], &first["total"]), (&json!(true), &json!(4)));
    assert_eq!(first["data"][0], json!({"role": "system", "content": "Be brief.", "number": 1}));
    let detail = server.get(SESSION).await.json();
    let conversation = &detail["conversations"][0];
    assert_eq!(
        (&conversation["name"], &conversation["model"], &conversation["messages"], &detail["has_more"]),
        (&json!("main"), &json!("tiny"), &json!(4), &json!(false))
    );
    let rest = page("?conversation=main&after=3").await.json();
    assert_eq!(rest["data"], json!([{"role": "user", "content": "three", "number": 4}]));
    assert_eq!(rest["has_more"], false);
    for (query, status, code) in
        [("?limit=0", 400, "invalid_value"), ("?conversation=side", 404, "conversation_not_found")]
    {
        let refused = page(query).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (status, &json!(code)), "{query}");
    }
}

#[tokio::test]
async fn dot_segments_are_not_valid_session_ids() {
    let server = server().await;
    for id in [".", "..", "%2e", "%2e%2e", "%2E."] {
        let path = format!("/v1/agents/echo/sessions/{id}/messages");
        let refused = server.post(&path, &json!({"text": "hi"})).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.error()["code"]),
            (400, &json!("invalid_name")),
            "{id}"
        );
        let message = refused.error()["message"].to_string();
        assert!(message.contains("neither . nor .."), "{message}");
    }
    let fork = server.post(&format!("{SESSION}/fork"), &json!({"session": ".."})).await;
    assert_eq!((fork.status.as_u16(), &fork.error()["code"]), (400, &json!("invalid_name")));
}

#[tokio::test]
async fn a_fork_is_a_new_session_and_forking_twice_is_a_conflict() {
    let server = server().await;
    let path = format!("{SESSION}/fork");
    let fork = server.post(&path, &json!({"session": "copy"})).await;
    assert_eq!((fork.status.as_u16(), &fork.json()["turns"]), (201, &json!(3)), "{}", fork.text);
    assert_eq!(fork.headers["location"], "/v1/agents/echo/sessions/copy");
    assert_eq!(server.get("/v1/agents/echo/sessions/copy").await.json()["state_keys"], json!(["key"]));
    let again = server.post(&path, &json!({"session": "copy"})).await;
    assert_eq!((again.status.as_u16(), &again.error()["code"]), (409, &json!("session_exists")));
    let lost = server.post("/v1/agents/echo/sessions/nobody/fork", &json!({"session": "x"})).await;
    assert_eq!((lost.status.as_u16(), &lost.error()["code"]), (404, &json!("session_not_found")));
    assert_eq!(server.post(&path, &json!({"name": "x"})).await.status, 400);
}

#[tokio::test]
async fn an_exported_document_is_imported_unchanged() {
    let server = server().await;
    let exported = server.get(&format!("{SESSION}/export")).await.json();
    assert_eq!((&exported["format"], &exported["version"]), (&json!("skep.session"), &json!(1)));
    assert_eq!((&exported["state"], &exported["turns"]), (&json!({"key": "AP8H"}), &json!(3)));
    assert_eq!(exported["conversations"][0]["transcript"]["messages"].as_array().unwrap().len(), 4);

    let refused = put(&server, SESSION, &exported).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (409, &json!("session_exists")));
    assert_eq!(put(&server, &format!("{SESSION}?replace=true"), &exported).await.status, 201);
    let other = put(&server, "/v1/agents/echo/sessions/other", &exported).await;
    assert_eq!((other.status.as_u16(), &other.json()["id"]), (201, &json!("other")), "{}", other.text);
    let again = server.get("/v1/agents/echo/sessions/other/export").await.json();
    for field in ["state", "conversations", "turns", "created_at_ms"] {
        assert_eq!(again[field], exported[field], "{field}");
    }
}

#[tokio::test]
async fn a_session_of_another_agent_is_imported_only_on_request() {
    let server = server().await;
    let exported = server.get(&format!("{SESSION}/export")).await.json();
    let manifest = Manifest::from_toml("name = \"other\"").unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
    let path = "/v1/agents/other/sessions/s";
    for query in ["", "?from_other_agent=false", "?replace=true"] {
        let refused = put(&server, &format!("{path}{query}"), &exported).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (409, &json!("other_agent")));
        let message = refused.error()["message"].as_str().unwrap().to_owned();
        assert!(
            message.contains("from agent \"echo\"") && message.contains("--from-other-agent"),
            "{message}"
        );
        assert_eq!(server.get(path).await.status, 404);
    }
    let taken = put(&server, &format!("{path}?from_other_agent=true"), &exported).await;
    assert_eq!(taken.status, 201, "{}", taken.text);
    assert_eq!(server.get(&format!("{path}/export")).await.json()["agent"], "other");
}

#[tokio::test]
async fn errors_in_a_document_are_described() {
    let server = server().await;
    let right = server.get(&format!("{SESSION}/export")).await.json();
    for (change, status, expected) in [
        (json!({"format": "x"}), 400, "`format` is \"x\""),
        (json!({"version": 2}), 400, "imports version 1"),
        (json!({"state": {"key": "%"}}), 400, "not base64"),
        (json!({"surprise": 1}), 400, "unknown field `surprise`"),
        (json!({"turns": 0}), 422, "turns is 0"),
        (
            json!({"conversations": [{"name": "main", "model": "other", "transcript":
                right["conversations"][0]["transcript"]}]}),
            422,
            "\"main\": no model is called `other`",
        ),
    ] {
        let mut document = right.clone();
        for (name, value) in change.as_object().unwrap() {
            document[name] = value.clone();
        }
        let refused = put(&server, "/v1/agents/echo/sessions/new", &document).await;
        let message = refused.error()["message"].as_str().unwrap().to_owned();
        assert_eq!(refused.status, status, "{message}");
        assert!(message.contains(expected), "{message}");
    }
    let mut document = right;
    document["conversations"][0]["transcript"]["tokens"] = json!([1, 70_000]);
    let refused = put(&server, "/v1/agents/echo/sessions/new", &document).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (422, &json!("invalid_session")));
    assert_eq!(server.get("/v1/agents/echo/sessions/new").await.status, 404);
}

#[tokio::test]
async fn a_session_that_is_too_large_to_export_is_refused_with_its_size() {
    let server = Server::start().await;
    let manifest = Manifest::from_toml("name = \"echo\"\n[limits]\nsession_kb = 131072").unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
    let conversation = |number: usize| {
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("x".repeat(7 << 20)));
        PortableConversation { name: format!("c{number}"), model: "tiny".into(), digest: None, transcript }
    };
    let session = PortableSession {
        summary: SessionSummary { id: "s".into(), turns: 1, created_at_ms: 5, updated_at_ms: 6 },
        state: [].into(),
        conversations: (0..5).map(conversation).collect(),
    };
    server.host.import_session("echo", session, false).await.unwrap();
    let refused = server.get(&format!("{SESSION}/export")).await;
    let error = refused.error();
    assert_eq!((refused.status.as_u16(), &error["code"]), (413, &json!("session_too_large")), "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("session echo/s has "), "{error}");
}

#[tokio::test]
async fn a_session_is_warmed_without_computing_and_is_pinned_only_where_there_is_a_disk() {
    let server = server().await;
    let steps = server.engine.stats().steps;
    let warmed = server.ok(&format!("{SESSION}/warm"), &json!({})).await.json();
    assert_eq!((&warmed["object"], &warmed["session"]), (&json!("session.warmed"), &json!("s")));
    let conversation = &warmed["conversations"][0];
    assert_eq!((&conversation["name"], &conversation["read_tokens"]), (&json!("main"), &json!(0)));
    assert_eq!(conversation["skipped"], "the model has not processed any of it yet");
    assert_eq!(server.engine.stats().steps, steps);
    let lost = server.post("/v1/agents/echo/sessions/nobody/warm", &json!({})).await;
    assert_eq!((lost.status.as_u16(), &lost.error()["code"]), (404, &json!("session_not_found")));
    let disk = server.get("/v1/kv").await.json();
    assert_eq!((&disk["is_on"], &disk["pins"], &disk["read_pages"]), (&json!(false), &json!([]), &json!(0)));
    let path = format!("{SESSION}/pin");
    let pinned = server.post(&path, &json!({})).await;
    let unpinned = server.send(Request::delete(&path).body(Body::empty()).unwrap()).await;
    for refused in [pinned, unpinned] {
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (409, &json!("kv_disk_off")));
    }
}
