//! Tests of what compiles, of what is refused with which message, and that hostile input is refused quickly and
//! without harm.

use serde_json::{Value, json};

use super::ConstraintCompiler;
use crate::{Constraint, EngineError};

pub(super) fn compiler() -> ConstraintCompiler {
    let tokenizer = std::sync::Arc::new(crate::tests::fixture::byte_tokenizer());
    ConstraintCompiler::new(&tokenizer, 320, &[crate::tests::fixture::EOS], "bytes").unwrap()
}

/// Returns the message of a refusal, or `None` if the constraint compiles.
pub(super) fn refusal(compiler: &ConstraintCompiler, constraint: Constraint) -> Option<String> {
    match compiler.compile(&constraint) {
        Ok(_) => None,
        Err(EngineError::Constraint { message, .. }) => Some(message),
        Err(other) => panic!("{other}"),
    }
}

/// Returns whether the constraint accepts exactly this text.
pub(super) fn accepts(compiler: &ConstraintCompiler, constraint: &Constraint, text: &str) -> bool {
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
fn malformed_schemas_are_refused_with_keyword_and_pointer() {
    let compiler = compiler();
    let nested = |schema: Value| json!({"type": "object", "properties": {"a/b": {"items": schema}}});
    let cases = [
        (json!({"type": "wat"}), "type"),
        (json!({"type": 7}), "type"),
        (json!({"type": []}), "type"),
        (json!({"enum": []}), "enum"),
        (json!({"anyOf": []}), "anyOf"),
        (json!({"not": 3}), "not"),
        (json!({"required": true}), "required"),
        (json!({"dependentRequired": {"a": [1]}}), "dependentRequired"),
        (json!({"minLength": -1}), "minLength"),
        (json!({"minContains": "1"}), "minContains"),
        (json!({"uniqueItems": "yes"}), "uniqueItems"),
        (json!({"minimum": "3"}), "minimum"),
        (json!({"multipleOf": 0}), "multipleOf"),
        (json!({"format": 3}), "format"),
        (json!({"pattern": "a(b"}), "pattern"),
        (json!({"patternProperties": {"(".repeat(200): true}}), "patternProperties"),
        (json!({"x-key-order": "random"}), "x-key-order"),
        (json!({"additionalProperties": 3}), "additionalProperties"),
        (json!({"$ref": "#/$defs/missing"}), "$ref"),
        (json!({"$ref": "https://example.com/schema.json"}), "$ref"),
        (json!({"$dynamicRef": "#nowhere"}), "$dynamicRef"),
    ];
    for (schema, keyword) in cases {
        let message = refusal(&compiler, Constraint::JsonSchema(nested(schema.clone()))).unwrap_or_default();
        let location = format!("/properties/a~1b/items/{keyword}");
        assert!(message.contains(keyword) && message.contains(&location), "{schema}: {message}");
    }
    for (schema, named) in [
        (json!({"type": "object", "x-guidance": {"lenient": true}}), "x-guidance"),
        (json!({"properties": {"a": 7}}), "/properties/a"),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "exclusiveMinimum": true}),
            "/exclusiveMinimum",
        ),
    ] {
        let message = refusal(&compiler, Constraint::JsonSchema(schema.clone())).unwrap_or_default();
        assert!(message.contains(named), "{schema}: {message}");
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
fn unsatisfiable_schemas_are_refused() {
    let compiler = compiler();
    for schema in [
        json!(false),
        json!({"type": "string", "minLength": 3, "maxLength": 2}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
        json!({"type": "object", "required": ["a"], "properties": {"a": false}}),
        json!({"allOf": [{"type": "string"}, {"type": "array"}]}),
        json!({"$defs": {"d": {"type": "string", "minLength": 3, "maxLength": 2}}, "$ref": "#/$defs/d"}),
    ] {
        let message = refusal(&compiler, Constraint::JsonSchema(schema.clone())).unwrap_or_default();
        assert!(message.contains("atisf"), "{schema}: {message}");
    }
}

#[test]
fn misspelt_keywords_are_annotations_with_a_warning() {
    let compiler = compiler();
    let warnings =
        |schema: Value| compiler.compile(&Constraint::JsonSchema(schema)).unwrap().warnings().to_vec();
    let misspelt = json!({"properties": {"a": {"type": "string", "maxLenght": 3}}, "requried": ["a"]});
    let found = warnings(misspelt);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("/properties/a/maxLenght") && found[0].contains("`maxLength`"), "{found:?}");
    assert!(found[1].contains("/requried") && found[1].contains("`required`"), "{found:?}");
    let nullable = warnings(json!({"type": "string", "nullable": true}));
    assert!(nullable.len() == 1 && nullable[0].contains("/nullable"), "{nullable:?}");
    let meant = json!({"type": "object", "x-type": 1, "_format": "x", "example": 1, "order": 3, "widget": "w",
        "properties": {"formatt": {"type": "string"}}, "default": {"maxLenght": 1}, "readonly": true});
    assert_eq!(warnings(meant), [] as [String; 0]);
}

#[test]
fn annotations_and_vacuous_keywords_are_allowed_everywhere() {
    let compiler = compiler();
    let noted = |mut schema: Value| {
        let notes = json!({"title": "T", "description": "{\"not\": \"a keyword\"}", "default": {"if": 1}, "examples": [{"not": 1}],
            "$comment": "c", "deprecated": true, "readOnly": true, "writeOnly": false, "x-order": 1, "uniqueItems": false,
            "unevaluatedProperties": true, "propertyNames": {"type": "string"}});
        schema.as_object_mut().unwrap().extend(notes.as_object().unwrap().clone());
        schema
    };
    let names = ["not", "if", "uniqueItems", "format", "const", "enum", "required", "oneOf", "title", "$ref"];
    let properties: serde_json::Map<String, Value> = names
        .iter()
        .map(|name| (name.to_string(), noted(json!({"type": "integer", "format": "uint8"}))))
        .collect();
    let schema = Constraint::JsonSchema(noted(json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/root",
        "type": "object", "properties": properties, "required": names, "additionalProperties": false,
    })));
    let text: Vec<String> = names.iter().map(|name| format!("\"{name}\": 1")).collect();
    assert!(accepts(&compiler, &schema, &format!("{{{}}}", text.join(", "))));
    let data = json!({"uniqueItems": true, "minItems": 1e9, "pattern": "((", "$ref": "#/nowhere"});
    let schema = Constraint::JsonSchema(json!({"const": data}));
    let text =
        "{\"uniqueItems\": true, \"minItems\": 1000000000, \"pattern\": \"((\", \"$ref\": \"#/nowhere\"}";
    assert!(accepts(&compiler, &schema, text), "the content of `const` is data");
}

