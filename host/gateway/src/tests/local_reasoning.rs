//! Tests of a local model that reasons, through the routes of every API: the reasoning is separate from the answer, whole and in
//! streams, its budget and its switch are obeyed, and fields that change nothing are named.

use super::fixture::{Server, TestResponse};
use serde_json::{Value, json};
use skep_engine::{Engine, EngineOptions, LocalModel, SpecialTokens};
use skep_model::{ChatTemplate, LoadedModel};

#[path = "../../../../tests/fixtures/scripted_model.rs"]
mod scripted_model;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A template that opens no reasoning, closes it if a request turns it off, and shows what it got.
const TEMPLATE: &str = "{% if note is defined %}<|im_start|>note\n{{ note }}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if tools %}<tool_call>{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
const THINKS: &str = "<think>\nRome is far.\n</think>\n\nYes, it is.";
const CALLS: &str = "<think>\nI look.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

/// Starts a server with the model `thinker`, whose answers are `scripts`.
async fn server(scripts: &[&str]) -> Server {
    let tokenizer = scripted_model::tokenizer(&["<think>", "</think>"]);
    let template = ChatTemplate::new(TEMPLATE, None, None).unwrap();
    let model = scripted_model::model(tokenizer, SpecialTokens::Parse, template, scripts);
    let model = LoadedModel { name: "thinker".into(), ..model };
    let engine = Engine::start(model, EngineOptions::default()).unwrap();
    Server::with_models(vec![LocalModel::new("thinker", "cpu", move |_| Ok(engine.clone()))]).await
}

fn chat(more: Value) -> Value {
    let body = json!({"model": "thinker", "messages": [{"role": "user", "content": "Is Rome far?"}], "max_tokens": 200});
    with(body, more)
}

fn response(more: Value) -> Value {
    with(json!({"model": "thinker", "input": "Is Rome far?", "max_output_tokens": 200}), more)
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn data(answer: &TestResponse) -> Vec<Value> {
    let lines = answer.text.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|line| *line != "[DONE]").map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ignored(answer: &TestResponse) -> &str {
    answer.headers.get("x-skep-ignored").map(|value| value.to_str().unwrap()).unwrap_or_default()
}

fn joined<'a>(values: impl Iterator<Item = &'a Value>) -> String {
    values.filter_map(Value::as_str).collect()
}

#[tokio::test]
async fn chats_have_the_reasoning_in_both_fields() {
    let server = server(&[THINKS, THINKS]).await;
    let whole = server.ok(CHAT, &chat(json!({}))).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], "Yes, it is.");
    for field in ["reasoning_content", "reasoning"] {
        assert_eq!(message[field], "Rome is far.", "{field}");
    }
    assert!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0, "{whole}");
    let streamed = server.ok(CHAT, &chat(json!({"stream": true, "seed": 1}))).await;
    let deltas: Vec<Value> =
        data(&streamed).iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    for (field, expected) in
        [("reasoning_content", "Rome is far."), ("reasoning", "Rome is far."), ("content", "Yes, it is.")]
    {
        assert_eq!(joined(deltas.iter().map(|delta| &delta[field])), expected, "{field}");
    }
    // A message that comes back as it was sent is taken.
    let messages =
        json!([{"role": "user", "content": "Is Rome far?"}, message, {"role": "user", "content": "Really?"}]);
    let _ =
        server.post("/tokenize", &json!({"model": "thinker", "messages": messages})).await.json()["count"]
            .as_u64()
            .expect("both fields are read");
}

#[tokio::test]
async fn responses_have_an_item_of_reasoning() {
    let server = server(&[THINKS, THINKS]).await;
    let whole = server.ok(RESPONSES, &response(json!({}))).await.json();
    let kinds: Vec<&str> =
        whole["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message"]);
    assert_eq!(whole["output"][0]["content"], json!([{"type": "reasoning_text", "text": "Rome is far."}]));
    assert_eq!(whole["output"][1]["content"][0]["text"], "Yes, it is.");
    let streamed = data(&server.ok(RESPONSES, &response(json!({"stream": true}))).await);
    let of = |kind: &str| {
        joined(streamed.iter().filter(|event| event["type"] == kind).map(|event| &event["delta"]))
    };
    assert_eq!(of("response.reasoning_text.delta"), "Rome is far.");
    assert_eq!(of("response.output_text.delta"), "Yes, it is.");
    let output = &streamed.last().unwrap()["response"]["output"];
    for (index, field) in [(0, "content"), (1, "content")] {
        assert_eq!(output[index][field], whole["output"][index][field]);
    }
}

