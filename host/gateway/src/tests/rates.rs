//! Tests rate limits through the routes, with a clock that only the tests advance.

use super::{
    fixture::{Server, TestResponse},
    turns::echo,
};
use crate::{AccessOptions, GatewayOptions, RateLimiter, RateOptions, TenantRates, rates::Clock};
use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Method, Request},
};
use serde_json::{Value, json};
use skep_engine::TokenMeter;
use skep_runtime::{AgentName, Manifest, NewApiKey, Role, SharedCounts, Tenant};
use std::{
    net::SocketAddr,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const MESSAGES: &str = "/v1/agents/echo/sessions/s/messages";

/// A host with an agent that replies without a model.
struct Limited {
    server: Server,
    rates: Arc<RateLimiter>,
    now: Arc<Mutex<Instant>>,
}

impl Limited {
    async fn start(keys_required: bool, options: RateOptions, max_accounts: usize) -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let hand = now.clone();
        let clock: Clock = Arc::new(move || *hand.lock().unwrap());
        let rates = Arc::new(RateLimiter::with_clock(options, clock, max_accounts));
        let access = AccessOptions { keys_required, open_metrics: true, ..AccessOptions::default() };
        let options = GatewayOptions { access, rates: rates.clone(), ..GatewayOptions::default() };
        let server = Server::with(options).await;
        let manifest = "name = \"echo\"\n[[trigger.http]]\nroute = \"/echo/{session}\"";
        server.host.deploy(Manifest::from_toml(manifest).unwrap(), echo(), "tester").await.unwrap();
        Limited { server, rates, now }
    }

    fn pass(&self, time: Duration) {
        *self.now.lock().unwrap() += time;
    }

    async fn key(&self, tenant: &str, requests_per_minute: Option<u32>) -> String {
        let new = NewApiKey {
            tenant: Tenant::new(tenant).unwrap(),
            role: Role::Invoke,
            agents: None,
            name: String::new(),
            expires_in: None,
            requests_per_minute: requests_per_minute.and_then(NonZeroU32::new),
            bodies: false,
        };
        self.server.host.keys().create(new).await.unwrap().1
    }

    async fn ask(&self, from: From<'_>, method: Method, path: &str, body: Value) -> TestResponse {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = match from {
            From::Key(key) => request.header("authorization", format!("Bearer {key}")),
            From::Address(address) => {
                let address: SocketAddr = address.parse().unwrap();
                request.extension(ConnectInfo(address))
            }
        }
        .body(Body::from(body.to_string()));
        self.server.send(request.unwrap()).await
    }

    async fn say(&self, from: From<'_>) -> TestResponse {
        self.ask(from, Method::POST, MESSAGES, json!({"text": "hi"})).await
    }
}

