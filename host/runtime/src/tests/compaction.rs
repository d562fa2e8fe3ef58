//! Tests of conversations that outgrow the model's context of 512 tokens.

use super::{
    durability::{detached, talker},
    fixture::Host,
    guest::Guest,
};
use crate::{Invocation, PortableConversation, RunEvent, TurnPhase};
use skep_engine::chat::Role;

/// Answers have up to 160 tokens, so the third does not fit beside the first two.
const TALK: [&str; 2] = ["one", "two"];

async fn talked(agent_toml: &str) -> Host {
    let host = Host::start().await;
    host.deploy("talk", agent_toml, talker()).await.expect("valid");
    for text in TALK {
        host.ask("talk", "s", text).await.expect("the context has room");
    }
    host
}

async fn conversation(host: &Host, agent: &str, session: &str) -> PortableConversation {
    host.agents.export_session(agent, session).await.expect("the session exists").conversations.remove(0)
}

/// Talks until a turn has compacted the conversation. Returns the text of that turn and what its
/// caller received.
async fn talk_until_compacted(host: &Host) -> (String, String) {
    for round in 0..20 {
        let text = format!("question {round}");
        let mut handle = host.invoke("talk", "s", &text).await.expect("taken");
        let mut shown = String::new();
        while let Some(event) = handle.next().await {
            match event.expect("the turn succeeds") {
                RunEvent::Delta { text } => shown.push_str(&text),
                RunEvent::Done(outcome) => assert_eq!(outcome.text, shown),
                _ => {}
            }
        }
        if is_compacted(&conversation(host, "talk", "s").await) {
            return (text, shown);
        }
    }
    panic!("the context did not fill up after twenty answers");
}

fn is_compacted(conversation: &PortableConversation) -> bool {
    conversation.transcript.messages()[0].content.starts_with("Summarise our conversation")
}

#[tokio::test]
async fn an_overflowing_conversation_is_compacted_and_keeps_its_tokens() {
    for _ in 0..50 {
        let host = talked("").await;
        let (text, shown) = talk_until_compacted(&host).await;
        let compacted = conversation(&host, "talk", "s").await.transcript;
        let messages = compacted.messages();
        let (question, answer) = (&messages[messages.len() - 2], &messages[messages.len() - 1]);
        assert_eq!((question.content.as_str(), answer.content.as_str()), (text.as_str(), shown.as_str()));
        assert_eq!(
            (messages[1].role, messages[2].role),
            (Role::Assistant, Role::User),
            "speakers take turns"
        );
        assert!(compacted.tokens().len() <= 512);
        assert!(
            messages.iter().all(|message| message.content != TALK[0]),
            "the oldest message was summarized"
        );
        let host = host.restart().await;
        host.ask("talk", "s", "and so on").await.expect("the context has room, or is compacted");
        let after = conversation(&host, "talk", "s").await.transcript;
        // Skipped if the context was full again, or the conversation cannot continue from its
        // tokens.
        if after.messages().starts_with(messages) && host.have_text(compacted.tokens()) {
            assert!(after.tokens().starts_with(compacted.tokens()), "token for token");
            return;
        }
    }
    panic!("no compacted conversation had room for another answer");
}

