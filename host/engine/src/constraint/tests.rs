//! What compiles, what is refused by name, and that hostile input is refused quickly and without harm.

use serde_json::{Value, json};

use super::ConstraintCompiler;
use crate::{Constraint, EngineError};

fn compiler() -> ConstraintCompiler {
    let tokenizer = std::sync::Arc::new(crate::tests::fixture::byte_tokenizer());
    ConstraintCompiler::new(&tokenizer, 320, &[crate::tests::fixture::EOS]).unwrap()
}

/// The message of a refusal, or `None` if the constraint compiles.
fn refusal(compiler: &ConstraintCompiler, constraint: Constraint) -> Option<String> {
    match compiler.compile(&constraint) {
        Ok(_) => None,
        Err(EngineError::Constraint { message }) => Some(message),
        Err(other) => panic!("{other}"),
    }
}

/// Whether the constraint accepts exactly this text.
fn accepts(compiler: &ConstraintCompiler, constraint: &Constraint, text: &str) -> bool {
    let mut state = compiler.compile(constraint).unwrap();
    for byte in text.bytes() {
        let allowed = !state.is_done()
            && state.mask().is_ok_and(|mask| mask.words()[usize::from(byte) / 32] >> (byte % 32) & 1 == 1);
        if !allowed || state.accept(u32::from(byte)).is_err() {
            return false;
        }
    }
    let eos = crate::tests::fixture::EOS as usize;
    state.is_done() || state.mask().is_ok_and(|mask| mask.words()[eos / 32] >> (eos % 32) & 1 == 1)
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    let compiler = compiler();
    let cases: [(Value, &str); 10] = [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"type": "array", "contains": {"type": "null"}}), "contains"),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"type": "string", "format": "phase-of-the-moon"}), "phase-of-the-moon"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
        (json!({"$ref": "https://example.com/schema.json"}), "example.com"),
        (json!({"type": "wat"}), "wat"),
        (json!({"type": "object", "x-guidance": {"lenient": true}}), "x-guidance"),
        (json!({"if": {"type": "string"}, "then": {"maxLength": 3}}), "if"),
        (json!(false), "schema"),
    ];
    for (schema, named) in cases {
        let message = refusal(&compiler, Constraint::JsonSchema(schema.clone()));
        assert!(message.as_ref().is_some_and(|text| text.contains(named)), "{schema}: {message:?}");
    }
    for (constraint, named) in [
        (Constraint::Regex("a(b".to_string()), ""),
        (Constraint::Lark("start: missing_rule".to_string()), "missing_rule"),
        (Constraint::Lark(String::new()), ""),
    ] {
        let message = refusal(&compiler, constraint.clone());
        assert!(message.as_ref().is_some_and(|text| text.contains(named)), "{constraint:?}: {message:?}");
    }
}

