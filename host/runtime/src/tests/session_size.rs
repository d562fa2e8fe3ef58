//! Tests of the size of sessions, in the store and in memory.

use super::{
    fixture::{Host, until},
    inference::chatter,
};
use crate::{PortableConversation, PortableSession, SessionSummary};
use skep_engine::chat::{ChatMessage, Transcript};

fn session(id: &str, conversations: Vec<PortableConversation>) -> PortableSession {
    PortableSession {
        summary: SessionSummary { id: id.into(), turns: 1, created_at_ms: 1, updated_at_ms: 1 },
        state: [("key".to_owned(), b"value".to_vec())].into(),
        conversations,
    }
}

/// Returns a conversation of this many messages with this many bytes each.
fn conversation(name: &str, messages: usize, bytes: usize) -> PortableConversation {
    let mut transcript = Transcript::new();
    (0..messages).for_each(|_| transcript.push(ChatMessage::user("x".repeat(bytes))));
    PortableConversation { name: name.into(), model: "tiny".into(), digest: None, transcript }
}

#[tokio::test]
async fn a_session_grows_up_to_its_limit_and_keeps_its_contents() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\nsession_kb = 1", chatter()).await.expect("valid");
    let mut turns = 0;
    let refused = loop {
        match host.ask("chat", "s", "hello").await {
            Ok(outcome) => turns = outcome.turn,
            Err(error) => break error,
        }
        assert!(turns < 100, "the session has no limit");
    };
    // The guest traps when it cannot append a message; the generated text may exceed the limit as
    // well.
    assert!(["limit_exceeded", "agent_trapped"].contains(&refused.code()), "{refused}");
    assert!(turns > 0, "the first turn fits");
    let bytes = host.store().session_bytes("chat", "s").await.expect("readable").expect("the session exists");
    assert!(bytes <= 1_024, "{bytes}");
    assert_eq!(host.agents.session("chat", "s").await.expect("the session exists").summary.turns, turns);
}

#[tokio::test]
async fn an_oversized_import_is_refused_and_an_oversized_session_stays_readable() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\nsession_kb = 64", chatter()).await.expect("valid");
    let large = || session("s", vec![conversation("large", 100, 1_000)]);
    let error =
        host.agents.import_session("chat", large(), false).await.expect_err("the session is too large");
    assert!(error.to_string().contains("`session_kb` allows 64 KiB"), "{error}");

    host.deploy("chat", "[limits]\nsession_kb = 1024", chatter()).await.expect("valid");
    host.agents.import_session("chat", large(), false).await.expect("the session fits");
    host.deploy("chat", "[limits]\nsession_kb = 64", chatter()).await.expect("valid");
    let error = host.ask("chat", "s", "hello").await.expect_err("the session must not grow");
    assert_eq!(error.code(), "agent_trapped", "{error}");
    assert_eq!(
        host.agents.session("chat", "s").await.expect("the session exists").conversations[0].messages,
        100
    );
}

#[tokio::test]
async fn a_turn_reads_only_the_conversations_that_it_opens() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let large = 1 << 20;
    let whole = session("s", vec![conversation("archive", 4, large), conversation("main", 1, 10)]);
    host.agents.import_session("chat", whole, false).await.expect("the session fits");
    host.answer("chat", "s", "hello").await;
    let remembered = until(async || Some(host.agents.remembered_bytes()).filter(|bytes| *bytes > 0)).await;
    assert!(remembered < large, "{remembered} bytes are in memory; one message of the archive has {large}");
    let detail = host.agents.session("chat", "s").await.expect("the session exists");
    let counts: Vec<_> = detail
        .conversations
        .iter()
        .map(|one| (one.name.as_str(), one.messages, one.bytes > large as u64))
        .collect();
    assert_eq!(counts, [("archive", 4, true), ("main", 3, false)], "all conversations are kept");
}

#[tokio::test]
async fn a_session_is_read_in_pages() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let whole = session("s", vec![conversation("a", 700, 10), conversation("b", 700, 10)]);
    host.agents.import_session("chat", whole, false).await.expect("the session fits");
    let detail = host.agents.session("chat", "s").await.expect("the session exists");
    assert_eq!((detail.messages.len(), detail.has_more), (1_000, true));
    let page = host.agents.messages("chat", "s", "b", 650, 1_000).await.expect("the session exists");
    let numbers: Vec<u64> = page.messages.iter().map(|(number, _)| *number).collect();
    assert_eq!((page.total, numbers), (700, (651..=700).collect()));
    for after in [700, u64::MAX] {
        let page = host.agents.messages("chat", "s", "b", after, 1_000).await.expect("the session exists");
        assert!(page.messages.is_empty(), "after {after}");
    }
}
