//! Tests batches of each endpoint, and the life of their result files.

use super::{
    batches::{Client, without_key},
    fixture::Server,
};
use crate::GatewayOptions;
use serde_json::{Value, json};
use skep_runtime::{BatchOptions, RuntimeOptions};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

/// Has requests for an endpoint answered, and returns the batch and the bodies of the answers.
async fn answered(client: &Client<'_>, endpoint: &str, bodies: &[Value]) -> (Value, Vec<Value>) {
    let line = |(index, body): (usize, &Value)| {
        let line = json!({"custom_id": index.to_string(), "method": "POST", "url": endpoint, "body": body});
        format!("{line}\n")
    };
    let file: String = bodies.iter().enumerate().map(line).collect();
    let input = client.upload(&file).await;
    let create = json!({"input_file_id": input, "endpoint": endpoint, "completion_window": "24h"});
    let created = client.post("/v1/batches", create).await.json();
    assert_eq!(created["endpoint"], endpoint, "{created}");
    let batch = client.ended(&created["id"]).await;
    assert_eq!(batch["request_counts"]["completed"], bodies.len(), "{batch}");
    let lines = client.lines(&batch["output_file_id"]).await;
    assert_eq!(lines, client.lines(&batch["output_file_id"]).await, "a file stays as it is");
    let answers = lines.into_iter().map(|mut line| line["response"]["body"].take()).collect();
    (batch, answers)
}

#[tokio::test]
async fn choices_and_log_probabilities_are_those_of_the_route() {
    let server = Server::start().await;
    let client = without_key(&server);
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
                      "ignore_eos": true, "temperature": 1, "seed": 5, "n": 3, "logprobs": true, "top_logprobs": 2});
    let (_, answers) = answered(&client, CHAT, std::slice::from_ref(&chat)).await;
    let live = server.ok(CHAT, &chat).await.json();
    assert_eq!(answers[0]["choices"], live["choices"]);
    assert_eq!(answers[0]["usage"]["completion_tokens"], 12);
    let scored = answers[0]["choices"][2]["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap();
    assert_eq!(scored.len(), 2);
    let text = json!({"model": "tiny", "prompt": ["hello, is", "it"], "max_tokens": 4, "ignore_eos": true,
                      "temperature": 1, "seed": 5, "n": 2, "logprobs": 1, "echo": true});
    let ids = json!({"model": "tiny", "prompt": [72, 105], "max_tokens": 3, "temperature": 0,
                     "response_format": {"type": "regex", "regex": "[ab]{2}"}});
    let bodies = [text, ids];
    let (batch, answers) = answered(&client, TEXT, &bodies).await;
    for (body, answer) in bodies.iter().zip(&answers) {
        let live = server.ok(TEXT, body).await.json();
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"], live["choices"]);
        assert_eq!(answer["usage"]["total_tokens"], live["usage"]["total_tokens"]);
    }
    assert_eq!(answers[0]["choices"].as_array().unwrap().len(), 4);
    assert_eq!(batch["model"], "tiny");
}

