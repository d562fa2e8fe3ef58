//! Grants and limits, as seen by an operator: over HTTP, and across restarts.

use crate::harness::{Host, client};
use serde_json::json;
use skep_runtime::ModelGrant;

#[tokio::test]
async fn a_used_up_daily_token_budget_survives_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let host = Host::start(Some(data.path()));
    let (status, deployed) = host.deploy_guest("generate", "daily", "[limits]\ntokens_per_day = 6").await;
    assert_eq!(status, 201, "{deployed}");
    let (_, detail) = host.get("/v1/agents/daily").await;
    assert_eq!(detail["limits"]["tokens_per_day"], 6, "{detail}");
    let say = json!({"text": "Count to a hundred.", "data": {"max_tokens": 40, "temperature": 0.0}});
    let path = "/v1/agents/daily/sessions/s/messages";
    // The turn gets the rest of the daily budget and uses all of it.
    let answer = host.ok(path, say.clone()).await;
    assert_eq!(answer["usage"]["completion_tokens"], 6, "{answer}");
    host.stop();

    let host = Host::start(Some(data.path()));
    let response = client().post(host.at(path)).json(&say).send().await.unwrap();
    assert_eq!(response.status(), 429);
    let seconds: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=86_400).contains(&seconds), "{seconds}");
    let answer: serde_json::Value = response.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "tokens_used_up", "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("`tokens_per_day` under [limits] in agent.toml"), "{message}");
}

#[tokio::test]
async fn without_granted_models_agents_cannot_use_any() {
    let mut options = Host::options(None);
    options.runtime.granted_models = Some(Vec::<ModelGrant>::new());
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("generate", "denied", "").await.0, 201);
    let (status, answer) = host.message("denied", "s", "Hello.").await;
    assert!(status >= 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("to `models` under [grants] in skep.toml"), "{message}");
}
