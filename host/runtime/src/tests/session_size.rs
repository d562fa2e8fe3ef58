//! What sessions take, in the store and in memory.

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

/// Of so many messages with so many bytes each.
fn conversation(name: &str, messages: usize, bytes: usize) -> PortableConversation {
    let mut transcript = Transcript::new();
    (0..messages).for_each(|_| transcript.push(ChatMessage::user("x".repeat(bytes))));
    PortableConversation { name: name.into(), model: "tiny".into(), digest: None, transcript }
}

#[tokio::test]
async fn a_session_grows_up_to_its_limit_and_keeps_what_it_has() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\nsession_kb = 1", chatter()).await.expect("valid");
    let mut turns = 0;
    let refused = loop {
        match host.ask("chat", "s", "hello").await {
            Ok(outcome) => turns = outcome.turn,
            Err(error) => break error,
        }
        assert!(turns < 100, "nothing bounds it");
    };
    // The guest traps when it cannot append; what it generated may be too much as well.
    assert!(["limit_exceeded", "agent_trapped"].contains(&refused.code()), "{refused}");
    assert!(turns > 0, "the first turn has room");
    let bytes = host.store().session_bytes("chat", "s").await.expect("readable").expect("it is there");
    assert!(bytes <= 1_024, "{bytes}");
    assert_eq!(host.agents.session("chat", "s").await.expect("it is there").summary.turns, turns);
}

#[tokio::test]
async fn a_session_over_the_limit_is_not_imported_and_one_that_was_there_before_stays_usable() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\nsession_kb = 64", chatter()).await.expect("valid");
    let large = || session("s", vec![conversation("large", 100, 1_000)]);
    let error = host.agents.import_session("chat", large(), false).await.expect_err("it is too large");
    assert!(error.to_string().contains("`session_kb` allows 64 KiB"), "{error}");

    host.deploy("chat", "[limits]\nsession_kb = 1024", chatter()).await.expect("valid");
    host.agents.import_session("chat", large(), false).await.expect("it fits");
    host.deploy("chat", "[limits]\nsession_kb = 64", chatter()).await.expect("valid");
    let error = host.ask("chat", "s", "hello").await.expect_err("it must not grow");
    assert_eq!(error.code(), "agent_trapped", "{error}");
    assert_eq!(host.agents.session("chat", "s").await.expect("it is there").conversations[0].messages, 100);
}

#[tokio::test]
async fn a_turn_reads_only_the_conversations_that_it_opens() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let large = 1 << 20;
    let whole = session("s", vec![conversation("archive", 4, large), conversation("main", 1, 10)]);
    host.agents.import_session("chat", whole, false).await.expect("it fits");
    host.answer("chat", "s", "hello").await;
    let remembered = until(async || Some(host.agents.remembered_bytes()).filter(|bytes| *bytes > 0)).await;
    assert!(
        remembered < large,
        "{remembered} bytes are in memory, and one message of the archive has {large}"
    );
    let detail = host.agents.session("chat", "s").await.expect("it is there");
    let counts: Vec<_> = detail
        .conversations
        .iter()
        .map(|one| (one.name.as_str(), one.messages, one.bytes > large as u64))
        .collect();
    assert_eq!(counts, [("archive", 4, true), ("main", 3, false)], "all of it is still there");
}

#[tokio::test]
async fn a_session_is_told_in_pages() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let whole = session("s", vec![conversation("a", 700, 10), conversation("b", 700, 10)]);
    host.agents.import_session("chat", whole, false).await.expect("it fits");
    let detail = host.agents.session("chat", "s").await.expect("it is there");
    assert_eq!((detail.messages.len(), detail.has_more), (1_000, true));
    let page = host.agents.messages("chat", "s", "b", 650, 1_000).await.expect("it is there");
    let numbers: Vec<u64> = page.messages.iter().map(|(number, _)| *number).collect();
    assert_eq!((page.total, numbers), (700, (651..=700).collect()));
    for after in [700, u64::MAX] {
        let page = host.agents.messages("chat", "s", "b", after, 1_000).await.expect("it is there");
        assert!(page.messages.is_empty(), "after {after}");
    }
}
