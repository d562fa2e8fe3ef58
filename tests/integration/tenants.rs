//! The deletion of a tenant on a real host, over HTTP and through the binary: what is gone, and what others keep.

use crate::logged_host::{Logged, answer};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;

/// Returns a text that is long enough for several KV pages.
fn plans(tenant: &str) -> String {
    format!("the plans of {tenant}: {}", "more and more words ".repeat(20))
}

/// Makes something of every kind that a tenant can have.
async fn use_everything(host: &Logged, tenant: &str) {
    host.chat(&plans(tenant)).await;
    host.message("desk", "ada", json!({"text": plans(tenant), "data": {"max_tokens": 4}})).await;
    let stored = json!({"model": "default", "input": plans(tenant), "max_output_tokens": 16});
    let (status, response) = host.post("/v1/responses", stored).await;
    assert_eq!(status, 200, "{response}");
    let batch = json!({"requests": [{"prompt": "later", "max_tokens": 3}]});
    assert_eq!(host.post("/ai/run/default?queueRequest=true", batch).await.0, 200);
    let form = reqwest::multipart::Form::new()
        .text("purpose", "batch")
        .part("file", reqwest::multipart::Part::bytes(b"{}\n".as_slice()).file_name("requests.jsonl"));
    let (status, file) = answer(host.request(Method::POST, "/v1/files").multipart(form)).await;
    assert_eq!(status, 200, "{file}");
    let event = json!({"topic": "plans.changed", "data": {"of": tenant}});
    let (status, published) = host.post("/v1/events", event).await;
    assert!((200..300).contains(&status), "{published}");
    // A turn that never ends by itself.
    let spinning =
        host.post("/v1/agents/spin/sessions/bob/messages?detach=true", json!({"text": "spin"})).await;
    assert_eq!(spinning.0, 202, "{}", spinning.1);
}

/// Returns the pages on disk, once nothing waits to be written and there are some.
async fn kv_pages(host: &Logged) -> u64 {
    for _ in 0..1_500 {
        let status = host.get("/v1/kv").await.1;
        let pages = status["pages"].as_u64().unwrap();
        if pages > 0 && status["queued_bytes"] == 0 {
            return pages;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no page was written: {}", host.get("/v1/kv").await.1);
}

async fn usage_of(host: &Logged, tenant: &str) -> Option<Value> {
    let report = host.get("/v1/usage?by=tenant").await.1;
    report["data"].as_array().unwrap().iter().find(|line| line["name"] == tenant).cloned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_tenant_is_gone_with_everything_but_its_bill() {
    // The disk of a test may be nearly full.
    let settings = "[kv]\ndisk_free_percent = 0\n[auth]\nrequired = true\n[requests]\nlog = \"full\"\n[limits]\ncpu_ms = 60000\n[[webhook]]\n\
                    url = \"http://127.0.0.1:9/hook\"\ntopics = [\"plans.*\"]\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n";
    let mut host = Logged::start(settings);
    let admin = host.create_key(&["--role", "admin", "--bodies"]);
    let acme = host.create_key(&["--tenant", "acme", "--role", "invoke"]);
    let rival = host.create_key(&["--tenant", "rival", "--role", "invoke"]);
    host.with_key(&admin);
    host.deploy("desk", "generate").await;
    host.deploy("spin", "spin").await;
    for (tenant, key) in [("acme", &acme), ("rival", &rival)] {
        use_everything(host.with_key(key), tenant).await;
    }

    // Only an operator deletes tenants, and not the operator's own.
    let delete =
        |host: &Logged, path: &str| answer(host.request(Method::DELETE, &format!("/v1/tenants/{path}")));
    assert_eq!(delete(&host, "acme").await.0, 403, "a rival does not");
    host.with_key(&admin);
    let (status, refused) = delete(&host, "local").await;
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("invalid_name")), "{refused}");
    assert_eq!(delete(&host, "nobody").await.1["error"]["code"], "tenant_not_found");

    // Each tenant has a chat, a turn, a response and the item of a batch.
    host.records("&tenant=acme", 4).await;
    host.records("&tenant=rival", 4).await;
    let pages = kv_pages(&host).await;
    let listed = String::from_utf8(host.skep(&["tenant", "list"], "").stdout).unwrap();
    let listed: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(listed.contains(&vec!["acme", "1", "1"]), "the open turn has no session yet: {listed:?}");
    let used = usage_of(&host, "acme").await.expect("it used models");

    let said = host.skep(&["tenant", "delete", "acme", "--yes", "--json"], "").stdout;
    let deleted: Value = serde_json::from_slice(&said).unwrap();
    for (what, count) in
        [("keys", 1), ("sessions", 2), ("batches", 1), ("files", 1), ("responses", 1), ("usage", 0)]
    {
        assert_eq!(deleted[what], count, "{what}: {deleted}");
    }
    for what in ["events", "requests", "kv_pages"] {
        assert!(deleted[what].as_u64() > Some(0), "{what}: {deleted}");
    }
    assert_eq!(host.records("&tenant=acme", 0).await.len(), 0);
    let found = host.get("/v1/requests?q=plans%20of%20acme").await.1;
    assert_eq!(found["data"], json!([]), "{found}");
    assert_eq!(host.get("/v1/agents/desk/sessions?tenant=acme").await.1["data"], json!([]));
    let events = host.get("/v1/events").await.1.to_string();
    assert!(!events.contains("acme") && events.contains("rival"), "{events}");
    assert!(host.get("/v1/kv").await.1["pages"].as_u64() < Some(pages));
    // The bill stays, with all that was used.
    let bill = usage_of(&host, "acme").await.expect("it is kept");
    assert_eq!(bill["output_tokens"], used["output_tokens"], "{bill}");
    // It has nothing left to delete, and its name is free.
    assert_eq!(delete(&host, "acme").await.1["error"]["code"], "tenant_not_found");
    assert_eq!(host.with_key(&acme).get("/v1/models").await.0, 401);

    // The other tenant has lost nothing.
    host.with_key(&rival);
    assert_eq!(host.records("", 4).await.len(), 4);
    assert_eq!(host.get("/v1/agents/desk/sessions/ada").await.0, 200);
    assert_eq!(host.get("/v1/files").await.1["data"].as_array().unwrap().len(), 1);

    host.with_key(&admin);
    let forgotten = delete(&host, "rival?forget_usage=true").await.1;
    assert!(forgotten["usage"].as_u64() > Some(0), "{forgotten}");
    assert_eq!(usage_of(&host, "rival").await, None);
    let tenants = host.get("/v1/tenants").await.1;
    assert_eq!(tenants["data"], json!([{"object": "tenant", "name": "local", "keys": 1, "sessions": 0}]));
}
