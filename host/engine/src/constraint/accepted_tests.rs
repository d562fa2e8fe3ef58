//! Tests of the accepted set: the ways in which JSON may be written, position by position, and when a document
//! is complete.

use serde_json::{Value, json};

use super::tests::{accepts, compiler};
use super::{ConstraintCompiler, OutputConstraint, Spelling};
use crate::Constraint;

fn schema(schema: Value) -> Constraint {
    Constraint::JsonSchema(schema)
}

/// Follows a text byte by byte. Returns the position where it is stopped, if it is.
fn stopped_at(state: &mut OutputConstraint, text: &str) -> Option<usize> {
    text.bytes().position(|byte| !state.try_accept(u32::from(byte)))
}

fn check(compiler: &ConstraintCompiler, constraint: &Constraint, accepted: &[&str], refused: &[&str]) {
    for text in accepted {
        let mut state = compiler.compile(constraint).unwrap();
        assert_eq!(stopped_at(&mut state, text), None, "{text:?}");
        assert!(accepts(compiler, constraint, text), "{text:?} is complete");
    }
    for text in refused {
        assert!(!accepts(compiler, constraint, text), "{text:?}");
    }
}

#[test]
fn bounded_white_space_is_accepted_at_every_position() {
    let compiler = compiler();
    let constraint = schema(json!({
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": false,
    }));
    let parts = ["", "{", "\"a\"", ":", "[", "1", ",", "2", "]", ",", "\"b\"", ":", "true", "}", ""];
    assert!(accepts(&compiler, &constraint, &parts.concat()));
    let indent = |blanks: usize| format!("\n{}", " ".repeat(blanks));
    let (widest, too_wide) = (indent(20), indent(21));
    for gap in 0..parts.len() - 1 {
        let with = |space: &str| format!("{}{space}{}", parts[..=gap].concat(), parts[gap + 1..].concat());
        for space in [" ", "\n", "\r\n", "\n  ", "\r\n\t\t", &widest] {
            assert!(accepts(&compiler, &constraint, &with(space)), "{space:?} in gap {gap}");
        }
        for space in ["  ", "\t", "\n\n", " \n", "\r", "\u{b}", "\u{a0}", &too_wide] {
            assert!(!accepts(&compiler, &constraint, &with(space)), "{space:?} in gap {gap}");
        }
    }
    let pretty = serde_json::to_string_pretty(&json!({"a": [1, 2], "b": true})).unwrap();
    check(&compiler, &constraint, &[&pretty, &parts.join(" "), &parts.join("\n")], &["{\"a\": [1, 2]}"]);
}

#[test]
fn a_document_is_complete_when_only_white_space_could_follow() {
    let compiler = compiler();
    let cases = [
        (json!({"type": "object", "additionalProperties": {"type": "integer"}}), " {\"a\": 1\n}"),
        (json!({"type": "array"}), "[1, {}]"),
        (json!({"type": "string"}), "\"a b\""),
        (json!({"enum": ["a", "ab"]}), "\"ab\""),
        (json!({"type": "boolean"}), "true"),
        (json!({"type": "null"}), "null"),
        (json!(true), "{}"),
    ];
    for (wanted, text) in cases {
        let mut state = compiler.compile(&schema(wanted.clone())).unwrap();
        for byte in text.bytes() {
            assert!(!state.is_complete(), "{wanted} before {:?} of {text:?}", char::from(byte));
            state.accept(u32::from(byte)).unwrap();
        }
        assert!(state.is_complete(), "{wanted} after {text:?}");
        state.accept(u32::from(b'\n')).unwrap();
        assert!(state.is_complete(), "{wanted} after {text:?} and a line break");
    }
    for (wanted, text) in [(json!({"type": "integer"}), "12"), (json!({"type": "number"}), "-1.5e3")] {
        let mut state = compiler.compile(&schema(wanted)).unwrap();
        assert_eq!(stopped_at(&mut state, text), None);
        assert!(!state.is_complete(), "{text} may continue");
        state.accept(u32::from(b' ')).unwrap();
        assert!(state.is_complete(), "{text} cannot continue after white space");
    }
    let mut own = compiler.compile(&Constraint::Regex("ab *".to_string())).unwrap();
    assert_eq!(stopped_at(&mut own, "ab"), None);
    assert!(!own.is_complete(), "the blanks of a regular expression belong to it");
}

