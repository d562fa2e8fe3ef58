//! Tests keys, roles and tenants, with real keys.

use super::{
    fixture::{Server, TestResponse},
    turns::echo,
};
use crate::{AccessOptions, GatewayOptions};
use axum::{
    body::Body,
    http::{Method, Request},
};
use serde_json::{Value, json};
use skep_runtime::{AgentName, Manifest, NewApiKey, Role, Tenant};

const SESSION: &str = "/v1/agents/echo/sessions/s";

/// Starts a server that requires keys and has agents with routes.
pub(super) async fn guarded() -> Server {
    let access = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let server = Server::with(GatewayOptions { access, ..GatewayOptions::default() }).await;
    for manifest in [
        "name = \"echo\"\n[[trigger.http]]\nroute = \"/echo/{session}\"",
        "name = \"other\"\n[[trigger.http]]\nroute = \"/other/{session}\"",
    ] {
        server.host.deploy(Manifest::from_toml(manifest).unwrap(), echo(), "tester").await.unwrap();
    }
    server
}

pub(super) async fn key(server: &Server, tenant: &str, role: Role, agents: Option<&str>) -> String {
    let new = NewApiKey {
        tenant: Tenant::new(tenant).unwrap(),
        role,
        agents: agents.map(|agent| vec![AgentName::new(agent).unwrap()]),
        name: String::new(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    server.host.keys().create(new).await.unwrap().1
}

pub(super) async fn ask(server: &Server, key: &str, method: Method, path: &str, body: Value) -> TestResponse {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("authorization", format!("Bearer {key}"))
        .header("content-type", "application/json")
        .body(Body::from(if body.is_null() { String::new() } else { body.to_string() }));
    server.send(request.unwrap()).await
}

async fn get(server: &Server, key: &str, path: &str) -> TestResponse {
    ask(server, key, Method::GET, path, Value::Null).await
}

async fn say(server: &Server, key: &str, text: &str) -> TestResponse {
    ask(server, key, Method::POST, &format!("{SESSION}/messages"), json!({ "text": text })).await
}

#[tokio::test]
async fn without_a_key_only_health_checks_respond() {
    let server = guarded().await;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/agents", "/v1/models", "/metrics", SESSION, "/echo/s", "/nothing/here", "/v1/keys"] {
        let answer = server.get(path).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error()["code"].as_str()),
            (401, Some("missing_api_key")),
            "{path}"
        );
        assert_eq!(answer.headers["www-authenticate"], "Bearer realm=\"skep\"", "{path}");
        assert!(answer.headers.contains_key("x-request-id"), "{path}");
    }
    let wrong = get(&server, &format!("skep_{}", "0".repeat(64)), "/v1/agents").await;
    assert_eq!((wrong.status.as_u16(), wrong.error()["code"].as_str()), (401, Some("invalid_api_key")));
    assert!(wrong.headers["www-authenticate"].to_str().unwrap().contains("invalid_token"));
}

#[tokio::test]
async fn each_role_has_its_permissions_and_refusals_name_the_required_role() {
    let server = guarded().await;
    let message = json!({"text": "hi"});
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let requests = [
        (Role::Read, Method::GET, "/v1/agents".to_owned(), Value::Null),
        (Role::Read, Method::GET, "/v1/agents/echo/logs".to_owned(), Value::Null),
        (Role::Metrics, Method::GET, "/metrics".to_owned(), Value::Null),
        (Role::Invoke, Method::POST, format!("{SESSION}/messages"), message.clone()),
        (Role::Invoke, Method::POST, "/echo/s".to_owned(), message),
        (Role::Invoke, Method::POST, "/v1/chat/completions".to_owned(), chat),
        (Role::Admin, Method::GET, "/v1/keys".to_owned(), Value::Null),
        (Role::Admin, Method::DELETE, "/v1/agents/other".to_owned(), Value::Null),
    ];
    for role in [Role::Metrics, Role::Read, Role::Invoke, Role::Admin] {
        let tenant = if role.may(Role::Metrics) { "local" } else { "acme" };
        let key = key(&server, tenant, role, None).await;
        for (needed, method, path, body) in &requests {
            let answer = ask(&server, &key, method.clone(), path, body.clone()).await;
            if role.may(*needed) {
                assert!(answer.status.is_success(), "{role} {method} {path}: {}", answer.text);
            } else {
                let error = answer.error();
                assert_eq!((answer.status.as_u16(), &error["code"]), (403, &json!("role_missing")));
                let message = error["message"].as_str().unwrap();
                assert!(message.contains(&format!("role `{needed}`")), "{message}");
            }
        }
    }
}

