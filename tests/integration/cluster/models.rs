//! Hosts without a model, and hosts with different ones: agents run anywhere, and a host that has a model computes it for all.

use super::{
    gate::Gate,
    nodes::{Node, Site, until},
};
use crate::harness::{content, parse_events};
use reqwest::Method;
use serde_json::{Value, json};

/// Waits until a host has a model, its own or that of another host, and returns its entry in the list of models.
async fn listed(node: &Node, model: &str) -> Value {
    let find = async || {
        let models = node.get("/v1/models").await.1["data"].as_array().cloned().unwrap_or_default();
        models.into_iter().find(|known| known["id"] == model)
    };
    until(async || find().await.is_some()).await;
    find().await.unwrap()
}

fn question(model: &str) -> Value {
    let messages = json!([{"role": "user", "content": "What is gravity?"}]);
    json!({"model": model, "messages": messages, "max_tokens": 24, "temperature": 0})
}

/// Returns the text of a streamed answer.
async fn streamed(node: &Node, model: &str) -> String {
    let mut body = question(model);
    body["stream"] = json!(true);
    let response = node.request(Method::POST, "/v1/chat/completions").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let events = parse_events(&response.text().await.unwrap());
    let chunks = events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
    chunks.filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect()
}

/// Returns the use of a model that all hosts have recorded.
async fn used(node: &Node, model: &str) -> [u64; 3] {
    let (_, report, _) = node.get("/v1/usage?by=model").await;
    let line = report["data"].as_array().unwrap().iter().find(|line| line["name"] == model).cloned();
    let line = line.unwrap_or_default();
    ["requests", "input_tokens", "output_tokens"].map(|field| line[field].as_u64().unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_without_a_model_serves_the_model_of_another_host() {
    let Some(site) = Site::start(false).await else { return };
    let computing = site.node().await;
    let gateway = site.gateway().await;
    assert_eq!(gateway.get("/readyz").await.0, 200, "it is ready without a model");
    let model = listed(&gateway, "tiny").await;
    let details = &model["skep"];
    assert_eq!(
        (&details["location"], &details["hosts"], &details["is_default"]),
        (&json!("cluster"), &json!([computing.number]), &json!(true)),
        "{model}"
    );
    let own = listed(&computing, "tiny").await;
    assert_eq!((&own["skep"]["location"], &own["skep"]["hosts"]), (&json!("local"), &Value::Null), "{own}");
    assert_eq!(model["context_length"], own["context_length"]);
    let hosts = gateway.ok(Method::GET, "/v1/cluster", Value::Null).await["hosts"].take();
    let roles: Vec<(&Value, &Value)> =
        hosts.as_array().unwrap().iter().map(|host| (&host["role"], &host["models"])).collect();
    assert_eq!(roles, [(&json!("all"), &json!(["tiny"])), (&json!("gateway"), &json!([]))]);

    answers_are_the_same_at_both(&gateway, &computing).await;

    // An agent runs where its session is, and a model that it uses may leave and come back meanwhile.
    gateway.deploy("gate", "gate", "model = \"tiny\"\n[grants]\nhosts = [\"*\"]").await;
    let gate = Gate::start().await;
    let (turn, owner) = gateway.begin("gate/sessions/s", &gate.url).await;
    assert_eq!(owner, gateway.number);
    gate.has(1).await;
    computing.kill();
    let mut refusals = Vec::new();
    let refused = loop {
        let (status, refusal, _) = gateway.ask(Method::POST, "/v1/chat/completions", question("tiny")).await;
        match status {
            503 => refusals.push(refusal["error"]["code"].clone()),
            _ => break (status, refusal),
        }
    };
    assert!(refusals.iter().all(|code| code == "upstream_unavailable"), "{refusals:?}");
    let error = &refused.1["error"];
    assert_eq!((refused.0, &error["code"]), (404, &json!("model_not_found")), "{error}");
    let message = error["message"].as_str().unwrap();
    assert_eq!(message, "no model is called `tiny`; available models: none");

    let computing = site.node().await;
    listed(&gateway, "tiny").await;
    gate.open();
    until(async || gateway.get(&turn).await.1["state"] == "done").await;
    let own = computing.ok(Method::POST, "/v1/chat/completions", question("tiny")).await;
    assert_eq!(streamed(&gateway, "tiny").await, content(&own));
    assert_eq!(gateway.say("gate/sessions/s", &gate.url).await.0["turn"], 2);
}

async fn answers_are_the_same_at_both(gateway: &Node, computing: &Node) {
    let own = computing.ok(Method::POST, "/v1/chat/completions", question("tiny")).await;
    let passed_on = gateway.ok(Method::POST, "/v1/chat/completions", question("tiny")).await;
    assert_eq!(content(&passed_on), content(&own));
    assert_eq!(passed_on["usage"]["completion_tokens"], own["usage"]["completion_tokens"]);
    // Usage is written in the background, by the host that was asked.
    until(async || used(gateway, "tiny").await[0] >= 2).await;
    let sum = |field: &str| {
        [&own, &passed_on].map(|answer| answer["usage"][field].as_u64().unwrap()).iter().sum::<u64>()
    };
    assert_eq!(used(gateway, "tiny").await, [2, sum("prompt_tokens"), sum("completion_tokens")]);
    assert_eq!(streamed(gateway, "tiny").await, content(&own));

    let schema = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
        "additionalProperties": false});
    let mut formed = question("default");
    formed["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    formed["max_tokens"] = json!(300);
    let formed = gateway.ok(Method::POST, "/v1/chat/completions", formed).await;
    let value: Value = serde_json::from_str(content(&formed)).unwrap_or_else(|_| panic!("{formed}"));
    assert_eq!(value, json!({"a": 1}));
    let response = json!({"model": "tiny", "input": "hello", "max_output_tokens": 8, "store": false});
    let response = gateway.ok(Method::POST, "/v1/responses", response).await;
    assert!(response["usage"]["input_tokens"].as_u64() > Some(0), "{response}");
    let run = json!({"prompt": "hello", "max_tokens": 8});
    let run = gateway.ok(Method::POST, "/ai/run/tiny", run).await;
    assert!(run["result"]["response"].is_string(), "{run}");
    until(async || used(computing, "tiny").await[0] >= 6).await;
    assert_eq!(used(gateway, "tiny").await[0], 6, "each request is counted once");

    let mut scored = question("tiny");
    scored["logprobs"] = json!(true);
    let (status, refused, _) = gateway.ask(Method::POST, "/v1/chat/completions", scored).await;
    assert_eq!(status, 400, "tokens stay where the model is: {refused}");
    let (status, unknown, _) = gateway.ask(Method::POST, "/v1/chat/completions", question("none")).await;
    assert_eq!((status, &unknown["error"]["code"]), (404, &json!("model_not_found")));
    assert!(unknown["error"]["message"].as_str().unwrap().ends_with("available models: tiny"), "{unknown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_with_different_models_have_one_catalog() {
    let Some(site) = Site::start(false).await else { return };
    let one = site.node_with_model("one").await;
    let two = site.node_with_model("two").await;
    for (node, other, name) in [(&one, &two, "two"), (&two, &one, "one")] {
        let model = listed(node, name).await;
        assert_eq!(model["skep"]["hosts"], json!([other.number]), "{model}");
        let models = node.get("/v1/models").await.1["data"].take();
        let own: Vec<bool> =
            models.as_array().unwrap().iter().map(|model| model["skep"]["location"] == "local").collect();
        assert_eq!(own, [true, false], "its own models come first: {models}");
        let answer = node.ok(Method::POST, "/v1/chat/completions", question(name)).await;
        assert_eq!(answer["model"], name);
    }
    let gate = Gate::start().await;
    gate.open();
    one.deploy("gate", "far", "model = \"two\"\n[grants]\nhosts = [\"*\"]").await;
    two.knows(&["far"]).await;
    for node in [&one, &two] {
        let (answer, owner) = node.say("far/sessions/s", &gate.url).await;
        assert_eq!(owner, one.number, "the session stays, wherever its model is: {answer}");
    }
}
