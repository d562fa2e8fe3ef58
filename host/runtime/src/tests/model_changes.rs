//! Sessions whose model is another one than before: under the same name, or because the host has it no more.

use super::{
    durability::{detached, talker},
    fixture::{Host, permuted_engine, tiny_engine},
    guest::Guest,
    inference::chatter,
};
use crate::{ModelMismatch, PortableConversation, RunEvent, RunHandle, RuntimeOptions, TurnPhase};
use skep_engine::{ModelSet, chat::Transcript};
use skep_store::{StateChange, TurnCommit};

const QUESTION: &str = "hello, one and all";

async fn conversation(host: &Host, agent: &str) -> PortableConversation {
    host.agents.export_session(agent, "s").await.expect("it is there").conversations.remove(0)
}

/// The models that a turn says it changes between, and what it answers.
async fn changes(mut handle: RunHandle) -> (Vec<(String, String)>, String) {
    let mut changes = Vec::new();
    loop {
        match handle.next().await.expect("there is an end").expect("the turn goes well") {
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

/// That all tokens are those of the host's model, and that the model has seen all messages.
fn check_tokens(host: &Host, transcript: &Transcript) {
    let engine = host.agents.models().get(None).expect("there is one");
    transcript.check(&engine).expect("the tokens spell the text");
    assert!(!transcript.tokens().is_empty() && transcript.rendered().contains(QUESTION));
}

#[tokio::test]
async fn tokens_of_another_model_of_the_same_name_are_made_anew_from_the_messages() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    host.answer("chat", "s", QUESTION).await;
    let before = conversation(&host, "chat").await.transcript;
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), []);

    let host = host.stop().await.start_with(models(permuted_engine("tiny")), RuntimeOptions::default()).await;
    let mismatch = ModelMismatch { model: "tiny".into(), is_served: true, sessions: 1 };
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), [mismatch]);
    let told = changes(host.invoke("chat", "s", "again").await.expect("taken")).await.0;
    assert_eq!(told, [("tiny".to_owned(), "tiny".to_owned())]);
    let after = conversation(&host, "chat").await;
    let texts = |transcript: &Transcript| {
        transcript.messages().iter().map(|message| message.content.clone()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&after.transcript)[..2], texts(&before), "what was said is what was said");
    check_tokens(&host, &after.transcript);
    assert_eq!(after.digest.as_ref(), Some(&host.agents.models().get(None).expect("one").info().digest));

    assert_eq!(host.agents.model_mismatches().await.expect("readable"), []);
    let told = changes(host.invoke("chat", "s", "and again").await.expect("taken")).await.0;
    assert_eq!(told, [], "it is told once");
}

#[tokio::test]
async fn tokens_that_were_stored_without_a_digest_have_to_spell_their_text() {
    for (engine, expected) in [(tiny_engine("tiny"), 0), (permuted_engine("tiny"), 1)] {
        let host = Host::start().await;
        host.deploy("chat", "", chatter()).await.expect("valid");
        host.answer("chat", "s", QUESTION).await;
        // As an early version wrote it.
        let mut row = host.store().session("chat", "s").await.expect("readable").expect("there").conversations.remove(0);
        let mut body: serde_json::Value = serde_json::from_slice(&row.body).expect("JSON");
        body.as_object_mut().expect("an object").remove("digest").expect("it has one");
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
        host.store().commit_turn(commit).await.expect("it is the next one");
        let host = host.stop().await.start_with(models(engine), RuntimeOptions::default()).await;
        let told = changes(host.invoke("chat", "s", "again").await.expect("taken")).await.0;
        assert_eq!(told.len(), expected);
        check_tokens(&host, &conversation(&host, "chat").await.transcript);
    }
}

#[tokio::test]
async fn a_session_whose_model_is_gone_goes_on_with_its_agents_own_unless_agent_toml_names_it() {
    let host = Host::start().await;
    host.deploy("free", "", chatter()).await.expect("valid");
    host.deploy("pinned", "model = \"tiny\"", chatter()).await.expect("valid");
    for agent in ["free", "pinned"] {
        host.answer(agent, "s", QUESTION).await;
    }
    let host = host.stop().await.start_with(models(permuted_engine("new")), RuntimeOptions::default()).await;
    let mismatch = ModelMismatch { model: "tiny".into(), is_served: false, sessions: 2 };
    assert_eq!(host.agents.model_mismatches().await.expect("readable"), [mismatch]);
    let told = changes(host.invoke("free", "s", "again").await.expect("taken")).await.0;
    assert_eq!(told, [("tiny".to_owned(), "new".to_owned())]);
    let after = conversation(&host, "free").await;
    assert_eq!(after.model, "new");
    check_tokens(&host, &after.transcript);

    let error = host.ask("pinned", "s", "again").await.expect_err("its model is not there");
    assert_eq!(error.code(), "model_gone");
    assert!(error.to_string().contains("there is only new"), "{error}");
    let host = host.stop().await.start_with(models(tiny_engine("tiny")), RuntimeOptions::default()).await;
    host.answer("pinned", "s", "again").await;
}

