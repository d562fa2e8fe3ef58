//! Tests `/v1/requests`: pages, exports, and the parameters that are refused. The fixture compares each response with the
//! document.

use super::fixture::Server;
use crate::GatewayOptions;
use serde_json::{Value, json};
use skep_runtime::{RequestLogMode, RequestLogOptions, RuntimeOptions};
use std::time::Duration;

async fn logging(mode: RequestLogMode) -> Server {
    let requests = RequestLogOptions { mode, ..RequestLogOptions::default() };
    let runtime = RuntimeOptions { requests, ..RuntimeOptions::default() };
    Server::with_runtime(GatewayOptions::default(), runtime).await
}

/// Makes this many requests, and waits until they are stored, which happens in the background.
async fn with_requests(mode: RequestLogMode, count: usize) -> Server {
    let server = logging(mode).await;
    for number in 0..count {
        let body = json!({"prompt": format!("hello {number}"), "max_tokens": 2, "temperature": 0});
        server.ok("/v1/completions", &body).await;
    }
    for _ in 0..500 {
        let page = server.get("/v1/requests").await.json();
        if page["data"].as_array().unwrap().len() == count {
            return server;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{count} requests were not logged");
}

fn texts(page: &Value) -> Vec<&str> {
    let records = page["data"].as_array().unwrap().iter();
    records.map(|record| record["body"]["messages"][0]["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn pages_and_exports_have_all_records_once() {
    let server = with_requests(RequestLogMode::Full, 5).await;
    let page = server.get("/v1/requests?limit=3&bodies=true").await.json();
    assert_eq!(texts(&page), ["hello 4", "hello 3", "hello 2"]);
    let next = page["next"].as_str().unwrap();
    let rest = server.get(&format!("/v1/requests?limit=3&bodies=true&cursor={next}")).await.json();
    assert_eq!((texts(&rest), &rest["next"]), (vec!["hello 1", "hello 0"], &Value::Null));
    let export = server.get("/v1/requests?format=jsonl&bodies=true").await;
    assert_eq!(export.headers["content-type"], "application/jsonl");
    let lines: Vec<Value> = export.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let said: Vec<_> = lines.iter().map(|line| &line["body"]["messages"][0]["text"]).collect();
    assert_eq!(said, ["hello 0", "hello 1", "hello 2", "hello 3", "hello 4"]);
    let two = server.get("/v1/requests?format=jsonl&limit=2").await.text;
    assert_eq!(two.lines().count(), 2);
    let one = server.get(&format!("/v1/requests/{}", lines[2]["id"].as_str().unwrap())).await.json();
    assert_eq!(one, lines[2]);
    let found = server.get("/v1/requests?q=HELLO%203&model=tiny&status=ok").await.json();
    assert_eq!((found["data"].as_array().unwrap().len(), found["data"][0].get("body")), (1, None));
    assert_eq!(found["data"][0]["id"], lines[3]["id"]);
}

#[tokio::test]
async fn times_select_records() {
    let server = with_requests(RequestLogMode::Metadata, 1).await;
    let record = server.get("/v1/requests").await.json()["data"][0].clone();
    let at_ms = record["at_ms"].as_u64().unwrap();
    for (query, count) in [
        (format!("since_ms={at_ms}"), 1),
        (format!("since_ms={}", at_ms + 1), 0),
        (format!("until_ms={}", at_ms + 1), 1),
        (format!("until_ms={at_ms}"), 0),
        ("tenant=local&session=s".to_owned(), 0),
        ("key=key-1".to_owned(), 0),
        ("since_ms=18446744073709551615".to_owned(), 0),
    ] {
        let page = server.get(&format!("/v1/requests?{query}")).await.json();
        assert_eq!(page["data"].as_array().unwrap().len(), count, "{query}");
    }
}

#[tokio::test]
async fn mistakes_in_parameters_are_named() {
    let server = logging(RequestLogMode::Off).await;
    let long = format!("q={}", "x".repeat(257));
    for (query, parameter) in [
        ("status=done", "status"),
        ("cursor=next", "cursor"),
        ("format=csv", "format"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("q=", "q"),
        (&long, "q"),
    ] {
        let refused = server.get(&format!("/v1/requests?{query}")).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!(parameter)), "{query}");
    }
    let missing = server.get("/v1/requests/req_1").await;
    assert_eq!((missing.status.as_u16(), &missing.error()["code"]), (404, &json!("request_not_found")));
}
