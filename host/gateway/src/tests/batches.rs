//! Tests `/v1/files` and `/v1/batches`.

use super::{
    access::{guarded, key},
    fixture::{Server, TestResponse},
};
use crate::GatewayOptions;
use axum::{
    body::Body,
    http::{Method, Request},
};
use serde_json::{Value, json};
use skep_runtime::{BatchOptions, Role, RuntimeOptions};
use std::time::Duration;

const FORM: &str = "multipart/form-data; boundary=cut";
const CHAT: &str = "/v1/chat/completions";

/// A caller of a server.
pub(super) struct Client<'a> {
    server: &'a Server,
    key: Option<String>,
}

impl Client<'_> {
    async fn send(&self, method: Method, path: &str, kind: &str, body: impl Into<Body>) -> TestResponse {
        let mut request = Request::builder().method(method).uri(path).header("content-type", kind);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        self.server.send(request.body(body.into()).unwrap()).await
    }

    pub(super) async fn get(&self, path: &str) -> TestResponse {
        self.send(Method::GET, path, "application/json", "").await
    }

    pub(super) async fn delete(&self, path: &str) -> TestResponse {
        self.send(Method::DELETE, path, "application/json", "").await
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> TestResponse {
        self.send(Method::POST, path, "application/json", body.to_string()).await
    }

    pub(super) async fn upload(&self, content: &str) -> String {
        let answer = self.form(&[("purpose", "batch")], Some(content)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    async fn form(&self, fields: &[(&str, &str)], file: Option<&str>) -> TestResponse {
        let part = |(name, value): &(&str, &str)| {
            format!("--cut\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        let fields: String = fields.iter().map(part).collect();
        let file = file.map_or_else(String::new, |file| {
            format!(
                "--cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"requests.jsonl\"\r\n\
                 content-type: application/jsonl\r\n\r\n{file}\r\n"
            )
        });
        self.send(Method::POST, "/v1/files", FORM, format!("{fields}{file}--cut--\r\n")).await
    }

    async fn create(&self, file: &str) -> TestResponse {
        let body = json!({"input_file_id": file, "endpoint": CHAT, "completion_window": "24h",
                          "metadata": {"night": "7"}});
        self.post("/v1/batches", body).await
    }

    /// Waits until a batch has ended.
    pub(super) async fn ended(&self, id: &Value) -> Value {
        let path = format!("/v1/batches/{}", id.as_str().unwrap());
        loop {
            let batch = self.get(&path).await.json();
            if batch["status"] != "in_progress" && batch["status"] != "cancelling" {
                return batch;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the lines of a file.
    pub(super) async fn lines(&self, id: &Value) -> Vec<Value> {
        let content = self.get(&format!("/v1/files/{}/content", id.as_str().unwrap())).await;
        assert_eq!(
            (content.status.as_u16(), &content.headers["content-type"]),
            (200, &"application/octet-stream".parse().unwrap())
        );
        content.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub(super) fn without_key(server: &Server) -> Client<'_> {
    Client { server, key: None }
}

pub(super) fn with_key<'a>(server: &'a Server, key: &str) -> Client<'a> {
    Client { server, key: Some(key.to_owned()) }
}

fn line(id: &str, more: Value) -> String {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
                          "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"custom_id": id, "method": "POST", "url": CHAT, "body": body}).to_string() + "\n"
}

#[tokio::test]
async fn a_batch_is_answered_into_an_output_file_and_an_error_file() {
    let server = Server::start().await;
    let client = without_key(&server);
    let too_long = "a b ".repeat(5_000);
    let file = line("one", json!({}))
        + &line("long", json!({"messages": [{"role": "user", "content": too_long}]}))
        + "\n"
        + &line("two", json!({"store": true}));
    let input = client.upload(&file).await;
    let created = client.create(&input).await;
    assert_eq!(created.headers["x-skep-ignored"], "body.store");
    let created = created.json();
    assert_eq!((&created["object"], &created["status"]), (&json!("batch"), &json!("in_progress")));
    assert_eq!(
        (&created["request_counts"]["total"], &created["metadata"]),
        (&json!(3), &json!({"night": "7"}))
    );
    assert_eq!(created["expires_at"].as_u64().unwrap(), created["created_at"].as_u64().unwrap() + 86_400);
    let batch = client.ended(&created["id"]).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 2, "failed": 1}));
    assert_eq!((&batch["input_file_id"], &batch["model"]), (&json!(input), &json!("tiny")));
    assert!(batch["completed_at"].as_u64() >= batch["in_progress_at"].as_u64());
    let answers = client.lines(&batch["output_file_id"]).await;
    let ids: Vec<&Value> = answers.iter().map(|line| &line["custom_id"]).collect();
    assert_eq!(ids, ["one", "two"]);
    let now: Value = serde_json::from_str(&line("x", json!({}))).unwrap();
    let now = server.ok(CHAT, &now["body"]).await.json();
    let response = &answers[0]["response"];
    assert_eq!((&response["status_code"], &answers[0]["error"]), (&json!(200), &Value::Null));
    assert_eq!(response["body"]["object"], "chat.completion");
    assert_eq!(response["body"]["choices"], now["choices"]);
    let errors = client.lines(&batch["error_file_id"]).await;
    assert_eq!((errors.len(), &errors[0]["custom_id"]), (1, &json!("long")));
    assert_eq!(errors[0]["response"]["status_code"], 400, "{}", errors[0]);
    assert_eq!(errors[0]["response"]["body"]["error"]["code"], "context_length_exceeded");
    // The results are files, with a size that is known.
    let output = format!("/v1/files/{}", batch["output_file_id"].as_str().unwrap());
    let shown = client.get(&output).await.json();
    assert_eq!((&shown["purpose"], &shown["object"]), (&json!("batch_output"), &json!("file")));
    assert_eq!(shown["bytes"], client.get(&format!("{output}/content")).await.text.len());
    let listed = client.get("/v1/files").await.json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 3, "{listed}");
    let first = client.get("/v1/files?order=asc&limit=1").await.json();
    assert_eq!((&first["data"][0]["id"], &first["has_more"]), (&json!(input), &json!(true)));
    let rest = client.get(&format!("/v1/files?order=asc&after={input}&purpose=batch_output")).await.json();
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (2, &json!(false)));
    assert_eq!(client.delete(&output).await.json()["deleted"], true);
    for gone in [
        client.get(&output).await,
        client.get(&format!("{output}/content")).await,
        client.delete(&output).await,
    ] {
        assert_eq!((gone.status.as_u16(), &gone.error()["code"]), (404, &json!("file_not_found")));
    }
    let batch = client.ended(&created["id"]).await;
    assert!(batch.get("output_file_id").is_none() && batch["error_file_id"].is_string(), "{batch}");
}

#[tokio::test]
async fn a_file_with_errors_becomes_a_failed_batch_that_names_the_lines() {
    let server = Server::start().await;
    let client = without_key(&server);
    let file = line("a", json!({})) + "{\n" + &line("a", json!({})) + &line("b", json!({"temperature": 9}));
    let input = client.upload(&file).await;
    let batch = client.create(&input).await.json();
    assert_eq!((&batch["status"], &batch["request_counts"]["total"]), (&json!("failed"), &json!(0)));
    assert!(batch["failed_at"].is_u64() && batch.get("output_file_id").is_none(), "{batch}");
    let errors = batch["errors"]["data"].as_array().unwrap();
    let found: Vec<_> =
        errors.iter().map(|error| (&error["line"], &error["code"], &error["param"])).collect();
    assert_eq!(
        found,
        [
            (&json!(2), &json!("invalid_json"), &Value::Null),
            (&json!(3), &json!("duplicate_custom_id"), &json!("custom_id")),
            (&json!(4), &json!("invalid_value"), &json!("body.temperature")),
        ]
    );
    assert!(errors[2]["message"].as_str().unwrap().starts_with("line 4: temperature is 9"), "{}", errors[2]);
    assert_eq!(client.ended(&batch["id"]).await, batch, "it is kept");
    for (body, status, param) in [
        (json!({"endpoint": CHAT, "completion_window": "24h"}), 400, "input_file_id"),
        (
            json!({"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}),
            404,
            "input_file_id",
        ),
        (
            json!({"input_file_id": input, "endpoint": "/v1/embeddings", "completion_window": "24h"}),
            400,
            "endpoint",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "1h"}),
            400,
            "completion_window",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": 1}}),
            400,
            "metadata.a",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b".repeat(513)}}),
            400,
            "metadata",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h", "output_expires_after": {}}),
            400,
            "output_expires_after",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h",
                   "output_expires_after": {"anchor": "created_at", "seconds": 60}}),
            400,
            "output_expires_after.seconds",
        ),
        (
            json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h",
                   "output_expires_after": {"anchor": "now", "seconds": 3600}}),
            400,
            "output_expires_after.anchor",
        ),
    ] {
        let answer = client.post("/v1/batches", body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (status, &json!(param)),
            "{}",
            answer.text
        );
    }
    let odd = json!({"input_file_id": input, "endpoint": CHAT, "completion_window": "24h", "priority": 1});
    assert_eq!(client.post("/v1/batches", odd).await.headers["x-skep-ignored"], "priority");
}