#[tokio::test]
async fn a_client_that_stores_nothing_carries_the_reasoning_itself() {
    let server = server(&[THINKS, THINKS]).await;
    let carries = json!({"store": false, "include": ["reasoning.encrypted_content"]});
    let whole = server.ok(RESPONSES, &response(carries.clone())).await.json();
    let carried = &whole["output"][0]["encrypted_content"];
    assert!(carried.as_str().is_some_and(|text| !text.contains("Rome")), "{whole}");
    let streamed = data(&server.ok(RESPONSES, &response(with(json!({"stream": true}), carries))).await);
    let items: Vec<&Value> = streamed.iter().filter(|event| event["item"]["type"] == "reasoning").collect();
    assert_eq!(items[0]["item"].get("encrypted_content"), None, "it has not ended");
    assert_eq!(&items[1]["item"]["encrypted_content"], carried);
    assert_eq!(&streamed.last().unwrap()["response"]["output"][0]["encrypted_content"], carried);

    // The prompt of the next request has the reasoning, though its text is gone. A template that shows reasoning is needed
    // to see that, so the stored items are read.
    let stripped = json!({"type": "reasoning", "summary": [], "encrypted_content": carried});
    let foreign = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAA"});
    let server = self::server(&[THINKS]).await;
    let input = json!([{"role": "user", "content": "Is Rome far?"}, stripped, whole["output"][1], foreign,
                       {"role": "user", "content": "Really?"}]);
    let next = server.ok(RESPONSES, &response(json!({"input": input}))).await.json();
    assert_eq!(next["output"][0].get("encrypted_content"), None, "nobody asked for it");
    let items = server
        .get(&format!("{RESPONSES}/{}/input_items?order=asc", next["id"].as_str().unwrap()))
        .await
        .json();
    let texts: Vec<&Value> = items["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|item| item["type"] == "reasoning")
        .map(|item| &item["content"][0]["text"])
        .collect();
    assert_eq!(texts, ["Rome is far.", "s"]);
}

#[tokio::test]
async fn messages_have_a_block_of_thinking() {
    let server = server(&[THINKS, THINKS]).await;
    let body = |more: Value| {
        let body = json!({"model": "thinker", "max_tokens": 200, "messages": [{"role": "user", "content": "Is Rome far?"}],
                          "thinking": {"type": "enabled", "budget_tokens": 1024}});
        with(body, more)
    };
    let whole = server.ok(MESSAGES, &body(json!({}))).await;
    assert_eq!(ignored(&whole), "");
    let content = &whole.json()["content"];
    assert_eq!((&content[0]["type"], &content[0]["thinking"]), (&json!("thinking"), &json!("Rome is far.")));
    assert_eq!((&content[1]["type"], &content[1]["text"]), (&json!("text"), &json!("Yes, it is.")));
    let streamed = data(&server.ok(MESSAGES, &body(json!({"stream": true}))).await);
    let deltas = |field: &str| joined(streamed.iter().map(|event| &event["delta"][field]));
    assert_eq!((deltas("thinking").as_str(), deltas("text").as_str()), ("Rome is far.", "Yes, it is."));
}

#[tokio::test]
async fn a_budget_and_a_switch_end_the_reasoning() {
    let long = format!("<think>{}</think>\n\nYes.", "a, b; ".repeat(40));
    let server = server(&[&long, "Yes.", &long, "Yes."]).await;
    let budget = chat(json!({"thinking": {"type": "enabled", "budget_tokens": 1}}));
    let answer = server.ok(CHAT, &budget).await.json();
    assert_eq!(answer["choices"][0]["message"]["reasoning"], "a", "{answer}");
    let off = server.ok(CHAT, &chat(json!({"reasoning_effort": "none"}))).await;
    let message = &off.json()["choices"][0]["message"];
    assert_eq!((&message["content"], message.get("reasoning")), (&json!("Yes."), None));
    assert_eq!(ignored(&off), "");
    let budget = response(json!({"reasoning": {"max_tokens": 1}}));
    let answer = server.ok(RESPONSES, &budget).await.json();
    assert_eq!(answer["output"][0]["content"][0]["text"], "a", "{answer}");
    let off = server.ok(RESPONSES, &response(json!({"reasoning": {"effort": "none"}}))).await.json();
    assert_eq!((&off["output"][0]["type"], off["output"].as_array().unwrap().len()), (&json!("message"), 1));
}

#[tokio::test]
async fn the_last_message_is_continued_where_it_ends() {
    let server = server(&["it is.", " far.\n</think>\n\nYes.", "it is."]).await;
    let continued = |last: Value, more: Value| {
        let messages = json!([{"role": "user", "content": "Is Rome far?"}, last]);
        let body =
            json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
        chat(with(body, more))
    };
    let opened = "<|im_start|>user\nIs Rome far?<|im_end|>\n<|im_start|>assistant\n";
    for (last, more, begun, reasoning, content) in [
        (
            json!({"role": "assistant", "content": "Yes, ", "reasoning_content": "Rome is far."}),
            json!({"thinking": {"type": "enabled", "budget_tokens": 1}}),
            Some("<think>\nRome is far.\n</think>\n\nYes, "),
            None,
            "it is.",
        ),
        (
            json!({"role": "assistant", "content": "", "reasoning_content": "Rome is"}),
            json!({}),
            Some("<think>\nRome is"),
            Some(" far."),
            "Yes.",
        ),
        // A tag that the caller writes into the answer is text.
        (json!({"role": "assistant", "content": "<think> "}), json!({}), None, None, "it is."),
    ] {
        let answer = server.ok(CHAT, &continued(last, more)).await.json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], content, "{answer}");
        assert_eq!(message.get("reasoning").and_then(Value::as_str), reasoning, "{answer}");
        let Some(begun) = begun else { continue };
        let prompt =
            json!({"model": "thinker", "prompt": format!("{opened}{begun}"), "add_special_tokens": false});
        let count = &server.ok("/tokenize", &prompt).await.json()["count"];
        assert_eq!(&answer["usage"]["prompt_tokens"], count, "{begun}");
    }
    let user = json!({"role": "user", "content": "Yes, "});
    let assistant = json!({"role": "assistant", "content": "Yes, "});
    for (last, more, parameter) in [
        (user, json!({}), "continue_final_message"),
        (assistant.clone(), json!({"response_format": {"type": "json_object"}}), "continue_final_message"),
        (assistant, json!({"add_generation_prompt": true}), "add_generation_prompt"),
    ] {
        let refused = server.post(CHAT, &continued(last, more)).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!(parameter)));
    }
}

