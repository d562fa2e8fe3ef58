//! Requests from web pages, and names of a host that requires no key.

use super::{
    fixture::{Server, TestResponse},
    turns::echo,
};
use crate::{AccessOptions, GatewayOptions};
use axum::{
    body::Body,
    http::{Method, Request},
};
use skep_runtime::Manifest;

const PAGE: &str = "https://app.example";

async fn server(access: AccessOptions) -> Server {
    let options = GatewayOptions { access, origins: vec![PAGE.to_owned()], ..GatewayOptions::default() };
    let server = Server::with(options).await;
    let manifest = "name = \"echo\"\n[[trigger.http]]\nroute = \"/echo/{session}\"";
    server.host.deploy(Manifest::from_toml(manifest).unwrap(), echo(), "tester").await.unwrap();
    server
}

async fn ask(server: &Server, method: Method, path: &str, headers: &[(&str, &str)]) -> TestResponse {
    let request =
        headers.iter().fold(Request::builder().method(method).uri(path), |request, (name, value)| {
            request.header(*name, *value)
        });
    let body = Body::from(r#"{"text":"hi"}"#);
    server.send(request.header("content-type", "application/json").body(body).unwrap()).await
}

#[tokio::test]
async fn a_page_that_is_not_allowed_reaches_no_route_and_starts_no_turn() {
    let server = server(AccessOptions::default()).await;
    let routes = [
        (Method::POST, "/v1/agents/echo/sessions/s/messages"),
        (Method::POST, "/echo/s"),
        (Method::DELETE, "/v1/agents/echo"),
        (Method::POST, "/v1/keys"),
        (Method::POST, "/ai/run/tiny"),
        (Method::OPTIONS, "/v1/keys"),
        (Method::GET, "/v1/agents"),
        (Method::GET, "/healthz"),
        (Method::GET, "/nothing/here"),
    ];
    for (method, path) in routes {
        for page in [
            ("origin", "https://evil.example"),
            ("origin", "http://localhost:8080"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            // A page from another port of this machine.
            ("sec-fetch-site", "same-site"),
        ] {
            let answer = ask(&server, method.clone(), path, &[page]).await;
            let code = answer.error()["code"].take();
            assert_eq!(
                (answer.status.as_u16(), code.as_str()),
                (403, Some("origin_not_allowed")),
                "{path} {page:?}"
            );
            assert!(!answer.headers.contains_key("access-control-allow-origin"), "{path} {page:?}");
        }
    }
    let refusal =
        ask(&server, Method::GET, "/v1/agents", &[("origin", "https://evil.example")]).await.error();
    let message = refusal["message"].as_str().unwrap();
    assert!(message.contains("[http] origins = [\"https://evil.example\"]"), "{message}");
    let two = [("origin", PAGE), ("origin", "https://evil.example")];
    assert_eq!(ask(&server, Method::GET, "/v1/agents", &two).await.status, 403);
    assert_eq!(server.get("/v1/agents/echo").await.status, 200, "it was not deleted");
    assert_eq!(server.get("/v1/agents/echo/sessions/s").await.status, 404, "no turn was started");
    for typed in ["none", "same-origin"] {
        assert_eq!(ask(&server, Method::GET, "/v1/agents", &[("sec-fetch-site", typed)]).await.status, 200);
    }
}

#[tokio::test]
async fn an_allowed_page_gets_cors_headers_but_still_needs_a_key() {
    let server = server(AccessOptions { keys_required: true, ..AccessOptions::default() }).await;
    let asks_first = [
        ("origin", PAGE),
        ("sec-fetch-site", "cross-site"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    for path in ["/v1/agents/echo/sessions/s/messages", "/echo/s", "/mcp"] {
        let allowed = ask(&server, Method::OPTIONS, path, &asks_first).await;
        assert_eq!(allowed.status, 204, "{path}: {}", allowed.text);
        assert_eq!(allowed.headers["access-control-allow-origin"], PAGE);
        assert_eq!(allowed.headers["access-control-allow-headers"], "authorization,content-type");
        let methods = allowed.headers["access-control-allow-methods"].to_str().unwrap();
        assert!(methods.contains("POST") && methods.contains("DELETE"), "{methods}");
        // An allowed origin does not replace a key.
        let answer = ask(&server, Method::POST, path, &[("origin", PAGE)]).await;
        assert_eq!(answer.status, 401, "{path}: {}", answer.text);
        assert_eq!(answer.headers["access-control-allow-origin"], PAGE);
        assert_eq!(answer.headers["vary"], "origin");
    }
}

#[tokio::test]
async fn a_host_without_keys_accepts_only_local_names() {
    let server = server(AccessOptions { local_names_only: true, ..AccessOptions::default() }).await;
    for path in ["/v1/agents", "/healthz", "/mcp", "/echo/s"] {
        for name in ["evil.example:8080", "localhost.evil.example", "10.0.0.7:8080", "", "a b"] {
            let answer = ask(&server, Method::POST, path, &[("host", name)]).await;
            let error = answer.error();
            assert_eq!(
                (answer.status.as_u16(), error["code"].as_str()),
                (421, Some("host_not_allowed")),
                "{path} {name}"
            );
            assert!(error["message"].as_str().unwrap().contains("[auth] required = true"), "{error}");
        }
    }
    let two = [("host", "localhost"), ("host", "evil.example")];
    assert_eq!(ask(&server, Method::GET, "/v1/agents", &two).await.status, 421);
    for name in ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "localhost", "app.example"] {
        assert_eq!(ask(&server, Method::GET, "/v1/agents", &[("host", name)]).await.status, 200, "{name}");
    }
    let rebound = ask(&server, Method::GET, "http://evil.example/v1/agents", &[]).await;
    assert_eq!(rebound.status, 421, "HTTP/2 sends the name in the URI");
}

#[tokio::test]
async fn a_page_of_this_host_itself_is_accepted_if_no_other_machine_can_have_its_name() {
    let open = server(AccessOptions::default()).await;
    let keyed = server(AccessOptions { keys_required: true, ..AccessOptions::default() }).await;
    for (origin, host, when_open, when_keyed) in [
        ("http://localhost:8080", "localhost:8080", 200, 401),
        ("http://LOCALHOST:8080", "localhost:8080", 200, 401),
        ("http://127.0.0.1:8080", "127.0.0.1:8080", 200, 401),
        ("http://[::1]:8080", "[::1]:8080", 200, 401),
        ("http://10.0.0.7", "10.0.0.7:80", 200, 401),
        ("https://10.0.0.7", "10.0.0.7", 200, 401),
        // A page can make its own name resolve to this host, but has no key.
        ("http://evil.example:8080", "evil.example:8080", 403, 401),
        ("http://localhost:8081", "localhost:8080", 403, 403),
        ("http://localhost:8080", "127.0.0.1:8080", 403, 403),
        ("http://localhost", "localhost:8080", 403, 403),
        ("https://localhost", "localhost:80", 403, 403),
        ("ftp://localhost:8080", "localhost:8080", 403, 403),
        ("localhost:8080", "localhost:8080", 403, 403),
        ("http://evil.example", "", 403, 403),
    ] {
        for (server, expected) in [(&open, when_open), (&keyed, when_keyed)] {
            let answer = ask(server, Method::GET, "/v1/agents", &[("origin", origin), ("host", host)]).await;
            assert_eq!(answer.status, expected, "{origin} at {host}: {}", answer.text);
        }
    }
}
