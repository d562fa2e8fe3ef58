//! Tests errors, bounds, health and metrics.

use super::fixture::Server;
use crate::GatewayOptions;
use axum::{body::Body, http::Request};
use serde_json::json;

#[tokio::test]
async fn all_errors_have_one_shape() {
    let server = Server::with(GatewayOptions { max_body_bytes: 4096, ..GatewayOptions::default() }).await;
    let request = |method: &str, path: &str, body: String| {
        Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap()
    };
    let chat = "/v1/chat/completions";
    let deep = format!("{{\"messages\": {}", "[".repeat(2000));
    for (request, status, code) in [
        (request("GET", "/nothing/here", String::new()), 404, "route_not_found"),
        (request("PUT", "/v1/models", String::new()), 405, "method_not_allowed"),
        (request("GET", chat, String::new()), 405, "method_not_allowed"),
        (request("POST", chat, "x".repeat(5000)), 413, "body_too_large"),
        (request("POST", chat, deep), 400, "invalid_json"),
        (request("POST", chat, "{".into()), 400, "invalid_json"),
        (request("POST", chat, "[]".into()), 400, "invalid_json"),
        (request("POST", chat, "{}".into()), 400, "invalid_value"),
        (request("POST", chat, "{\"messages\": []}".into()), 400, "invalid_value"),
        (request("GET", "/v1/models/none", String::new()), 404, "model_not_found"),
        (request("GET", "/v1/agents/none", String::new()), 404, "agent_not_found"),
        (request("DELETE", "/v1/agents/none", String::new()), 404, "agent_not_found"),
        (request("GET", "/v1/agents/none/logs?limit=x", String::new()), 400, "invalid_request"),
        (request("POST", "/v1/approvals/none", "{}".into()), 400, "invalid_value"),
        (request("GET", "/v1/agents/none/logs?limit=0", String::new()), 400, "invalid_value"),
        (request("GET", "/v1/agents/none/sessions", String::new()), 404, "agent_not_found"),
        (request("GET", "/v1/agents/none/sessions/%FF", String::new()), 400, "invalid_request"),
        (
            request("POST", "/v1/agents/none/sessions/s/messages", "{\"text\": \"x\"}".into()),
            404,
            "agent_not_found",
        ),
        (
            request("POST", "/v1/agents/none/sessions/s/messages", "{\"txt\": \"x\"}".into()),
            400,
            "invalid_value",
        ),
        (request("POST", "/v1/agents", "{}".into()), 400, "invalid_form"),
    ] {
        let line = format!("{} {}", request.method(), request.uri());
        let answer = server.send(request).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error()["code"].as_str()),
            (status, Some(code)),
            "{line}: {}",
            answer.text
        );
        assert!(answer.headers.contains_key("x-request-id"), "{line}");
    }
}

#[tokio::test]
async fn a_body_announced_over_the_limit_is_refused_before_it_is_sent() {
    let server = Server::start().await;
    let body = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let request = Request::post("/v1/completions").header("content-length", "99999999").body(body).unwrap();
    assert_eq!(server.send(request).await.status, 413);
}

#[tokio::test]
async fn deploying_validates_the_parts_of_the_form() {
    let options = GatewayOptions { max_component_bytes: 1 << 20, ..GatewayOptions::default() };
    let server = Server::with(options).await;
    let form = |parts: &[(&str, &[u8])]| {
        let mut body = Vec::new();
        for (name, bytes) in parts {
            let head = format!(
                "--cut\r\ncontent-disposition: form-data; name=\"{name}\"; filename=\"{name}\"\r\n\r\n"
            );
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(bytes);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"--cut--\r\n");
        Request::post("/v1/agents")
            .header("content-type", "multipart/form-data; boundary=cut")
            .body(Body::from(body))
            .unwrap()
    };
    let manifest: &[u8] = b"name = \"a\"\n";
    let large = vec![0; 4 << 20];
    for (parts, status, code) in [
        (vec![("manifest", manifest)], 400, "invalid_value"),
        (vec![("component", b"x".as_slice())], 400, "invalid_value"),
        (vec![("manifest", manifest), ("other", b"")], 400, "invalid_value"),
        (vec![("manifest", b"name = 7".as_slice()), ("component", b"x")], 400, "invalid_manifest"),
        (vec![("manifest", manifest), ("component", b"no wasm")], 400, "invalid_component"),
        (vec![("manifest", manifest), ("component", large.as_slice())], 413, "body_too_large"),
    ] {
        let answer = server.send(form(&parts)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error()["code"].as_str()),
            (status, Some(code)),
            "{}",
            answer.text
        );
    }
}