#[derive(Clone, Copy)]
enum From<'a> {
    Key(&'a str),
    Address(&'a str),
}

fn requests(per_minute: u32, burst: u32) -> TenantRates {
    TenantRates {
        requests_per_minute: NonZeroU32::new(per_minute),
        request_burst: NonZeroU32::new(burst),
        tokens_per_minute: None,
    }
}

fn everyone(others: TenantRates) -> RateOptions {
    RateOptions { others, ..RateOptions::default() }
}

/// Returns the status and the rate-limit headers of requests: limit, remaining, reset, and the retry delay.
fn rate_status(answer: &TestResponse) -> (u16, [&str; 4]) {
    let header = |name: &str| answer.headers.get(name).map_or("", |value| value.to_str().unwrap());
    let names = ["limit", "remaining", "reset"].map(|what| format!("x-ratelimit-{what}-requests"));
    let [limit, remaining, reset] = names.each_ref().map(|name| header(name));
    (answer.status.as_u16(), [limit, remaining, reset, header("retry-after")])
}

#[tokio::test]
async fn two_hosts_keep_a_rate_together() {
    let rates = || everyone(requests(120, 20));
    let hosts = [Limited::start(true, rates(), 100).await, Limited::start(true, rates(), 100).await];
    let keys = [hosts[0].key("acme", None).await, hosts[1].key("acme", None).await];
    let exchange = || {
        let [one, other] = hosts.each_ref().map(|host| host.rates.own());
        hosts[0].rates.note(vec![(2, other)]);
        hosts[1].rates.note(vec![(1, one)]);
    };
    exchange();
    let mut admitted = 0;
    // Two minutes, in which four times as many requests come as are allowed.
    for _ in 0..240 {
        for (host, key) in hosts.iter().zip(&keys) {
            for _ in 0..2 {
                admitted += u32::from(host.say(From::Key(key)).await.status.is_success());
            }
            host.pass(Duration::from_millis(500));
        }
        exchange();
    }
    let alone = 20 + 2 * 120;
    assert!((alone * 95 / 100..=alone * 105 / 100).contains(&admitted), "{admitted} instead of {alone}");
}

#[tokio::test]
async fn requests_over_the_burst_are_refused_with_a_retry_delay() {
    let host = Limited::start(true, everyone(requests(20, 2)), 100).await;
    let key = host.key("acme", None).await;
    let from = From::Key(&key);
    assert_eq!(rate_status(&host.say(from).await), (200, ["20", "1", "3s", ""]));
    assert_eq!(rate_status(&host.say(from).await), (200, ["20", "0", "6s", ""]));
    host.pass(Duration::from_millis(1_500));
    let refused = host.say(from).await;
    assert_eq!(rate_status(&refused), (429, ["20", "0", "4.5s", "2"]));
    let error = refused.error();
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("requests per minute: 20") && message.contains("[tenants.acme]"), "{message}");
    host.pass(Duration::from_millis(1_500));
    assert_eq!(rate_status(&host.say(from).await), (200, ["20", "0", "6s", ""]));
    assert_eq!(rate_status(&host.say(from).await).0, 429, "only answered requests count");
}

/// Returns how many are used of each rate with this name, and how many can be, and whether it is a key's own.
fn used(limits: &Value, name: &str) -> Vec<(u64, u64, bool)> {
    let number = |limit: &Value, field: &str| limit[field].as_u64().unwrap();
    let named = limits["data"].as_array().unwrap().iter().filter(|limit| limit["name"] == name);
    named.map(|limit| (number(limit, "used"), number(limit, "limit"), limit["of"].is_string())).collect()
}

