//! Structured output over HTTP: finished output conforms, and invalid constraints are refused.

use crate::harness::{content, shared};
use serde_json::{Value, json};

#[tokio::test]
async fn a_schema_is_met_at_any_temperature() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["city", "days", "sky"],
        "properties": {"city": {"type": "string", "maxLength": 16}, "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "sky": {"enum": ["clear", "cloudy", "rain"]}}});
    for seed in 0..4 {
        let answer = chat(json!({"temperature": 1.0, "seed": seed, "max_tokens": 80,
            "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "strict": true, "schema": schema}}}))
        .await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let value: Value = serde_json::from_str(content(&answer)).unwrap();
        assert!(value["city"].as_str().unwrap().chars().count() <= 16);
        assert!((1.0..=7.0).contains(&value["days"].as_f64().unwrap()));
        assert!(["clear", "cloudy", "rain"].contains(&value["sky"].as_str().unwrap()));
        assert_eq!(value.as_object().unwrap().len(), 3);
    }
}

#[tokio::test]
async fn accepts_a_bare_schema_and_a_json_object() {
    let bare = json!({"response_format": {"type": "json_schema", "json_schema":
        {"type": "object", "required": ["ok"], "properties": {"ok": {"type": "boolean"}}, "additionalProperties": false}},
        "max_tokens": 30});
    let value: Value = serde_json::from_str(content(&chat(bare).await)).unwrap();
    assert!(value["ok"].is_boolean());
}

#[tokio::test]
async fn an_invalid_schema_is_a_400_with_the_reason() {
    for (schema, names) in [
        (json!({"type": "object", "properties": {"a": {"type": "nonsense"}}}), "nonsense"),
        (json!({"$ref": "https://example.com/other.json"}), "https://example.com/other.json"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
    ] {
        let request = json!({"messages": [{"role": "user", "content": "x"}], "response_format":
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
        let (status, answer) = shared().post("/v1/chat/completions", request).await;
        assert_eq!(status, 400, "{schema}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(names), "{message:?} should name {names:?}");
        assert!(answer["error"]["code"].is_string());
    }
}

#[tokio::test]
async fn values_that_masks_cannot_enforce_are_valid_too() {
    // The model would name the same color twice, but the host prevents it.
    let schema = json!({"type": "object", "required": ["colours"], "additionalProperties": false, "vendor-note": 1,
        "properties": {"colours": {"type": "array", "minItems": 3, "maxItems": 3, "uniqueItems": true,
                                   "format": "palette", "items": {"enum": ["red", "green", "blue"]}}}});
    let mut taken_back = 0;
    for seed in 0..6 {
        let answer = chat(json!({"messages": [{"role": "user", "content": "Say red three times, as JSON."}],
            "max_tokens": 200, "temperature": 1.2, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}))
        .await;
        let said: Value = serde_json::from_str(answer["choices"][0]["message"]["content"].as_str().unwrap())
            .unwrap_or_else(|error| panic!("{error}: {answer}"));
        let mut colours: Vec<&str> =
            said["colours"].as_array().unwrap().iter().map(|colour| colour.as_str().unwrap()).collect();
        colours.sort_unstable();
        assert_eq!(colours, ["blue", "green", "red"], "{answer}");
        taken_back += answer["usage"]["completion_tokens_details"]["taken_back_tokens"].as_u64().unwrap_or(0);
    }
    assert!(taken_back > 0, "no answer had to be taken back, so the test shows nothing");
}

#[tokio::test]
async fn a_required_tool_is_called_with_arguments_that_conform() {
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters":
            {"type": "object", "additionalProperties": false, "required": ["city"],
             "properties": {"city": {"type": "string", "maxLength": 20}}}}},
        {"type": "function", "function": {"name": "set_alarm", "description": "Sets an alarm.", "parameters":
            {"type": "object", "additionalProperties": false, "required": ["hour"],
             "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}}}}}]);
    for (choice, allowed) in [
        (json!("required"), &["get_weather", "set_alarm"][..]),
        (json!({"type": "function", "function": {"name": "set_alarm"}}), &["set_alarm"][..]),
    ] {
        let answer = chat(
            json!({"tools": tools, "tool_choice": choice, "max_tokens": 80, "temperature": 0.7, "seed": 3}),
        )
        .await;
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
        let call = &answer["choices"][0]["message"]["tool_calls"][0];
        let name = call["function"]["name"].as_str().unwrap();
        assert!(allowed.contains(&name), "{answer}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        match name {
            "get_weather" => assert!(arguments["city"].as_str().unwrap().chars().count() <= 20),
            _ => assert!((0..24).contains(&arguments["hour"].as_i64().unwrap())),
        }
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
    }
}

#[tokio::test]
async fn truncated_schema_output_finishes_with_length() {
    let schema = json!({"type": "string", "minLength": 200, "maxLength": 300});
    let answer = chat(json!({"max_tokens": 5, "response_format":
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}))
    .await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
}

async fn chat(extra: Value) -> Value {
    let mut request = json!({"temperature": 0, "messages": [
        {"role": "user", "content": "What will the weather be like in Lisbon over the next three days? Answer in JSON."}]});
    for (key, value) in extra.as_object().unwrap() {
        request[key] = value.clone();
    }
    shared().ok("/v1/chat/completions", request).await
}