#[tokio::test]
async fn tenants_do_not_see_each_others_sessions() {
    let server = guarded().await;
    let (acme, rival, local) = (
        key(&server, "acme", Role::Invoke, None).await,
        key(&server, "rival", Role::Invoke, None).await,
        key(&server, "local", Role::Invoke, None).await,
    );
    let told = say(&server, &acme, "of acme").await.json();
    assert_eq!((&told["session"], &told["turn"]), (&json!("s"), &json!(1)));
    let turn = format!("{SESSION}/turns/{}", told["turn_id"].as_str().unwrap());
    for stranger in [&rival, &local] {
        let fork = format!("{SESSION}/fork");
        let copied = ask(&server, stranger, Method::POST, &fork, json!({"session": "mine"})).await;
        assert_eq!(copied.status, 404, "{}", copied.text);
        let (messages, export) = (format!("{SESSION}/messages"), format!("{SESSION}/export"));
        for path in [
            SESSION,
            &turn,
            &messages,
            &export,
            &format!("{turn}/events"),
            "/v1/agents/echo/sessions/acme%2Fs",
        ] {
            let answer = get(&server, stranger, path).await;
            assert!([400, 404].contains(&answer.status.as_u16()), "{path}: {}", answer.text);
        }
        for path in [SESSION, &turn] {
            let answer = ask(&server, stranger, Method::DELETE, path, Value::Null).await;
            assert_eq!(answer.status, 404, "{path}: {}", answer.text);
        }
        assert_eq!(get(&server, stranger, "/v1/agents/echo/sessions").await.json()["data"], json!([]));
    }
    // The same name is a different session: this is its first turn.
    for stranger in [&rival, &local] {
        assert_eq!(say(&server, stranger, "mine").await.json()["turn"], 1);
    }
    for (method, path, headers) in [
        (Method::POST, "/echo/s", json!({"text": "by its route"})),
        (
            Method::POST,
            "/v1/chat/completions",
            json!({"model": "agent:echo", "user": "s", "messages": [{"role": "user", "content": "as a model"}]}),
        ),
    ] {
        assert_eq!(ask(&server, &acme, method, path, headers).await.status, 200, "{path}");
    }
    for to in ["rival/s", "local/s"] {
        let copied =
            ask(&server, &acme, Method::POST, &format!("{SESSION}/fork"), json!({"session": to})).await;
        assert_eq!(copied.status, 400, "{}", copied.text);
    }
    let copied = ask(&server, &acme, Method::POST, &format!("{SESSION}/fork"), json!({"session": "t"})).await;
    assert_eq!((copied.status.as_u16(), &copied.json()["id"]), (201, &json!("t")));
    let gone = ask(&server, &acme, Method::DELETE, "/v1/agents/echo/sessions/t", Value::Null).await;
    assert_eq!(gone.status, 204);
    let detail = get(&server, &acme, SESSION).await.json();
    assert_eq!((&detail["id"], &detail["turns"]), (&json!("s"), &json!(3)));
    let list = get(&server, &acme, "/v1/agents/echo/sessions").await.json();
    assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &json!("s")));
    assert_eq!(get(&server, &acme, "/v1/agents/echo/sessions?after=s").await.json()["data"], json!([]));
    assert_eq!(get(&server, &acme, "/v1/agents/echo/sessions?after=rival%2F").await.status, 400);
    assert_eq!(get(&server, &rival, SESSION).await.json()["turns"], 1);
    let shown = get(&server, &acme, &turn).await.json();
    assert_eq!((&shown["state"], &shown["session"]), (&json!("done"), &json!("s")));
}

#[tokio::test]
async fn the_operator_can_see_and_delete_sessions_of_all_tenants_but_not_send_to_them() {
    let server = guarded().await;
    let (acme, reader, admin) = (
        key(&server, "acme", Role::Invoke, None).await,
        key(&server, "local", Role::Read, None).await,
        key(&server, "local", Role::Admin, None).await,
    );
    let turn = say(&server, &acme, "of acme").await.json();
    say(&server, &admin, "of the operator").await;
    let (list, one) = ("/v1/agents/echo/sessions", "/v1/agents/echo/sessions/acme%2Fs");
    let of_acme = format!("{list}?tenant=acme");
    let ids = async |key: &str, path: &str| get(&server, key, path).await.json()["data"][0]["id"].take();
    assert_eq!(ids(&admin, &of_acme).await, "acme/s");
    assert_eq!(ids(&acme, &of_acme).await, "s");
    assert_eq!(ids(&admin, list).await, "s");
    assert_eq!(get(&server, &admin, &format!("{of_acme}&after=acme%2Fs")).await.json()["data"], json!([]));
    let shown = get(&server, &admin, one).await.json();
    assert_eq!((&shown["id"], &shown["turns"]), (&json!("acme/s"), &json!(1)));
    let path = format!("{one}/turns/{}", turn["turn_id"].as_str().unwrap());
    assert_eq!(get(&server, &admin, &path).await.json()["session"], "acme/s");
    for (key, status) in [(&reader, 403), (&key(&server, "rival", Role::Invoke, None).await, 403)] {
        assert_eq!(get(&server, key, &of_acme).await.status, status);
        assert_eq!(get(&server, key, one).await.status, 400);
    }
    assert_eq!(say(&server, &acme, "!").await.status, 500, "a trap is logged");
    for (key, session) in [(&admin, json!("acme/s")), (&acme, json!("s")), (&reader, Value::Null)] {
        for path in ["/v1/logs", "/v1/agents/echo/logs"] {
            assert_eq!(get(&server, key, path).await.json()["data"][0]["session"], session, "{path}");
        }
    }
    let of_session = get(&server, &admin, "/v1/logs?session=acme%2Fs").await.json();
    assert_eq!(of_session["data"][0]["session"], "acme/s");
    let said = ask(&server, &admin, Method::POST, &format!("{one}/messages"), json!({"text": "hi"})).await;
    assert_eq!(said.status, 404, "{}", said.text);
    assert_eq!(ask(&server, &admin, Method::DELETE, one, Value::Null).await.status, 204);
    assert_eq!(get(&server, &acme, SESSION).await.status, 404);
    assert_eq!(
        get(&server, &admin, SESSION).await.json()["turns"],
        1,
        "the operator's session of that name is a different one"
    );
}