#[tokio::test]
async fn health_models_and_metrics() {
    let server = Server::start().await;
    assert_eq!(server.get("/healthz").await.json()["status"], "ok");
    assert_eq!(server.get("/readyz").await.json()["models"], json!(["tiny"]));
    let models = server.get("/v1/models").await.json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["object"]), (&json!("tiny"), &json!("model")));
    assert_eq!(server.get("/v1/models/tiny").await.json()["id"], "tiny");
    assert_eq!(server.get("/v1/agents").await.json()["data"], json!([]));
    // A second server in the process records into the same metrics.
    let other = Server::start().await;
    other.get("/healthz").await;
    let metrics = server.get("/metrics").await;
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    assert!(
        metrics.text.contains("skep_http_requests_total{route=\"/healthz\",status=\"200\"}"),
        "{}",
        metrics.text
    );
}

#[tokio::test]
async fn a_host_whose_store_fails_is_not_ready_and_reports_why() {
    let server = Server::start().await;
    assert_eq!(server.get("/readyz").await.status, 200);
    server.store.close().await;
    let began = std::time::Instant::now();
    // The previous result is cached for a second.
    let answer = loop {
        let answer = server.get("/readyz").await;
        if answer.status != 200 {
            break answer;
        }
        assert!(began.elapsed().as_secs() < 10, "still ready");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    };
    let error = answer.error();
    assert_eq!((answer.status.as_u16(), &error["code"]), (503, &json!("store_failed")));
    assert!(error["message"].as_str().unwrap().contains("the store is not writable"), "{error}");
    assert_eq!(server.get("/healthz").await.status, 200, "the process is alive");
}

#[tokio::test]
async fn process_and_open_work_metrics_are_updated_on_request() {
    let server = Server::start().await;
    let metrics = server.get("/metrics").await.text;
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
        let value = line.unwrap_or_else(|| panic!("{name} in {metrics}")).rsplit(' ').next().unwrap();
        value.parse::<f64>().unwrap()
    };
    assert_eq!(value("skep_build_info{version=\""), 1.0);
    assert!(metrics.contains("# TYPE skep_open_turns gauge"), "{metrics}");
    for name in ["skep_open_turns", "skep_waiting_approvals", "skep_dead_letters"] {
        assert!(value(name) >= 0.0);
    }
    if cfg!(target_os = "linux") {
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_open_fds") >= 3.0 && value("process_open_fds") <= value("process_max_fds"));
        assert!(value("process_start_time_seconds") > 1.6e9);
    }
}

#[tokio::test]
async fn headers_are_bounded_and_request_ids_are_returned() {
    let server = Server::start().await;
    let chat = |name: &str, value: &str| {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
        Request::post("/v1/chat/completions").header(name, value).body(Body::from(body.to_string())).unwrap()
    };
    let answer = server.send(chat("x-session-affinity", &"s".repeat(300))).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("x-session-affinity")));
    for name in ["x-session-affinity", "x-session-id", "x-parent-session-id"] {
        assert_eq!(server.send(chat(name, "ses-1")).await.status, 200);
    }
    let answer = server.send(chat("x-request-id", "mine-7")).await;
    assert_eq!(answer.headers["x-request-id"], "mine-7");
}