#[test]
fn inexact_bounds_are_never_looser_than_requested() {
    let compiler = compiler();
    let integer = |extra: Value| {
        let mut schema = json!({"type": "integer"});
        schema.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Constraint::JsonSchema(schema)
    };
    let largest = integer(json!({"maximum": u64::MAX, "minimum": i64::MIN}));
    assert!(accepts(&compiler, &largest, "8999999999999999999") && accepts(&compiler, &largest, "-12"));
    assert!(!accepts(&compiler, &largest, "18446744073709551616"));
    let exclusive = integer(json!({"exclusiveMaximum": 9_007_199_254_740_993_u64, "minimum": 9e15}));
    assert!(accepts(&compiler, &exclusive, "9007199254740990"));
    assert!(!accepts(&compiler, &exclusive, "9007199254740993"));
}

#[test]
fn threads_that_need_the_same_constraint_compile_it_once() {
    let compiler = std::sync::Arc::new(compiler());
    let barrier = std::sync::Arc::new(std::sync::Barrier::new(8));
    let ask = |constraint: Constraint| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (compiler, barrier, constraint) = (compiler.clone(), barrier.clone(), constraint.clone());
                std::thread::spawn(move || {
                    barrier.wait();
                    refusal(&compiler, constraint)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    };
    let schema =
        json!({"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,40}$"}, "maxItems": 30});
    assert_eq!(ask(Constraint::JsonSchema(schema)), vec![None; 8]);
    let refusals = ask(Constraint::JsonSchema(json!({"type": "string", "pattern": "a(b"})));
    assert!(refusals.iter().all(|refusal| refusal.is_some() && *refusal == refusals[0]), "{refusals:?}");
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!((count(&compiler.misses), count(&compiler.hits)), (2, 14));
}

