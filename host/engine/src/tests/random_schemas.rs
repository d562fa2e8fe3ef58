//! Random JSON Schemas of bounded depth, with every keyword that is enforced.

use serde_json::{Map, Value, json};

use super::draws::Draws;

const MAX_DEPTH: usize = 3;
const NAMES: [&str; 8] = ["a", "b", "name", "id", "äö", "with space", "q\"uote", "type"];
const PATTERNS: [&str; 9] = [
    "^[a-z]+$",
    "^[A-Z][a-z]{0,5}$",
    "\\d{2,4}",
    "^(yes|no)$",
    "^\\w+-\\w+$",
    "[éü]",
    "^\"?\\\\?/$",
    "^.{3}$",
    "x",
];
const NAME_PATTERNS: [&str; 3] = ["^x_", "^[0-9]+$", "_s$"];
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Returns a schema that may refer to `#/$defs/leaf` and to the recursive `#/$defs/tree`.
pub fn schema(draws: &mut Draws) -> Value {
    let mut root = value(draws, 0);
    if let Some(members) = root.as_object_mut() {
        members.insert("$defs".into(), json!({"leaf": scalar(draws), "tree": tree(draws)}));
    }
    root
}

/// Adds keywords that a mask cannot follow, and unknown annotations.
pub fn loosen(draws: &mut Draws, schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    for (key, value) in members.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs", Value::Object(schemas)) => {
                schemas.values_mut().for_each(|schema| loosen(draws, schema));
            }
            ("items" | "additionalProperties", schema) => loosen(draws, schema),
            ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| loosen(draws, schema));
            }
            _ => {}
        }
    }
    if !draws.one_in(3) {
        return;
    }
    let added = match draws.below(12) {
        0 => json!({"uniqueItems": true}),
        1 => json!({"not": {"enum": [null, true, 7, "", {}, []]}}),
        2 => {
            json!({"if": {"type": "object", "required": ["a"]}, "then": {"required": ["b"]}, "else": {"minProperties": 1}})
        }
        3 => json!({"contains": {"type": ["integer", "string"]}, "minContains": 2}),
        4 => json!({"propertyNames": {"maxLength": 4}}),
        5 => json!({"dependentRequired": {"a": ["b"], "name": ["id"]}}),
        6 => json!({"unevaluatedProperties": false}),
        7 => json!({"minProperties": 2, "maxProperties": 3}),
        8 => json!({"pattern": "^(?!a)"}),
        9 => json!({"maxLength": 1_000_000, "maxItems": 2_000_000}),
        10 => json!({"nullable": true, "widget": {"type": 3}, "readonly": 1, "format": "odd"}),
        _ => json!({"dependencies": {"a": {"required": ["b"]}, "id": ["b"]}}),
    };
    for (key, value) in added.as_object().into_iter().flatten() {
        members.entry(key.clone()).or_insert_with(|| value.clone());
    }
}

/// Returns a schema for a tool's parameters, which are an object.
pub fn object_schema(draws: &mut Draws) -> Value {
    let mut root = object(draws, 0);
    root["$defs"] = json!({"leaf": scalar(draws), "tree": tree(draws)});
    root
}

fn tree(draws: &mut Draws) -> Value {
    json!({"type": "object", "required": ["v"], "additionalProperties": false,
        "properties": {"v": scalar(draws), "left": {"$ref": "#/$defs/tree"},
                       "list": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}})
}

fn value(draws: &mut Draws, depth: usize) -> Value {
    if depth >= MAX_DEPTH {
        return scalar(draws);
    }
    match draws.below(12) {
        0 | 1 => scalar(draws),
        2..=4 => object(draws, depth),
        5 | 6 => array(draws, depth),
        7 => json!({"anyOf": list(draws, depth, 1)}),
        8 => one_of(draws, depth),
        9 => all_of(draws, depth),
        10 => json!({"$ref": *draws.pick(&["#/$defs/leaf", "#/$defs/tree"])}),
        _ => noted(draws, depth),
    }
}

