//! The example agents in other languages: built by their own commands, deployed with their manifests, and
//! used with the default model.

use crate::harness::{Host, shared, skipped};
use serde_json::{Value, json};

async fn turn(host: &Host, agent: &str, text: &str) -> Value {
    let (status, answer) = host.message(agent, "ada", text).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn an_agent_in_python_generates_and_keeps_its_state() {
    let host = shared();
    host.deploy_example("py-diary").await;
    let first = turn(host, "py-diary", "I bought a book for 12 euros.").await;
    assert_eq!(first["data"]["entries"][0]["euros"], 12, "{first}");
    let second = turn(host, "py-diary", "I bought lunch for 9 euros.").await;
    assert_eq!(second["data"]["total_euros"], 21, "{second}");
    assert!(second["text"].as_str().unwrap().starts_with("That makes 21 euros in all"), "{second}");
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{second}");

    let (status, refusal) = host.message("py-diary", "ada", "Hello").await;
    assert_eq!((status, &refusal["error"]["code"]), (422, &json!("invalid_message")), "{refusal}");
    let (_, logs) = host.get("/v1/agents/py-diary/logs?level=info").await;
    assert_eq!(logs["data"].as_array().unwrap().len(), 2, "{logs}");
}

#[tokio::test]
async fn an_agent_in_javascript_calls_its_tool_and_keeps_its_state() {
    // Node is not required to build Skep.
    if std::process::Command::new("npm").arg("--version").output().is_err() {
        return skipped("examples/js-thermostat needs Node 20 or later, but npm is not installed");
    }
    let host = shared();
    host.deploy_example("js-thermostat").await;
    let first = turn(host, "js-thermostat", "Set the kitchen to 21 degrees.").await;
    assert_eq!(first["tool_calls"][0]["name"], "set_temperature", "{first}");
    let rooms = first["data"]["rooms"].as_object().unwrap();
    assert_eq!(rooms.len(), 1, "{first}");
    let celsius = rooms.values().next().unwrap();
    let expected = format!("Done. The warmest room has {celsius} degrees");
    assert!(first["text"].as_str().unwrap().starts_with(&expected), "{first}");
    let second = turn(host, "js-thermostat", "Set the office to 19 degrees.").await;
    assert!(second["data"]["rooms"].as_object().unwrap().contains_key("office"), "{second}");
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{second}");

    let (status, refusal) = host.message("js-thermostat", "ada", "Hello").await;
    assert_eq!((status, &refusal["error"]["code"]), (422, &json!("invalid_message")), "{refusal}");
}
