//! Tests of the models that clients may use without an agent, on every route that names a model.

use super::{
    access::{ask, key},
    batches::with_key,
    fixture::{Server, TestResponse},
};
use crate::{AccessOptions, GatewayOptions};
use axum::http::Method;
use serde_json::{Value, json};
use skep_engine::{
    Model, ModelDigest, RemoteInfo, RemoteModel, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, Input, RemoteStream},
};
use skep_runtime::{ModelGrant, Role, RuntimeOptions};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A model on another server, or a route if it has members. It counts the requests that it gets.
struct Far {
    info: RemoteInfo,
    members: Vec<String>,
    asked: Arc<AtomicUsize>,
}

impl Far {
    fn model(name: &str, members: &[&str], asked: &Arc<AtomicUsize>) -> Model {
        let info = RemoteInfo {
            name: name.to_owned(),
            digest: ModelDigest::remote("http://far", name),
            context_length: Some(8192),
            created_unix_s: 0,
        };
        let members = members.iter().map(ToString::to_string).collect();
        Model::Remote(Arc::new(Far { info, members, asked: asked.clone() }))
    }
}

impl RemoteModel for Far {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn members(&self) -> Vec<String> {
        self.members.clone()
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        self.asked.fetch_add(1, Ordering::AcqRel);
        let usage = Usage { prompt_tokens: 5, completion_tokens: 2, ..Usage::default() };
        let outcome = ChatOutcome { usage, ..ChatOutcome::remote("Hi.".to_owned(), ChatFinish::Stop) };
        Box::pin(futures::stream::iter([
            Ok(ChatEvent::Started { prompt_tokens: 5, cached_tokens: 0, cache_write_tokens: 0 }),
            Ok(ChatEvent::Text { delta: "Hi.".to_owned(), logprobs: Vec::new() }),
            Ok(ChatEvent::Finished(outcome)),
        ]))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

/// Returns options in which these tenants have these models.
fn granting(tenants: &[(&str, &[&str])]) -> RuntimeOptions {
    let grant = |name: &&str| ModelGrant::try_from((*name).to_owned()).unwrap();
    let of = |models: &[&str]| models.iter().map(grant).collect::<Vec<_>>();
    let tenant_models = tenants.iter().map(|&(tenant, models)| (tenant.to_owned(), of(models))).collect();
    RuntimeOptions { tenant_models, ..RuntimeOptions::default() }
}

const TENANTS: [(&str, &[&str]); 2] = [("near", &["far/*"]), ("wide", &["*", "far/*"])];

/// Starts a server that requires keys, with models of two upstreams, two routes, and an alias. Returns the number of requests
/// that the models other than `tiny` got.
async fn start() -> (Server, Arc<AtomicUsize>) {
    let access = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let options = GatewayOptions { access, ..GatewayOptions::default() };
    let server = Server::with_runtime(options, granting(&TENANTS)).await;
    let asked = Arc::<AtomicUsize>::default();
    let models: [(&str, &[&str]); 4] = [
        ("far/model", &[]),
        ("other/model", &[]),
        ("smart", &["tiny", "far/model"]),
        ("both", &["far/model", "other/model"]),
    ];
    for (name, members) in models {
        let _ = server.host.models().clone().with(Far::model(name, members, &asked));
    }
    server.host.models().set_alias("fast", "far/model").unwrap();
    (server, asked)
}

/// Returns a request to each route that names a model.
fn requests(model: &str) -> Vec<(String, Value)> {
    let messages = json!([{"role": "user", "content": "hello"}]);
    let chat = json!({"model": model, "max_tokens": 4, "messages": messages});
    let response = json!({"model": model, "input": "hello", "max_output_tokens": 16});
    let mut later = response.clone();
    later["background"] = json!(true);
    vec![
        ("/v1/chat/completions".to_owned(), chat.clone()),
        ("/v1/messages".to_owned(), chat),
        ("/v1/messages/count_tokens".to_owned(), json!({"model": model, "messages": messages})),
        ("/v1/completions".to_owned(), json!({"model": model, "prompt": "hello", "max_tokens": 4})),
        ("/v1/responses".to_owned(), response),
        ("/v1/responses".to_owned(), later),
        ("/tokenize".to_owned(), json!({"model": model, "prompt": "hello"})),
        (format!("/ai/run/{model}"), json!({"messages": messages})),
        (format!("/ai/run/{model}?queueRequest=true"), json!({"requests": [{"messages": messages}]})),
    ]
}

async fn chat(server: &Server, key: &str, model: &str) -> TestResponse {
    let (path, body) = requests(model).remove(0);
    ask(server, key, Method::POST, &path, body).await
}

/// Checks that every route refuses a model, because the caller may not use `lacking`.
async fn check_refused(server: &Server, key: &str, model: &str, lacking: &str) {
    let why = format!("may not use the model {lacking};");
    for (path, body) in requests(model) {
        let answer = ask(server, key, Method::POST, &path, body).await;
        assert_eq!(answer.status, 403, "{path}: {}", answer.text);
        let body = answer.json();
        let message = if path.starts_with("/ai/") {
            assert_eq!(body["errors"][0]["code"], 403, "{body}");
            &body["errors"][0]["message"]
        } else if path.starts_with("/v1/messages") {
            assert_eq!(body["error"]["type"], "permission_error", "{body}");
            &body["error"]["message"]
        } else {
            assert_eq!(body["error"]["code"], "model_not_granted", "{body}");
            &body["error"]["message"]
        };
        assert!(message.as_str().is_some_and(|message| message.contains(&why)), "{path}: {body}");
    }
    let client = with_key(server, key);
    let endpoint = "/v1/chat/completions";
    let line = json!({"custom_id": "a", "method": "POST", "url": endpoint, "body": requests(model)[0].1});
    let input = client.upload(&format!("{line}\n")).await;
    let create = json!({"input_file_id": input, "endpoint": endpoint, "completion_window": "24h"});
    let created = client.post("/v1/batches", create).await.json();
    let batch = client.ended(&created["id"]).await;
    assert_eq!(batch["status"], "failed", "{batch}");
    let error = &batch["errors"]["data"][0];
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("model_not_granted"), &json!("body.model")),
        "{batch}"
    );
}