/// Returns a schema with annotations and keywords that assert nothing, along with some that do.
fn noted(draws: &mut Draws, depth: usize) -> Value {
    let mut schema = value(draws, depth + 1);
    if let Some(members) = schema.as_object_mut() {
        members.extend(Map::from_iter([
            ("title".into(), json!("not")),
            ("description".into(), json!("{\"uniqueItems\": true}")),
            ("default".into(), json!({"if": 1})),
            ("uniqueItems".into(), json!(false)),
            ("x-order".into(), json!(draws.below(9))),
        ]));
    }
    schema
}

fn list(draws: &mut Draws, depth: usize, least: usize) -> Vec<Value> {
    (0..least + draws.below(3)).map(|_| value(draws, depth + 1)).collect()
}

fn scalar(draws: &mut Draws) -> Value {
    match draws.below(9) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 | 3 => number(draws, "integer"),
        4 => number(draws, "number"),
        5 | 6 => string(draws),
        7 => json!({"enum": (0..1 + draws.below(4)).map(|_| constant(draws, 0)).collect::<Vec<_>>()}),
        _ => json!({"const": constant(draws, 0)}),
    }
}

fn number(draws: &mut Draws, kind: &str) -> Value {
    let mut schema = Map::from_iter([("type".to_string(), json!(kind))]);
    let steps: &[f64] = if kind == "integer" { &[1.0, 1.0, 10.0, 1000.0] } else { &[1.0, 0.5, 0.01, 12.345] };
    let step = *draws.pick(steps);
    let least = draws.below(41) as f64 - 20.0;
    let width = 1 + draws.below(60);
    let (least, most) = (least * step, least * step + width as f64 * step);
    let spelled = |bound: f64| if kind == "integer" { json!(bound as i64) } else { json!(bound) };
    match draws.below(3) {
        0 => {}
        1 => _ = schema.insert("minimum".into(), spelled(least)),
        _ => _ = schema.insert("exclusiveMinimum".into(), spelled(least - step)),
    }
    match draws.below(3) {
        0 => {}
        1 => _ = schema.insert("maximum".into(), spelled(most)),
        _ => _ = schema.insert("exclusiveMaximum".into(), spelled(most + step)),
    }
    if draws.one_in(4) {
        let steps = if kind == "integer" { json!([2, 5, 7]) } else { json!([0.5, 0.25, 3]) };
        schema.insert("multipleOf".into(), steps[draws.below(3)].clone());
    }
    if draws.one_in(5) {
        schema.insert("format".into(), json!("int64"));
    }
    schema.into()
}

fn string(draws: &mut Draws) -> Value {
    let mut schema = Map::from_iter([("type".to_string(), json!("string"))]);
    match draws.below(4) {
        0 => _ = schema.insert("pattern".into(), json!(draws.pick(&PATTERNS))),
        1 => _ = schema.insert("format".into(), json!(draws.pick(&FORMATS))),
        _ => {}
    }
    let least = draws.below(6);
    if draws.one_in(3) {
        schema.insert("minLength".into(), json!(least));
    }
    if draws.one_in(2) {
        schema.insert("maxLength".into(), json!(least + draws.below(12)));
    }
    schema.into()
}

fn constant(draws: &mut Draws, depth: usize) -> Value {
    match draws.below(if depth > 1 { 7 } else { 9 }) {
        0 => Value::Null,
        1 => json!(draws.one_in(2)),
        2 => json!(draws.below(2000) as i64 - 1000),
        3 => json!((draws.below(4000) as f64 - 2000.0) / 8.0),
        4 => json!("tab\t\"quote\" \\ \u{8}\u{c}\r\n 🐝 /é"),
        5 => json!(NAMES[draws.below(8)]),
        6 => json!(-1_234_567_890_123_456_i64),
        7 => (0..draws.below(3)).map(|_| constant(draws, depth + 1)).collect(),
        _ => (0..draws.below(3))
            .map(|_| (NAMES[draws.below(8)].to_string(), constant(draws, depth + 1)))
            .collect::<Map<_, _>>()
            .into(),
    }
}

