//! Conversations of a guest that knows nothing of asynchronous calls.

use super::{fixture::Host, guest::Guest};
use crate::RunEvent;

/// Appends the message to the conversation `main`, generates eight tokens, and replies with them.
///
/// At 1024: the parameters of `generate` (the handle, then at 8 the options: `max-tokens` at 72, `visible` at 120).
fn chatter() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/inference@0.1.0" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.0" "[method]conversation.append-user"
                (func $append (param i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.0" "[method]conversation.generate"
                (func $generate (param i32 i32)))
            (data (i32.const 512) "main")"#,
        on_message: r#"
            (call $open (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 600))
            (if (i32.load8_u (i32.const 600)) (then unreachable))
            (local.set $a (i32.load offset=4 (i32.const 600)))
            (call $append (local.get $a) (local.get $text) (local.get $length) (i32.const 640))
            (if (i32.load8_u (i32.const 640)) (then unreachable))
            (i32.store (i32.const 1024) (local.get $a))
            (i32.store8 offset=80 (i32.const 1024) (i32.const 1))
            (i32.store offset=84 (i32.const 1024) (i32.const 8))
            (i32.store8 offset=128 (i32.const 1024) (i32.const 1))
            (call $generate (i32.const 1024) (i32.const 2048))
            (if (i32.load8_u (i32.const 2048)) (then unreachable))
            (local.set $text (i32.load offset=8 (i32.const 2048)))
            (local.set $length (i32.load offset=12 (i32.const 2048)))"#,
        ..Guest::default()
    }
}

#[tokio::test]
async fn a_visible_generation_is_streamed_and_counted() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let mut handle = host.invoke("chat", "s", "hi").await.expect("taken");
    let (mut text, mut generations) = (String::new(), 0);
    let outcome = loop {
        match handle.next().await.expect("there is an end").expect("the turn goes well") {
            RunEvent::Delta { text: delta } => text.push_str(&delta),
            RunEvent::Generation { usage, .. } => generations += usage.completion_tokens,
            RunEvent::Done(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!(outcome.text, text);
    assert!((1..=8).contains(&generations));
    assert_eq!(outcome.usage.completion_tokens, generations);
}

#[tokio::test]
async fn a_conversation_goes_on_after_a_restart_from_its_cached_tokens() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let first = host.ask("chat", "s", "a message that fills more than a page").await.expect("goes well");
    assert_eq!(first.usage.cached_tokens, 0);
    let host = host.restart().await;
    let second = host.ask("chat", "s", "and another").await.expect("goes well");
    assert!(second.usage.cached_tokens >= first.usage.prompt_tokens / 16 * 16, "{second:?} after {first:?}");
    let session = host.agents.session("chat", "s").await.expect("it is there");
    assert_eq!(session.messages.len(), 4);
    assert_eq!(session.usage.prompt_tokens, first.usage.prompt_tokens + second.usage.prompt_tokens);
}

#[tokio::test]
async fn a_turns_tokens_are_bounded() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\ntokens_per_turn = 3", chatter()).await.expect("valid");
    let outcome = host.ask("chat", "s", "hi").await.expect("goes well");
    assert!((1..=3).contains(&outcome.usage.completion_tokens), "{outcome:?}");
}