/// [`talker`] that replies with the error if its last generation fails; `first` are instructions before that.
fn teller(first: &str) -> Guest {
    let talker = talker();
    let failed = "(if (i32.load8_u (i32.const 2048)) (then unreachable))";
    let (before, after) = talker.on_message.split_once(failed).expect("it looks whether it failed");
    let (before, generate) = before.split_once("(call $generate").expect("it generates");
    let on_message = format!(
        r#"{before} {first} (call $generate {generate}
        (if (i32.load8_u (i32.const 2048))
            (then
                (i32.store (i32.const 2056) (i32.load (i32.const 2060)))
                (i32.store (i32.const 2060) (i32.load (i32.const 2064)))))
        {after}"#
    );
    Guest { on_message: on_message.leak(), ..talker }
}

/// Begins a turn of `guest`, cuts it off after some text, and ends it on a host whose model is another one of the same name.
async fn cut_off_and_exchanged(guest: impl Fn() -> Guest, texts: usize) -> (Host, String) {
    for _ in 0..20 {
        let host = Host::start().await;
        host.deploy("talk", "", guest()).await.expect("valid");
        let mut handle = host.agents.invoke(detached("talk", QUESTION)).await.expect("taken");
        let id = handle.turn_id().to_owned();
        let mut seen = 0;
        while seen < texts {
            match handle.next().await {
                Some(Ok(RunEvent::Delta { .. })) => seen += 1,
                Some(Ok(RunEvent::Generation { .. })) if texts > 1 => {
                    // From here on it is the second generation.
                    seen = texts - 1;
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => panic!("{error}"),
                None => break,
            }
        }
        let exchanged = models(permuted_engine("tiny"));
        let host = host.stop().await.start_with(exchanged, RuntimeOptions::default()).await;
        if let TurnPhase::Done { .. } = host.agents.turn("talk", "s", &id).await.expect("kept").phase {
            // It was faster than the end of the host, or said nothing that has a text.
            continue;
        }
        let outcome = host.agents.follow("talk", "s", &id).await.expect("kept").outcome().await;
        return (host, outcome.expect("the guest goes on").text);
    }
    panic!("no generation was cut off");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_under_which_the_model_was_exchanged_is_interrupted() {
    let (host, text) = cut_off_and_exchanged(|| teller(""), 1).await;
    assert!(text.starts_with("interrupted: the model tiny was exchanged"), "{text}");
    // The agent goes on.
    host.answer("talk", "s", QUESTION).await;
    check_tokens(&host, &conversation(&host, "talk").await.transcript);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_the_exchanged_model_stays_in_the_conversation_as_text() {
    // Four tokens first.
    let first = r#"
        (i32.store offset=84 (i32.const 1024) (i32.const 4))
        (call $generate (i32.const 1024) (i32.const 2048))
        (if (i32.load8_u (i32.const 2048)) (then unreachable))
        (i32.store offset=84 (i32.const 1024) (i32.const 160))"#;
    let (host, text) = cut_off_and_exchanged(|| teller(first), 1_000).await;
    assert!(text.starts_with("interrupted: "), "{text}");
    let transcript = conversation(&host, "talk").await.transcript;
    assert_eq!(transcript.messages().len(), 2, "the question and the first answer");
    assert_eq!(transcript.tokens(), [0; 0], "no token of the other model");
    host.answer("talk", "s", "again").await;
    check_tokens(&host, &conversation(&host, "talk").await.transcript);
}

#[tokio::test]
async fn an_export_takes_its_messages_to_another_model_of_the_same_name_and_its_tokens_to_the_same_one() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    host.answer("chat", "s", QUESTION).await;
    let export = host.agents.export_session("chat", "s").await.expect("it is there");
    for (engine, has_tokens) in [(tiny_engine("tiny"), true), (permuted_engine("tiny"), false)] {
        let other = Host::with_models(models(engine), RuntimeOptions::default()).await;
        other.deploy("chat", "", chatter()).await.expect("valid");
        other.agents.import_session("chat", export.clone(), false).await.expect("it is right");
        let imported = conversation(&other, "chat").await.transcript;
        assert_eq!(!imported.tokens().is_empty(), has_tokens);
        assert_eq!(imported.messages().len(), 2);
        other.answer("chat", "s", "again").await;
        check_tokens(&other, &conversation(&other, "chat").await.transcript);
    }
}