fn array(draws: &mut Draws, depth: usize) -> Value {
    let mut schema = Map::from_iter([("type".to_string(), json!("array"))]);
    if draws.one_in(3) {
        schema.insert("prefixItems".into(), list(draws, depth, 1).into());
    }
    match draws.below(4) {
        0 => {}
        1 => _ = schema.insert("items".into(), json!(false)),
        _ => _ = schema.insert("items".into(), value(draws, depth + 1)),
    }
    let least = draws.below(3);
    if draws.one_in(3) {
        schema.insert("minItems".into(), json!(least));
    }
    if draws.one_in(2) {
        schema.insert("maxItems".into(), json!(least + draws.below(4)));
    }
    schema.into()
}

fn object(draws: &mut Draws, depth: usize) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for _ in 0..draws.below(4) {
        let name = *draws.pick(&NAMES);
        properties.insert(name.into(), value(draws, depth + 1));
        if draws.one_in(2) && !required.contains(&name) {
            required.push(name);
        }
    }
    let mut schema = Map::from_iter([("type".to_string(), json!("object"))]);
    if draws.one_in(4) {
        let pattern = *draws.pick(&NAME_PATTERNS);
        schema.insert("patternProperties".into(), json!({pattern: value(draws, depth + 1)}));
    }
    match draws.below(5) {
        0 => {}
        1 => _ = schema.insert("additionalProperties".into(), value(draws, depth + 1)),
        _ => _ = schema.insert("additionalProperties".into(), json!(false)),
    }
    if draws.one_in(6) {
        schema.insert("minProperties".into(), json!(required.len() + draws.below(2)));
    }
    if draws.one_in(6) {
        schema.insert("maxProperties".into(), json!(required.len() + draws.below(3)));
    }
    if draws.one_in(8) {
        required.push("more");
    }
    schema.insert("properties".into(), properties.into());
    schema.insert("required".into(), json!(required));
    schema.into()
}

/// Returns alternatives that exclude each other: by a tag, by type or by value.
fn one_of(draws: &mut Draws, depth: usize) -> Value {
    let alternatives = match draws.below(3) {
        0 => ["one", "two", "three"][..2 + draws.below(2)]
            .iter()
            .map(|tag| {
                json!({"type": "object", "required": ["tag"], "additionalProperties": draws.one_in(4),
                       "properties": {"tag": {"const": tag}, "value": value(draws, depth + 1)}})
            })
            .collect(),
        1 => vec![string(draws), number(draws, "integer"), array(draws, depth), json!({"type": "null"})],
        _ => vec![
            json!({"enum": [1, "a"]}),
            json!({"const": 2}),
            json!({"const": "b"}),
            json!({"type": "boolean"}),
        ],
    };
    json!({"oneOf": alternatives})
}

/// Returns members of `allOf` that can hold together.
fn all_of(draws: &mut Draws, depth: usize) -> Value {
    match draws.below(4) {
        0 => json!({"allOf": [string(draws), {"minLength": 1}]}),
        1 => json!({"type": "number", "allOf": [number(draws, "number"), {"maximum": 50}]}),
        2 => json!({"allOf": [
            {"type": "object", "properties": {"a": value(draws, depth + 1)}, "required": ["a"]},
            {"type": "object", "properties": {"b": value(draws, depth + 1)}, "maxProperties": 4},
        ]}),
        _ => {
            let mut schema = object(draws, depth);
            schema["anyOf"] =
                json!([{"required": ["a"]}, {"required": ["b"]}, {"properties": {"a": {"type": "string"}}}]);
            schema
        }
    }
}
