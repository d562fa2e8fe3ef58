//! Tests batches of `/ai/run/{model}`: queueing, fetching, cancelling, and refusals.

use super::{
    fixture::{Server, TestResponse},
    workers_ai::{failure, result},
};
use axum::{body::Body, http::Request};
use serde_json::{Value, json};

const QUEUE: &str = "/ai/run/tiny?queueRequest=true";

fn prompt(text: &str, extra: Value) -> Value {
    let mut body = json!({"prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Queues a batch and waits until it is done.
async fn answered(server: &Server, body: &Value) -> Value {
    let queued = result(&server.ok(QUEUE, body).await);
    assert_eq!((&queued["status"], &queued["model"]), (&json!("queued"), &json!("tiny")));
    fetched(server, &queued["request_id"]).await
}

async fn fetched(server: &Server, id: &Value) -> Value {
    loop {
        let answer = result(&server.ok("/ai/run/tiny", &json!({"request_id": id})).await);
        if answer.get("responses").is_some() {
            return answer;
        }
        assert!(["queued", "running"].contains(&answer["status"].as_str().unwrap()), "{answer}");
        assert_eq!(&answer["request_id"], id);
        tokio::task::yield_now().await;
    }
}

async fn delete(server: &Server, path: &str) -> TestResponse {
    server.send(Request::delete(path).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn each_request_of_a_batch_is_answered_in_its_own_schema() {
    let server = Server::start().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                        "additionalProperties": false});
    let form =
        json!({"response_format": {"type": "json_schema", "json_schema": schema}, "ignore_eos": false});
    let mut whole = prompt("is it?", form.clone());
    whole["max_tokens"] = json!(60);
    let requests = json!([
        prompt("hello", json!({"external_reference": "mine"})),
        {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0,
         "ignore_eos": true},
        whole,
        prompt("cut off", form),
        prompt("x", json!({"max_tokens": 1_000_000})),
    ]);
    let answer = answered(&server, &json!({ "requests": requests })).await;
    let responses = answer["responses"].as_array().unwrap();
    let ids: Vec<u64> = responses.iter().map(|response| response["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4]);
    let ends: Vec<bool> = responses.iter().map(|response| response["success"].as_bool().unwrap()).collect();
    assert_eq!(ends, [true, true, true, false, false]);
    let now = result(&server.ok("/ai/run/tiny", &requests[0]).await);
    assert_eq!(responses[0]["result"]["response"], now["response"], "the same answer as without a batch");
    assert_eq!(responses[0]["external_reference"], "mine");
    assert_eq!(responses[1]["result"]["choices"][0]["message"]["content"], now["response"]);
    assert!(responses[1].get("external_reference").is_none());
    assert!(responses[2]["result"]["response"]["ok"].is_boolean(), "{answer}");
    assert_eq!(
        (&responses[3]["error"]["code"], &responses[4]["error"]["code"]),
        (&json!(5024), &json!(5021))
    );
    let usage = answer["usage"]["completion_tokens"].as_u64().unwrap();
    let used = |at: usize| responses[at]["result"]["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage, used(0) + used(1) + used(2) + 4, "tokens of a cut-off answer count, too");
}

#[tokio::test]
async fn a_single_request_can_be_queued_as_a_batch() {
    let server = Server::start().await;
    for body in [
        prompt("hello", json!({"options": {"queueRequest": true}})),
        prompt("hello", json!({"queueRequest": true})),
    ] {
        let queued = result(&server.ok("/ai/run/@cf/meta/tiny", &body).await);
        let answer = fetched(&server, &queued["request_id"]).await;
        assert_eq!(answer["responses"].as_array().unwrap().len(), 1);
        assert_eq!(answer["responses"][0]["success"], true);
    }
}

#[tokio::test]
async fn a_batch_reports_its_status_and_can_be_cancelled() {
    let server = Server::start().await;
    let long = prompt("hello", json!({"max_tokens": 1000}));
    let requests: Vec<&Value> = std::iter::repeat_n(&long, 40).collect();
    let queued = result(&server.ok(QUEUE, &json!({ "requests": requests })).await);
    let path = format!("/ai/batches/{}", queued["request_id"].as_str().unwrap());
    let standing = result(&server.get(&path).await);
    assert_eq!(standing["items"]["total"], 40, "{standing}");
    let cancelled = result(&delete(&server, &path).await);
    assert_eq!((&cancelled["status"], &cancelled["items"]["waiting"]), (&json!("cancelled"), &json!(0)));
    let answer = fetched(&server, &queued["request_id"]).await;
    assert!(answer["responses"].as_array().unwrap().iter().any(|response| response["error"]["code"] == 3008));
    assert_eq!(
        result(&delete(&server, &path).await)["status"],
        "cancelled",
        "cancelling twice is the same as once"
    );
}

#[tokio::test]
async fn a_batch_with_an_invalid_request_is_refused_and_the_field_is_named() {
    let server = Server::start().await;
    let large = prompt(&"x".repeat(10_000_000), json!({}));
    for (path, body, status, code, pointer) in [
        (QUEUE, json!({"requests": []}), 400, 5006, Value::Null),
        (QUEUE, json!({"requests": 7}), 400, 5006, json!("requests")),
        (QUEUE, json!({"requests": [prompt("a", json!({})), {}]}), 400, 5006, json!("requests[1].prompt")),
        (
            QUEUE,
            json!({"requests": [prompt("a", json!({"stream": true}))]}),
            400,
            5006,
            json!("requests[0].stream"),
        ),
        (
            QUEUE,
            json!({"requests": [prompt("a", json!({"external_reference": 7}))]}),
            400,
            5006,
            json!("requests[0].external_reference"),
        ),
        (QUEUE, json!({"requests": [{"messages": [], "n": 17}]}), 400, 5006, json!("requests[0].n")),
        (QUEUE, large, 413, 3006, Value::Null),
        ("/ai/run/tiny", json!({"requests": [prompt("a", json!({}))]}), 400, 5006, json!("requests")),
        ("/ai/run/tiny", json!({"request_id": "none"}), 404, 404, Value::Null),
        ("/ai/run/agent:none?queueRequest=true", prompt("a", json!({})), 400, 5007, Value::Null),
        ("/ai/run/agent:none", prompt("a", json!({})), 400, 5007, Value::Null),
    ] {
        let (found, error) = failure(&server.post(path, &body).await);
        assert_eq!(
            (found, &error["code"], &error["source"]["pointer"]),
            (status, &json!(code), &pointer),
            "{error}"
        );
    }
    let (_, unknown) = failure(&server.post("/ai/run/agent:none", &prompt("a", json!({}))).await);
    assert!(unknown["message"].as_str().unwrap().starts_with("agent \"none\" is not deployed"), "{unknown}");
    for answer in [server.get("/ai/batches/none").await, delete(&server, "/ai/batches/none").await] {
        assert_eq!(failure(&answer).0, 404);
    }
}
