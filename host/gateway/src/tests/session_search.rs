//! Searches in what was said, over HTTP.

use super::{
    access::{ask, guarded, key},
    fixture::{Server, TestResponse},
};
use axum::http::Method;
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, Transcript};
use skep_runtime::{PortableConversation, PortableSession, Role, SessionSummary};
use std::collections::BTreeMap;

/// Adds a session, given by the host's id, in which this was said.
async fn said(server: &Server, session: &str, text: &str) {
    let mut transcript = Transcript::new();
    transcript.set_system("You keep bees.");
    transcript.push(ChatMessage::user(text));
    let (model, digest) = ("tiny".to_owned(), None);
    let conversation = PortableConversation { name: "main".into(), model, digest, transcript };
    let session = PortableSession {
        summary: SessionSummary { id: session.into(), turns: 1, created_at_ms: 5, updated_at_ms: 6 },
        state: BTreeMap::new(),
        conversations: vec![conversation],
    };
    server.host.import_session("echo", session, false).await.unwrap();
}

async fn search(server: &Server, key: &str, query: &str) -> TestResponse {
    ask(server, key, Method::GET, &format!("/v1/sessions?{query}"), Value::Null).await
}

/// Returns the ids of the sessions that a search finds.
async fn found(server: &Server, key: &str, query: &str) -> Vec<String> {
    let answer = search(server, key, query).await;
    assert_eq!(answer.status, 200, "{query}: {}", answer.text);
    let page = answer.json();
    assert_eq!((&page["has_more"], &page["searched_to"]), (&json!(false), &Value::Null), "{page}");
    page["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_tenant_finds_its_sessions_by_what_was_said_in_them() {
    let server = guarded().await;
    let acme = key(&server, "acme", Role::Invoke, None).await;
    let narrow = key(&server, "acme", Role::Read, Some("other")).await;
    let zenith = key(&server, "zenith", Role::Read, None).await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let metrics = key(&server, "local", Role::Metrics, None).await;
    said(&server, "acme/honey", "Where do Bees live,\nand how?").await;
    said(&server, "acme/wax", "Where is the candle?").await;
    said(&server, "zenith/wax", "Bees make wax.").await;

    let answer = search(&server, &acme, "text=LIVE%20bees").await.json();
    let [session] = &answer["data"].as_array().unwrap()[..] else { panic!("one is found: {answer}") };
    let message = json!({
        "conversation": "main", "number": 2, "role": "user", "excerpt": "Where do Bees live, and how?"
    });
    assert_eq!((&session["id"], &session["said"]), (&json!("honey"), &message));
    for (key, query, expected) in [
        (&acme, "text=where", &["wax", "honey"][..]),
        (&acme, "text=where&search=hon", &["honey"][..]),
        (&acme, "text=bees&agent=other", &[][..]),
        // The system message is the same in all sessions.
        (&acme, "text=keep", &[][..]),
        (&zenith, "text=bees", &["wax"][..]),
        (&narrow, "text=bees", &[][..]),
        (&admin, "text=bees", &["zenith/wax", "acme/honey"][..]),
        (&admin, "text=bees&tenant=acme", &["acme/honey"][..]),
    ] {
        assert_eq!(found(&server, key, query).await, expected, "{query}");
    }
    for (key, query) in [(&acme, "text=bees&tenant=zenith"), (&metrics, "text=bees")] {
        let refused = search(&server, key, query).await;
        assert_eq!(refused.status, 403, "{query}: {}", refused.text);
    }
    let listed = search(&server, &acme, "text=&limit=1").await.json();
    assert_eq!((&listed["data"][0]["id"], &listed["data"][0]["said"]), (&json!("wax"), &Value::Null));
    ask(&server, &acme, Method::DELETE, "/v1/agents/echo/sessions/honey", Value::Null).await;
    assert_eq!(found(&server, &acme, "text=where").await, ["wax"]);
}

#[tokio::test]
async fn a_search_is_read_in_pages_and_its_text_is_bounded() {
    let server = guarded().await;
    let acme = key(&server, "acme", Role::Read, None).await;
    for session in ["acme/one", "acme/two", "acme/three"] {
        said(&server, session, "bees").await;
        said(&server, &format!("{session}-other"), "wasps").await;
    }
    let (mut ids, mut before) = (Vec::new(), String::new());
    loop {
        let page = search(&server, &acme, &format!("text=bees&limit=1{before}")).await.json();
        ids.extend(page["data"].as_array().unwrap().iter().map(|one| one["id"].clone()));
        assert_eq!(page["has_more"], page["searched_to"].is_string(), "{page}");
        let Some(place) = page["searched_to"].as_str() else { break };
        before = format!("&before={place}");
    }
    assert_eq!(ids, [json!("three"), json!("two"), json!("one")]);
    for (text, why) in [
        ("%20".to_owned(), "no words"),
        ("a+".repeat(17), "17 words; at most 16"),
        ("a".repeat(257), "257 bytes; at most 256"),
    ] {
        let refused = search(&server, &acme, &format!("text={text}")).await;
        let error = refused.error();
        assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!("text")), "{error}");
        assert!(error["message"].as_str().unwrap().contains(why), "{error}");
    }
}