#[tokio::test]
async fn a_caller_reads_how_far_the_rates_of_its_tenant_are_used() {
    let mut options = everyone(requests(20, 2));
    let paced = TenantRates { tokens_per_minute: NonZeroU32::new(100), ..TenantRates::default() };
    options.tenants.insert("paced".to_owned(), paced);
    let host = Limited::start(true, options, 100).await;
    let (key, paced) = (host.key("acme", Some(5)).await, host.key("paced", None).await);
    let read = async |key: &str, path: &str| host.ask(From::Key(key), Method::GET, path, Value::Null).await;
    assert_eq!(host.say(From::Key(&key)).await.status, 200);
    host.rates.count("paced", 40);
    let own = read(&key, "/v1/limits").await.json();
    assert_eq!(own["tenant"], "acme");
    assert_eq!(used(&own, "request_burst"), [(1, 2, false)], "{own}");
    assert_eq!(used(&own, "requests_per_minute"), [(1, 5, true)], "{own}");
    host.pass(Duration::from_secs(60));
    let later = read(&key, "/v1/limits").await.json();
    assert_eq!(used(&later, "request_burst"), [(0, 2, false)], "{later}");
    // Nobody but an admin reads the limits of another tenant, or what all tenants use of an agent.
    host.rates.count("paced", 40);
    assert_eq!(read(&key, "/v1/limits?tenant=paced").await.status, 403);
    assert_eq!(read(&key, "/v1/agents/echo").await.json().get("used"), None);
    let of_paced = read(&paced, "/v1/limits").await.json();
    assert_eq!(used(&of_paced, "tokens_per_minute"), [(40, 100, false)], "{of_paced}");
    let new = |tenant: &str, role: Role| NewApiKey {
        tenant: Tenant::new(tenant).unwrap(),
        role,
        agents: None,
        name: String::new(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    let keys = host.server.host.keys();
    // A key for some agents does not see what other agents of its tenant use.
    let narrow =
        NewApiKey { agents: Some(vec![AgentName::new("echo").unwrap()]), ..new("acme", Role::Invoke) };
    let narrow = keys.create(narrow).await.unwrap().1;
    assert_eq!(read(&narrow, "/v1/limits").await.error()["code"], "key_is_for_agents");
    let admin = keys.create(new("local", Role::Admin)).await.unwrap().1;
    assert_eq!(read(&admin, "/v1/limits?tenant=paced").await.json(), of_paced);
    // A key that has expired is left out.
    let expired = NewApiKey {
        expires_in: Some(Duration::from_nanos(1)),
        requests_per_minute: NonZeroU32::new(7),
        ..new("acme", Role::Invoke)
    };
    keys.create(expired).await.unwrap();
    let of_keys = read(&admin, "/v1/limits?tenant=acme").await.json();
    assert_eq!(used(&of_keys, "requests_per_minute"), [(0, 5, true)], "{of_keys}");
}

#[tokio::test]
async fn without_keys_each_address_reads_its_own_use() {
    let host = Limited::start(false, everyone(requests(20, 20)), 100).await;
    let (one, other) = (From::Address("198.51.100.1:1"), From::Address("198.51.100.2:1"));
    assert_eq!(host.say(one).await.status, 200);
    for (from, expected) in [(one, 1), (other, 0)] {
        let limits = host.ask(from, Method::GET, "/v1/limits", Value::Null).await.json();
        assert_eq!(used(&limits, "requests_per_minute"), [(expected, 20, false)], "{limits}");
    }
}

#[tokio::test]
async fn clients_behind_a_trusted_proxy_have_separate_limits() {
    let rates = Arc::new(RateLimiter::new(everyone(requests(20, 1))));
    let trusted_proxies = vec!["10.0.0.0/8".parse().unwrap()];
    let server = Server::with(GatewayOptions { rates, trusted_proxies, ..GatewayOptions::default() }).await;
    let send = async |peer: &str, forwarded_for: &str| {
        let peer: SocketAddr = peer.parse().unwrap();
        let request = Request::post("/v1/chat/completions").header("x-forwarded-for", forwarded_for);
        server
            .send(request.extension(ConnectInfo(peer)).body(Body::from("{}")).unwrap())
            .await
            .status
            .as_u16()
    };
    assert_eq!(send("10.0.0.1:1", "198.51.100.1").await, 400);
    assert_eq!(send("10.0.0.1:1", "198.51.100.1").await, 429);
    assert_eq!(send("10.0.0.2:1", "6.6.6.6, 198.51.100.1").await, 429, "entries from the client are ignored");
    assert_eq!(send("10.0.0.1:1", "198.51.100.2").await, 400);
    assert_eq!(send("203.0.113.5:1", "198.51.100.3").await, 400);
    assert_eq!(send("203.0.113.5:1", "198.51.100.4").await, 429, "other senders are not trusted");
}

#[tokio::test]
async fn tenants_have_independent_limits() {
    let mut options = everyone(requests(60, 1));
    options.tenants.insert("big".to_owned(), requests(600, 3));
    let host = Limited::start(true, options, 100).await;
    let [one, same, other, big] = [
        host.key("one", None).await,
        host.key("one", None).await,
        host.key("other", None).await,
        host.key("big", None).await,
    ];
    assert_eq!(host.say(From::Key(&one)).await.status, 200);
    assert_eq!(host.say(From::Key(&same)).await.status, 429, "a tenant's keys share its limit");
    assert_eq!(host.say(From::Key(&other)).await.status, 200);
    for remaining in ["2", "1", "0"] {
        assert_eq!(rate_status(&host.say(From::Key(&big)).await).1[1], remaining);
    }
    assert_eq!(host.say(From::Key(&big)).await.status, 429);
}

#[tokio::test]
async fn replaced_limits_count_what_was_used_before() {
    let host = Limited::start(true, everyone(requests(2, 2)), 100).await;
    let (key, narrow) = (host.key("acme", None).await, host.key("acme", Some(1)).await);
    host.rates.count("acme", 7);
    assert_eq!(host.say(From::Key(&narrow)).await.status, 200);
    assert_eq!(rate_status(&host.say(From::Key(&key)).await).1[1], "0");
    assert_eq!(host.say(From::Key(&key)).await.status, 429);
    host.rates.replace(everyone(requests(5, 5)));
    assert_eq!(rate_status(&host.say(From::Key(&key)).await).1[..2], ["5", "2"]);
    assert_eq!(host.say(From::Key(&narrow)).await.status, 429, "the limit of the key itself stays used up");
    host.rates.replace(everyone(requests(1, 1)));
    assert_eq!(host.say(From::Key(&key)).await.status, 429);
    host.rates.replace(RateOptions::default());
    assert_eq!(rate_status(&host.say(From::Key(&key)).await), (200, ["", "", "", ""]));
    let tokens_per_minute = NonZeroU32::new(5);
    host.rates.replace(everyone(TenantRates { tokens_per_minute, ..TenantRates::default() }));
    assert_eq!(host.say(From::Key(&key)).await.status, 200, "tokens are counted from now on");
    host.rates.count("acme", 6);
    assert_eq!(host.say(From::Key(&key)).await.status, 429);
}

#[tokio::test]
async fn a_key_can_have_a_limit_below_its_tenants() {
    let host = Limited::start(true, everyone(requests(60, 3)), 100).await;
    let (narrow, wide) = (host.key("acme", Some(1)).await, host.key("acme", None).await);
    assert_eq!(rate_status(&host.say(From::Key(&narrow)).await), (200, ["1", "0", "1m0s", ""]));
    let refused = host.say(From::Key(&narrow)).await;
    assert_eq!(rate_status(&refused), (429, ["1", "0", "1m0s", "60"]));
    assert!(refused.text.contains("--requests-per-minute"), "{}", refused.text);
    assert_eq!(
        rate_status(&host.say(From::Key(&wide)).await).1[1],
        "1",
        "the refused request did not count for the tenant"
    );
}

#[tokio::test]
async fn only_invocations_are_refused_each_in_its_routes_shape() {
    let host = Limited::start(true, everyone(requests(1, 1)), 100).await;
    let key = host.key("acme", None).await;
    let from = From::Key(&key);
    assert_eq!(host.say(from).await.status, 200);
    for path in [MESSAGES, "/echo/s", "/v1/chat/completions", "/v1/completions", "/v1/events", "/mcp"] {
        let refused = host.ask(from, Method::POST, path, json!({})).await;
        assert_eq!(rate_status(&refused), (429, ["1", "0", "1m0s", "60"]), "{path}: {}", refused.text);
        assert_eq!(refused.error()["code"], "rate_limit_exceeded", "{path}");
    }
    for path in ["/ai/run/tiny", "/client/v4/accounts/a/ai/run/@cf/x/tiny"] {
        let refused = host.ask(from, Method::POST, path, json!({"prompt": "x"})).await;
        assert_eq!(rate_status(&refused), (429, ["1", "0", "1m0s", "60"]), "{path}: {}", refused.text);
        let body = refused.json();
        assert_eq!((&body["success"], &body["errors"][0]["code"]), (&json!(false), &json!(429)), "{body}");
        assert!(body["errors"][0]["message"].as_str().unwrap().contains("requests per minute: 1"), "{body}");
    }
    for path in ["/healthz", "/readyz", "/metrics", "/v1/agents", "/v1/models"] {
        let answer = host.ask(from, Method::GET, path, Value::Null).await;
        assert_eq!(rate_status(&answer), (200, ["", "", "", ""]), "{path}: {}", answer.text);
    }
    let cancelled =
        host.ask(from, Method::DELETE, "/v1/agents/echo/sessions/s/turns/none", Value::Null).await;
    assert_eq!(cancelled.status, 404, "a caller over the limit may cancel");
    for path in ["/v1/responses/resp_none/cancel", "/v1/batches/none/cancel"] {
        let cancelled = host.ask(from, Method::POST, path, json!({})).await;
        assert_eq!(cancelled.status, 404, "{path}: {}", cancelled.text);
    }
    let metrics = host.server.get("/metrics").await.text;
    assert!(metrics.contains("skep_rate_limited_total{limit=\"tenant_requests\"}"), "{metrics}");
}

#[tokio::test]
async fn without_keys_each_address_has_a_separate_limit() {
    let host = Limited::start(false, everyone(requests(60, 1)), 100).await;
    for (address, status) in [
        ("10.0.0.1:5000", 200),
        ("10.0.0.1:5001", 429),
        ("[::ffff:10.0.0.1]:5000", 429),
        ("10.0.0.2:5000", 200),
        ("[2001:db8::1]:5000", 200),
        ("[2001:db8::2:3:4:5]:5000", 429),
        ("[2001:db8:0:1::1]:5000", 200),
    ] {
        let answer = host.say(From::Address(address)).await;
        assert_eq!(answer.status, status, "{address}: {}", answer.text);
    }
}

#[tokio::test]
async fn many_addresses_take_bounded_memory_and_cannot_bypass_the_limit() {
    let host = Limited::start(false, everyone(requests(60, 1)), 10).await;
    let mut answered = 0;
    for n in 0..50 {
        let answer = host.say(From::Address(&format!("10.0.0.{n}:1"))).await;
        answered += u32::from(answer.status == 200);
        assert!(host.rates.len() <= 11);
    }
    assert_eq!(answered, 11, "ten with separate accounts, and one for all others");
    host.pass(Duration::from_secs(60));
    for n in 0..10 {
        assert_eq!(
            host.say(From::Address(&format!("10.0.1.{n}:1"))).await.status,
            200,
            "accounts are available again"
        );
    }
}

#[tokio::test]
async fn a_tenant_without_tokens_waits_and_others_do_not() {
    let tokens =
        |per_minute| TenantRates { tokens_per_minute: NonZeroU32::new(per_minute), ..TenantRates::default() };
    let host = Limited::start(true, everyone(tokens(600)), 100).await;
    let (acme, rival) = (host.key("acme", None).await, host.key("rival", None).await);
    let headers = |answer: &TestResponse| {
        ["limit", "remaining", "reset"]
            .map(|what| answer.headers[&format!("x-ratelimit-{what}-tokens")].to_str().unwrap().to_owned())
    };
    assert_eq!(headers(&host.say(From::Key(&acme)).await), ["600", "600", "0ms"]);
    host.rates.count("acme", 599);
    let answer = host.say(From::Key(&acme)).await;
    assert_eq!((answer.status.as_u16(), headers(&answer)), (200, ["600", "1", "59.9s"].map(str::to_owned)));
    host.rates.count("acme", 31);
    let refused = host.say(From::Key(&acme)).await;
    assert_eq!((refused.status.as_u16(), headers(&refused)), (429, ["600", "0", "1m3s"].map(str::to_owned)));
    assert_eq!(refused.headers["retry-after"], "4");
    assert!(refused.text.contains("tokens_per_minute under [tenants.acme]"), "{}", refused.text);
    assert_eq!(host.say(From::Key(&rival)).await.status, 200);
    host.pass(Duration::from_millis(3_100));
    assert_eq!(host.say(From::Key(&acme)).await.status, 200);
}