#[tokio::test]
async fn an_agent_without_compaction_gets_a_context_overflow() {
    let host = talked("[sessions]\ncompaction = \"off\"").await;
    for round in 0..20 {
        let before = host.agents.export_session("talk", "s").await.expect("the session exists");
        let Err(error) = host.ask("talk", "s", &format!("question {round}")).await else { continue };
        // The guest traps on any error.
        assert_eq!(error.code(), "agent_trapped");
        let after = host.agents.export_session("talk", "s").await.expect("the session exists");
        assert_eq!(after.conversations, before.conversations);
        return;
    }
    panic!("the context did not fill up after twenty answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_compaction_produces_the_same_summary() {
    for round in 0..20 {
        let mut host = talked("").await;
        // Stops one answer before the context is full.
        let mut turn = 0;
        let full = loop {
            turn += 1;
            let before = format!("before-{turn}");
            host.agents.fork_session("talk", "s", &before).await.expect("the fork does not exist yet");
            host.ask("talk", "s", "go on").await.expect("the turn succeeds");
            if is_compacted(&conversation(&host, "talk", "s").await) {
                break before;
            }
        };
        let expected = conversation(&host, "talk", "s").await;
        let again = Invocation { session: full.clone(), ..detached("talk", "go on") };
        let handle = host.agents.invoke(again).await.expect("taken");
        let id = handle.turn_id().to_owned();
        let journal = loop {
            let journal = host.journals().await;
            if journal.contains("summarise") || host.open_turns().await == 0 {
                break journal;
            }
        };
        let is_cut_off = !journal.contains("\"result\"") && host.open_turns().await == 1;
        host = host.restart().await;
        let outcome = host.agents.follow("talk", &full, &id).await.expect("kept").outcome().await;
        outcome.expect("the turn is resumed");
        let detail = host.agents.turn("talk", &full, &id).await.expect("kept");
        assert!(matches!(detail.phase, TurnPhase::Done { .. }), "{detail:?}");
        let messages = conversation(&host, "talk", &full).await.transcript.messages().to_vec();
        let (known, answer) = (expected.transcript.messages(), messages.len() - 1);
        assert_eq!(messages[..answer], known[..known.len() - 1], "round {round}: the summary is the same");
        if is_cut_off {
            return;
        }
    }
    panic!("no compaction was interrupted");
}

/// Compacts the conversation `main` on "c", using the rest of the message as the summary if there
/// is any, and replies with the summary. Otherwise talks.
fn compactor() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/inference@0.1.1" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
                (func $append (param i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.generate"
                (func $generate (param i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.compact"
                (func $compact (param i32 i32 i32 i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "main")"#,
        on_message: r#"
            (call $open (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 600))
            (if (i32.load8_u (i32.const 600)) (then unreachable))
            (local.set $a (i32.load offset=4 (i32.const 600)))
            (if (i32.eq (i32.load8_u (local.get $text)) (i32.const 99))
                (then
                    ;; Keeps two messages.
                    (call $compact (local.get $a) (i32.const 1) (i32.const 2)
                        (i32.gt_u (local.get $length) (i32.const 1))
                        (i32.add (local.get $text) (i32.const 1)) (i32.sub (local.get $length) (i32.const 1))
                        (i32.const 1) (i32.const 8) (i32.const 2048))
                    (if (i32.load8_u (i32.const 2048)) (then unreachable))
                    (local.set $text (i32.load offset=8 (i32.const 2048)))
                    (local.set $length (i32.load offset=12 (i32.const 2048))))
                (else
                    (call $append (local.get $a) (local.get $text) (local.get $length) (i32.const 640))
                    (if (i32.load8_u (i32.const 640)) (then unreachable))
                    (i32.store (i32.const 1024) (local.get $a))
                    (i32.store8 offset=80 (i32.const 1024) (i32.const 1))
                    (i32.store offset=84 (i32.const 1024) (i32.const 8))
                    (call $generate (i32.const 1024) (i32.const 2048))
                    (if (i32.load8_u (i32.const 2048)) (then unreachable))))"#,
        pages: 4,
        ..Guest::default()
    }
}

#[tokio::test]
async fn an_agent_can_compact_on_demand_with_or_without_its_own_summary() {
    let host = Host::start().await;
    host.deploy("compact", "", compactor()).await.expect("valid");
    assert_eq!(host.answer("compact", "s", "c").await, "", "there is nothing to summarize");
    for text in ["one", "two", "three"] {
        host.answer("compact", "s", text).await;
    }
    let mut handle = host.invoke("compact", "s", "c").await.expect("taken");
    let (mut shown, mut generated) = (String::new(), 0);
    let outcome = loop {
        match handle.next().await.expect("the turn ends").expect("the turn succeeds") {
            RunEvent::Delta { text } => shown.push_str(&text),
            RunEvent::Generation { usage, .. } => generated += usage.completion_tokens,
            RunEvent::Done(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!(shown, "", "the caller does not see the summary");
    assert!((1..=8).contains(&generated) && outcome.usage.completion_tokens == generated, "{outcome:?}");
    let texts = async || {
        let messages = conversation(&host, "compact", "s").await.transcript.messages().to_vec();
        messages.into_iter().map(|message| message.content).collect::<Vec<_>>()
    };
    let compacted = texts().await;
    assert_eq!((compacted.len(), compacted[1].as_str()), (4, outcome.text.as_str()));
    assert_eq!(compacted[2], "three");

    assert_eq!(host.answer("compact", "s", "cWe talked.").await, "We talked.");
    assert_eq!(texts().await[..3], [compacted[0].clone(), "We talked.".into(), "three".into()]);
    let large = format!("c{}", "x".repeat((64 << 10) + 1));
    let error = host.ask("compact", "s", &large).await.expect_err("a summary is short");
    assert_eq!(error.code(), "agent_trapped", "the guest traps on any error");
    host.answer("compact", "s", "four").await;
    assert_eq!(texts().await.len(), 6);
}
