//! The answer does not depend on where the network split its bytes.

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::{chunk, said};
use crate::{
    UpstreamKind::{self, Anthropic, OpenAi, WorkersAi},
    assembly::{AssembledAnswer, Assembly},
    delta::Delta,
    fuzz,
    sse::EventReader,
    wire,
};

fn read(kind: UpstreamKind, parts: &[&[u8]]) -> (Vec<Delta>, AssembledAnswer) {
    let mut reader = EventReader::new(10_000);
    let mut decoder = wire::decoder(kind, Some(100));
    let mut deltas = Vec::new();
    for part in parts {
        reader.push(part).expect("valid");
        while let Some(data) = reader.next() {
            deltas.extend(decoder.event(&data).expect("readable"));
        }
    }
    assert!(!reader.finish());
    let mut assembly = Assembly::default();
    deltas.iter().for_each(|delta| assembly.add(delta).expect("in bounds"));
    assert!(assembly.is_whole());
    (deltas, assembly.answer(&[], 0))
}

fn events(events: &[Value]) -> String {
    events.iter().map(|event| format!("event: x\r\ndata: {event}\r\n\r\n")).collect()
}

fn openai() -> String {
    let call = |index: u64, id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        chunk(json!({"tool_calls": [{"index": index, "id": id, "function": function}]}), Value::Null)
    };
    let chunks = [
        chunk(json!({"reasoning_content": "Grübel…"}), Value::Null),
        said("Größe: "),
        said("🐝"),
        call(0, "call_a", "", ""),
        call(0, "", "lo", ""),
        call(0, "", "ok", "{\"o"),
        call(1, "call_b", "look", "{}"),
        call(0, "", "", "\": \"ü\"}"),
        chunk(json!({}), json!("tool_calls")),
        json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}),
    ];
    format!(": hello\n\n{}data: [DONE]\n\n", events(&chunks))
}

fn anthropic() -> String {
    let delta =
        |index: u64, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    events(&[
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}),
        delta(0, json!({"type": "thinking_delta", "thinking": "Grübel…"})),
        delta(1, json!({"type": "text_delta", "text": "Größe: 🐝"})),
        json!({"type": "content_block_start", "index": 2,
            "content_block": {"type": "tool_use", "id": "call_a", "name": "look", "input": {}}}),
        delta(2, json!({"type": "input_json_delta", "partial_json": "{\"o"})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "\": \"ü\"}"})),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 6}}),
        json!({"type": "message_stop"}),
    ])
}

fn workers_ai() -> String {
    let chunks = [
        json!({"response": "Größe: ", "p": "abc"}),
        json!({"response": "🐝"}),
        json!({"response": "", "tool_calls": [{"id": "call_a", "name": "look", "arguments": {"o": "ü"}}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 6}}),
    ];
    format!("{}data: [DONE]\n\n", events(&chunks))
}

#[test]
fn every_split_gives_the_same_answer() {
    for (kind, text) in [(OpenAi, openai()), (Anthropic, anthropic()), (WorkersAi, workers_ai())] {
        let bytes = text.as_bytes();
        let (deltas, answer) = read(kind, &[bytes]);
        assert_eq!(answer.text, "Größe: 🐝", "{kind:?}");
        assert_eq!(answer.calls[0].id, "call_a");
        assert_eq!(answer.calls[0].name, "look");
        let arguments: Value = serde_json::from_str(&answer.calls[0].arguments).expect("JSON");
        assert_eq!(arguments, json!({"o": "ü"}));
        assert_eq!((answer.usage.prompt_tokens, answer.usage.completion_tokens), (5, 6));
        for at in 0..bytes.len() {
            let split = read(kind, &[&bytes[..at], &bytes[at..]]);
            assert_eq!((&split.0, &split.1), (&deltas, &answer), "{kind:?} split at {at}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(read(kind, &single), (deltas, answer), "{kind:?} byte by byte");
    }
}

#[test]
fn mutated_streams_neither_panic_nor_depend_on_their_splits() {
    let mut random = StdRng::seed_from_u64(7);
    for (kind, text) in [(OpenAi, openai()), (Anthropic, anthropic()), (WorkersAi, workers_ai())] {
        for _ in 0..2000 {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..random.random_range(1..6) {
                let at = random.random_range(0..bytes.len());
                let to = random.random_range(at..bytes.len().min(at + 40));
                match random.random_range(0..4) {
                    0 => bytes[at] = random.random(),
                    1 => drop(bytes.drain(at..to)),
                    2 => bytes.splice(at..at, text.as_bytes()[..to - at].to_vec()).for_each(drop),
                    _ => bytes.truncate(at.max(1)),
                }
                if bytes.is_empty() {
                    bytes.push(b'd');
                }
            }
            fuzz::read_answer(kind, &bytes, random.random_range(1..50));
            fuzz::read_document(kind, &String::from_utf8_lossy(&bytes), random.random_range(200..600));
        }
    }
}