#[test]
fn json_has_one_spelling() {
    let compiler = compiler();
    let schema = Constraint::JsonSchema(json!({
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": false,
    }));
    assert!(accepts(&compiler, &schema, r#"{"a": [1, 2], "b": true}"#));
    assert!(!accepts(&compiler, &schema, r#"{"a":[1,2],"b":true}"#));
    assert!(!accepts(&compiler, &schema, "{\n\"a\": [1, 2], \"b\": true}"));
    assert!(!accepts(&compiler, &schema, r#"{"a": [1, 2]}"#));
}

#[test]
fn alternatives_that_exclude_each_other_compile_also_through_references() {
    let compiler = compiler();
    let variant = |tag: &str, kind: &str| {
        json!({"type": "object", "properties": {"tag": {"const": tag}, "value": {"type": kind}},
               "required": ["tag", "value"], "additionalProperties": false})
    };
    let schema = Constraint::JsonSchema(json!({
        "$defs": {"flag": variant("flag", "boolean"), "none": variant("none", "null")},
        "oneOf": [{"$ref": "#/$defs/flag"}, {"$ref": "#/$defs/none", "description": "nothing"}],
    }));
    assert!(accepts(&compiler, &schema, r#"{"tag": "flag", "value": true}"#));
    assert!(accepts(&compiler, &schema, r#"{"tag": "none", "value": null}"#));
    assert!(!accepts(&compiler, &schema, r#"{"tag": "none", "value": true}"#));
    let overlapping = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
    assert!(
        refusal(&compiler, Constraint::JsonSchema(overlapping)).is_some_and(|text| text.contains("anyOf"))
    );
}

#[test]
fn schemas_that_tools_really_have_compile() {
    let compiler = compiler();
    for schema in [
        json!({"type": ["string", "null"], "maxLength": 4}),
        json!({"type": "integer", "format": "uint32", "minimum": 0}),
        json!({"type": "number", "format": "double"}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}}),
        json!({"type": "string", "format": "date-time"}),
        json!({"oneOf": [{"const": "a", "description": "first"}, {"enum": ["b", "c"], "type": "string"}]}),
        json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "type": "object",
               "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 5}},
               "$defs": {"item": {"anyOf": [{"type": "string", "default": "x", "examples": ["y"]}, {"type": "null"}]}}}),
        json!({"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
               "$ref": "#/$defs/node"}),
        json!(true),
    ] {
        assert_eq!(refusal(&compiler, Constraint::JsonSchema(schema.clone())), None, "{schema}");
    }
}

#[test]
fn a_cached_constraint_starts_afresh() {
    let compiler = compiler();
    let constraint = Constraint::Regex("ab".to_string());
    for _ in 0..3 {
        assert!(accepts(&compiler, &constraint, "ab"));
        assert!(!accepts(&compiler, &constraint, "a"));
    }
}

#[test]
fn special_tokens_cannot_be_spelled_as_text() {
    let compiler = compiler();
    let mut state = compiler.compile(&Constraint::Regex(r"<\|im_[a-z]+\|>".to_string())).unwrap();
    let forced = state.forced();
    assert_eq!(forced, "<|im_".bytes().map(u32::from).collect::<Vec<_>>());
    let mask = state.mask().unwrap();
    assert_eq!(mask.words()[8], 0, "neither the start nor the end token, and no id without text");
}

#[test]
fn hostile_input_is_refused_without_harm() {
    let compiler = compiler();
    let deep = (0..300).fold(json!({}), |inner, _| json!({"items": inner, "type": "array"}));
    let wide: Value = (0..30_000).map(|n| json!(n)).collect::<Vec<_>>().into();
    let many_properties: Value = (0..2000)
        .map(|n| (format!("p{n}"), json!({"type": "string"})))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let hostile = [
        Constraint::JsonSchema(deep),
        Constraint::JsonSchema(json!({"enum": wide})),
        Constraint::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000u64})),
        Constraint::JsonSchema(json!({"type": "string", "pattern": "(((((((((("})),
        Constraint::JsonSchema(json!({"type": "integer", "multipleOf": 1e-300})),
        Constraint::Regex("(".repeat(100_000)),
        Constraint::Regex("a".repeat(300_000)),
        Constraint::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        Constraint::Lark("start: \"a\"{1000000000}".to_string()),
        // Optional members can be left out in any combination, which the parser has to follow all at once.
        Constraint::JsonSchema(json!({"type": "object", "properties": many_properties})),
    ];
    for constraint in hostile {
        let shown: String = format!("{constraint:?}").chars().take(80).collect();
        assert!(refusal(&compiler, constraint).is_some(), "{shown}");
    }
}

#[test]
fn what_explodes_only_later_fails_in_its_own_generation() {
    let compiler = compiler();
    for pattern in
        ["(a|b|c){0,9999}{0,9999}{0,9999}", "([ab]*a[ab]{60}|[ab]*b[ab]{61})*x", "((a?){500}){500}"]
    {
        let Ok(mut state) = compiler.compile(&Constraint::Regex(pattern.to_string())) else { continue };
        for _ in 0..200 {
            let Ok(mask) = state.mask() else { break };
            let allowed = (0..256).rev().find(|byte| mask.words()[byte / 32] >> (byte % 32) & 1 == 1);
            let Some(byte) = allowed else { break };
            if state.accept(byte as u32).is_err() || state.is_done() {
                break;
            }
        }
    }
}