#[tokio::test]
async fn a_cancelled_batch_keeps_its_answers_and_lists_pages() {
    let server = Server::start().await;
    let client = without_key(&server);
    let long: String = (0..30).map(|n| line(&n.to_string(), json!({"max_tokens": 1000}))).collect();
    let input = client.upload(&long).await;
    let created = client.create(&input).await.json();
    let path = format!("/v1/batches/{}", created["id"].as_str().unwrap());
    assert_eq!(client.post(&format!("{path}/cancel"), json!({})).await.status, 200);
    let batch = client.ended(&created["id"]).await;
    assert_eq!(batch["status"], "cancelled", "{batch}");
    assert!(batch["cancelled_at"].is_u64());
    let errors = client.lines(&batch["error_file_id"]).await;
    assert_eq!(errors[0]["error"]["code"], "batch_cancelled");
    assert_eq!(batch["request_counts"]["failed"], errors.len());
    let second = client.create(&client.upload(&line("a", json!({}))).await).await.json();
    client.ended(&second["id"]).await;
    let page = client.get("/v1/batches?limit=1").await.json();
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&second["id"], &json!(true)));
    let next = client.get(&format!("/v1/batches?after={}", second["id"].as_str().unwrap())).await.json();
    assert_eq!((&next["data"][0]["id"], &next["has_more"]), (&created["id"], &json!(false)));
    assert_eq!(client.get("/v1/batches?limit=101").await.error()["param"], "limit");
    // A batch of the other API is none of this one.
    let queued = server.ok("/ai/run/tiny?queueRequest=true", &json!({"prompt": "hello"})).await.json();
    let other = queued["result"]["request_id"].as_str().unwrap().to_owned();
    let shown = client.get(&format!("/v1/batches/{other}")).await;
    assert_eq!((shown.status.as_u16(), &shown.error()["code"]), (404, &json!("batch_not_found")));
    assert_eq!(client.get("/v1/batches").await.json()["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_batch_can_be_for_an_agent() {
    let server = Server::start().await;
    let manifest = skep_runtime::Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, super::turns::echo(), "tester").await.unwrap();
    let client = without_key(&server);
    let body = json!({"model": "agent:echo", "messages": [{"role": "user", "content": "hello"}]});
    let line = json!({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).to_string();
    let created = client.create(&client.upload(&line).await).await.json();
    let batch = client.ended(&created["id"]).await;
    let answers = client.lines(&batch["output_file_id"]).await;
    let content = &answers[0]["response"]["body"]["choices"][0]["message"]["content"];
    assert!(content.as_str().unwrap().contains("hello"), "{}", answers[0]);
}

#[tokio::test]
async fn uploads_are_checked() {
    let server = Server::start().await;
    let client = without_key(&server);
    for (fields, file, param) in [
        (vec![("purpose", "batch")], None, "file"),
        (vec![], Some("x"), "purpose"),
        (vec![("purpose", "assistants")], Some("x"), "purpose"),
        (vec![("purpose", "batch"), ("expires_after[seconds]", "60")], Some("x"), "expires_after[seconds]"),
        (vec![("purpose", "batch"), ("expires_after[seconds]", "x")], Some("x"), "expires_after[seconds]"),
        (vec![("purpose", "batch"), ("expires_after[anchor]", "later")], Some("x"), "expires_after[anchor]"),
    ] {
        let answer = client.form(&fields, file).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
    let fields = [
        ("purpose", "batch"),
        ("expires_after[anchor]", "created_at"),
        ("expires_after[seconds]", "3600"),
        ("color", "red"),
    ];
    let answer = client.form(&fields, Some("x\ny")).await;
    assert_eq!(answer.headers["x-skep-ignored"], "color");
    let file = answer.json();
    assert_eq!((&file["bytes"], &file["filename"]), (&json!(3), &json!("requests.jsonl")));
    assert_eq!(file["expires_at"].as_u64().unwrap(), file["created_at"].as_u64().unwrap() + 3_600);
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    assert_eq!(client.get(&format!("{path}/content")).await.text, "x\ny");
    assert_eq!(client.get(&path).await.json(), file);
    assert_eq!(client.delete(&path).await.json()["deleted"], true);
    assert_eq!(client.get(&path).await.status, 404);
    let plain = client.post("/v1/files", json!({"purpose": "batch"})).await;
    assert_eq!((plain.status.as_u16(), &plain.error()["code"]), (400, &json!("invalid_form")));
    for query in ["order=up", "limit=0", "after=file-none"] {
        assert_eq!(client.get(&format!("/v1/files?{query}")).await.status, 400, "{query}");
    }
}

#[tokio::test]
async fn an_incomplete_upload_times_out() {
    let upload_timeout = Duration::from_millis(50);
    let server = Server::with(GatewayOptions { upload_timeout, ..GatewayOptions::default() }).await;
    let client = without_key(&server);
    let begun = "--cut\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nba";
    let first = futures::stream::iter([Ok::<_, std::io::Error>(begun)]);
    let body = Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()));
    let answer = client.send(Method::POST, "/v1/files", FORM, body).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (408, &json!("body_timeout")));
    assert_eq!(GatewayOptions::default().upload_timeout, Duration::from_secs(600));
}