#[tokio::test]
async fn a_key_for_one_agent_cannot_reach_or_see_others() {
    let server = guarded().await;
    let narrow = key(&server, "acme", Role::Invoke, Some("echo")).await;
    let chat = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let message = json!({"text": "hi"});
    for (path, body, status) in [
        (format!("{SESSION}/messages"), &message, 200),
        ("/echo/s".to_owned(), &message, 200),
        ("/v1/chat/completions".to_owned(), &chat("agent:echo"), 200),
        ("/v1/agents/other/sessions/s/messages".to_owned(), &message, 403),
        ("/other/s".to_owned(), &message, 403),
        ("/v1/chat/completions".to_owned(), &chat("agent:other"), 403),
        ("/v1/chat/completions".to_owned(), &chat("tiny"), 403),
        ("/v1/completions".to_owned(), &json!({"prompt": "x"}), 403),
    ] {
        let answer = ask(&server, &narrow, Method::POST, &path, body.clone()).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text);
    }
    for path in ["/v1/agents/other", "/v1/agents/other/logs"] {
        let answer = get(&server, &narrow, path).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["code"]),
            (403, &json!("key_is_for_agents")),
            "{path}"
        );
    }
    let names = |list: TestResponse, key: &str| -> Vec<String> {
        let list = list.json();
        list["data"].as_array().unwrap().iter().map(|one| one[key].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(get(&server, &narrow, "/v1/agents").await, "name"), ["echo"]);
    assert_eq!(names(get(&server, &narrow, "/v1/models").await, "id"), ["agent:echo"]);
    assert_eq!(get(&server, &narrow, "/v1/models/tiny").await.status, 404);
}

#[tokio::test]
async fn an_admin_creates_lists_and_revokes_keys() {
    let server = guarded().await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let body =
        json!({"tenant": "acme", "role": "invoke", "agents": ["echo"], "name": "ci", "expires_in_s": 60});
    let made = ask(&server, &admin, Method::POST, "/v1/keys", body).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let made = made.json();
    let secret = made["key"].as_str().unwrap();
    assert_eq!(say(&server, secret, "hi").await.status, 200);

    // A request does not wait until the use of its key is stored.
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    let ours = loop {
        let list = get(&server, &admin, "/v1/keys").await;
        assert!(!list.text.contains(&secret[5..]), "the key itself is returned only once");
        let listed = list.json()["data"].as_array().unwrap().clone();
        let ours = listed.into_iter().find(|key| key["id"] == made["id"]).unwrap();
        if ours["last_used_at_ms"].is_u64() {
            break ours;
        }
        assert!(tokio::time::Instant::now() < deadline, "{ours}");
        tokio::task::yield_now().await;
    };
    assert_eq!(
        (&ours["tenant"], &ours["role"], &ours["agents"]),
        (&json!("acme"), &json!("invoke"), &json!(["echo"]))
    );
    assert!(ours["expires_at_ms"].is_u64() && ours["revoked_at_ms"].is_null());

    let path = format!("/v1/keys/{}", made["id"].as_str().unwrap());
    let revoked = ask(&server, &admin, Method::DELETE, &path, Value::Null).await;
    assert!(revoked.json()["revoked_at_ms"].is_u64());
    let refused = say(&server, secret, "hi").await;
    assert_eq!(refused.status, 401);
    assert!(refused.error()["message"].as_str().unwrap().contains("revoked"));

    for (body, status, code) in [
        (json!({"tenant": "default", "role": "read"}), 400, "invalid_value"),
        (json!({"tenant": "acme", "role": "owner"}), 400, "invalid_value"),
        (json!({"tenant": "acme", "role": "admin"}), 422, "invalid_key"),
        (json!({"tenant": "local", "role": "admin", "agents": ["echo"]}), 422, "invalid_key"),
        (json!({"tenant": "acme", "role": "read", "expires_in_s": 0}), 422, "invalid_key"),
        (json!({"tenant": "acme", "role": "read", "until": 1}), 400, "invalid_value"),
    ] {
        let answer = ask(&server, &admin, Method::POST, "/v1/keys", body.clone()).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text);
        assert_eq!(answer.error()["code"], code, "{body}: {}", answer.text);
    }
    assert_eq!(ask(&server, &admin, Method::DELETE, "/v1/keys/none", Value::Null).await.status, 404);
}
