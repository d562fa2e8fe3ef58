//! Tests of loads, unloads and aliases over HTTP.

use super::fixture::{Server, TestResponse, tiny_engine};
use serde_json::{Value, json};
use skep_engine::{LoadProgress, LocalModel};
use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

fn declared(name: &'static str) -> LocalModel {
    LocalModel::new(name, "cpu", move |_: &LoadProgress| Ok(tiny_engine(name)))
}

fn change(model: &str, action: &str) -> Value {
    json!({"model": model, "action": action, "wait": true})
}

async fn state(server: &Server, model: &str) -> Value {
    server.get(&format!("/v1/models/{model}")).await.json()["skep"].take()
}

async fn chat(server: &Server, model: &str) -> TestResponse {
    let messages = json!([{"role": "user", "content": "hello"}]);
    server.post("/v1/chat/completions", &json!({"model": model, "messages": messages, "max_tokens": 2})).await
}

#[tokio::test]
async fn a_model_is_loaded_by_its_first_request_and_unloaded_on_demand() {
    let server = Server::with_models(vec![declared("big")]).await;
    assert_eq!(state(&server, "big").await["state"], "unloaded");
    assert_eq!(chat(&server, "big").await.json()["model"], "big");
    let loaded = state(&server, "big").await;
    assert_eq!((&loaded["state"], &loaded["is_default"]), (&json!("loaded"), &json!(false)));
    assert_eq!(loaded["sampling"]["temperature"], 1.0);
    let unloaded = server.ok("/v1/models", &change("big", "unload")).await.json();
    assert_eq!((&unloaded["id"], &unloaded["skep"]["state"]), (&json!("big"), &json!("unloaded")));
    let loaded = server.ok("/v1/models", &change("big", "load")).await.json();
    assert_eq!(loaded["skep"]["state"], "loaded");
    for path in ["/ai/run/big", "/ai/run/@cf/vendor/big"] {
        server.ok("/v1/models", &change("big", "unload")).await;
        server.ok(path, &json!({"prompt": "hello", "max_tokens": 2})).await;
    }
    server.ok("/v1/models", &change("big", "unload")).await;
    server.ok("/v1/completions", &json!({"model": "big", "prompt": "a", "max_tokens": 2})).await;
}

#[tokio::test]
async fn a_request_that_waits_too_long_for_a_load_gets_a_retry_delay() {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let slow = LocalModel::new("slow", "cpu", move |progress: &LoadProgress| {
        progress.begin("reading", Some(4));
        progress.advance_to(1);
        held.lock().unwrap().recv().unwrap();
        Ok(tiny_engine("slow"))
    });
    let slow = LocalModel { load_wait: Duration::from_millis(50), ..slow };
    let server = Server::with_models(vec![slow]).await;
    let refused = chat(&server, "slow").await;
    assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (503, &json!("model_loading")));
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    let loading = state(&server, "slow").await;
    assert_eq!((&loading["message"], &loading["percent"]), (&json!("reading"), &json!(25)));
    let begun = server.post("/v1/models", &json!({"model": "slow", "action": "load"})).await;
    assert_eq!(begun.status, 202, "{}", begun.text);
    release.send(()).unwrap();
    server.ok("/v1/models", &change("slow", "load")).await;
    assert_eq!(chat(&server, "slow").await.status, 200);
}

#[tokio::test]
async fn a_load_that_fails_and_changes_that_cannot_be_made_are_errors_that_say_why() {
    let broken = LocalModel::new("broken", "cpu", |_: &LoadProgress| Err("it does not fit".to_owned()));
    let server = Server::with_models(vec![broken]).await;
    for answer in [chat(&server, "broken").await, server.post("/v1/models", &change("broken", "load")).await]
    {
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (503, &json!("model_unloaded")));
        assert!(answer.text.contains("it does not fit"), "{}", answer.text);
    }
    assert_eq!(state(&server, "broken").await["state"], "failed");
    for (body, status, expected) in [
        (change("nowhere", "load"), 404, "model_not_found"),
        (change("tiny", "unload"), 400, "stays loaded"),
        (change("tiny", "alias"), 400, "`alias` is missing"),
        (json!({"model": "tiny", "action": "load", "alias": "x"}), 400, "only for the action"),
        (json!({"model": "tiny", "action": "alias", "alias": "a/b"}), 400, "contains"),
        (json!({"model": "tiny", "action": "alias", "alias": "broken"}), 400, "is the name of a model"),
        (json!({"model": "broken", "action": "unload", "drain_s": 100_000}), 400, "drain_s"),
    ] {
        let answer = server.post("/v1/models", &body).await;
        assert_eq!(answer.status, status, "{}", answer.text);
        assert!(answer.text.contains(expected), "{}", answer.text);
    }
}

#[tokio::test]
async fn an_alias_names_the_model_that_it_points_at_now() {
    let server = Server::with_models(vec![declared("other")]).await;
    for model in ["tiny", "other"] {
        server.ok("/v1/models", &json!({"model": model, "action": "alias", "alias": "fast"})).await;
        assert_eq!(chat(&server, "fast").await.json()["model"], model);
        let shown = server.get("/v1/models/fast").await.json();
        assert_eq!((&shown["id"], &shown["skep"]["aliases"]), (&json!(model), &json!(["fast"])));
    }
    assert_eq!(state(&server, "tiny").await["aliases"], json!([]));
}
