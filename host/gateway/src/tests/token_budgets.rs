//! Tests a tenant's daily token budget on the routes that name a model directly.

use super::{
    fixture::{Server, TestResponse},
    workers_ai::failure,
};
use crate::GatewayOptions;
use serde_json::{Value, json};
use skep_runtime::RuntimeOptions;

const DAY_S: u64 = 86_400;

async fn with_tokens(tokens: u32) -> Server {
    let tenant_tokens_per_day = [("local".to_owned(), tokens)].into();
    let runtime = RuntimeOptions { tenant_tokens_per_day, ..RuntimeOptions::default() };
    Server::with_runtime(GatewayOptions::default(), runtime).await
}

fn asking(mut body: Value) -> Value {
    body.as_object_mut()
        .unwrap()
        .extend(json!({"max_tokens": 4, "temperature": 0, "ignore_eos": true}).as_object().unwrap().clone());
    body
}

/// Checks that the response refuses the request until midnight.
fn refused(answer: &TestResponse) {
    assert_eq!(answer.status, 429, "{}", answer.text);
    let seconds: u64 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=DAY_S).contains(&seconds), "{seconds}");
    assert!(answer.text.contains("`tokens_per_day` under [tenants.local] in skep.toml"), "{}", answer.text);
}

#[tokio::test]
async fn all_routes_share_a_tenants_daily_token_budget() {
    let chat = asking(json!({"messages": [{"role": "user", "content": "hello"}]}));
    let completion = asking(json!({"prompt": "hello"}));
    let streamed = |body: &Value| {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body
    };
    let routes = [
        ("/v1/chat/completions", chat.clone()),
        ("/v1/chat/completions", streamed(&chat)),
        ("/v1/completions", completion.clone()),
        ("/v1/completions", streamed(&completion)),
        ("/ai/run/tiny", completion.clone()),
        ("/ai/run/tiny", streamed(&completion)),
        ("/ai/run/tiny", chat.clone()),
    ];
    for (path, body) in &routes {
        // Four tokens do not use up five, eight do.
        let server = with_tokens(5).await;
        server.ok(path, body).await;
        server.ok(path, body).await;
        for (path, body) in &routes {
            refused(&server.post(path, body).await);
        }
    }
    let server = with_tokens(4).await;
    server.ok("/v1/completions", &completion).await;
    let limits = server.get("/v1/limits").await.json();
    let used_up = json!({"name": "tokens_per_day", "used": 4, "limit": 4});
    assert!(limits["data"].as_array().unwrap().contains(&used_up), "{limits}");
    let error = server.post("/v1/completions", &completion).await.error();
    assert_eq!((&error["code"], &error["type"]), (&json!("tokens_used_up"), &json!("rate_limit_error")));
    let server = with_tokens(4).await;
    server.ok("/ai/run/tiny", &completion).await;
    let (status, error) = failure(&server.post("/ai/run/tiny", &completion).await);
    assert_eq!((status, &error["code"]), (429, &json!(3036)), "the error code of Workers AI");
}
