//! Broken and hostile guests, requests and files: each gets a clear error, and the host continues.

use crate::harness::{client, guest, model_path, shared, text_guest};
use serde_json::{Value, json};

const TIGHT: &str =
    "[limits]\nmemory_mb = 16\ncpu_ms = 300\nturn_ms = 20000\ntokens_per_turn = 64\nstate_kb = 64";

/// Deploys a guest with tight limits, sends it a message, and expects an error. The host must still work
/// after that.
async fn refused(guest_name: &str, text: &str) -> Value {
    let host = shared();
    let name = format!("hostile-{}", guest_name.replace('_', "-"));
    let (status, deployed) = host.deploy_guest(guest_name, &name, TIGHT).await;
    assert_eq!(status, 201, "{deployed}");
    let (status, answer) = host.message(&name, "s", text).await;
    assert!((400..600).contains(&status), "{guest_name} got {status}: {answer}");
    let error = &answer["error"];
    assert!(error["message"].is_string() && error["code"].is_string(), "{answer}");
    assert_eq!(host.get("/healthz").await.0, 200);
    error.clone()
}

#[tokio::test]
async fn an_endless_loop_ends_at_its_cpu_limit() {
    let error = refused("spin", "spin").await;
    assert_eq!(error["code"], "limit_exceeded", "{error}");
    assert!(error["message"].as_str().unwrap().contains("cpu_ms"), "{error}");
}

#[tokio::test]
async fn a_memory_bomb_ends_at_its_memory_limit() {
    let error = refused("grow", "grow").await;
    assert!(error["message"].as_str().unwrap().contains("memory"), "{error}");
}

