//! Rate limits and weights of `skep.toml` for clients and agents, on a host that was started with the file.

use crate::harness::{Host, MODEL};
use reqwest::{Response, StatusCode};
use serde_json::json;
use skep_cli::config::Config;
use std::net::IpAddr;

fn host(toml: &str) -> Host {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("skep.toml");
    std::fs::write(&path, toml).unwrap();
    let mut options = Host::options(None);
    Config::read(&path).unwrap().apply(&mut options).unwrap();
    Host::start_with(options)
}

async fn complete(host: &Host, address: &str) -> Response {
    let address: IpAddr = address.parse().unwrap();
    skep_outbound::tls::install_provider();
    let client = reqwest::Client::builder().local_address(address).build().unwrap();
    let body = json!({"model": MODEL, "prompt": "One, two,", "max_tokens": 4});
    client.post(host.at("/v1/completions")).json(&body).send().await.unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

#[tokio::test]
async fn each_client_address_has_the_request_rate_of_the_file() {
    let host = host("[tenants.default]\nrequests_per_minute = 1\nrequest_burst = 2\n");
    for remaining in ["1", "0"] {
        let answered = complete(&host, "127.0.0.1").await;
        assert_eq!(answered.status(), StatusCode::OK);
        assert_eq!(header(&answered, "x-ratelimit-limit-requests"), "1");
        assert_eq!(header(&answered, "x-ratelimit-remaining-requests"), remaining);
    }
    let refused = complete(&host, "127.0.0.1").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!((1..=60).contains(&header(&refused, "retry-after").parse::<u32>().unwrap()));
    assert_eq!(complete(&host, "127.0.0.2").await.status(), StatusCode::OK, "another client");
}

#[tokio::test]
async fn tokens_of_an_agents_turn_count_for_its_tenant() {
    let host = host("[tenants.local]\ntokens_per_minute = 4\n");
    assert_eq!(host.deploy_guest("generate", "spends", "").await.0, 201);
    let (status, answer) = host.message("spends", "s", "Name a colour.").await;
    assert_eq!(status, 200, "{answer}");
    let (status, refused) = host.message("spends", "s", "Name another one.").await;
    assert_eq!((status, &refused["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("tokens per minute: 4"), "{message}");
    let completed = complete(&host, "127.0.0.1").await;
    assert_eq!(completed.status(), StatusCode::TOO_MANY_REQUESTS, "the same tokens");
    assert_eq!(header(&completed, "x-ratelimit-remaining-tokens"), "0");
}