#[tokio::test]
async fn calls_come_after_the_reasoning() {
    let server = server(&[CALLS, CALLS, CALLS]).await;
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                        "additionalProperties": false});
    let function = json!({"name": "weather", "parameters": schema});
    let more = json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"});
    let answer = server.ok(CHAT, &chat(more)).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["reasoning"]),
        (&json!("tool_calls"), &json!("I look."))
    );
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "weather");
    let tools = json!([{"type": "function", "name": "weather", "parameters": schema}]);
    let answer = server.ok(RESPONSES, &response(json!({"tools": tools}))).await.json();
    let kinds: Vec<&str> =
        answer["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "function_call"]);
    let tools = json!([{"name": "weather", "input_schema": schema}]);
    let body = json!({"model": "thinker", "max_tokens": 200, "tools": tools,
                      "messages": [{"role": "user", "content": "Is Rome far?"}]});
    let answer = server.ok(MESSAGES, &body).await.json();
    assert_eq!(
        (&answer["content"][0]["type"], &answer["content"][1]["type"]),
        (&json!("thinking"), &json!("tool_use"))
    );
    assert_eq!(answer["stop_reason"], "tool_use");
}

#[tokio::test]
async fn fields_of_reasoning_that_change_nothing_are_named() {
    let server = server(&[THINKS]).await;
    // The template of this model reads no effort, and a variable of the name `note`.
    let kwargs = json!({"enable_thinking": true, "note": "<|im_end|>", "depth": 3});
    let answer =
        server.ok(CHAT, &chat(json!({"reasoning_effort": "high", "chat_template_kwargs": kwargs}))).await;
    assert_eq!(ignored(&answer), "reasoning_effort, chat_template_kwargs.depth");
    let tiny = |more: Value| with(chat(json!({"model": "tiny", "max_tokens": 2})), more);
    for (more, named) in [
        (json!({"reasoning_effort": "low"}), "reasoning_effort"),
        (json!({"reasoning_effort": "none", "enable_thinking": false}), ""),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 9}}),
            "thinking.type, thinking.budget_tokens",
        ),
        (json!({"thinking": {"type": "disabled"}}), ""),
        (json!({"reasoning": {"effort": "low", "max_tokens": 0}}), "reasoning.effort"),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), "chat_template_kwargs.enable_thinking"),
    ] {
        assert_eq!(ignored(&server.ok(CHAT, &tiny(more.clone())).await), named, "{more}");
    }
    let body =
        json!({"model": "tiny", "max_output_tokens": 2, "input": "hi", "reasoning": {"effort": "high"}});
    assert_eq!(ignored(&server.ok(RESPONSES, &body).await), "reasoning.effort");
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}],
                      "output_config": {"effort": "high"}, "unheard_of": 1});
    for path in [MESSAGES, "/v1/messages/count_tokens"] {
        assert_eq!(ignored(&server.ok(path, &body).await), "unheard_of, output_config.effort", "{path}");
    }
}

#[tokio::test]
async fn variables_of_the_template_reach_it_as_text() {
    let server = server(&[]).await;
    let count = async |kwargs: Value| {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = json!({"model": "thinker", "messages": messages, "chat_template_kwargs": kwargs,
                          "return_token_strs": true});
        let answer = server.ok("/tokenize", &body).await.json();
        let tokens: Vec<String> = serde_json::from_value(answer["token_strs"].clone()).unwrap();
        tokens
    };
    let plain = count(json!({})).await.concat();
    let tokens = count(json!({"note": "a<|im_end|>"})).await;
    assert_eq!(tokens.concat(), format!("<|im_start|>note\na<|im_end|><|im_end|>\n{plain}"));
    let ends = tokens.iter().filter(|token| *token == "<|im_end|>").count();
    assert_eq!(ends, plain.matches("<|im_end|>").count() + 1, "the one of the variable is text");
    let answer = server
        .post(
            "/tokenize",
            &json!({"model": "thinker", "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"tools": []}}),
        )
        .await;
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["param"]),
        (400, &json!("chat_template_kwargs.tools"))
    );
}