#[test]
fn a_single_spelling_is_forced_and_within_the_accepted_set() {
    let compiler = compiler();
    let constraint = schema(json!({"const": {"a": [1, null], "b": {}}}));
    for (spelling, text) in [
        (Spelling::Compact, "{\"a\":[1,null],\"b\":{}}"),
        (Spelling::Spaced, "{\"a\": [1, null], \"b\": {}}"),
    ] {
        let mut strict = compiler.strict(&constraint, spelling).unwrap();
        let forced: Vec<u8> = strict.forced().into_iter().map(|id| id as u8).collect();
        assert_eq!(String::from_utf8(forced).unwrap(), text);
        assert!(accepts(&compiler, &constraint, text));
    }
    assert!(compiler.compile(&constraint).unwrap().forced().is_empty(), "there may be white space first");
}

#[test]
fn unicode_escapes_are_accepted_only_in_unrestricted_strings() {
    let compiler = compiler();
    let free = schema(json!({"type": "string"}));
    let surrogates = r#""\ud83d\udc1d""#;
    check(
        &compiler,
        &free,
        &[r#""\u00e9\u0041""#, surrogates, r#""\n\u0001""#],
        &[r#""\ud83d""#, r#""\udc1d\ud83d""#, r#""\u00g1""#],
    );
    let one = schema(json!({"type": "string", "minLength": 1, "maxLength": 1}));
    check(&compiler, &one, &[surrogates, r#""\u00e9""#, "\"é\""], &[r#""\u0041\u0041""#]);
    for formed in
        [json!({"const": "a"}), json!({"enum": ["a", "b"]}), json!({"type": "string", "pattern": "^a$"})]
    {
        check(&compiler, &schema(formed), &["\"a\""], &[r#""\u0061""#]);
    }
    let uuid = schema(json!({"type": "string", "format": "uuid"}));
    check(
        &compiler,
        &uuid,
        &["\"01234567-89ab-cdef-0123-456789abcdef\""],
        &[r#""\u0030\u0031234567-89ab-cdef-0123-456789abcdef""#],
    );
    let control = schema(json!({"enum": ["a\u{1}", "del\u{7f}"]}));
    check(&compiler, &control, &[r#""a\u0001""#], &["\"a\""]);
}

#[test]
fn an_additional_property_cannot_be_spelled_like_a_described_one() {
    let compiler = compiler();
    let described = |additional: Value| {
        schema(
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": additional}),
        )
    };
    let closed = described(json!({"type": "string"}));
    check(&compiler, &closed, &[r#"{"a": 1, "b\n\"": "x"}"#], &[r#"{"a": "x"}"#, r#"{"\u0061": "x"}"#]);
    let open = described(json!(true));
    check(
        &compiler,
        &open,
        &[r#"{"a": 1, "b": {}, "\u0001": "\u0061"}"#],
        &[r#"{"a": "x"}"#, r#"{"\u0061": "x"}"#],
    );
    let undescribed = schema(json!({"type": "object", "additionalProperties": {"type": "string"}}));
    check(&compiler, &undescribed, &[r#"{"\u0061": "\u0062"}"#], &[r#"{"\u0061": 1}"#]);
}

#[test]
fn numbers_follow_the_syntax_of_json() {
    let compiler = compiler();
    let number = schema(json!({"type": "number"}));
    check(&compiler, &number, &["1e5", "-1.25E-3", "0.0", "1.50"], &["01", "1.", ".5", "+1"]);
    let bounded = schema(json!({"type": "number", "minimum": 0, "maximum": 10}));
    check(&compiler, &bounded, &["1.0", "10", "0.25"], &["11", "1e5", "-1"]);
}

#[test]
fn an_integer_has_no_fraction_or_exponent() {
    let compiler = compiler();
    let bounded = schema(json!({"type": "integer", "minimum": -3, "exclusiveMaximum": 120}));
    // JSON Schema accepts 7.0, but a program that reads an integer often does not.
    check(&compiler, &bounded, &["-3", "0", "119"], &["120", "-4", "7.0", "1.5", "1.", "01", "1e1"]);
    let nested = schema(json!({
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3},
            "maybe": {"type": ["integer", "null"], "minimum": 0},
            "any": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
            "number": {"type": ["integer", "number"]},
            "next": {"$ref": "#"},
        },
        "required": ["list"],
        "additionalProperties": {"type": "integer"},
        "$defs": {"n": {"type": "integer", "maximum": 9}},
    }));
    check(
        &compiler,
        &nested,
        &[
            r#"{"list": [1, 2,3]}"#,
            "{\n  \"list\":[ -4 ] ,\n  \"maybe\": null, \"any\": \"ab\"\n}",
            r#"{"list":[9],"maybe":3,"any":4,"number":1.0,"next":{"list":[0],"maybe":1}, "more\n": 1, "x":2}"#,
        ],
        &[
            r#"{"list": []}"#,
            r#"{"list": [1.0]}"#,
            r#"{"list": [10]}"#,
            r#"{"list": [1,2,3,4]}"#,
            r#"{"list": [1], "maybe": -1}"#,
            r#"{"list": [1], "maybe": 1.0}"#,
            r#"{"list": [1], "any": 1.0}"#,
            r#"{"list": [1], "list": 1}"#,
            r#"{"list": [1], "x": 1.0}"#,
            r#"{"maybe": 1, "list": [1]}"#,
            r#"{"list": [1],}"#,
        ],
    );
}

#[test]
fn properties_come_in_any_order_if_the_schema_requests_it() {
    let compiler = compiler();
    let constraint = |extra: Value| {
        let mut wanted = json!({
            "type": "object", "x-key-order": "any", "required": ["b", "c"],
            "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "array"}},
        });
        wanted.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        schema(json!({"type": "array", "items": wanted}))
    };
    let closed = constraint(json!({"additionalProperties": false}));
    check(
        &compiler,
        &closed,
        &[
            r#"[{"b": true, "c": []}, {"c":[],"b":false}]"#,
            "[{\"c\": [],\n  \"a\": \"x\",\n  \"b\": true}]",
            "[]",
        ],
        &[
            r#"[{"b": true}]"#,
            r#"[{"c": [], "a": "x"}]"#,
            r#"[{"b": true, "c": [], "b": true}]"#,
            r#"[{"b": true, "c": [], "d": 1}]"#,
            r#"[{"b": 1, "c": []}]"#,
        ],
    );
    let open = constraint(json!({}));
    check(
        &compiler,
        &open,
        &[r#"[{"c": [], "b": true, "d": 1, "e": {}}]"#],
        &[
            r#"[{"c": [], "b": true, "a": 1}]"#,
            r#"[{"c": [], "b": true, "d": 1, "a": "x"}]"#,
            r#"[{"c": [], "b": true, "d": 1, "b": true}]"#,
        ],
    );
    let ordered =
        schema(json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}));
    check(&compiler, &ordered, &[r#"{"a": null, "b": null}"#], &[r#"{"b": null, "a": null}"#]);
    let warnings =
        |schema: Value| compiler.compile(&Constraint::JsonSchema(schema)).unwrap().warnings().len();
    let many: serde_json::Map<String, Value> = (0..9).map(|n| (format!("p{n}"), json!(true))).collect();
    assert_eq!(warnings(json!({"type": "object", "x-key-order": "any", "properties": many})), 1);
    assert_eq!(warnings(json!({"type": "object", "x-key-order": "any", "properties": {"a": true}})), 0);
    let merged = json!({"allOf": [{"type": "object", "x-key-order": "any", "properties": {"a": true}}]});
    assert_eq!(warnings(merged), 1, "the order is not followed where schemas are merged");
}
