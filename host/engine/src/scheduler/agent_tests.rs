//! Tests of what agents need while pages are scarce: sessions whose prompt is cached come before others of their agent, and
//! sessions that wait for a tool keep their pages.

use std::time::Duration;

use serde_json::json;

use super::tests::Harness;
use super::waiting::MAX_OVERTAKEN;
use crate::sequence_id::SequenceId;
use crate::tests::fixture::greedy;
use crate::{
    BeforeCalls, CallMarkup, CallableTool, Constraint, FinishReason, GenerateRequest, ObjectMarkup, Priority,
    ToolCallForm,
};

/// Returns a request of an agent's session whose prompt is `text`, for `max_tokens` tokens.
fn of(agent: &str, session: &str, text: &str, max_tokens: usize) -> GenerateRequest {
    let mut request = greedy(text, max_tokens);
    request.affinity.agent = Some(agent.to_string());
    request.affinity.session = Some(session.to_string());
    request
}

/// Returns the form of text that may call a tool. A call begins with `open`.
fn calls(open: &str) -> Constraint {
    let markup = ObjectMarkup {
        open: open.to_string(),
        close: "]".to_string(),
        between: String::new(),
        open_is_special: false,
        reserved: Vec::new(),
    };
    Constraint::ToolCalls(ToolCallForm {
        tools: vec![CallableTool { name: "look".to_string(), parameters: json!({"type": "object"}) }],
        before: BeforeCalls::Text,
        parallel: false,
        markup: CallMarkup::Object(markup),
    })
}

/// Runs a request until it has drawn `x`, and ends it.
fn end_after_first_token(harness: &mut Harness, request: GenerateRequest, reason: FinishReason) {
    let id = SequenceId(harness.submit(request));
    while harness.scheduler.sequence(id).is_none_or(|sequence| sequence.output().is_empty()) {
        harness.step();
    }
    harness.scheduler.end(id, Ok(reason));
}

/// Runs a session of 5 pages, whose prompt repeats a letter, to the call of a tool.
fn call_tool(harness: &mut Harness, letter: &str) {
    let mut request = of("agent", letter, &letter.repeat(80), 4);
    request.constraint = Some(Constraint::JsonObject);
    end_after_first_token(harness, request, FinishReason::ConstraintDone);
}

/// Runs a prompt that repeats a letter, for which nobody is expected to come back.
fn run_once(harness: &mut Harness, letter: &str, tokens: usize) {
    harness.submit(of("agent", letter, &letter.repeat(tokens), 1));
    harness.run();
}

/// Returns the number of cached pages of prompts that repeat a letter.
fn cached(harness: &Harness, letters: &[&str]) -> Vec<usize> {
    letters.iter().map(|letter| pages(harness, &letter.repeat(320))).collect()
}

fn pages(harness: &Harness, text: &str) -> usize {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    harness.scheduler.kv.peek_prefix("", &tokens).len()
}

fn expected(harness: &Harness) -> usize {
    harness.scheduler.continuations.len()
}

#[test]
fn a_session_that_waits_for_a_tool_keeps_its_pages_before_one_that_ended() {
    let json = || Some(Constraint::JsonObject);
    let cases = [
        ("a form", json(), FinishReason::ConstraintDone, true),
        ("a form that was cut off", json(), FinishReason::Length, false),
        ("a call", Some(calls("x")), FinishReason::Eos, true),
        ("text without a call", Some(calls("<call>")), FinishReason::Eos, false),
        ("an answer", None, FinishReason::Eos, false),
    ];
    for (name, constraint, reason, waits) in cases {
        let mut harness = Harness::new(16, 1, 64);
        let mut request = of("agent", "a", &"a".repeat(80), 4);
        request.constraint = constraint;
        end_after_first_token(&mut harness, request, reason);
        run_once(&mut harness, "b", 80);
        assert_eq!(cached(&harness, &["a", "b"]), [5, 5]);
        // It needs 11 pages, and 6 are free.
        run_once(&mut harness, "c", 176);
        let left = cached(&harness, &["a", "b"]);
        assert_eq!(left, if waits { [5, 0] } else { [0, 5] }, "{name}");
    }
}

#[test]
fn background_work_is_not_expected_to_be_continued() {
    let mut harness = Harness::new(16, 1, 64);
    let mut request = greedy(&"a".repeat(80), 4);
    request.constraint = Some(calls("x"));
    request.priority = Priority::Background;
    end_after_first_token(&mut harness, request.clone(), FinishReason::Eos);
    assert_eq!(expected(&harness), 0);
    request.priority = Priority::Interactive;
    end_after_first_token(&mut harness, request, FinishReason::Eos);
    assert_eq!(expected(&harness), 1);
}

