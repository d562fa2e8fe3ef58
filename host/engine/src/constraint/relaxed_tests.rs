//! Tests of keywords that a mask cannot follow: the schema is accepted, the mask accepts a superset, and the
//! affected value is named with a schema that decides about it.

use serde_json::{Value, json};

use super::tests::{accepts, compiler};
use super::{PathStep, UnenforcedValue};
use crate::Constraint;
use crate::tests::unenforced::rejects;

/// A valid document, one that only the check refuses, and one that the mask refuses already.
struct Case {
    schema: Value,
    valid: &'static str,
    checked: &'static str,
    masked: Option<&'static str>,
}

fn case(schema: Value, valid: &'static str, checked: &'static str, masked: Option<&'static str>) -> Case {
    Case { schema, valid, checked, masked }
}

#[test]
fn keywords_that_the_mask_cannot_follow_are_named_and_checked() {
    let tree = json!({"type": "object", "required": ["v"], "properties": {"v": {"type": "integer"},
        "next": {"$ref": "#/$defs/tree", "required": ["name"], "properties": {"name": {"type": "string"}}}}});
    let cases = [
        case(json!({"type": "array", "uniqueItems": true}), "[1, 2]", "[1, 1]", Some("{}")),
        case(json!({"type": "integer", "not": {"const": 3}}), "4", "3", Some("\"\"")),
        case(
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
            "{\"a\": 1, \"b\": 2}",
            "{\"a\": 1}",
            Some("{\"a\": \"\"}"),
        ),
        case(json!({"dependentRequired": {"a": ["b"]}}), "{\"b\": 1}", "{\"a\": 1}", None),
        case(json!({"dependencies": {"a": ["b"]}}), "{\"b\": 1}", "{\"a\": 1}", None),
        case(
            json!({"dependentSchemas": {"a": {"maxProperties": 1}}}),
            "{\"a\": 1}",
            "{\"a\": 1, \"b\": 1}",
            None,
        ),
        case(json!({"type": "array", "contains": {"type": "null"}}), "[1, null]", "[1]", Some("1")),
        case(
            json!({"type": "array", "contains": {"type": "null"}, "maxContains": 1}),
            "[1, null]",
            "[null, null]",
            None,
        ),
        case(
            json!({"type": "object", "propertyNames": {"maxLength": 2}}),
            "{\"ab\": 1}",
            "{\"abc\": 1}",
            None,
        ),
        case(
            json!({"allOf": [{"properties": {"a": true}}], "unevaluatedProperties": false}),
            "{\"a\": 1}",
            "{\"b\": 1}",
            None,
        ),
        case(
            json!({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}),
            "4",
            "6",
            Some("true"),
        ),
        case(json!({"type": "object", "minProperties": 2}), "{\"a\": 1, \"b\": 2}", "{\"a\": 1}", None),
        case(json!({"type": "array", "minItems": 10_001}), "", "[]", Some("{}")),
        case(json!({"type": "number", "minimum": 1e19}), "", "5", Some("\"\"")),
        case(json!({"type": "string", "pattern": "^(?!b)[a-c]+$"}), "\"ab\"", "\"ba\"", Some("1")),
        case(
            json!({"patternProperties": {"^a": {"type": "integer"}, "z$": {"minimum": 3}}}),
            "{\"az\": 3}",
            "{\"az\": 2}",
            None,
        ),
        case(
            json!({"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}),
            "{\"v\": 1, \"next\": {\"v\": 1, \"name\": \"n\"}}",
            "{\"v\": 1, \"next\": {\"v\": 1}}",
            Some("{}"),
        ),
    ];
    let compiler = compiler();
    for Case { schema, valid, checked, masked } in cases {
        let constraint = Constraint::JsonSchema(schema.clone());
        let unenforced = compiler.compile(&constraint).unwrap().unenforced().clone();
        assert!(!unenforced.is_empty(), "{schema}");
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        if !valid.is_empty() {
            assert!(accepts(&compiler, &constraint, valid), "{schema}: {valid}");
            assert!(!rejects(&unenforced, &value(valid)), "{schema}: {valid} {unenforced:?}");
        }
        assert!(accepts(&compiler, &constraint, checked), "{schema}: {checked}");
        assert!(rejects(&unenforced, &value(checked)), "{schema}: {checked} {unenforced:?}");
        if let Some(masked) = masked {
            assert!(!accepts(&compiler, &constraint, masked), "{schema}: {masked}");
        }
    }
}

#[test]
fn older_drafts_keep_their_meaning() {
    let compiler = compiler();
    let draft = |version: &str, mut schema: Value| {
        schema["$schema"] = format!("http://json-schema.org/{version}/schema#").into();
        Constraint::JsonSchema(schema)
    };
    let cases = [
        (draft("draft-04", json!({"minimum": 3, "exclusiveMinimum": true, "type": "integer"})), "4", "3"),
        (
            Constraint::JsonSchema(json!({"maximum": 3, "exclusiveMaximum": true, "type": "integer"})),
            "2",
            "3",
        ),
        (
            draft(
                "draft-07",
                json!({"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}}),
            ),
            "[null, 1]",
            "[1]",
        ),
        // Siblings of `$ref` have no effect.
        (
            draft(
                "draft-07",
                json!({"definitions": {"d": {"type": "integer"}}, "$ref": "#/definitions/d", "maximum": 1}),
            ),
            "2",
            "\"\"",
        ),
        (
            Constraint::JsonSchema(
                json!({"$defs": {"d": {"type": "integer"}}, "$ref": "#/$defs/d", "maximum": 1}),
            ),
            "1",
            "2",
        ),
        (
            draft(
                "draft-04",
                json!({"id": "http://x.test/root", "items": {"$ref": "root#/definitions/a"}, "type": "array",
                "definitions": {"a": {"type": "null"}}}),
            ),
            "[null]",
            "[1]",
        ),
        (
            Constraint::JsonSchema(
                json!({"$id": "https://x.test/root", "$ref": "item", "$defs": {"x": {"$id": "item", "$ref": "#part",
                "$defs": {"y": {"$anchor": "part", "type": "boolean"}}}}}),
            ),
            "true",
            "1",
        ),
        (
            Constraint::JsonSchema(
                json!({"$recursiveAnchor": true, "type": "array", "items": {"$recursiveRef": "#"}}),
            ),
            "[[], [[]]]",
            "[1]",
        ),
        (
            Constraint::JsonSchema(
                json!({"$dynamicAnchor": "n", "type": "array", "items": {"$dynamicRef": "#n"}}),
            ),
            "[[], [[]]]",
            "[1]",
        ),
        (
            Constraint::JsonSchema(json!({"components": {"schemas": {"a/b": {"type": "null"}}},
                "$ref": "#/components/schemas/a~1b"})),
            "null",
            "1",
        ),
    ];
    for (constraint, accepted, refused) in cases {
        assert!(accepts(&compiler, &constraint, accepted), "{constraint:?}: {accepted}");
        assert!(!accepts(&compiler, &constraint, refused), "{constraint:?}: {refused}");
        assert_eq!(compiler.compile(&constraint).unwrap().unenforced().len(), 0, "{constraint:?}");
    }
}

#[test]
fn the_path_to_a_value_leads_through_references() {
    let compiler = compiler();
    let schema = json!({
        "type": "object",
        "properties": {"people": {"type": "array", "items": {"$ref": "#/definitions/person"}}},
        "definitions": {"person": {"type": "object", "properties": {"tags": {"$ref": "#/definitions/tags"}}},
                        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": true}},
    });
    let state = compiler.compile(&Constraint::JsonSchema(schema)).unwrap();
    let [UnenforcedValue { tool: None, path, schema }] = &state.unenforced()[..] else {
        panic!("{:?}", state.unenforced())
    };
    let property = |name: &str| PathStep::Property(name.to_string());
    assert_eq!(path, &[property("people"), PathStep::AnyItem, property("tags")]);
    assert_eq!(schema["uniqueItems"], true);
    assert!(schema.get("$defs").is_none(), "{schema}");
}
