//! Tests that the events of an answer join to the whole outcome, however the answer is cut into chunks, and
//! whatever else runs. Each case is identified by its seed, which a failure prints.

use std::collections::HashSet;

use futures::future::join_all;
use serde_json::{Map, Value, json};
use skep_model::{ChatTemplate, Sampling};

use super::answer::{ChatEvent, ChatFinish, ChatOutcome};
use super::message::{ChatMessage, ToolCall, ToolChoice, ToolSpec};
use super::options::ChatOptions;
use super::parsed::ParsedEvent;
use super::stream::{ChatStream, chat};
use super::tool_parser::tests::joined;
use super::{fixture, markup};
use crate::tests::draws::Draws;

const STREAMS: u64 = 600;
const ANSWERS: u64 = 60;

/// Returns a mix of text, calls in the spellings that models use, invalid calls, and beginnings of markup.
fn stream(draws: &mut Draws) -> String {
    let texts = [
        "Let me see. ",
        "a < b",
        "<tool_cal",
        "</tool_call>",
        "🐝é ",
        "\n",
        " \t",
        "{\"name\": \"f\"}",
        "<<",
        "\\",
    ];
    let broken = [
        "<tool_call>no json</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [}</tool_call>",
        "<tool_call>{\"name\": \"\\ud83d\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}} and more</tool_call>",
        "<tool_call><tool_call>",
    ];
    let parts = (0..draws.below(7)).map(|_| match draws.below(4) {
        0 | 1 => (*draws.pick(&texts)).to_string(),
        2 => spelled_call(draws),
        _ => (*draws.pick(&broken)).to_string(),
    });
    let mut text: String = parts.collect();
    if draws.one_in(3) {
        let characters = text.chars().count();
        text = text.chars().take(draws.below(characters + 1)).collect();
    }
    text
}

fn spelled_call(draws: &mut Draws) -> String {
    let space = *draws.pick(&["", " ", "\n", "\n  "]);
    let arguments = escaped(&arguments(draws, 0).to_string(), draws);
    let (name, quoted) = (*draws.pick(&["f", "get_weather", "a.b"]), Value::from(arguments.as_str()));
    let body = match draws.below(5) {
        0 => format!("{{\"arguments\":{space}{arguments}, \"name\": \"{name}\"}}"),
        1 => format!("{{\"name\": \"{name}\",{space}\"parameters\": {arguments}}}"),
        2 => format!("{{\"name\": \"{name}\", \"arguments\": {quoted}}}"),
        _ => format!("{{\"name\":{space}\"{name}\", \"arguments\": {arguments}{space}}}"),
    };
    format!("<tool_call>{space}{body}{space}</tool_call>")
}

fn arguments(draws: &mut Draws, depth: usize) -> Value {
    let texts = ["}", "{\"", "</tool_call>", "<tool_call>", "\\", "\"", "é🐝", "a\nb", "]]}}", ""];
    let members = (0..draws.below(4)).map(|index| {
        let value = match draws.below(if depth > 2 { 3 } else { 5 }) {
            0 | 1 => json!(draws.pick(&texts)),
            2 => json!(draws.below(1000)),
            3 => json!([arguments(draws, depth + 1), draws.pick(&texts)]),
            _ => arguments(draws, depth + 1),
        };
        (format!("{}{index}", draws.pick(&texts)), value)
    });
    members.collect::<Map<_, _>>().into()
}

/// Escapes some characters beyond ASCII, with surrogate pairs.
fn escaped(json: &str, draws: &mut Draws) -> String {
    let mut out = String::new();
    for c in json.chars() {
        match c.is_ascii() || draws.one_in(2) {
            true => out.push(c),
            false => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04x}")),
        }
    }
    out
}

#[test]
fn random_streams_parse_the_same_in_any_chunks() {
    for seed in 0..STREAMS {
        let mut draws = Draws::new(seed);
        let (text, cut) = (stream(&mut draws), draws.one_in(2));
        let whole = joined(&[&text], cut);
        for _ in 0..6 {
            let pieces = draws.pieces(&text);
            assert_eq!(joined(&pieces, cut), whole, "seed {seed}, cut {cut}: {pieces:?}");
        }
        for event in &whole {
            if let ParsedEvent::CallFinished { call, .. } = event {
                let value: Value = serde_json::from_str(&call.arguments)
                    .unwrap_or_else(|_| json!(format!("the grammar would not accept {}", call.arguments)));
                assert!(value.is_object() || text.contains("[}"), "seed {seed}: {call:?} of {text:?}");
            }
        }
    }
}

#[test]
fn well_formed_calls_are_found_with_their_arguments() {
    for seed in 0..STREAMS {
        let mut draws = Draws::new(seed);
        let wanted: Vec<Value> = (0..1 + draws.below(4)).map(|_| arguments(&mut draws, 0)).collect();
        let calls: Vec<ToolCall> = wanted
            .iter()
            .map(|value| {
                let arguments = escaped(&value.to_string(), &mut draws);
                ToolCall { id: String::new(), name: "f".into(), arguments }
            })
            .collect();
        let text = markup::assistant("Here:", &calls);
        let pieces = draws.pieces(&text);
        let found: Vec<Value> = joined(&pieces, false)
            .into_iter()
            .filter_map(|event| match event {
                ParsedEvent::CallFinished { call, .. } => {
                    Some(serde_json::from_str(&call.arguments).unwrap())
                }
                _ => None,
            })
            .collect();
        assert_eq!(found, wanted, "seed {seed}: {pieces:?}");
    }
}

