//! The body of one request in each wire format, field by field.

use serde_json::{Value, json};
use skep_engine::{
    Constraint, Sampling,
    chat::{
        ChatMessage, ChatOptions, Image, ImageDetail, ImageKind, ImageSource, Input, Reasoning, Role,
        SamplingOverrides, ToolCall, ToolChoice, ToolSpec,
    },
};

use crate::{
    ReasoningControl, StructuredOutput, UpstreamKind, UpstreamModelOptions, question::Question, wire,
};

fn written(
    kind: UpstreamKind,
    model: &UpstreamModelOptions,
    messages: &[ChatMessage],
    options: &ChatOptions,
) -> Value {
    let base = "https://a.example/v1".parse().expect("valid");
    wire::body(kind, &Question::new(kind, model, &messages.to_vec().into(), options).expect("valid"), &base)
}

fn conversation() -> Vec<ChatMessage> {
    let call = |id: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: "look".into(),
        arguments: arguments.into(),
    };
    let calls = vec![call("functions.look:0", "{\"at\": 1}"), call("c2", "")];
    vec![
        ChatMessage::system("Be brief."),
        ChatMessage::user("Look."),
        ChatMessage { tool_calls: calls, reasoning: Some("Hm.".into()), ..ChatMessage::assistant("") },
        ChatMessage::tool("functions.look:0", "a cat"),
        ChatMessage::tool("c2", "a dog"),
        ChatMessage::user("And?"),
    ]
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"at": {"type": "integer"}}})
}

fn asked() -> ChatOptions {
    let tool = ToolSpec { name: "look".into(), description: "Looks.".into(), parameters: parameters() };
    ChatOptions {
        tools: vec![tool],
        parallel_tool_calls: false,
        examples: vec![ChatMessage::user("Hi."), ChatMessage::assistant("Hi!")],
        sampling: Sampling { temperature: 0.7, top_p: 0.9, top_k: 40, ..Sampling::default() },
        seed: Some(7 + (5 << 53)),
        max_tokens: Some(100),
        stop: vec!["END".into()],
        ..ChatOptions::default()
    }
}

fn model() -> UpstreamModelOptions {
    UpstreamModelOptions {
        remote_name: Some("big-1".into()),
        max_output: Some(64),
        ..UpstreamModelOptions::new("big")
    }
}