#[test]
fn exclusive_alternatives_compile_even_through_references() {
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
    let outer = |name: &str| json!({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": false});
    let schema = Constraint::JsonSchema(json!({
        "$defs": {"one": outer("one"), "two": outer("two"), "number": {"enum": [1, 2]}},
        "oneOf": [{"$ref": "#/$defs/one"}, {"allOf": [{"$ref": "#/$defs/two"}]}, {"$ref": "#/$defs/number"},
                  {"const": 3}, {"type": ["null", "string"]}, {"anyOf": [{"const": true}, {"type": "array"}]}],
    }));
    for text in ["{\"one\": 1}", "{\"two\": 2}", "2", "3", "null", "\"x\"", "true", "[{}]"] {
        assert!(accepts(&compiler, &schema, text), "{text}");
    }
    assert!(!accepts(&compiler, &schema, "{\"one\": 1, \"two\": 2}") && !accepts(&compiler, &schema, "4"));
    assert_eq!(compiler.compile(&schema).unwrap().unenforced().len(), 0);
    for schema in [
        json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        json!({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}),
        json!({"oneOf": [{"properties": {"tag": {"const": "a"}}}, {"properties": {"tag": {"const": "b"}}}]}),
        json!({"oneOf": [{"required": ["a"], "properties": {"a": {"const": 1}}}, {"required": ["a"], "properties": {"a": {"const": 2}}}]}),
        json!({"oneOf": [{"type": "string"}, {"$ref": "#"}]}),
    ] {
        let state = compiler.compile(&Constraint::JsonSchema(schema.clone())).unwrap();
        assert_eq!(state.unenforced().len(), 1, "{schema}");
    }
}

#[test]
fn typical_tool_schemas_compile() {
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
fn new_constraints_of_a_tenant_push_out_only_its_own() {
    let compiler = compiler();
    let compile = |tenant: &str, number: usize| {
        compiler.compile_for(tenant, &Constraint::Regex(format!("{tenant}{number}"))).unwrap();
    };
    compile("calm", 0);
    (0..80).for_each(|number| compile("busy", number));
    let before = compiler.misses.load(std::sync::atomic::Ordering::Relaxed);
    compile("calm", 0);
    compile("busy", 79);
    assert_eq!(compiler.misses.load(std::sync::atomic::Ordering::Relaxed), before);
    compile("busy", 0);
    assert_eq!(compiler.misses.load(std::sync::atomic::Ordering::Relaxed), before + 1);
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
        Constraint::JsonSchema(json!({"type": "string", "pattern": "(((((((((("})),
        Constraint::Regex("(".repeat(100_000)),
        Constraint::Regex("a".repeat(300_000)),
        Constraint::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        Constraint::Lark("start: \"a\"{1000000000}".to_string()),
        // Optional members can be left out in any combination, and the parser has to follow all combinations at
        // once.
        Constraint::JsonSchema(json!({"type": "object", "properties": many_properties})),
    ];
    for constraint in hostile {
        let shown: String = format!("{constraint:?}").chars().take(80).collect();
        assert!(refusal(&compiler, constraint).is_some(), "{shown}");
    }
    // Keywords that the mask leaves to a check are accepted.
    for schema in [
        json!({"type": "array", "minItems": 1_000_000_000u64}),
        json!({"type": "string", "maxLength": u64::MAX}),
        json!({"type": "integer", "multipleOf": 1e-300}),
        json!({"type": "string", "pattern": "^a{20000}$"}),
    ] {
        let state = compiler.compile(&Constraint::JsonSchema(schema.clone())).unwrap();
        assert_eq!(state.unenforced().len(), 1, "{schema}");
    }
}

#[test]
fn a_late_explosion_fails_only_its_own_generation() {
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
