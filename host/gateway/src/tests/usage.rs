//! Tests `/v1/usage`, and budgets in money on the routes that name a model directly.

use super::{
    access::{ask, guarded, key},
    fixture::Server,
    workers_ai::failure,
};
use crate::GatewayOptions;
use axum::{
    body::Body,
    http::{Method, Request},
};
use futures::StreamExt;
use serde_json::{Value, json};
use skep_runtime::{Price, PriceList, Role, RuntimeOptions};
use std::time::Duration;
use tower::ServiceExt;

fn prices() -> PriceList {
    let rate = |text: &str| text.parse().unwrap();
    let price = Price {
        input: rate("1"),
        cached_input: rate("0.1"),
        cache_write: None,
        output: rate("10"),
        currency: "USD".parse().unwrap(),
        from: "2024-01-01".parse().unwrap(),
    };
    let mut prices = PriceList::default();
    prices.add("tiny", vec![price]).unwrap();
    prices
}

async fn priced(budget: Option<&str>, prices: PriceList) -> Server {
    let tenant_money_per_day = budget.map(|money| ("local".to_owned(), money.parse().unwrap()));
    let tenant_money_per_day = tenant_money_per_day.into_iter().collect();
    let runtime = RuntimeOptions { prices, tenant_money_per_day, ..RuntimeOptions::default() };
    Server::with_runtime(GatewayOptions::default(), runtime).await
}

fn completion(max_tokens: u32) -> Value {
    json!({"prompt": "hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

/// Waits until this many requests are counted, which happens in the background, and returns the report.
async fn report(server: &Server, query: &str, requests: u64) -> Value {
    for _ in 0..500 {
        let report = server.get(&format!("/v1/usage?{query}")).await.json();
        if report["total"]["requests"].as_u64() >= Some(requests) {
            return report;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{requests} requests were not counted");
}

#[tokio::test]
async fn requests_to_models_are_counted_and_priced() {
    let server = priced(None, prices()).await;
    let mut expected = (0, 0, 0);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let mut body = completion(4);
        if path.contains("chat") {
            body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": true, "n": 2});
        }
        let usage = server.ok(path, &body).await.json()["usage"].clone();
        expected.0 += usage["prompt_tokens"].as_u64().unwrap();
        expected.1 += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        expected.2 += usage["completion_tokens"].as_u64().unwrap();
    }
    let report = report(&server, "by=model", 3).await;
    let line = &report["data"][0];
    assert_eq!((&line["name"], &line["requests"]), (&json!("tiny"), &json!(3)));
    let (input, cached, output) = expected;
    assert_eq!(
        (&line["input_tokens"], &line["cached_input_tokens"], &line["output_tokens"]),
        (&json!(input), &json!(cached), &json!(output))
    );
    // By hand, in tenths of a millionth.
    let tenths = 10 * (input - cached) + cached + 100 * output;
    let amount: f64 = line["cost"][0]["amount"].as_str().unwrap().parse().unwrap();
    assert!((amount - tenths as f64 / 1e7).abs() < 1e-12, "{amount} is not {tenths} tenths");
    assert_eq!(line["unknown_cost"], Value::Null);
    assert_eq!(report["total"]["cost"], line["cost"]);
    let direct = server.get("/v1/usage").await.json();
    assert_eq!((&direct["by"], &direct["data"][0]["name"]), (&json!("agent"), &Value::Null));
}

#[tokio::test]
async fn a_model_without_a_price_costs_an_unknown_amount() {
    let server = priced(None, PriceList::default()).await;
    server.ok("/v1/completions", &completion(4)).await;
    let total = report(&server, "by=day", 1).await["total"].clone();
    assert_eq!((&total["cost"], &total["unknown_cost"]["models"]), (&json!([]), &json!(["tiny"])));
    assert_eq!(total["unknown_cost"]["output_tokens"], 4);
    let table = server.get("/v1/usage?by=model&format=csv").await;
    assert_eq!(table.headers["content-type"], "text/csv; charset=utf-8");
    let mut lines = table.text.lines();
    let columns = "model,requests,input_tokens,cached_input_tokens,cache_write_input_tokens,output_tokens,\
                   estimated_requests,estimated_input_tokens,estimated_output_tokens,currency,cost,saved_by_cache";
    assert_eq!(lines.next(), Some(columns));
    let input = &total["input_tokens"];
    assert_eq!(lines.next(), Some(&*format!("tiny,1,{input},0,0,4,0,0,0,,unknown,unknown")));
    assert_eq!(lines.next(), None);
}

#[tokio::test]
async fn a_stream_that_the_client_leaves_is_an_estimate() {
    let server = priced(None, prices()).await;
    let mut body = completion(3_000);
    body["stream"] = json!(true);
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = server.router.clone().oneshot(request).await.unwrap();
    let mut pieces = response.into_body().into_data_stream();
    pieces.next().await.unwrap().unwrap();
    drop(pieces);
    let total = report(&server, "by=tenant", 1).await["total"].clone();
    assert_eq!(total["estimated"]["requests"], 1, "{total}");
    assert_eq!(total["estimated"]["input_tokens"], total["input_tokens"]);
    let output = total["output_tokens"].as_u64().unwrap();
    // The engine may have produced everything before it learned that nobody reads.
    assert!((1..=3_000).contains(&output), "{output}");
}

#[tokio::test]
async fn shows_how_much_of_a_budget_is_spent() {
    let server = priced(Some("0.50 USD"), prices()).await;
    server.ok("/v1/completions", &completion(4)).await;
    let spent = report(&server, "by=tenant", 1).await["total"]["cost"][0]["amount"].clone();
    let limits = server.get("/v1/limits").await.json();
    assert_eq!(limits["tenant"], "local");
    assert_eq!(limits["money_per_day"], json!({"currency": "USD", "used": spent, "limit": "0.50"}));
    let free = priced(None, prices()).await.get("/v1/limits").await.json();
    assert_eq!(free["money_per_day"], Value::Null);
}

#[tokio::test]
async fn a_budget_in_money_is_reserved_and_settled() {
    let free = priced(None, prices()).await.ok("/v1/completions", &completion(4)).await.json();
    // In millionths: the prompt's tokens, and four of output. The budget lacks one millionth for a third request.
    let prompt = free["usage"]["prompt_tokens"].as_u64().unwrap();
    let budget = format!("0.{:06} USD", 3 * (prompt + 40) - 1);
    let server = priced(Some(&budget), prices()).await;
    let mut refused = None;
    for request in 1..=4 {
        let answer = server.post("/v1/completions", &completion(4)).await;
        if answer.status != 200 {
            refused = Some((request, answer));
            break;
        }
    }
    let (request, answer) = refused.expect("the money is used up");
    assert_eq!(request, 3, "two are spent, and the rest does not pay for a third");
    assert_eq!(answer.status, 429);
    let seconds: u64 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=86_400).contains(&seconds), "{seconds}");
    let error = answer.error();
    assert_eq!(error["code"], "money_used_up");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("`money_per_day` under [tenants.local] in skep.toml"), "{message}");
    // A request that fits is let through.
    server.ok("/v1/completions", &completion(1)).await;
    let chat = json!({"messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(server.post("/v1/chat/completions", &chat).await.error()["code"], "money_used_up");
    let (status, error) = failure(&server.post("/ai/run/tiny", &completion(4)).await);
    assert_eq!((status, &error["code"]), (429, &json!(3036)));
}

#[tokio::test]
async fn a_budget_in_money_refuses_an_unknown_price() {
    let server = priced(Some("5 USD"), PriceList::default()).await;
    let chat = json!({"messages": [{"role": "user", "content": "hello"}]});
    for (path, body) in [("/v1/completions", &completion(4)), ("/v1/chat/completions", &chat)] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, 403, "{}", answer.text);
        let error = answer.error();
        assert_eq!(error["code"], "price_unknown");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("hint: add the price under [prices.\"tiny\"] in skep.toml"), "{message}");
    }
    assert_eq!(failure(&server.post("/ai/run/tiny", &completion(4)).await).0, 403);
}