#[test]
fn requests_have_the_format_of_openai() {
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}});
    let expected = json!({
        "model": "big-1",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": null,
                "tool_calls": [call("functions.look:0", "{\"at\": 1}"), call("c2", "{}")]},
            {"role": "tool", "content": "a cat", "tool_call_id": "functions.look:0"},
            {"role": "tool", "content": "a dog", "tool_call_id": "c2"},
            {"role": "user", "content": "And?"},
        ],
        "stream": true,
        "stream_options": {"include_usage": true},
        "tools": [{"type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": parameters()}}],
        "parallel_tool_calls": false,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ["END"],
        "max_tokens": 64,
    });
    assert_eq!(written(UpstreamKind::OpenAi, &model(), &conversation(), &asked()), expected);
    let plain = written(UpstreamKind::OpenAi, &model(), &[ChatMessage::user("x")], &ChatOptions::default());
    let expected = json!({
        "model": "big-1",
        "messages": [{"role": "user", "content": "x"}],
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    assert_eq!(plain, expected, "defaults are left out");
    let sampling_overrides = SamplingOverrides { temperature: Some(1.0), ..SamplingOverrides::default() };
    let usual = ChatOptions { sampling_overrides, ..ChatOptions::default() };
    for kind in [UpstreamKind::OpenAi, UpstreamKind::Anthropic, UpstreamKind::WorkersAi] {
        let body = written(kind, &model(), &[ChatMessage::user("x")], &usual);
        assert_eq!((&body["temperature"], body.get("top_p")), (&json!(1.0), None), "{kind:?}");
    }
}

#[test]
fn the_reasoning_that_a_request_asks_for_is_sent_as_its_server_takes_it() {
    let sent = |kind, reasoning_control, reasoning: Reasoning| {
        let model = UpstreamModelOptions { reasoning_control, max_output: None, ..model() };
        let options = ChatOptions { reasoning, max_tokens: Some(4000), ..ChatOptions::default() };
        let mut body = written(kind, &model, &[ChatMessage::user("x")], &options);
        let fields = ["reasoning_effort", "chat_template_kwargs", "thinking", "output_config"];
        fields.map(|field| body[field].take())
    };
    let none = || Value::Null;
    let effort =
        |word: &str| Reasoning { enabled: Some(true), effort: Some(word.into()), ..Reasoning::default() };
    let low = || effort("low");
    let kept = || {
        let variables = json!({"preserve_thinking": true}).as_object().cloned().unwrap();
        Reasoning { variables, ..low() }
    };
    let off = || Reasoning { enabled: Some(false), ..Reasoning::default() };
    let budget = |tokens| Reasoning { budget: Some(tokens), ..Reasoning::default() };
    let thinking = |tokens: usize| json!({"type": "enabled", "budget_tokens": tokens});
    use ReasoningControl::{Budget, Effort, None as Nothing, Template};
    use UpstreamKind::{Anthropic, OpenAi, WorkersAi};
    for (kind, control, reasoning, expected) in [
        (OpenAi, Effort, low(), [json!("low"), none(), none(), none()]),
        (OpenAi, Effort, effort("minimal"), [json!("minimal"), none(), none(), none()]),
        (OpenAi, Effort, effort("max"), [json!("xhigh"), none(), none(), none()]),
        (OpenAi, Effort, off(), [json!("none"), none(), none(), none()]),
        (OpenAi, Template, low(), [none(), json!({"enable_thinking": true}), none(), none()]),
        (OpenAi, Effort, kept(), [json!("low"), none(), none(), none()]),
        (
            OpenAi,
            Template,
            kept(),
            [none(), json!({"preserve_thinking": true, "enable_thinking": true}), none(), none()],
        ),
        (OpenAi, Template, off(), [none(), json!({"enable_thinking": false}), none(), none()]),
        (Anthropic, Effort, low(), [none(), none(), none(), json!({"effort": "low"})]),
        (Anthropic, Effort, effort("minimal"), [none(), none(), none(), json!({"effort": "low"})]),
        (Anthropic, Effort, effort("max"), [none(), none(), none(), json!({"effort": "max"})]),
        (Anthropic, Budget, low(), [none(), none(), thinking(2048), none()]),
        (Anthropic, Budget, effort("minimal"), [none(), none(), thinking(2048), none()]),
        (Anthropic, Budget, budget(500), [none(), none(), thinking(1024), none()]),
        (Anthropic, Budget, budget(9000), [none(), none(), thinking(3999), none()]),
        (Anthropic, Budget, off(), [none(), none(), json!({"type": "disabled"}), none()]),
        (Anthropic, Budget, Reasoning::default(), [none(), none(), none(), none()]),
        (Anthropic, Nothing, low(), [none(), none(), none(), none()]),
        (OpenAi, Nothing, low(), [none(), none(), none(), none()]),
        (WorkersAi, Nothing, low(), [none(), none(), none(), none()]),
    ] {
        assert_eq!(sent(kind, control, reasoning.clone()), expected, "{kind:?} {control:?} {reasoning:?}");
    }
    let model = UpstreamModelOptions { reasoning_control: Budget, max_output: None, ..model() };
    let after_calls = ChatOptions { reasoning: low(), max_tokens: Some(4000), ..asked() };
    let calls = conversation();
    let answered = calls.iter().position(|message| message.role == Role::Tool).expect("results") + 2;
    for (messages, is_thinking) in [(&calls[..2], true), (&calls[..answered], false)] {
        let body = written(Anthropic, &model, messages, &after_calls);
        assert_eq!(body.get("thinking").is_some(), is_thinking, "{body}");
    }
    let tool_choice = ToolChoice::Required;
    let forced = ChatOptions { reasoning: low(), tool_choice, ..asked() };
    let error = Question::new(Anthropic, &model, &Vec::new().into(), &forced).expect_err("both").to_string();
    assert!(error.contains("`reasoning`") && error.contains("cannot reason before an answer"), "{error}");
}

#[test]
fn openai_reasoning_choices_and_forms() {
    let mut thinking = model();
    thinking.capabilities.reasoning = true;
    let body = written(UpstreamKind::OpenAi, &thinking, &conversation(), &asked());
    assert_eq!(body["messages"][4]["reasoning_content"], "Hm.");
    for (choice, expected) in [
        (ToolChoice::Auto, Value::Null),
        (ToolChoice::None, json!("none")),
        (ToolChoice::Required, json!("required")),
        (ToolChoice::Named("look".into()), json!({"type": "function", "function": {"name": "look"}})),
    ] {
        let options = ChatOptions { tool_choice: choice, ..asked() };
        let body = written(UpstreamKind::OpenAi, &model(), &conversation(), &options);
        assert_eq!(body.get("tool_choice").cloned().unwrap_or_default(), expected);
    }
    let open = parameters();
    let closed = json!({"type": "object", "properties": {}, "additionalProperties": false});
    for (schema, strict) in [(open, false), (closed, true)] {
        let output = Some(Constraint::JsonSchema(schema.clone()));
        let options = ChatOptions { output, ..ChatOptions::default() };
        let body = written(UpstreamKind::OpenAi, &model(), &[], &options);
        let form = json!({"name": "answer", "strict": strict, "schema": schema});
        assert_eq!(body["response_format"], json!({"type": "json_schema", "json_schema": form}));
    }
    let json = ChatOptions { output: Some(Constraint::JsonObject), ..ChatOptions::default() };
    let body = written(UpstreamKind::OpenAi, &model(), &[ChatMessage::user("x")], &json);
    assert_eq!(body["response_format"], json!({"type": "json_object"}));
    assert_eq!(body["messages"][0]["content"], "Answer with a JSON object.");
    let mut by_tool = model();
    by_tool.capabilities.structured = StructuredOutput::Tool;
    let options = ChatOptions { output: Some(Constraint::JsonSchema(parameters())), ..asked() };
    let body = written(UpstreamKind::OpenAi, &by_tool, &[], &options);
    assert_eq!(
        (&body["tools"][1]["function"]["name"], &body["tool_choice"]),
        (&json!("answer"), &json!("required"))
    );
}

#[test]
fn openai_itself_has_its_own_name_for_the_maximum() {
    let options = ChatOptions { max_tokens: Some(5), ..ChatOptions::default() };
    let (model, base) = (model(), "https://api.openai.com/v1".parse().expect("valid"));
    let nothing = Vec::new().into();
    let question = Question::new(UpstreamKind::OpenAi, &model, &nothing, &options).expect("valid");
    let body = wire::body(UpstreamKind::OpenAi, &question, &base);
    assert_eq!((&body["max_completion_tokens"], body.get("max_tokens")), (&json!(5), None));
}

#[test]
fn requests_have_the_format_of_anthropic() {
    let mark = json!({"type": "ephemeral"});
    let expected = json!({
        "model": "big-1",
        "max_tokens": 64,
        "stream": true,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hi!"}]},
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "functions_look_0", "name": "look", "input": {"at": 1}},
                {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "functions_look_0", "content": "a cat"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "a dog"},
                {"type": "text", "text": "And?", "cache_control": mark},
            ]},
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": parameters(), "cache_control": mark}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "stop_sequences": ["END"],
    });
    assert_eq!(written(UpstreamKind::Anthropic, &model(), &conversation(), &asked()), expected);
}

