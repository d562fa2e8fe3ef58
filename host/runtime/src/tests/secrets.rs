//! Tests of secrets: what guests are granted, what the server receives, and that values never reach
//! a guest.

use super::{
    fixture::Host,
    guest::Guest,
    web::{Server, fetcher, granting},
};
use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use skep_outbound::Origins;

/// Requests the secret `KEY`, sends it to the URL in the message, and replies with the answer.
fn sender() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/http@0.1.1" "fetch" (func $fetch
                (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/http@0.1.1" "secret" (func $secret (param i32 i32 i32)))
            (data (i32.const 512) "POSTKEY")"#,
        on_message: r#"
            (call $secret (i32.const 516) (i32.const 3) (i32.const 640))
            (if (i32.load8_u (i32.const 640))
                (then
                    (local.set $text (i32.load (i32.const 648))) (local.set $length (i32.load (i32.const 652))))
                (else
                    (call $fetch (i32.const 512) (i32.const 4) (local.get $text) (local.get $length)
                        (i32.const 0) (i32.const 0)
                        (i32.const 1) (i32.load (i32.const 644)) (i32.load (i32.const 648))
                        (i32.const 0) (i32.const 0) (i32.const 600))
                    (if (i32.load8_u (i32.const 600))
                        (then
                            (local.set $text (i32.load (i32.const 608)))
                            (local.set $length (i32.load (i32.const 612))))
                        (else
                            (local.set $text (i32.load (i32.const 624)))
                            (local.set $length (i32.load (i32.const 628)))))))"#,
        ..Guest::default()
    }
}

/// Does the same as [`sender`], with an additional header whose name and value have these lengths.
fn sender_with(header: &'static str, name: u32, value: u32) -> Guest {
    let plain = sender();
    let module = format!(
        r#"{} (data (i32.const 528) "{header}")
            (data (i32.const 576) "\10\02\00\00\{name:02x}\00\00\00\{:02x}\02\00\00\{value:02x}\00\00\00")"#,
        plain.module,
        16 + name,
    );
    let sent = plain.on_message.replacen("(i32.const 0) (i32.const 0)", "(i32.const 576) (i32.const 1)", 1);
    assert_ne!(sent, plain.on_message, "the header is sent");
    Guest { module: module.leak(), on_message: sent.leak(), ..plain }
}

fn origins(origin: &str) -> Origins {
    Origins::try_from(vec![origin.parse().expect("an origin")]).expect("one")
}

fn manifest(hosts: &str) -> String {
    format!("[grants]\nhosts = [\"*\"]\nsecrets = [{{ name = \"KEY\", hosts = [{hosts:?}] }}]")
}

const VALUE: &str = "s3cret-value";

#[tokio::test]
async fn the_server_receives_the_value_and_the_agent_a_placeholder() {
    let mut server = Server::start().await;
    let origin = format!("http://{}", server.address);
    let host = Host::with(granting(&["*"])).await;
    host.agents.set_secret(None, "KEY", VALUE, &origins(&origin)).await.expect("valid");
    host.deploy("pay", &manifest(&origin), sender()).await.expect("valid");
    let mut seen = Vec::new();
    for session in ["a", "b"] {
        let handle = host.invoke("pay", session, &format!("{origin}/charge")).await.expect("taken");
        let asked = server.next().await;
        assert_eq!(asked.body, VALUE);
        asked.answer(&format!("you sent {VALUE}")).await;
        seen.push(handle.outcome().await.expect("the turn succeeds").text);
    }
    assert!(
        seen.iter().all(|text| text.starts_with("you sent secret.KEY.") && !text.contains(VALUE)),
        "{seen:?}"
    );
    assert_ne!(seen[0], seen[1], "placeholders differ between turns");
}

#[tokio::test]
async fn a_secret_is_sent_only_where_developer_and_operator_both_allow_it() {
    let server = Server::start().await;
    let (origin, url) = (format!("http://{}", server.address), format!("http://{}/", server.address));
    for (developer, operator, expected) in [
        (
            "https://api.example.com",
            Some(&*origin),
            "to the hosts of KEY in secrets under [grants] in agent.toml",
        ),
        (&*origin, Some("https://api.example.com"), "with `skep secret set KEY --to ORIGIN`"),
        (&*origin, None, "the operator sets it with `skep secret set KEY`"),
    ] {
        let host = Host::with(granting(&["*"])).await;
        if let Some(operator) = operator {
            host.agents.set_secret(None, "KEY", VALUE, &origins(operator)).await.expect("valid");
        }
        host.deploy("pay", &manifest(developer), sender()).await.expect("valid");
        let answer = host.answer("pay", "s", &url).await;
        assert!(answer.contains(expected) && !answer.contains(VALUE), "{answer}");
    }
    let host = Host::with(granting(&["*"])).await;
    host.agents.set_secret(None, "KEY", VALUE, &origins(&origin)).await.expect("valid");
    host.deploy("pay", "[grants]\nhosts = [\"*\"]", sender()).await.expect("valid");
    let answer = host.answer("pay", "s", &url).await;
    assert!(answer.contains("\"KEY\" is not granted") && answer.contains("agent.toml"), "{answer}");
    assert!(server.asked.is_empty());
}