#[tokio::test]
async fn a_table_bomb_ends_at_its_limit() {
    let host = shared();
    let manifest = "name = \"table-bomb\"\n[limits]\ntable_elements = 50000";
    let (status, deployed) = host.deploy(manifest, text_guest("table_bomb")).await;
    assert_eq!(status, 201, "{deployed}");
    let (_, answer) = host.message("table-bomb", "s", "go").await;
    assert_eq!(answer["error"]["code"], "limit_exceeded", "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("50000 entries") && message.contains("`table_elements` under [limits]"));
    assert_eq!(host.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn component_and_instance_bombs_are_refused_before_compilation() {
    let host = shared();
    for (name, reason) in [
        ("component_bomb", "its nested components expand to more than 4096 instances"),
        ("instance_bomb", "instances under [limits] in skep.toml"),
    ] {
        let component = text_guest(name);
        assert!(component.len() < 4 << 10, "{name} has {} bytes", component.len());
        let (status, answer) = host.deploy("name = \"bomb\"", component).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("invalid_component")), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(reason), "{answer}");
    }
    assert_eq!(host.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn endless_recursion_and_a_panic_are_traps() {
    for name in ["recurse", "panic"] {
        let error = refused(name, "go").await;
        assert!(
            ["agent_trapped", "limit_exceeded"].contains(&error["code"].as_str().unwrap()),
            "{name}: {error}"
        );
    }
}

#[tokio::test]
async fn a_panic_is_reported_with_message_and_location_to_the_caller_and_the_log() {
    let host = shared();
    assert_eq!(host.deploy_guest("panic", "panics", "").await.0, 201);
    for (text, said) in [("the oven is cold", "the oven is cold"), ("index", "index out of bounds")] {
        let (status, answer) = host.message("panics", "s", text).await;
        assert_eq!((status, &answer["error"]["code"]), (500, &json!("agent_trapped")), "{answer}");
        let (_, logs) = host.get("/v1/agents/panics/logs?limit=10").await;
        let logged = logs["data"].to_string();
        for told in [answer["error"]["message"].as_str().unwrap(), &logged] {
            assert!(told.contains(said) && told.contains("examples/panic.rs:1"), "{told}");
        }
    }
}

#[tokio::test]
async fn state_over_its_quota_is_refused_to_the_guest() {
    let error = refused("big", "state").await;
    assert!(error["message"].as_str().unwrap().contains("state_kb"), "{error}");
}

#[tokio::test]
async fn log_lines_and_resources_are_limited() {
    let host = shared();
    assert_eq!(host.deploy_guest("chatty", "flood", "").await.0, 201);
    assert_eq!(host.message("flood", "s", "100000").await.0, 200);
    let (_, logs) = host.get("/v1/agents/flood/logs?limit=1000").await;
    let lines = logs["data"].as_array().unwrap().len();
    assert!((1..=300).contains(&lines), "{lines} lines were kept");
    refused("leak", "100000").await;
}

#[tokio::test]
async fn an_unread_stream_blocks_nothing_and_leaves_nothing() {
    let host = shared();
    assert_eq!(host.deploy_guest("hoard", "hoard", "[limits]\nturn_ms = 60000").await.0, 201);
    let (status, answer) = host.message("hoard", "reply", "reply").await;
    assert_eq!((status, &answer["text"]), (200, &json!("kept")));
    let (status, answer) = host.message("hoard", "wait", "wait").await;
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = host.message("hoard", "trap", "trap").await;
    assert!(status >= 500, "{answer}");
    assert_eq!(answer["error"]["code"], "agent_trapped", "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("broke after Some("), "{answer}");
    assert_eq!(host.get("/v1/agents/hoard/sessions/trap").await.0, 404, "none of it was committed");
}

#[tokio::test]
async fn data_of_other_sessions_and_agents_is_invisible() {
    let host = shared();
    for agent in ["peek-one", "peek-two"] {
        assert_eq!(host.deploy_guest("peek", agent, "").await.0, 201);
    }
    assert_eq!(host.message("peek-one", "victim", "hide secret").await.0, 200);
    for (agent, session) in [("peek-one", "attacker"), ("peek-two", "victim")] {
        for key in [
            "secret",
            "../victim/secret",
            "victim/secret",
            "peek-one/victim/secret",
            "%",
            "victim\u{0}secret",
        ] {
            let (status, answer) = host.message(agent, session, &format!("look {key}")).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(
                answer["data"],
                json!({"value": null, "keys": [], "messages": 0}),
                "{agent}/{session}"
            );
        }
    }
    let (_, own) = host.message("peek-one", "victim", "look secret").await;
    assert_eq!(own["data"]["value"], "mine", "{own}");
}

#[tokio::test]
async fn invalid_components_are_refused_with_a_reason() {
    let host = shared();
    let truncated = guest("noop")[..500].to_vec();
    for (what, bytes) in [("text", b"not wasm".to_vec()), ("truncated", truncated), ("empty", vec![])] {
        let (status, answer) = host.deploy("name = \"broken\"", bytes).await;
        assert!((400..500).contains(&status), "{what}: {status} {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("component"), "{what}: {answer}");
    }
}

#[tokio::test]
async fn a_manifest_with_a_wrong_field_names_the_nearest_one() {
    let (status, answer) =
        shared().deploy("name = \"x\"\n[limits]\nmemory_mib = 3", guest("noop").to_vec()).await;
    assert_eq!(status, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("memory_mib") && message.contains("memory_mb"), "{message}");
    for name in ["", "Has Space", "../up", &"x".repeat(300)] {
        let (status, answer) = shared().deploy(&format!("name = \"{name}\""), guest("noop").to_vec()).await;
        assert_eq!(status, 400, "{name:?}: {answer}");
    }
}

#[tokio::test]
async fn invalid_requests_are_400_and_404_with_one_error_shape() {
    let host = shared();
    let hello = json!([{"role": "user", "content": "hello"}]);
    for (path, body, status) in [
        ("/v1/chat/completions", json!({"messages": []}), 400),
        ("/v1/chat/completions", json!({"messages": hello, "model": "gpt-nothing"}), 404),
        ("/v1/chat/completions", json!({"messages": hello, "model": "agent:nobody"}), 404),
        ("/v1/chat/completions", json!({"messages": hello, "temperature": -1}), 400),
        ("/v1/chat/completions", json!({"messages": hello, "top_p": 7}), 400),
        ("/v1/chat/completions", json!({"messages": hello, "n": 100000}), 400),
        ("/v1/chat/completions", json!({"messages": [{"role": "wizard", "content": "x"}]}), 400),
        ("/v1/chat/completions", json!({"messages": "hello"}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": hello, "response_format": {"type": "regex", "regex": "("}}),
            400,
        ),
        ("/v1/completions", json!({"prompt": [99999999]}), 400),
        ("/v1/completions", json!({"prompt": "word ".repeat(20_000)}), 400),
        ("/v1/completions", json!({}), 400),
        ("/v1/agents/nobody/sessions/s/messages", json!({"text": "x"}), 404),
        ("/no/such/route", json!({}), 404),
    ] {
        let (got, answer) = host.post(path, body.clone()).await;
        let shown: String = body.to_string().chars().take(120).collect();
        assert_eq!(got, status, "{path} {shown}: {answer}");
        let error = &answer["error"];
        assert!(
            error["message"].is_string() && error["code"].is_string() && error["type"].is_string(),
            "{answer}"
        );
    }
    let (status, _) = host.get("/v1/chat/completions").await;
    assert_eq!(status, 405);
}

#[tokio::test]
async fn body_size_is_limited_and_bad_json_is_reported() {
    let url = shared().at("/v1/chat/completions");
    let post =
        |body: String| client().post(&url).header("content-type", "application/json").body(body).send();
    let response = post("{\"messages\": ".into()).await.unwrap();
    assert_eq!(response.status(), 400);
    let nested = "[".repeat(100_000);
    assert_eq!(post(format!("{{\"messages\": {nested}")).await.unwrap().status(), 400);
    let huge = format!("{{\"prompt\": \"{}\"}}", "x".repeat(64 << 20));
    // The server may close the connection before it has read the whole body.
    if let Ok(response) = post(huge).await {
        assert_eq!(response.status(), 413);
        assert!(response.json::<Value>().await.unwrap()["error"]["code"].is_string());
    }
}

#[test]
fn a_truncated_model_file_is_an_error_that_names_the_position() {
    let bytes = std::fs::read(model_path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    for length in [0, 3, 24, 1000, 100_000, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = match skep_model::Checkpoint::open(&path) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{length} bytes of the file were accepted as a model"),
        };
        assert!(
            error.contains("cut.gguf") || error.contains("tensor") || error.contains("key"),
            "{length}: {error}"
        );
    }
}
