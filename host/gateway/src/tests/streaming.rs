//! Checks that streamed responses equal whole responses, for random requests. Each case is a seed, which a failure
//! prints.

use super::fixture::{Server, TestResponse};
use serde_json::{Map, Value, json};

const CASES: u64 = 48;

/// A reproducible random generator (SplitMix64).
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ (bits >> 31)) % end
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn pick(&mut self, from: Value) -> Value {
        from[self.below(from.as_array().map_or(1, |list| list.len() as u64)) as usize].clone()
    }
}

/// Returns the parameters that chat and text completions share.
fn request(draws: &mut Draws, seed: u64) -> Map<String, Value> {
    let mut body = Map::new();
    let mut set = |key: &str, value: Value| _ = body.insert(key.into(), value);
    set("seed", json!(seed));
    set("temperature", draws.pick(json!([0, 0.7, 1, 2])));
    set("max_tokens", draws.pick(json!([1, 7, 30, 90])));
    set("n", json!(1 + draws.below(3)));
    set("ignore_eos", json!(draws.one_in(2)));
    if draws.one_in(2) {
        set("stop", draws.pick(json!(["e", ["th", "a", "\u{fffd}"], ["}"], ["tool", "\""]])));
    }
    match draws.below(5) {
        0 => set(
            "guided_json",
            json!({"type": "array", "items": {"enum": ["é", "🐝", 1, {"a": null}]}, "maxItems": 4}),
        ),
        1 => set("guided_regex", json!("[a-e🐝é]{3,20}")),
        _ => {}
    }
    body
}

fn chat(draws: &mut Draws, seed: u64) -> Value {
    let mut body = request(draws, seed);
    body.insert("messages".into(), json!([{"role": "user", "content": "hello, is it you? and the user"}]));
    if draws.one_in(2) {
        body.insert("logprobs".into(), json!(true));
        body.insert("top_logprobs".into(), json!(draws.below(3)));
    }
    if draws.one_in(2) {
        let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Ös\"lo"]}, "note": {"type": "string", "maxLength": 4}},
                                "required": ["city"], "additionalProperties": false});
        body.insert(
            "tools".into(),
            json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]),
        );
        body.insert("tool_choice".into(), draws.pick(json!(["auto", "required", "required"])));
        body.insert("parallel_tool_calls".into(), json!(draws.one_in(2)));
        body.insert("max_tokens".into(), draws.pick(json!([20, 60, 300])));
    }
    body.into()
}

fn completion(draws: &mut Draws, seed: u64) -> Value {
    let mut body = request(draws, seed);
    body.insert("prompt".into(), draws.pick(json!(["once", ["the tool", "é"], [5, 6, 7]])));
    body.insert("echo".into(), json!(draws.one_in(3)));
    if draws.one_in(2) {
        body.insert("logprobs".into(), json!(draws.below(3)));
    }
    body.into()
}

/// Returns the choices of a whole response, without ids, which are random.
fn whole(answer: &TestResponse) -> Vec<Value> {
    let mut answer = answer.json();
    let choices = answer["choices"].as_array_mut().unwrap();
    let calls = choices
        .iter_mut()
        .filter_map(|choice| choice.pointer_mut("/message/tool_calls"))
        .flat_map(|calls| calls.as_array_mut().into_iter().flatten());
    for call in calls {
        call.as_object_mut().unwrap().remove("id").unwrap();
    }
    std::mem::take(choices)
}

/// Joins the chunks of a stream to choices.
fn joined(chunks: &[Value], is_chat: bool, count: usize, wants_logprobs: bool) -> Vec<Value> {
    let mut choices: Vec<Value> = (0..count).map(|index| blank(index, is_chat, wants_logprobs)).collect();
    for piece in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let choice = &mut choices[piece["index"].as_u64().unwrap() as usize];
        assert!(choice["finish_reason"].is_null(), "a chunk follows the end: {piece}");
        choice["finish_reason"] = piece["finish_reason"].clone();
        let (said, text) = match is_chat {
            true => (&piece["delta"]["content"], &mut choice["message"]["content"]),
            false => (&piece["text"], &mut choice["text"]),
        };
        *text = json!(text.as_str().unwrap().to_owned() + said.as_str().unwrap_or_default());
        for call in piece["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let calls = choice["message"]["tool_calls"].as_array_mut().unwrap();
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert!(call["id"].is_string());
                calls.push(json!({"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}}));
            }
            let arguments = &mut calls[index]["function"]["arguments"];
            *arguments = json!(
                arguments.as_str().unwrap().to_owned() + call["function"]["arguments"].as_str().unwrap()
            );
        }
        for (key, more) in piece["logprobs"].as_object().into_iter().flatten() {
            choice["logprobs"][key].as_array_mut().unwrap().extend(more.as_array().unwrap().clone());
        }
    }
    choices
}

fn blank(index: usize, is_chat: bool, wants_logprobs: bool) -> Value {
    let logprobs = match (wants_logprobs, is_chat) {
        (false, _) => Value::Null,
        (true, true) => json!({"content": []}),
        (true, false) => json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}),
    };
    match is_chat {
        true => json!({"index": index, "message": {"role": "assistant", "content": "", "tool_calls": []},
                       "finish_reason": null, "logprobs": logprobs}),
        false => json!({"index": index, "text": "", "logprobs": logprobs, "finish_reason": null}),
    }
}

/// Removes the differences that are expected: a stream contains the start of a call that was cut off, and a whole
/// response does not; without calls there is no list of calls.
fn settled(mut choices: Vec<Value>) -> Vec<Value> {
    for message in choices.iter_mut().filter_map(|choice| choice.get_mut("message")) {
        let calls = message["tool_calls"].as_array_mut().unwrap();
        calls.retain(|call| {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            serde_json::from_str::<Value>(arguments).is_ok()
        });
        if calls.is_empty() {
            message.as_object_mut().unwrap().remove("tool_calls");
        } else if message["content"] == "" {
            message["content"] = Value::Null;
        }
    }
    choices
}

#[tokio::test]
async fn streamed_and_whole_responses_are_equal() {
    let server = Server::start().await;
    let (mut calls, mut cut) = (0, 0);
    for seed in 0..CASES {
        let mut draws = Draws(seed);
        let is_chat = !draws.one_in(3);
        let path = if is_chat { "/v1/chat/completions" } else { "/v1/completions" };
        let mut body = if is_chat { chat(&mut draws, seed) } else { completion(&mut draws, seed) };
        let answered = whole(&server.ok(path, &body).await);
        body["stream"] = json!(true);
        let chunks = server.ok(path, &body).await.chunks();
        let wants_logprobs = body["logprobs"].is_u64() || body["logprobs"] == true;
        let streamed = settled(joined(&chunks, is_chat, answered.len(), wants_logprobs));
        assert_eq!(streamed, answered, "seed {seed}: {path} {body}");
        calls += answered.iter().filter(|choice| choice["finish_reason"] == "tool_calls").count();
        cut += answered.iter().filter(|choice| choice["finish_reason"] == "length").count();
    }
    assert!(
        calls > 0 && cut > 0,
        "{calls} calls and {cut} cut-off responses are too few for a meaningful test"
    );
}