#[test]
fn anthropic_choices_and_forms() {
    for (choice, expected) in [
        (ToolChoice::None, json!({"type": "none"})),
        (ToolChoice::Required, json!({"type": "any"})),
        (ToolChoice::Named("look".into()), json!({"type": "tool", "name": "look"})),
    ] {
        let options = ChatOptions { tool_choice: choice, parallel_tool_calls: true, ..asked() };
        let body = written(UpstreamKind::Anthropic, &model(), &conversation(), &options);
        assert_eq!(body["tool_choice"], expected);
    }
    let output = Some(Constraint::JsonSchema(json!({"type": "string"})));
    let options = ChatOptions { output: output.clone(), ..ChatOptions::default() };
    let body = written(UpstreamKind::Anthropic, &UpstreamModelOptions::new("m"), &[], &options);
    assert_eq!(body["max_tokens"], 4096);
    assert_eq!(body["tools"][0]["input_schema"]["properties"], json!({"answer": {"type": "string"}}));
    let forced = json!({"type": "tool", "name": "answer", "disable_parallel_tool_use": true});
    assert_eq!(body["tool_choice"], forced);
    let body = written(UpstreamKind::Anthropic, &model(), &[], &ChatOptions { output, ..asked() });
    assert_eq!(body["tool_choice"], json!({"type": "any", "disable_parallel_tool_use": true}));
}

