//! Tests of sessions whose model has changed: under the same name, or because the host no longer
//! has it.

use super::{
    durability::QUESTION,
    fixture::{Host, check_tokens, permuted_engine, tiny_engine},
    inference::chatter,
};
use crate::{ModelMismatch, PortableConversation, RunEvent, RunHandle, RuntimeOptions};
use skep_engine::{ModelSet, chat::Transcript};
use skep_store::{StateChange, TurnCommit};

async fn conversation(host: &Host, agent: &str) -> PortableConversation {
    host.agents.export_session(agent, "s").await.expect("the session exists").conversations.remove(0)
}

/// Returns the model changes that a turn reports, and its reply.
async fn changes(mut handle: RunHandle) -> (Vec<(String, String)>, String) {
    let mut changes = Vec::new();
    loop {
        match handle.next().await.expect("the turn ends").expect("the turn succeeds") {
            RunEvent::ModelChanged { conversation, from, to } => {
                assert_eq!(conversation, "main");
                changes.push((from, to));
            }
            RunEvent::Done(outcome) => return (changes, outcome.text),
            _ => {}
        }
    }
}

fn models(engine: skep_engine::Engine) -> ModelSet {
    ModelSet::new(engine)
}

#[tokio::test]
async fn tokens_are_recomputed_when_the_model_of_the_same_name_changes() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    host.answer("chat", "s", QUESTION).await;
    let before = conversation(&host, "chat").await.transcript;
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), []);

    let host = host.stop().await.start_with(models(permuted_engine("tiny")), RuntimeOptions::default()).await;
    let mismatch = ModelMismatch { model: "tiny".into(), is_served: true, sessions: 1 };
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), [mismatch]);
    let reported = changes(host.invoke("chat", "s", "again").await.expect("taken")).await.0;
    assert_eq!(reported, [("tiny".to_owned(), "tiny".to_owned())]);
    let after = conversation(&host, "chat").await;
    let texts = |transcript: &Transcript| {
        transcript.messages().iter().map(|message| message.content.clone()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&after.transcript)[..2], texts(&before), "the messages are unchanged");
    check_tokens(&host, "chat").await;
    assert_eq!(after.digest.as_ref(), Some(host.agents.models().get(None).expect("loaded").digest()));

    assert_eq!(host.agents.model_mismatches().await.expect("readable"), []);
    let reported = changes(host.invoke("chat", "s", "and again").await.expect("taken")).await.0;
    assert_eq!(reported, [], "the change is reported once");
}

#[tokio::test]
async fn tokens_stored_without_a_digest_are_checked_against_their_text() {
    for (engine, expected) in [(tiny_engine("tiny"), 0), (permuted_engine("tiny"), 1)] {
        let host = Host::start().await;
        host.deploy("chat", "", chatter()).await.expect("valid");
        host.answer("chat", "s", QUESTION).await;
        // Rewrites the row as an early version stored it.
        let mut row = host
            .store()
            .session("chat", "s")
            .await
            .expect("readable")
            .expect("there")
            .conversations
            .remove(0);
        let mut body: serde_json::Value = serde_json::from_slice(&row.body).expect("JSON");
        body.as_object_mut().expect("an object").remove("digest").expect("the digest is stored");
        (row.body, row.digest) = (body.to_string().into_bytes(), None);
        let mark = StateChange { key: "mark".into(), value: Some(vec![1]) };
        let commit = TurnCommit {
            agent: "chat".into(),
            session: "s".into(),
            turn: 2,
            state: vec![mark],
            conversations: vec![row],
            ..TurnCommit::default()
        };
        host.store().commit_turn(commit).await.expect("the commit is the next turn");
        let host = host.stop().await.start_with(models(engine), RuntimeOptions::default()).await;
        let reported = changes(host.invoke("chat", "s", "again").await.expect("taken")).await.0;
        assert_eq!(reported.len(), expected);
        check_tokens(&host, "chat").await;
    }
}

#[tokio::test]
async fn a_session_whose_model_was_removed_uses_the_agents_model_unless_it_is_pinned() {
    let host = Host::start().await;
    host.deploy("free", "", chatter()).await.expect("valid");
    host.deploy("pinned", "model = \"tiny\"", chatter()).await.expect("valid");
    for agent in ["free", "pinned"] {
        host.answer(agent, "s", QUESTION).await;
    }
    let host = host.stop().await.start_with(models(permuted_engine("new")), RuntimeOptions::default()).await;
    let mismatch = ModelMismatch { model: "tiny".into(), is_served: false, sessions: 2 };
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), [mismatch]);
    let reported = changes(host.invoke("free", "s", "again").await.expect("taken")).await.0;
    assert_eq!(reported, [("tiny".to_owned(), "new".to_owned())]);
    let after = conversation(&host, "free").await;
    assert_eq!(after.model, "new");
    check_tokens(&host, "free").await;

    let error = host.ask("pinned", "s", "again").await.expect_err("the pinned model is gone");
    assert_eq!(error.code(), "model_gone");
    assert!(error.to_string().contains("it serves: new"), "{error}");
    let host = host.stop().await.start_with(models(tiny_engine("tiny")), RuntimeOptions::default()).await;
    host.answer("pinned", "s", "again").await;
}

#[tokio::test]
async fn an_import_keeps_tokens_only_for_the_same_model() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    host.answer("chat", "s", QUESTION).await;
    let export = host.agents.export_session("chat", "s").await.expect("the session exists");
    for (engine, has_tokens) in [(tiny_engine("tiny"), true), (permuted_engine("tiny"), false)] {
        let other = Host::with_models(models(engine), RuntimeOptions::default()).await;
        other.deploy("chat", "", chatter()).await.expect("valid");
        other.agents.import_session("chat", export.clone(), false).await.expect("the export is valid");
        let imported = conversation(&other, "chat").await.transcript;
        assert_eq!(!imported.tokens().is_empty(), has_tokens);
        assert_eq!(imported.messages().len(), 2);
        other.answer("chat", "s", "again").await;
        check_tokens(&other, "chat").await;
    }
}
