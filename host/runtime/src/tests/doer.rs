//! A guest that acts outside of the host whenever it is invoked, and counts its actions in its
//! state.

use super::{
    fixture::{Host, invocation},
    guest::Guest,
    outside::Outside,
    tools::finder,
};
use crate::Invocation;

/// State keys of the counters: all actions, and those reported as interrupted.
const EVERYTHING: &str = "n";
const INTERRUPTED: &str = "i";

/// Grants and triggers of an agent with this guest.
pub(super) const MANIFEST: &str = "[grants]\nhosts = [\"*\"]\nevents = [\"order.*\"]\n\
    [[trigger.event]]\ntopic = \"order.*\"\nsession = \"{data.to}\"\n";

/// Sends a POST to `/message`, `/alarm`, `/event` or `/tool`, depending on what invoked it. Other
/// messages act by their first letter: `a` sets an alarm in a second, `r` one every second, `e`
/// emits `order.paid` for session s.
pub(super) fn doer(outside: &Outside) -> Guest {
    let imports = r#"
        (import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
        (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))
        (import "skep:agent/schedule@0.1.1" "after"
            (func $after (param i32 i32 i64 i32 i32 i32 i32 i32 i32)))
        (import "skep:agent/schedule@0.1.1" "every"
            (func $every (param i32 i32 i64 i32 i32 i32 i32 i32 i32)))
        (import "skep:agent/events@0.1.1" "emit" (func $emit (param i32 i32 i32 i32 i32 i32)))
        (import "skep:agent/http@0.1.1" "fetch" (func $fetch
            (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32)))"#;
    let urls = [("message", 3_000), ("alarm", 3_100), ("event", 3_200), ("tool", 3_300)];
    let url = |name: &str| outside.url(&format!("/{name}"));
    let data: String =
        urls.iter().map(|(name, at)| format!("(data (i32.const {at}) \"{}\")", url(name))).collect();
    let does = |at: usize| {
        let (name, at) = urls[at];
        format!("(call $do (i32.const {at}) (i32.const {}))", url(name).len())
    };
    let functions = format!(
        r#"
        {data}
        (data (i32.const 3400) "POST") (data (i32.const 3410) "wake") (data (i32.const 3420) "order.paid")
        (data (i32.const 3440) "{{\"to\":\"s\"}}")
        (data (i32.const 3500) "{EVERYTHING}{INTERRUPTED}") (data (i32.const 3520) "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")
        (func $check (if (i32.load8_u (i32.const 640)) (then unreachable)))
        (func $counted (param $key i32) (result i32)
            (call $get (local.get $key) (i32.const 1) (i32.const 600))
            (if (result i32) (i32.load8_u (i32.const 600)) (then (i32.load (i32.const 608))) (else (i32.const 0))))
        (func $count (param $key i32)
            (call $set (local.get $key) (i32.const 1)
                (i32.const 3520) (i32.add (i32.const 1) (call $counted (local.get $key))) (i32.const 640))
            (call $check))
        (func $do (param $url i32) (param $length i32)
            (call $count (i32.const 3500))
            (call $fetch (i32.const 3400) (i32.const 4) (local.get $url) (local.get $length)
                (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
                (i32.const 4096))
            (if (i32.load8_u (i32.const 4096)) (then
                (if (i32.ne (i32.load8_u (i32.const 4100)) (i32.const 6)) (then unreachable))
                (call $count (i32.const 3501)))))
        (func (export "skep:agent/alarm-handler@0.1.1#on-alarm")
            (param $id i32) (param i32) (param $name i32) (param i32) (param i32 i32 i32) (param i32 i32)
            (param i64 i64 i64) (param $attempt i32) (param $missed i32) (result i32)
            {alarm} (i32.store8 (i32.const 200) (i32.const 0)) (i32.const 200))
        (func (export "skep:agent/event-handler@0.1.1#on-event")
            (param $id i32) (param i32) (param $topic i32) (param i32) (param i32 i32 i32) (param i32 i32)
            (param i64 i64 i64) (param $attempt i32) (result i32)
            {event} (i32.store8 (i32.const 200) (i32.const 0)) (i32.const 200))"#,
        alarm = does(1),
        event = does(2),
    );
    let schedule = |how: &str| {
        format!(
            "(call ${how} (i32.const 3410) (i32.const 4) (i64.const 1000)
                (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 640))
            (call $check)"
        )
    };
    let on_message = format!(
        r#"
        (local.set $a (i32.load8_u (local.get $text)))
        (if (i32.eq (local.get $a) (i32.const 97)) (then {after}))
        (if (i32.eq (local.get $a) (i32.const 114)) (then {every}))
        (if (i32.eq (local.get $a) (i32.const 101)) (then
            (call $emit (i32.const 3420) (i32.const 10) (i32.const 1) (i32.const 3440) (i32.const 10) (i32.const 640))
            (call $check)))
        (if (i32.eq (local.get $a) (i32.const 112)) (then {message}))"#,
        after = schedule("after"),
        every = schedule("every"),
        message = does(0),
    );
    let guest = finder(imports, &does(3), 0);
    Guest {
        world: "export skep:agent/tool-handler@0.1.1; export skep:agent/alarm-handler@0.1.1;
            export skep:agent/event-handler@0.1.1;",
        module: format!("{}{functions}", guest.module).leak(),
        on_message: on_message.leak(),
        ..guest
    }
}

/// Returns a message with an idempotency key, so that it can be sent again.
pub(super) fn keyed(agent: &str, session: &str, text: &str) -> Invocation {
    Invocation { idempotency_key: Some(format!("{session} {text}")), ..invocation(agent, session, text) }
}

/// Checks that the session has done `times` actions, each of which reached `path` exactly once; an
/// action reported as interrupted may or may not have reached it. Returns the number of interrupted
/// ones.
pub(super) async fn did(host: &Host, outside: &Outside, session: &str, path: &str, times: usize) -> usize {
    let exported = host.agents.export_session("doer", session).await.expect("the session exists");
    let counted = |key: &str| exported.state.get(key).map_or(0, Vec::len);
    assert_eq!(counted(EVERYTHING), times, "{session}: every action is committed once");
    let (interrupted, came) = (counted(INTERRUPTED), outside.count(path));
    assert!(
        (times - interrupted..=times).contains(&came),
        "{session}: {came} reached {path}; {times} were made, {interrupted} of them reported as interrupted"
    );
    interrupted
}