#[tokio::test]
async fn responses_continue_others_and_are_stored() {
    let server = Server::start().await;
    let client = without_key(&server);
    let body = |extra: Value| {
        let mut body =
            json!({"model": "tiny", "input": "hello, is it you?", "max_output_tokens": 6, "temperature": 0});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let first = server.ok(RESPONSES, &body(json!({}))).await.json();
    let next =
        body(json!({"previous_response_id": first["id"], "input": "and you?", "metadata": {"a": "b"}}));
    let unstored = body(json!({"store": false, "top_logprobs": 1, "truncation": "auto"}));
    let (_, answers) = answered(&client, RESPONSES, &[next.clone(), unstored]).await;
    let live = server.ok(RESPONSES, &next).await.json();
    let output = |response: &Value| response["output"][0]["content"][0]["text"].clone();
    assert_eq!(output(&answers[0]), output(&live));
    assert_eq!(answers[0]["usage"]["input_tokens"], live["usage"]["input_tokens"]);
    for (field, value) in [
        ("object", json!("response")),
        ("previous_response_id", first["id"].clone()),
        ("metadata", json!({"a": "b"})),
        ("status", live["status"].clone()),
        ("background", json!(false)),
    ] {
        assert_eq!(answers[0][field], value, "{field}");
    }
    let path = format!("{RESPONSES}/{}", answers[0]["id"].as_str().unwrap());
    let stored = server.get(&path).await.json();
    assert_eq!((&stored["output"], &stored["id"]), (&answers[0]["output"], &answers[0]["id"]));
    let items = server.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "and you?");
    let third = body(json!({"previous_response_id": answers[0]["id"], "input": "go on"}));
    let third = server.ok(RESPONSES, &third).await.json();
    let longer = third["usage"]["input_tokens"].as_u64() > live["usage"]["input_tokens"].as_u64();
    assert!(longer, "it continues the response of the batch: {third}");
    assert_eq!(answers[1]["truncation"], "auto");
    let scores = &answers[1]["output"][0]["content"][0]["logprobs"];
    assert_eq!(scores[0]["top_logprobs"].as_array().unwrap().len(), 1, "{scores}");
    let path = format!("{RESPONSES}/{}", answers[1]["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.status, 404, "it is not stored");
}

#[tokio::test]
async fn an_agent_responds_to_requests_of_a_batch() {
    let server = Server::start().await;
    let manifest = skep_runtime::Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, super::turns::echo(), "tester").await.unwrap();
    let client = without_key(&server);
    let body = json!({"model": "agent:echo", "input": "hello"});
    let (_, answers) = answered(&client, RESPONSES, &[body]).await;
    assert_eq!(answers[0]["model"], "agent:echo");
    let next = json!({"model": "agent:echo", "input": "again", "previous_response_id": answers[0]["id"]});
    let next = server.ok(RESPONSES, &next).await.json();
    assert_eq!(next["status"], "completed", "the session of the response is continued: {next}");
}

#[tokio::test]
async fn embeddings_are_refused_with_the_endpoints_that_there_are() {
    let server = Server::start().await;
    let body = json!({"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"});
    let refused = server.post("/v1/batches", &body).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!("endpoint")));
    assert!(refused.text.contains("embeddings") && refused.text.contains(RESPONSES), "{}", refused.text);
}

#[tokio::test]
async fn result_files_are_kept_as_long_as_asked_and_free_their_storage() {
    let batch = BatchOptions {
        retention: Duration::from_secs(60),
        file_retention: Duration::from_secs(7200),
        ..BatchOptions::default()
    };
    let runtime = RuntimeOptions { batch, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    let client = without_key(&server);
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2});
    let line = json!({"custom_id": "a", "method": "POST", "url": TEXT, "body": body}).to_string();
    let input = client.upload(&line).await;
    for (after, lives) in [(json!(null), 7200), (json!(3600), 3600), (json!(2_592_000), 7200)] {
        let mut create = json!({"input_file_id": input, "endpoint": TEXT, "completion_window": "24h"});
        if !after.is_null() {
            create["output_expires_after"] = json!({"anchor": "created_at", "seconds": after});
        }
        let created = client.post("/v1/batches", create).await.json();
        let batch = client.ended(&created["id"]).await;
        let path = format!("/v1/files/{}", batch["output_file_id"].as_str().unwrap());
        let file = client.get(&path).await.json();
        let life = file["expires_at"].as_u64().unwrap() - file["created_at"].as_u64().unwrap();
        assert_eq!(life, lives, "{file}");
        let bytes = async || {
            let id = created["id"].as_str().unwrap().trim_start_matches("batch_");
            server
                .store
                .batch_items(id)
                .await
                .unwrap()
                .iter()
                .map(|item| format!("{item:?}").len())
                .sum::<usize>()
        };
        let before = bytes().await;
        assert_eq!(client.delete(&path).await.json()["deleted"], true);
        assert!(bytes().await < before, "the results are gone with the last file");
        let shown = client.get(&format!("/v1/batches/{}", created["id"].as_str().unwrap())).await.json();
        assert_eq!(
            (&shown["status"], &shown["request_counts"]["completed"]),
            (&json!("completed"), &json!(1))
        );
    }
}