#[test]
fn requests_have_the_format_of_workers_ai() {
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}});
    let expected = json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "",
                "tool_calls": [call("functions.look:0", "{\"at\": 1}"), call("c2", "{}")]},
            {"role": "tool", "content": "a cat", "tool_call_id": "functions.look:0"},
            {"role": "tool", "content": "a dog", "tool_call_id": "c2"},
            {"role": "user", "content": "And?"},
        ],
        "stream": true,
        "tools": [{"type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": parameters()}}],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ["END"],
        "max_tokens": 64,
    });
    assert_eq!(written(UpstreamKind::WorkersAi, &model(), &conversation(), &asked()), expected);
    let output = Some(Constraint::JsonSchema(parameters()));
    let options = ChatOptions { output, ..ChatOptions::default() };
    let body = written(UpstreamKind::WorkersAi, &UpstreamModelOptions::new("m"), &[], &options);
    assert_eq!((&body["stream"], &body["max_tokens"]), (&json!(false), &json!(4096)));
    assert_eq!(body["response_format"], json!({"type": "json_schema", "json_schema": parameters()}));
}

/// Returns a message with a text, an image in the request, another text, and an image at an address.
fn shown(with_address: bool) -> ChatMessage {
    let source = ImageSource::Data { kind: ImageKind::Png, base64: "iVBORw0KGgo=".to_owned().into() };
    let mut images = vec![Image { at: 5, part: 1, source, detail: Some(ImageDetail::Low) }];
    if with_address {
        let source = ImageSource::Url("https://a.example/cat.jpg".to_owned().into());
        images.push(Image { at: 10, part: 3, source, detail: None });
    }
    ChatMessage { images, ..ChatMessage::user("Look.Here.") }
}

fn seeing() -> UpstreamModelOptions {
    let mut model = UpstreamModelOptions::new("m");
    model.capabilities.images = true;
    model
}

#[test]
fn images_keep_their_position_in_every_format() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let url = |image: Value| json!({"type": "image_url", "image_url": image});
    let data = json!({"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"});
    let address = json!({"url": "https://a.example/cat.jpg"});
    let options = ChatOptions::default();
    let body = written(UpstreamKind::OpenAi, &seeing(), &[shown(true)], &options);
    let content = json!([text("Look."), url(data.clone()), text("Here."), url(address)]);
    assert_eq!(body["messages"], json!([{"role": "user", "content": content}]));

    let body = written(UpstreamKind::Anthropic, &seeing(), &[shown(true)], &options);
    let source = |source: Value| json!({"type": "image", "source": source});
    let mut last = source(json!({"type": "url", "url": "https://a.example/cat.jpg"}));
    last["cache_control"] = json!({"type": "ephemeral"});
    let inside = source(json!({"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}));
    let content = json!([text("Look."), inside, text("Here."), last]);
    assert_eq!(body["messages"], json!([{"role": "user", "content": content}]));

    let body = written(UpstreamKind::WorkersAi, &seeing(), &[shown(false)], &options);
    let content = json!([text("Look."), url(data), text("Here.")]);
    assert_eq!(body["messages"], json!([{"role": "user", "content": content}]));
}

#[test]
fn an_image_that_a_model_or_its_server_cannot_take_is_refused_by_its_place() {
    let blind = UpstreamModelOptions::new("m");
    let input = Input::Messages(vec![ChatMessage::system("Be brief."), shown(true)]);
    for (kind, model, place, why) in [
        (UpstreamKind::OpenAi, &blind, "messages[1].content[1]", "the model m accepts only text"),
        (UpstreamKind::WorkersAi, &seeing(), "messages[1].content[3]", "send it as a data: URL"),
    ] {
        let error = Question::new(kind, model, &input, &ChatOptions::default()).expect_err(why).to_string();
        assert!(error.contains(place) && error.contains(why), "{error}");
    }
}

#[test]
fn a_text_is_sent_as_it_is_and_only_to_servers_that_continue_texts() {
    let input = Input::Text("Once upon".to_owned());
    let options = ChatOptions {
        max_tokens: Some(100),
        stop: vec!["END".into()],
        seed: Some(7),
        ..ChatOptions::default()
    };
    let base = "https://api.openai.com/v1".parse().expect("valid");
    let model = model();
    let question = Question::new(UpstreamKind::OpenAi, &model, &input, &options).expect("valid");
    let expected = json!({
        "model": "big-1",
        "prompt": "Once upon",
        "stream": true,
        "stream_options": {"include_usage": true},
        "seed": 7,
        "stop": ["END"],
        "max_tokens": 64,
    });
    assert_eq!(wire::body(UpstreamKind::OpenAi, &question, &base), expected);
    for kind in [UpstreamKind::Anthropic, UpstreamKind::WorkersAi] {
        let error = Question::new(kind, &model, &input, &options).expect_err("no such route").to_string();
        assert!(error.contains("`model`") && error.contains("/v1/chat/completions"), "{error}");
    }
}
