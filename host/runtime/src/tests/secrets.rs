//! Secrets of guests: what they are granted, what the server sees, and what is left of it on this side.

use super::{
    fixture::Host,
    guest::Guest,
    web::{Server, granting},
};
use skep_outbound::Origins;

/// Asks for the secret `KEY`, sends what it gets to the URL that it is sent, and replies with the answer.
fn sender() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/http@0.1.0" "fetch" (func $fetch
                (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/http@0.1.0" "secret" (func $secret (param i32 i32 i32)))
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

fn origins(origin: &str) -> Origins {
    Origins::try_from(vec![origin.parse().expect("an origin")]).expect("one")
}

fn manifest(hosts: &str) -> String {
    format!("[grants]\nhosts = [\"*\"]\nsecrets = [{{ name = \"KEY\", hosts = [{hosts:?}] }}]")
}

const VALUE: &str = "s3cret-value";

#[tokio::test]
async fn the_server_sees_the_value_and_the_agent_what_stands_for_it() {
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
        seen.push(handle.outcome().await.expect("goes well").text);
    }
    assert!(
        seen.iter().all(|text| text.starts_with("you sent secret.KEY.") && !text.contains(VALUE)),
        "{seen:?}"
    );
    assert_ne!(seen[0], seen[1], "what stands for it in one turn says nothing in another");
}

#[tokio::test]
async fn a_secret_goes_nowhere_that_developer_and_operator_do_not_both_allow() {
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
async fn another_agents_secret_is_not_there() {
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
    host.agents.delete_secret(Some("other"), "KEY").await.expect("it is there");
    let error = host.agents.delete_secret(Some("other"), "KEY").await.expect_err("it is gone");
    assert_eq!(error.code(), "secret_not_found");
}
