//! Tests of conversations in a guest that makes only synchronous calls.

use super::{
    durability::long_talker,
    fixture::{Host, invocation},
    guest::Guest,
};
use crate::{GenerationProgress, Invocation, RunEvent};

/// Appends the message to the conversation `main`, generates eight tokens, and replies with them.
///
/// At 1024: the parameters of `generate` (the handle, then at 8 the options: `max-tokens` at 72,
/// `visible` at 120).
pub(super) fn chatter() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/inference@0.1.1" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
                (func $append (param i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.generate"
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

/// Generates eight tokens repeatedly until that is refused, and fails with the error.
///
/// At 300: the error, in the form of an agent's error.
pub(super) fn relayer() -> Guest {
    let chatter = chatter();
    let (begin, _) = chatter.on_message.split_once("(call $generate").expect("the guest generates");
    let on_message = format!(
        r#"{begin}
            (loop $again
                (call $generate (i32.const 1024) (i32.const 2048))
                (br_if $again (i32.eqz (i32.load8_u (i32.const 2048)))))
            (i32.store8 (i32.const 300) (i32.const 1))
            (i32.store8 (i32.const 304) (i32.const 1))
            (i32.store8 (i32.const 308) (i32.load8_u (i32.const 2056)))
            (i32.store (i32.const 312) (i32.load (i32.const 2060)))
            (i32.store (i32.const 316) (i32.load (i32.const 2064)))
            (return (i32.const 300))"#
    );
    Guest { on_message: on_message.leak(), ..chatter }
}

#[tokio::test]
async fn a_visible_generation_is_streamed_and_counted() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let mut handle = host.invoke("chat", "s", "hi").await.expect("taken");
    let (mut text, mut generations) = (String::new(), 0);
    let outcome = loop {
        match handle.next().await.expect("the turn ends").expect("the turn succeeds") {
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
async fn a_conversation_continues_from_cached_tokens_after_a_restart() {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let first =
        host.ask("chat", "s", "a message that fills more than a page").await.expect("the turn succeeds");
    assert_eq!(first.usage.cached_tokens, 0);
    let host = host.restart().await;
    let second = host.ask("chat", "s", "and another").await.expect("the turn succeeds");
    assert!(second.usage.cached_tokens >= first.usage.prompt_tokens / 16 * 16, "{second:?} after {first:?}");
    let session = host.agents.session("chat", "s").await.expect("the session exists");
    assert_eq!(session.messages.len(), 4);
    assert_eq!(session.usage.prompt_tokens, first.usage.prompt_tokens + second.usage.prompt_tokens);
}

#[tokio::test]
async fn the_tokens_of_a_turn_are_limited() {
    let host = Host::start().await;
    host.deploy("chat", "[limits]\ntokens_per_turn = 3", chatter()).await.expect("valid");
    let outcome = host.ask("chat", "s", "hi").await.expect("the turn succeeds");
    assert!((1..=3).contains(&outcome.usage.completion_tokens), "{outcome:?}");
}

/// Generates at temperature 0 with this schema, up to 64 tokens and up to `stop`. Replies with `T`
/// for the error `truncated`, `E` for any other error, and `O` for success.
///
/// In addition to what `chatter` writes: `temperature` at 0, `stop` at 80, `output` at 108 of the
/// options.
pub(super) fn former(schema: &str, stop: Option<&str>) -> Guest {
    let chatter = chatter();
    let (stop, stops) = (stop.unwrap_or_default(), i32::from(stop.is_some()));
    let data = |text: &str| text.bytes().map(|byte| format!("\\{byte:02x}")).collect::<String>();
    let module = format!(
        r#"{} (data (i32.const 4096) "{}") (data (i32.const 5120) "{}") (data (i32.const 5600) "TEO")"#,
        chatter.module,
        data(schema),
        data(stop)
    );
    let (begin, _) = chatter.on_message.split_once("(call $generate").expect("the guest generates");
    let on_message = format!(
        r#"{begin}
            (i32.store8 offset=8 (i32.const 1024) (i32.const 1))
            (i32.store offset=84 (i32.const 1024) (i32.const 64))
            (i32.store (i32.const 5400) (i32.const 5120))
            (i32.store (i32.const 5404) (i32.const {}))
            (i32.store offset=88 (i32.const 1024) (i32.const 5400))
            (i32.store offset=92 (i32.const 1024) (i32.const {stops}))
            (i32.store8 offset=116 (i32.const 1024) (i32.const 1))
            (i32.store offset=120 (i32.const 1024) (i32.const 4096))
            (i32.store offset=124 (i32.const 1024) (i32.const {}))
            (call $generate (i32.const 1024) (i32.const 2048))
            (local.set $length (i32.const 1))
            (local.set $text (i32.const 5602))
            (if (i32.load8_u (i32.const 2048)) (then
                (local.set $text (i32.const 5601))
                (if (i32.eq (i32.load8_u offset=8 (i32.const 2048)) (i32.const 2))
                    (then (local.set $text (i32.const 5600))))))"#,
        stop.len(),
        schema.len()
    );
    Guest { module: module.leak(), on_message: on_message.leak(), ..chatter }
}

#[tokio::test]
async fn truncated_structured_output_is_an_error_and_leaves_no_message() {
    let host = Host::start().await;
    let long = r#"{"type": "string", "minLength": 500}"#;
    let fixed = format!(r#"{{"const": "{}"}}"#, "abcdefgh".repeat(20));
    for (name, guest, answer) in [
        ("limited", former(long, None), "T"),
        ("stopped", former(r#"{"const": "abcd"}"#, Some("cd")), "T"),
        ("refused", former(r#"{"type": "array", "uniqueItems": "yes"}"#, None), "E"),
        ("unsatisfied", former(r#"{"enum": ["ab", "aa"], "not": {"pattern": "a"}}"#, None), "E"),
        ("whole", former(r#"{"const": "ab"}"#, None), "O"),
        ("fixed", former(&fixed, None), "T"),
    ] {
        host.deploy(name, "", guest).await.expect("valid");
        assert_eq!(host.answer(name, "s", "hi").await, answer, "{name}");
        let messages = host.agents.session(name, "s").await.expect("the session exists").messages.len();
        assert_eq!(messages, if answer == "O" { 2 } else { 1 }, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeline_shows_the_progress_of_a_running_generation() {
    let host = Host::start().await;
    host.deploy("talk", "", long_talker()).await.expect("valid");
    // A generation may end before it is looked at.
    for round in 0..40 {
        let invocation = Invocation { detached: true, ..invocation("talk", &format!("s{round}"), "hello") };
        let mut handle = host.agents.invoke(invocation).await.expect("accepted");
        while !matches!(handle.next().await, None | Some(Ok(RunEvent::Delta { .. }))) {}
        let shown = host.agents.turn_timeline("talk", &format!("s{round}"), handle.turn_id()).await;
        let (_, timeline) = shown.expect("the turn is stored");
        let call = timeline.calls.iter().find(|call| call.name == "generate").expect("the turn generates");
        if call.took_us.is_some() {
            continue;
        }
        let GenerationProgress { queue_us, first_token_us } = call.progress;
        assert!(queue_us.is_some() && first_token_us >= queue_us, "{call:?}");
        return;
    }
    panic!("no generation was seen while it ran");
}
