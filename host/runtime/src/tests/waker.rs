//! A guest that sets schedules, handles alarms and events, and emits events.

use super::guest::Guest;

/// Acts by the first letter of a message: `a` sets an alarm in a second, `r` one every second, `f`
/// one that fails in a second, `t` sets one and traps, `e` emits `order.paid` for order s, `p`
/// emits `ping.x`, `d` emits a topic that is not granted. Any other message is answered with as
/// many letters as there were alarms; `E` counts events, `m` the missed times of the last alarm's
/// schedule. An alarm whose name starts with `!` traps, and so does an event of topic `trap.x`; a
/// `ping.x` is answered with another. The guest traps if an interface refuses a call.
pub(super) fn waker() -> Guest {
    Guest {
        world: "export skep:agent/alarm-handler@0.1.1; export skep:agent/event-handler@0.1.1;",
        module: r#"
            (import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
            (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))
            (import "skep:agent/schedule@0.1.1" "after"
                (func $after (param i32 i32 i64 i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/schedule@0.1.1" "every"
                (func $every (param i32 i32 i64 i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/events@0.1.1" "emit" (func $emit (param i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "aEm")
            (data (i32.const 520) "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")
            (data (i32.const 700) "!wake")
            (data (i32.const 710) "order.paid")
            (data (i32.const 720) "{\"order_id\":\"s\"}")
            (data (i32.const 740) "ping.x")
            (data (i32.const 750) "bill.x")
            (func $check (if (i32.load8_u (i32.const 640)) (then unreachable)))
            (func $wake (param $name i32) (param $length i32)
                (call $after (local.get $name) (local.get $length) (i64.const 1000)
                    (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 640))
                (call $check))
            (func $tell (param $topic i32) (param $length i32)
                (call $emit (local.get $topic) (local.get $length)
                    (i32.const 1) (i32.const 720) (i32.const 16) (i32.const 640)))
            (func $length (param $key i32) (result i32)
                (call $get (local.get $key) (i32.const 1) (i32.const 600))
                (if (result i32) (i32.load8_u (i32.const 600)) (then (i32.load (i32.const 608))) (else (i32.const 0))))
            (func $count (param $key i32)
                (call $set (local.get $key) (i32.const 1)
                    (i32.const 520) (i32.add (i32.const 1) (call $length (local.get $key))) (i32.const 640)))
            (func (export "skep:agent/alarm-handler@0.1.1#on-alarm")
                (param $id i32) (param i32) (param $name i32) (param i32) (param i32 i32 i32) (param i32 i32)
                (param i64 i64 i64) (param $attempt i32) (param $missed i32) (result i32)
                (if (i32.eq (i32.load8_u (local.get $name)) (i32.const 33)) (then unreachable))
                (call $count (i32.const 512))
                (call $set (i32.const 514) (i32.const 1) (i32.const 520) (local.get $missed) (i32.const 640))
                (i32.store8 (i32.const 200) (i32.const 0))
                (i32.const 200))
            (func (export "skep:agent/event-handler@0.1.1#on-event")
                (param $id i32) (param i32) (param $topic i32) (param i32) (param i32 i32 i32) (param i32 i32)
                (param i64 i64 i64) (param $attempt i32) (result i32)
                (if (i32.eq (i32.load8_u (local.get $topic)) (i32.const 116)) (then unreachable))
                (call $count (i32.const 513))
                (if (i32.eq (i32.load8_u (local.get $topic)) (i32.const 112))
                    (then (call $tell (i32.const 740) (i32.const 6))))
                (i32.store8 (i32.const 200) (i32.const 0))
                (i32.const 200))"#,
        on_message: r#"
            (local.set $a (i32.load8_u (local.get $text)))
            (if (i32.eq (local.get $a) (i32.const 97)) (then (call $wake (i32.const 701) (i32.const 4))))
            (if (i32.eq (local.get $a) (i32.const 102)) (then (call $wake (i32.const 700) (i32.const 5))))
            (if (i32.eq (local.get $a) (i32.const 116))
                (then (call $wake (i32.const 701) (i32.const 4)) (unreachable)))
            (if (i32.eq (local.get $a) (i32.const 114))
                (then (call $every (i32.const 701) (i32.const 4) (i64.const 1000)
                    (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 640))
                    (call $check)))
            (if (i32.eq (local.get $a) (i32.const 101))
                (then (call $tell (i32.const 710) (i32.const 10)) (call $check)))
            (if (i32.eq (local.get $a) (i32.const 112))
                (then (call $tell (i32.const 740) (i32.const 6)) (call $check)))
            (if (i32.eq (local.get $a) (i32.const 100))
                (then (call $tell (i32.const 750) (i32.const 6)) (call $check)))
            (local.set $b (i32.const 512))
            (if (i32.eq (local.get $a) (i32.const 69)) (then (local.set $b (i32.const 513))))
            (if (i32.eq (local.get $a) (i32.const 109)) (then (local.set $b (i32.const 514))))
            (local.set $length (call $length (local.get $b)))
            (local.set $text (i32.const 520))"#,
        ..Guest::default()
    }
}