#[tokio::test]
async fn another_agents_secret_is_not_available() {
    let server = Server::start().await;
    let origin = format!("http://{}", server.address);
    let host = Host::with(granting(&["*"])).await;
    host.agents.set_secret(Some("other"), "KEY", VALUE, &origins(&origin)).await.expect("valid");
    host.deploy("pay", &manifest(&origin), sender()).await.expect("valid");
    let answer = host.answer("pay", "s", &format!("{origin}/")).await;
    assert!(answer.contains("has no value"), "{answer}");
    assert!(server.asked.is_empty());
    let listed = host.agents.secrets().await.expect("read");
    assert_eq!((listed.len(), listed[0].agent.as_deref()), (1, Some("other")));
    host.agents.delete_secret(Some("other"), "KEY").await.expect("the secret exists");
    let error = host.agents.delete_secret(Some("other"), "KEY").await.expect_err("the secret is gone");
    assert_eq!(error.code(), "secret_not_found");
}

/// Starts a host with the agent `pay`, which is granted `KEY` with this value for this server.
async fn host_with(value: &str, server: &Server, guest: Guest) -> Host {
    let origin = format!("http://{}", server.address);
    let host = Host::with(granting(&["*"])).await;
    host.agents.set_secret(None, "KEY", value, &origins(&origin)).await.expect("valid");
    host.deploy("pay", &manifest(&origin), guest).await.expect("valid");
    host
}

#[tokio::test]
async fn a_value_is_removed_from_responses_in_every_encoding_and_across_chunks() {
    let value = "s3cret/\"value\"+>?";
    let mut server = Server::start().await;
    let host = host_with(value, &server, sender()).await;
    let url = format!("http://{}/echo", server.address);
    let encoded = |prefix: &str| {
        [STANDARD.encode(format!("{prefix}{value}")), URL_SAFE_NO_PAD.encode(format!("{prefix}{value}!"))]
    };
    let spellings = [
        value.to_owned(),
        "s3cret%2F%22value%22%2B%3E%3F".to_owned(),
        "s3cret%2f%22value%22%2b%3e%3f".to_owned(),
        value.bytes().map(|byte| format!("%{byte:02X}")).collect(),
        "s3cret/&quot;value&quot;+&gt;?".to_owned(),
        "s3cret&#x2F;&#34;value&#34;&#43;&#x3e;&#63;".to_owned(),
        r#"s3cret\/\"value\"+\u003e?"#.to_owned(),
    ];
    let spellings = spellings.into_iter().chain(["", "u", "us"].into_iter().flat_map(encoded));
    for (number, spelling) in spellings.enumerate() {
        let handle = host.invoke("pay", &format!("s{number}"), &url).await.expect("taken");
        let asked = server.next().await;
        assert_eq!(asked.body, value);
        asked.answer_in_chunks("", format!("you sent <{spelling}>").as_bytes()).await;
        let answer = handle.outcome().await.expect("the turn succeeds").text;
        assert!(answer.starts_with("you sent <") && answer.contains("secret.KEY."), "{spelling}: {answer}");
        assert!(!answer.contains(&spelling[4..]) && answer.len() < 70, "{spelling}: {answer}");
    }
}

#[tokio::test]
async fn responses_that_cannot_be_searched_are_not_requested_or_returned() {
    let mut server = Server::start().await;
    let url = format!("http://{}/", server.address);
    let host = host_with(VALUE, &server, sender_with("accept-encodinggzip", 15, 4)).await;
    let handle = host.invoke("pay", "s", &url).await.expect("taken");
    let asked = server.next().await;
    assert!(!asked.head.to_lowercase().contains("accept-encoding"), "{}", asked.head);
    asked.answer_in_chunks("content-encoding: gzip\r\n", b"whatever").await;
    let answer = handle.outcome().await.expect("the turn succeeds").text;
    assert!(answer.contains("cannot be searched for the secret") && answer.contains("gzip"), "{answer}");

    let host = host_with(VALUE, &server, sender_with("rangebytes=0-3", 5, 9)).await;
    let answer = host.answer("pay", "s", &url).await;
    assert!(answer.contains("\"range\"") && answer.contains("remove the header"), "{answer}");
    assert!(server.asked.is_empty());
}

#[tokio::test]
async fn responses_to_requests_without_the_secret_do_not_reveal_it() {
    let mut server = Server::start().await;
    let host = host_with(VALUE, &server, fetcher()).await;
    let handle = host.invoke("pay", "s", &format!("http://{}/", server.address)).await.expect("taken");
    // An agent tries out values: a correct guess must look the same as a wrong one.
    server.next().await.answer(&format!("{VALUE} or s3cret-guess")).await;
    let answer = handle.outcome().await.expect("the turn succeeds").text;
    assert_eq!(answer, format!("{VALUE} or s3cret-guess"));
}

#[tokio::test]
async fn a_guessable_value_is_refused() {
    let host = Host::with(granting(&["*"])).await;
    for value in ["k3y-v4lue!x", "password1234", "aaaaaaaaaaaaaaaa", "123456789012"] {
        let to = origins("https://api.example.com");
        let error = host.agents.set_secret(None, "KEY", value, &to).await.expect_err(value);
        assert_eq!(error.code(), "invalid_secret");
        assert!(error.to_string().contains("guessed") && !error.to_string().contains(value), "{error}");
    }
    assert!(host.agents.secrets().await.expect("read").is_empty());
}
