//! The status of the host over HTTP.

use super::{
    fixture::{Server, TestResponse},
    turns::echo,
};
use crate::GatewayOptions;
use axum::{body::Body, http::Request};
use serde_json::{Value, json};
use skep_runtime::{Manifest, RuntimeOptions};

#[tokio::test]
async fn the_status_shows_the_work_of_the_host_and_its_limits() {
    let options = RuntimeOptions { max_agents: 1, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), options).await;
    let manifest = Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
    server.ok("/v1/agents/echo/sessions/s/messages", &json!({"text": "hi"})).await;
    let status = server.get("/v1/status").await.json();
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert!(status["build"].as_str().unwrap().contains(std::env::consts::ARCH), "{status}");
    let model = &status["models"][0];
    assert_eq!(
        (&model["name"], &model["device"], &model["problem"]),
        (&json!("tiny"), &json!("cpu"), &json!(null))
    );
    assert_eq!((&model["context_length"], &model["kv_pages"]["used"]), (&json!(4096), &json!(0)));
    assert!(model["kv_pages"]["total"].as_u64().unwrap() > 0, "{model}");
    assert_eq!(status["agents"], json!({"ready": 1, "failed": 0}));
    assert_eq!(status["sessions"], json!({"total": 1, "active_turns": 0, "waiting_for_approval": 0}));
    assert_eq!(
        (&status["queues"]["messages"], &status["held"], &status["disk"]),
        (&json!(0), &json!(null), &json!(null))
    );
    assert!(status["data"] == "memory" || status["data"] == "postgres", "{status}");
    let limits = status["limits"].as_array().unwrap();
    assert!(limits.contains(&json!({"name": "max_agents", "used": 1, "limit": 1})), "{status}");
    assert!(
        limits.contains(&json!({"name": "max_queue", "of": "tiny", "used": 0, "limit": 256})),
        "{status}"
    );
    assert!(limits.contains(&json!({"name": "max_sessions_loaded", "used": 1, "limit": 10_000})), "{status}");
    for name in ["batches", "file_bytes", "response_bytes", "request_log_bytes", "outbound_requests"] {
        let unused = limits.iter().find(|limit| limit["name"] == name && limit["used"] == 0);
        assert!(unused.is_some_and(|limit| limit["limit"].as_u64() > Some(0)), "{name} in {status}");
    }
    // A turn gives back its place a moment after its answer.
    let unused = json!({"concurrent_turns": 0, "tokens_per_day": 0});
    let mut used = Value::Null;
    for _ in 0..500 {
        used = server.get("/v1/agents/echo").await.json()["used"].take();
        if used == unused {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(used, unused);
}

#[tokio::test]
async fn a_host_with_all_its_agents_refuses_another_one_as_a_conflict() {
    let options = RuntimeOptions { max_agents: 1, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), options).await;
    for (name, status) in [("one", 201), ("two", 409), ("one", 201)] {
        let answer = deploy(&server, &format!("name = \"{name}\"")).await;
        assert_eq!(answer.status.as_u16(), status, "{name}: {}", answer.text);
        if status == 409 {
            let error = answer.error();
            assert_eq!(error["code"], "host_full");
            assert!(error["message"].as_str().unwrap().contains("`max_agents` under [runtime]"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_grant_of_a_model_that_the_host_lacks_is_reported_when_it_is_deployed() {
    let server = Server::start().await;
    let warned = deploy(&server, "name = \"echo\"\n[grants]\nmodels = [\"tiny\", \"gpt-9\", \"*\"]").await;
    assert_eq!(warned.status, 201, "{}", warned.text);
    let warnings = warned.json()["warnings"].take();
    assert_eq!(warnings.as_array().unwrap().len(), 1, "{warnings}");
    let warning = warnings[0].as_str().unwrap();
    assert!(warning.contains("\"gpt-9\"") && warning.contains("it serves: tiny"), "{warning}");
    let quiet = deploy(&server, "name = \"echo\"").await.json();
    assert!(quiet.get("warnings").is_none(), "{quiet}");
}

async fn deploy(server: &Server, manifest: &str) -> TestResponse {
    let mut body = format!(
        "--b\r\ncontent-disposition: form-data; name=\"manifest\"\r\n\r\n{manifest}\r\n--b\r\n\
         content-disposition: form-data; name=\"component\"; filename=\"a.wasm\"\r\n\r\n"
    )
    .into_bytes();
    body.extend(echo());
    body.extend(b"\r\n--b--\r\n");
    let request = Request::post("/v1/agents").header("content-type", "multipart/form-data; boundary=b");
    server.send(request.body(Body::from(body)).unwrap()).await
}