/// Returns the names of the models that a caller sees.
async fn listed(server: &Server, key: &str) -> Vec<String> {
    let models = ask(server, key, Method::GET, "/v1/models", Value::Null).await.json();
    let names = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

#[tokio::test]
async fn a_tenant_without_models_of_its_own_uses_only_those_of_the_host() {
    let (server, asked) = start().await;
    let acme = key(&server, "acme", Role::Invoke, None).await;
    for (model, lacking) in [
        ("far/model", "far/model"),
        ("fast", "far/model"),
        ("smart", "far/model"),
        ("both", "far/model"),
        ("other/model", "other/model"),
    ] {
        check_refused(&server, &acme, model, lacking).await;
    }
    assert_eq!(asked.load(Ordering::Acquire), 0, "nothing left the host");
    assert_eq!(listed(&server, &acme).await, ["tiny"]);
    let hidden = ask(&server, &acme, Method::GET, "/v1/models/far/model", Value::Null).await;
    assert_eq!(hidden.status, 404, "{}", hidden.text);
    let local = chat(&server, &acme, "tiny").await;
    assert_eq!(local.status, 200, "{}", local.text);
    // The operator's own clients have no more, unless they are admins.
    let invoke = key(&server, "local", Role::Invoke, None).await;
    check_refused(&server, &invoke, "far/model", "far/model").await;
    assert_eq!(asked.load(Ordering::Acquire), 0);
}

#[tokio::test]
async fn a_tenant_with_models_of_its_own_uses_these_and_routes_over_them_only() {
    let (server, asked) = start().await;
    let near = key(&server, "near", Role::Invoke, None).await;
    // Its setting replaces the models of the host, and a route has a name of its own.
    for (model, lacking) in
        [("tiny", "tiny"), ("smart", "smart"), ("both", "both"), ("other/model", "other/model")]
    {
        check_refused(&server, &near, model, lacking).await;
    }
    let wide = key(&server, "wide", Role::Invoke, None).await;
    for model in ["both", "other/model"] {
        check_refused(&server, &wide, model, "other/model").await;
    }
    assert_eq!(asked.load(Ordering::Acquire), 0);
    assert_eq!(listed(&server, &near).await, ["far/model"]);
    assert_eq!(listed(&server, &wide).await, ["tiny", "far/model", "smart"]);
    for (number, (key, model)) in
        [(&near, "far/model"), (&near, "fast"), (&wide, "far/model"), (&wide, "smart")]
            .into_iter()
            .enumerate()
    {
        let answer = chat(&server, key, model).await;
        assert_eq!(answer.status, 200, "{model}: {}", answer.text);
        assert_eq!(answer.json()["choices"][0]["message"]["content"], "Hi.");
        assert_eq!(asked.load(Ordering::Acquire), number + 1);
    }
}

#[tokio::test]
async fn an_admin_uses_every_model_unless_its_tenant_stays_on_this_host() {
    let (server, asked) = start().await;
    let admin = key(&server, "local", Role::Admin, None).await;
    for (number, model) in ["far/model", "fast", "smart", "both", "other/model"].into_iter().enumerate() {
        let answer = chat(&server, &admin, model).await;
        assert_eq!(answer.status, 200, "{model}: {}", answer.text);
        assert_eq!(asked.load(Ordering::Acquire), number + 1);
    }
    server.host.set_rules(&granting(&[("local", &["*"])])).await;
    for model in ["far/model", "fast", "smart"] {
        check_refused(&server, &admin, model, "far/model").await;
    }
    assert_eq!(asked.load(Ordering::Acquire), 5, "nothing left the host after the setting");
    assert_eq!(listed(&server, &admin).await, ["tiny"]);
    assert_eq!(chat(&server, &admin, "tiny").await.status, 200);
}
