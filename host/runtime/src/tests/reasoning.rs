//! Tests of the reasoning of models, as agents read it.

use super::{
    durability::detached,
    fixture::{Host, until},
    guest::Guest,
    inference::chatter,
    upstreams::{REMOTE, Scripted, Step, granting, models},
};
use crate::{RunEvent, RuntimeOptions};
use skep_engine::{Engine, EngineOptions, ModelSet, SpecialTokens};
use skep_model::ChatTemplate;

#[path = "../../../../tests/fixtures/scripted_model.rs"]
mod scripted_model;

/// Generates as often as the message has letters, and then replies with the reasoning of the message with this index, or
/// of the last assistant message.
fn thinker(index: Option<u32>) -> Guest {
    let chatter = chatter();
    let module = format!(
        r#"(import "skep:agent/inference@0.1.1" "[method]conversation.reasoning"
            (func $reasoning (param i32 i32 i32 i32)))
        {} (data (i32.const 4096) "none")"#,
        chatter.module
    );
    let (begin, generate) = chatter.on_message.split_once("(call $generate").expect("the guest generates");
    let (generate, _) = generate.split_once("(local.set $text").expect("the guest replies");
    let on_message = format!(
        r#"{begin}
            (local.set $b (local.get $length))
            (loop $again
                (call $generate {generate}
                (local.set $b (i32.sub (local.get $b) (i32.const 1)))
                (br_if $again (local.get $b)))
            (call $reasoning (local.get $a) (i32.const {}) (i32.const {}) (i32.const 600))
            (local.set $text (i32.const 4096))
            (local.set $length (i32.const 4))
            (if (i32.load8_u (i32.const 600)) (then
                (local.set $text (i32.load (i32.const 604)))
                (local.set $length (i32.load (i32.const 608)))))"#,
        u32::from(index.is_some()),
        index.unwrap_or_default(),
    );
    Guest { module: module.leak(), on_message: on_message.leak(), ..chatter }
}

#[tokio::test]
async fn an_agent_reads_the_reasoning_of_each_message() {
    let answers = vec![
        vec![Step::Think("first, "), Step::Think("hm"), Step::Say("One."), Step::Finish],
        vec![Step::Say("Two."), Step::Finish],
        vec![Step::Think("third"), Step::Say("Three."), Step::Finish],
        vec![Step::Say("Four."), Step::Finish],
        vec![Step::Say("Five."), Step::Finish],
    ];
    let remote = Scripted::new(None, answers);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, thinker(None)).await.expect("valid");
    for expected in ["first, hm", "none", "third"] {
        assert_eq!(host.answer("chat", "s", "?").await, expected);
    }
    // The reasoning is stored with its message.
    let host = host.restart_with(granting(&["far/*"])).await;
    for (index, expected) in [(Some(1), "first, hm"), (Some(99), "none")] {
        host.deploy("chat", REMOTE, thinker(index)).await.expect("valid");
        assert_eq!(host.answer("chat", "s", "?").await, expected);
    }
    let messages = host.agents.session("chat", "s").await.expect("the session exists").messages;
    assert_eq!(messages[5].reasoning.as_deref(), Some("third"));
}

#[tokio::test]
async fn a_local_model_gives_no_reasoning() {
    let host = Host::start().await;
    host.deploy("chat", "", thinker(None)).await.expect("valid");
    assert_eq!(host.answer("chat", "s", "?").await, "none");
}

#[tokio::test]
async fn a_turn_that_runs_again_finds_the_reasoning_that_it_found_before() {
    let answers = vec![
        vec![Step::Think("before the crash"), Step::Say("One."), Step::Finish],
        vec![Step::Say("Two"), Step::Hang],
        vec![Step::Think("after it"), Step::Say("Two."), Step::Finish],
    ];
    let remote = Scripted::new(None, answers);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, thinker(Some(1))).await.expect("valid");
    let mut handle = host.agents.invoke(detached("chat", "??")).await.expect("taken");
    let id = handle.turn_id().to_owned();
    while !matches!(handle.next().await, Some(Ok(RunEvent::Delta { text })) if text == "Two") {}
    until(async || host.journals().await.contains("Two").then_some(())).await;
    let host = host.crash().await.start(granting(&["far/*"])).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the turn repeats what it did").text, "before the crash");
    let messages = host.agents.session("chat", "s").await.expect("the session exists").messages;
    let reasoning: Vec<_> = messages.iter().filter_map(|message| message.reasoning.as_deref()).collect();
    assert_eq!(reasoning, ["before the crash", "after it"]);
    assert_eq!(remote.asked().len(), 3);
}