/// The joined events of a stream: the text, and the id, name and arguments of each call that was started.
struct Joined {
    text: String,
    calls: Vec<ToolCall>,
    finished: Vec<ToolCall>,
    outcome: ChatOutcome,
}

async fn collect_stream(mut stream: ChatStream) -> Joined {
    let (mut text, mut calls, mut finished) = (String::new(), Vec::<ToolCall>::new(), Vec::new());
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            ChatEvent::Routed(_) | ChatEvent::Reasoning { .. } => panic!("a local model sends neither"),
            ChatEvent::Started { .. } => {}
            ChatEvent::Text { delta, .. } => text += &delta,
            ChatEvent::ToolCallStarted { index, id, name } => {
                assert_eq!(index, calls.len());
                calls.push(ToolCall { id, name, arguments: String::new() });
            }
            ChatEvent::ToolCallArguments { index, delta } => calls[index].arguments += &delta,
            ChatEvent::ToolCallFinished { index, call } => {
                assert_eq!(calls[index], call);
                finished.push(call);
            }
            ChatEvent::Finished(outcome) => {
                assert!(stream.next().await.is_none());
                return Joined { text, calls, finished, outcome };
            }
        }
    }
    panic!("the stream ended without an outcome");
}

fn tool(name: &str, parameters: Value) -> ToolSpec {
    ToolSpec { name: name.into(), description: String::new(), parameters }
}

#[tokio::test]
async fn random_answers_stream_the_same_as_their_outcome() {
    let scripts: Vec<String> = (0..ANSWERS).map(|seed| stream(&mut Draws::new(seed))).collect();
    let scripts: Vec<&str> = scripts.iter().map(String::as_str).collect();
    let engine = fixture::engine(ChatTemplate::chatml_default(), &scripts);
    let mut ids = HashSet::new();
    for seed in 0..ANSWERS {
        let mut draws = Draws::new(seed ^ 0xA5);
        let stops = [vec![], vec!["a <".to_string(), "🐝".into()], vec!["call".into()]];
        let options = ChatOptions {
            tools: vec![tool("f", json!({"additionalProperties": true})), tool("get_weather", json!({}))],
            tool_choice: draws.pick(&[ToolChoice::Auto, ToolChoice::Auto, ToolChoice::Required]).clone(),
            parallel_tool_calls: draws.one_in(2),
            max_tokens: Some(*draws.pick(&[9, 40, 300])),
            stop: draws.pick(&stops).clone(),
            ..ChatOptions::default()
        };
        let joined =
            collect_stream(chat(&engine, &[ChatMessage::user(format!("{seed}"))], options).unwrap()).await;
        let outcome = &joined.outcome;
        let shown = format!("seed {seed}: {:?} {:?}", outcome.finish, outcome.raw);
        assert_eq!((&joined.text, &joined.finished), (&outcome.text, &outcome.tool_calls), "{shown}");
        let begun = joined.calls.len() - joined.finished.len();
        assert!(begun == 0 || (begun == 1 && outcome.cut_off), "{shown}");
        assert!(!outcome.cut_off || outcome.finish == ChatFinish::Length, "{shown}");
        assert_eq!(
            outcome.finish == ChatFinish::ToolCalls,
            !outcome.tool_calls.is_empty() && outcome.finish != ChatFinish::Length,
            "{shown}"
        );
        assert!(joined.calls.iter().all(|call| ids.insert(call.id.clone())), "{shown}");
    }
}

#[tokio::test]
async fn calls_of_concurrent_requests_never_mix() {
    let engine = crate::tests::fixture::engine_with_short_prompts();
    let requests = (0..32).map(|n| {
        let parameters = json!({"type": "object", "additionalProperties": false, "required": ["owner", "note"],
            "properties": {"owner": {"const": format!("request {n}")}, "note": {"type": "string", "maxLength": 5}}});
        let options = ChatOptions {
            tools: vec![tool(&format!("tool_{n}"), parameters)],
            tool_choice: ToolChoice::Required,
            parallel_tool_calls: n % 2 == 0,
            sampling: Sampling { temperature: 1.5, ..Sampling::default() },
            seed: Some(n),
            max_tokens: Some(300),
            ..ChatOptions::default()
        };
        collect_stream(chat(&engine, &[ChatMessage::user(format!("{n}"))], options).unwrap())
    });
    let mut ids = HashSet::new();
    for (n, joined) in join_all(requests).await.into_iter().enumerate() {
        assert!(!joined.finished.is_empty() && joined.text.is_empty(), "{n}: {}", joined.outcome.raw);
        assert_eq!(joined.finished, joined.outcome.tool_calls);
        for call in &joined.calls {
            assert!(ids.insert(call.id.clone()));
            assert_eq!(call.name, format!("tool_{n}"));
            let dense = |text: &str| text.split_whitespace().collect::<String>();
            let (owner, arguments) = (dense(&format!("{{\"owner\":\"request {n}\"")), dense(&call.arguments));
            assert!(arguments.starts_with(&owner) || owner.starts_with(&arguments), "{n}: {call:?}");
        }
    }
}
