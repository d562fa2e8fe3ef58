//! Tests of components that were built for an earlier version of `skep:agent`. Their text never changes.

use super::{
    durability::detached,
    fixture::Host,
    tools::{Bank, granted, granting, with_bank},
};
use crate::Manifest;
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
};

/// Returns one of `tests/fixtures/components`.
fn component(name: &str) -> Vec<u8> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/components");
    wat::parse_file(fixtures.join(name)).expect("the text is WebAssembly")
}

async fn deploy(host: &Host, name: &str, more: &str, component: Vec<u8>) {
    let manifest = Manifest::from_toml(&format!("name = \"{name}\"\n{more}")).expect("valid");
    host.agents.deploy(manifest, component, "tester").await.expect("an earlier version is served");
}

#[tokio::test]
async fn an_agent_for_the_first_version_has_all_its_handlers() {
    let host = Host::with(granting(&["agent:*/*"])).await;
    let triggers = "[[trigger.event]]\ntopic = \"order.paid\"\nsession = \"{id}\"\n[[schedule]]\nname = \"daily\"\ncron = \"0 0 * * *\"\n\
                    session = \"calendar\"";
    deploy(&host, "orders", triggers, component("agent-0.1.0.wat")).await;
    deploy(&host, "desk", &granted("\"agent:orders/find\""), component("agent-0.1.0.wat")).await;
    assert_eq!(host.answer("desk", "s", "agent:orders/find").await, r#"{"id":1}"#);
    assert_eq!(host.agents.session("desk", "s").await.expect("committed").messages.len(), 2);
    assert_eq!(host.agents.session("orders", "desk~s").await.expect("called").summary.turns, 1);
}

#[tokio::test]
async fn an_agent_for_the_first_version_is_replayed() {
    let bank = Arc::new(Bank::default());
    let host = Host::with(with_bank(&bank)).await;
    deploy(&host, "desk", &granted("\"mcp:bank/look\""), component("agent-0.1.0.wat")).await;
    let id = host.agents.invoke(detached("desk", "mcp:bank/look")).await.expect("taken").turn_id().to_owned();
    bank.called.notified().await;
    let host = host.restart_with(with_bank(&bank)).await;
    let followed = host.agents.follow("desk", "s", &id).await.expect("kept");
    let outcome = followed.outcome().await.expect("the turn repeats what it did");
    assert_eq!(outcome.text, r#"{"id":1}"#);
    assert_eq!(bank.calls.load(Ordering::Acquire), 2, "a call that changes nothing is repeated");
    assert_eq!(host.agents.session("desk", "s").await.expect("committed").messages.len(), 2);
}

#[tokio::test]
async fn a_synchronous_agent_for_the_first_version_generates() {
    let host = Host::start().await;
    deploy(&host, "chat", "", component("agent-sync-0.1.0.wat")).await;
    let outcome = host.ask("chat", "s", "hi").await.expect("the turn succeeds");
    assert!((1..=8).contains(&outcome.usage.completion_tokens), "{outcome:?}");
    assert_eq!(host.agents.session("chat", "s").await.expect("committed").messages[1].content, outcome.text);
}