#[tokio::test]
async fn the_room_for_files_is_bounded() {
    let batch = BatchOptions { max_batches: 2, ..BatchOptions::default() };
    let runtime = RuntimeOptions { batch, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    let client = without_key(&server);
    for _ in 0..2 {
        client.upload("x").await;
    }
    let full = client.form(&[("purpose", "batch")], Some("x")).await;
    assert_eq!((full.status.as_u16(), &full.error()["code"]), (429, &json!("queue_full")));
}

#[tokio::test]
async fn files_and_batches_of_another_tenant_do_not_exist() {
    let server = guarded().await;
    let mut clients = Vec::new();
    for tenant in ["acme", "zeta"] {
        let key = key(&server, tenant, Role::Invoke, None).await;
        clients.push(Client { server: &server, key: Some(key) });
    }
    let input = clients[0].upload(&line("a", json!({}))).await;
    let created = clients[0].create(&input).await.json();
    let batch = clients[0].ended(&created["id"]).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let other = &clients[1];
    for file in [&json!(input), &batch["output_file_id"]] {
        let path = format!("/v1/files/{}", file.as_str().unwrap());
        for answer in
            [other.get(&path).await, other.get(&format!("{path}/content")).await, other.delete(&path).await]
        {
            assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!("file_not_found")));
        }
        assert_eq!(clients[0].get(&path).await.status, 200);
    }
    assert_eq!(other.create(&input).await.status, 404);
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    for answer in [other.get(&path).await, other.post(&format!("{path}/cancel"), json!({})).await] {
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!("batch_not_found")));
    }
    assert_eq!(other.get("/v1/files").await.json()["data"], json!([]));
    assert_eq!(other.get("/v1/batches").await.json()["data"], json!([]));
    let reader = key(&server, "acme", Role::Read, None).await;
    let reader = Client { server: &server, key: Some(reader) };
    assert_eq!(reader.get("/v1/files").await.status, 200);
    assert_eq!(reader.form(&[("purpose", "batch")], Some("x")).await.status, 403);
    let narrow = key(&server, "acme", Role::Invoke, Some("echo")).await;
    let narrow = Client { server: &server, key: Some(narrow) };
    assert_eq!(narrow.get("/v1/files").await.error()["code"], "key_is_for_agents");
}