#[tokio::test]
async fn the_reasoning_that_is_kept_is_bounded() {
    let long = format!("x{}", "ü".repeat(200_000)).leak();
    let remote = Scripted::new(None, vec![vec![Step::Think(long), Step::Say("One."), Step::Finish]]);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, chatter()).await.expect("valid");
    assert_eq!(host.answer("chat", "s", "?").await, "One.");
    let messages = host.agents.session("chat", "s").await.expect("the session exists").messages;
    let kept = messages[1].reasoning.as_deref().expect("the model gave one");
    assert!(kept.len() == (256 << 10) - 1 && long.starts_with(kept), "{} bytes", kept.len());
}

/// A template whose model writes its reasoning between tags.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Generates like [`thinker`], but up to 3,000 tokens.
fn patient_thinker(index: Option<u32>) -> Guest {
    let thinker = thinker(index);
    let (few, many) =
        ("offset=84 (i32.const 1024) (i32.const 8)", "offset=84 (i32.const 1024) (i32.const 3000)");
    Guest { on_message: thinker.on_message.replace(few, many).leak(), ..thinker }
}

fn local(scripts: &[&str]) -> ModelSet {
    let tokenizer = scripted_model::tokenizer(&["<think>", "</think>"]);
    let template = ChatTemplate::new(TEMPLATE, None, None).expect("the template compiles");
    let model = scripted_model::model(tokenizer, SpecialTokens::Parse, template, scripts);
    ModelSet::new(Engine::start(model, EngineOptions::default()).expect("the engine starts"))
}

#[tokio::test]
async fn the_reasoning_of_a_local_model_is_shown_and_kept() {
    let models = local(&["<think>\nfirst, hm\n</think>\n\nOne.", "Two."]);
    let host = Host::with_models(models, RuntimeOptions::default()).await;
    host.deploy("chat", "", patient_thinker(None)).await.expect("valid");
    let mut handle = host.agents.invoke(detached("chat", "?")).await.expect("taken");
    let (mut thought, mut said, mut replied) = (String::new(), String::new(), None);
    while let Some(event) = handle.next().await {
        match event.expect("the turn succeeds") {
            RunEvent::Thinking { text } => thought += &text,
            RunEvent::Delta { text } => said += &text,
            RunEvent::Done(outcome) => replied = Some(outcome.text),
            _ => {}
        }
    }
    assert_eq!((thought.as_str(), said.as_str()), ("first, hm", "One."));
    assert_eq!(replied.as_deref(), Some("first, hm"), "the agent reads it");
    let host = host.restart().await;
    host.deploy("chat", "", patient_thinker(Some(1))).await.expect("valid");
    assert_eq!(host.answer("chat", "s", "?").await, "first, hm");
}

#[tokio::test]
async fn the_reasoning_of_a_local_model_continues_after_a_crash() {
    let steps: String = (0..60).map(|step| format!("step {step}, ")).collect();
    let script = format!("<think>\n{steps}done\n</think>\n\nOne.");
    // A generation that the crash cut off before its first token was kept begins with the next script.
    let host = Host::with_models(local(&[script.as_str(); 2]), RuntimeOptions::default()).await;
    host.deploy("chat", "", patient_thinker(None)).await.expect("valid");
    let mut handle = host.agents.invoke(detached("chat", "?")).await.expect("taken");
    let id = handle.turn_id().to_owned();
    while !matches!(handle.next().await, Some(Ok(RunEvent::Thinking { .. }))) {}
    let host = host.crash().await.start(RuntimeOptions::default()).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the turn repeats what it did").text, format!("{steps}done"));
    let messages = host.agents.session("chat", "s").await.expect("the session exists").messages;
    assert_eq!(messages[1].reasoning.as_deref(), Some(format!("{steps}done").as_str()));
}
