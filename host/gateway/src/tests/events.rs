//! Tests schedules, events and webhooks over HTTP.

use super::fixture::Server;
use axum::{body::Body, http::Request};
use serde_json::json;

#[tokio::test]
async fn events_are_accepted_in_both_formats_and_only_once() {
    let server = Server::start().await;
    let plain = json!({"topic": "order.paid", "id": "1", "data": {"n": 1}, "time": "2026-11-21T10:40:18Z"});
    let answer = server.post("/v1/events", &plain).await;
    assert_eq!((answer.status.as_u16(), answer.json()["state"].clone()), (202, json!("accepted")));
    let again = server.post("/v1/events", &plain).await;
    assert_eq!((again.status.as_u16(), again.json()["state"].clone()), (200, json!("known")));
    let cloud = json!({
        "specversion": "1.0", "id": "1", "source": "/shop", "type": "order.sent", "datacontenttype": "application/json",
        "data": [1], "extension": true,
    });
    assert_eq!(server.post("/v1/events", &cloud).await.status, 202);
    let listed = server.get("/v1/events?limit=1").await.json();
    let newest = &listed["data"][0];
    assert_eq!((&newest["topic"], &newest["source"]), (&json!("order.sent"), &json!("/shop")));
    let older = server.get(&format!("/v1/events?before={}", newest["key"])).await.json();
    assert_eq!(
        (&older["data"][0]["at_ms"], &older["data"][1]),
        (&json!(1_795_257_618_000_u64), &json!(null))
    );
}

#[tokio::test]
async fn an_invalid_event_is_refused_and_the_error_names_the_field() {
    let server = Server::start().await;
    for (body, code, word) in [
        (json!({"data": 1}), 400, "topic"),
        (json!({"topic": "a", "tpoic": "b"}), 400, "tpoic"),
        (json!({"topic": "a b"}), 400, "is not a valid topic"),
        (json!({"topic": "skep.turn.done"}), 400, "reserved for the host"),
        (json!({"topic": "a", "time": "yesterday"}), 400, "RFC 3339"),
        (json!({"specversion": "0.3", "id": "1", "source": "s", "type": "t"}), 400, "CloudEvents 1.0"),
        (
            json!({"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data_base64": "aa"}),
            400,
            "data_base64",
        ),
    ] {
        let answer = server.post("/v1/events", &body).await;
        assert_eq!(answer.status.as_u16(), code, "{body}");
        assert!(answer.error()["message"].as_str().unwrap().contains(word), "{}", answer.text);
    }
}

#[tokio::test]
async fn nobody_publishes_under_the_source_of_the_host() {
    let server = Server::start().await;
    for topic in ["skep.turn.done", "cf.workersAi.model.batch.queued", "order.paid"] {
        let plain = json!({"topic": topic, "id": "1", "source": "skep"});
        let cloud = json!({"specversion": "1.0", "id": "1", "source": "skep", "type": topic});
        for body in [plain, cloud] {
            let answer = server.post("/v1/events", &body).await;
            assert_eq!(answer.status.as_u16(), 400, "{body}: {}", answer.text);
            assert_eq!(answer.error()["param"], "source", "{body}: {}", answer.text);
        }
    }
    assert_eq!(server.get("/v1/events").await.json()["data"], json!([]));
}

#[tokio::test]
async fn a_webhook_can_be_added_listed_without_its_secret_and_removed() {
    let server = Server::start().await;
    let body = json!({"url": "https://example.com/hook", "topics": ["order.*"]});
    let added = server.post("/v1/webhooks", &body).await;
    assert_eq!(added.status, 201, "{}", added.text);
    assert!(added.json()["secret"].as_str().unwrap().starts_with("whsec_"));
    let listed = server.get("/v1/webhooks").await.json();
    assert_eq!(listed["data"][0]["topics"], json!(["order.*"]));
    assert!(listed["data"][0].get("secret").is_none());
    let stands = |key: &str| listed["data"][0][key].clone();
    assert_eq!(
        (stands("last_try"), stands("waiting"), stands("next_try_at_ms")),
        (json!(null), json!(0), json!(null))
    );
    assert_eq!(server.post("/v1/webhooks/wh_none/test", &json!(null)).await.status, 404);
    let private =
        server.post("/v1/webhooks", &json!({"url": "http://127.0.0.1/hook", "topics": ["*"]})).await;
    assert_eq!((private.status.as_u16(), private.error()["code"].clone()), (400, json!("invalid_webhook")));
    assert!(private.text.contains("allow_private"), "{}", private.text);
    let path = format!("/v1/webhooks/{}", added.json()["id"].as_str().unwrap());
    let remove = async || server.send(Request::delete(&path).body(Body::empty()).unwrap()).await.status;
    assert_eq!(remove().await, 204);
    assert_eq!(remove().await, 404);
    let wrong = server.post("/v1/webhooks", &json!({"url": "ftp://x", "topics": ["*"]})).await;
    assert_eq!((wrong.status.as_u16(), wrong.error()["code"].clone()), (400, json!("invalid_webhook")));
    let wrong = server.post("/v1/webhooks", &json!({"url": "https://x", "topics": ["or*"]})).await;
    assert_eq!(wrong.error()["param"], "topics[0]");
}

#[tokio::test]
async fn unknown_schedules_and_dead_letters_are_404() {
    let server = Server::start().await;
    assert_eq!(server.get("/v1/schedules").await.json()["data"], json!([]));
    assert_eq!(server.get("/v1/schedules?agent=nobody").await.status, 404);
    assert_eq!(server.post("/v1/agents/nobody/schedules/x/run", &json!(null)).await.status, 404);
    assert_eq!(server.get("/v1/webhooks/dead-letters").await.json()["data"], json!([]));
    assert_eq!(server.post("/v1/webhooks/dead-letters/7/redeliver", &json!(null)).await.status, 404);
}