#[test]
fn pages_are_kept_for_a_bounded_time() {
    for (wait, left) in [(Duration::ZERO, [5, 0]), (Duration::from_secs(3), [1, 4])] {
        let mut harness = Harness::new(16, 1, 64);
        call_tool(&mut harness, "a");
        run_once(&mut harness, "b", 80);
        run_once(&mut harness, "c", 100);
        assert_eq!(cached(&harness, &["a", "b", "c"]), [5, 4, 6], "a's pages were kept");
        harness.wait(wait);
        // It needs 5 pages, and one is free.
        run_once(&mut harness, "d", 80);
        assert_eq!(cached(&harness, &["a", "b"]), left, "after {wait:?}");
    }
}

#[test]
fn pages_of_at_most_half_of_the_cache_are_kept() {
    let mut harness = Harness::new(16, 1, 64);
    call_tool(&mut harness, "a");
    call_tool(&mut harness, "b");
    run_once(&mut harness, "c", 48);
    assert_eq!(cached(&harness, &["a", "b", "c"]), [5, 5, 3]);
    // It needs 8 pages, and 3 are free.
    run_once(&mut harness, "d", 128);
    assert_eq!(cached(&harness, &["a", "b", "c"]), [0, 5, 3], "the newer session is kept");
}

#[test]
fn the_wait_ends_with_the_next_request_or_with_the_session() {
    let mut harness = Harness::new(64, 1, 64);
    call_tool(&mut harness, "a");
    call_tool(&mut harness, "b");
    assert_eq!(expected(&harness), 2);
    harness.submit(of("agent", "a", &"a".repeat(100), 1));
    assert_eq!(expected(&harness), 1);
    harness.scheduler.forget_continuations(|owner| owner.session.as_deref() == Some("b"));
    assert_eq!(expected(&harness), 0);
    let mut request = greedy(&"z".repeat(80), 4);
    request.constraint = Some(calls("x"));
    end_after_first_token(&mut harness, request, FinishReason::Eos);
    harness.submit(greedy("another text", 1));
    assert_eq!(expected(&harness), 1);
    harness.submit(greedy(&format!("{}xy", "z".repeat(80)), 1));
    assert_eq!(expected(&harness), 0, "without a session, the beginning of the prompt counts");
    harness.run();
}

/// Returns a harness of 16 pages, all of which are cached: 5 of "h", and 11 that were used later.
fn full_harness(agent: &str) -> Harness {
    let mut harness = Harness::new(16, 1, 64);
    for (letter, tokens) in [("h", 80), ("c", 176)] {
        harness.submit(of(agent, letter, &letter.repeat(tokens), 1));
        harness.run();
    }
    assert_eq!(cached(&harness, &["h", "c"]), [5, 11]);
    harness
}

fn hot_prompt(number: usize) -> String {
    format!("{}{}", "h".repeat(80), number.to_string().repeat(16))
}

#[test]
fn a_cached_session_overtakes_others_of_its_agent_while_pages_are_scarce() {
    for (pages, hot_is_first) in [(16, true), (200, false)] {
        let mut harness = Harness::new(pages, 1, 64);
        run_once(&mut harness, "h", 80);
        run_once(&mut harness, "c", 176);
        let cold = harness.submit(of("agent", "cold", &"k".repeat(96), 1));
        let hot = harness.submit(of("agent", "hot", &hot_prompt(1), 1));
        let order = if hot_is_first { [hot, cold] } else { [cold, hot] };
        assert_eq!(harness.run()[2..], order, "{pages} pages");
        assert_eq!((harness.cached_tokens(hot), harness.cached_tokens(cold)), (80, 0));
    }
}

#[test]
fn a_session_is_overtaken_a_bounded_number_of_times() {
    let mut harness = full_harness("agent");
    let cold = harness.submit(of("agent", "cold", &"k".repeat(96), 1));
    for number in 0..20 {
        harness.submit(of("agent", &number.to_string(), &hot_prompt(number), 1));
    }
    let order = harness.run()[2..].to_vec();
    assert_eq!(order.len(), 21);
    assert_eq!(order.iter().position(|id| *id == cold), Some(MAX_OVERTAKEN as usize), "{order:?}");
}

#[test]
fn cached_prompts_change_no_order_between_agents_and_tenants() {
    let mut harness = full_harness("first");
    let cold = harness.submit(of("cold", "s", &"k".repeat(96), 1));
    let hot = harness.submit(of("hot", "s", &hot_prompt(1), 1));
    assert_eq!(harness.run()[2..], [cold, hot]);

    let mut harness = full_harness("agent");
    let mut of_other_tenant = of("agent", "s", &"k".repeat(96), 1);
    of_other_tenant.affinity.tenant = "other".to_string();
    let cold = harness.submit(of_other_tenant);
    let hot = harness.submit(of("agent", "s", &hot_prompt(1), 1));
    assert_eq!(harness.run()[2..], [cold, hot]);
}