#[tokio::test]
async fn a_tenant_sees_its_own_usage_and_an_admin_all_of_it() {
    let server = guarded().await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let (acme, globex) =
        (key(&server, "acme", Role::Invoke, None).await, key(&server, "globex", Role::Invoke, None).await);
    for (key, times) in [(&acme, 2), (&globex, 1)] {
        for _ in 0..times {
            assert_eq!(ask(&server, key, Method::POST, "/v1/completions", completion(2)).await.status, 200);
        }
    }
    let usage = async |key: &str, query: &str| {
        ask(&server, key, Method::GET, &format!("/v1/usage?{query}"), Value::Null).await
    };
    let names = |report: &Value| -> Vec<(String, u64)> {
        let lines = report["data"].as_array().unwrap().iter();
        lines
            .map(|line| (line["name"].as_str().unwrap().to_owned(), line["requests"].as_u64().unwrap()))
            .collect()
    };
    let mut all = Vec::new();
    for _ in 0..500 {
        all = names(&usage(&admin, "by=tenant").await.json());
        if all.iter().map(|(_, requests)| requests).sum::<u64>() == 3 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(all, [("acme".to_owned(), 2), ("globex".to_owned(), 1)]);
    assert_eq!(names(&usage(&acme, "by=tenant").await.json()), [("acme".to_owned(), 2)]);
    assert_eq!(names(&usage(&admin, "by=tenant&tenant=globex").await.json()), [("globex".to_owned(), 1)]);
    let by_key = names(&usage(&globex, "by=key").await.json());
    assert!(by_key.len() == 1 && by_key[0].0.starts_with("key-"), "{by_key:?}");
    let other = usage(&acme, "tenant=globex").await;
    assert_eq!((other.status.as_u16(), &other.error()["code"]), (403, &json!("role_missing")));
    let narrow = key(&server, "acme", Role::Read, Some("echo")).await;
    assert_eq!(usage(&narrow, "").await.error()["code"], "key_is_for_agents");
    let metrics = key(&server, "local", Role::Metrics, None).await;
    assert_eq!(usage(&metrics, "").await.status, 403);
}

#[tokio::test]
async fn wrong_queries_are_refused_by_name() {
    let server = Server::start().await;
    for (query, parameter) in [
        ("by=weather", "by"),
        ("since=yesterday", "since"),
        ("until=2026-02-30", "until"),
        ("since=0d", "since"),
        ("since=2026-02-01&until=2026-01-31", "since"),
        ("format=xml", "format"),
    ] {
        let answer = server.get(&format!("/v1/usage?{query}")).await;
        assert_eq!(answer.status, 400, "{query}");
        assert_eq!(answer.error()["param"], parameter, "{query}");
    }
}
