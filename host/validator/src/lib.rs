//! A JSON Schema validator whose run time is bounded: schemas and values are untrusted, and the parts of a schema may refer to each
//! other so that a small value takes exponentially many steps.
//!
//! The library validates a representation of JSON that counts each look at the value ([`metered`]) and unwinds when the
//! limit is reached. Work that looks at nothing is bounded when the schema is compiled ([`in_place`]). A limit grows with
//! the value, so that an ordinary schema never reaches it. The patterns of a schema are not interrupted: a single match takes
//! time that is linear in the string, or [`PATTERN_STEPS`].

#![forbid(unsafe_code)]

mod in_place;
mod metered;

use std::borrow::Cow;
use std::fmt;

use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

use metered::{Budget, Exhausted, Metered, Node, Rates, metered};

/// Maximum number of steps of one match of a pattern with lookaround or backreferences, which may take exponentially many.
const PATTERN_STEPS: usize = 100_000;

/// Decodes the percent escapes of the fragment of a reference. A `%` without two digits stays, and so does a fragment that would not
/// be UTF-8.
pub fn percent_decoded(fragment: &str) -> Cow<'_, str> {
    percent_encoding::percent_decode_str(fragment).decode_utf8().unwrap_or(Cow::Borrowed(fragment))
}

/// A compiled JSON Schema. Validation takes a number of steps that is bounded by the size of the value.
#[derive(Debug)]
pub struct SchemaValidator {
    validator: Validator<Metered>,
    rates: Rates,
}

/// The patterns that a schema may have, and whether `format` is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Patterns are matched in linear time: those with lookaround or backreferences do not compile. Formats are checked.
    Linear,
    /// Lookaround and backreferences are allowed. Formats are annotations.
    Backtracking,
}

/// The reason why a value did not pass.
#[derive(Debug)]
pub enum Invalid<'v> {
    /// The errors in the value. The list is never empty.
    Errors(Vec<ValidationError<'v>>),
    /// The value does not match, but finding out where would take too many steps.
    Somewhere,
    /// Validation was abandoned, so it is unknown whether the value matches.
    TooManySteps,
}

impl SchemaValidator {
    /// Compiles a schema. The error says what is wrong, and where in the schema.
    pub fn compile(schema: &Value, dialect: Dialect) -> Result<Self, String> {
        let unseen_steps = in_place::check(schema)?;
        let options = jsonschema::options_for::<Metered>();
        let built = match dialect {
            Dialect::Linear => options.with_pattern_options(PatternOptions::regex()).build(schema),
            Dialect::Backtracking => options
                .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(PATTERN_STEPS))
                .should_validate_formats(false)
                .build(schema),
        };
        let validator =
            built.map_err(|error| format!("at {:?}: {error}", error.instance_path().to_string()))?;
        Ok(SchemaValidator { validator, rates: Rates::new(schema, unseen_steps) })
    }

    /// Checks a value. Finds the first error.
    pub fn check<'v>(&'v self, value: &'v Value) -> Result<(), Invalid<'v>> {
        let budget = self.rates.budget(value);
        if self.is_valid(value, budget)? { Ok(()) } else { Err(self.first_error(value, budget)) }
    }

    /// Checks a value. Finds all errors, or the first one if finding all would take too many steps.
    pub fn check_all<'v>(&'v self, value: &'v Value) -> Result<(), Invalid<'v>> {
        let budget = self.rates.budget(value);
        if self.is_valid(value, budget)? {
            return Ok(());
        }
        let errors = || self.validator.iter_errors(Node(value)).collect::<Vec<_>>();
        match metered(budget, errors) {
            Ok(errors) if !errors.is_empty() => Err(Invalid::Errors(errors)),
            _ => Err(self.first_error(value, budget)),
        }
    }

    /// Decides without looking for reasons. The library remembers what it has found out, so this takes the fewest steps.
    fn is_valid(&self, value: &Value, budget: Budget) -> Result<bool, Invalid<'static>> {
        metered(budget, || self.validator.is_valid(Node(value))).map_err(|Exhausted| Invalid::TooManySteps)
    }

    fn first_error<'v>(&'v self, value: &'v Value, budget: Budget) -> Invalid<'v> {
        match metered(budget, || self.validator.validate(Node(value))) {
            Ok(Err(error)) => Invalid::Errors(vec![error]),
            _ => Invalid::Somewhere,
        }
    }
}

/// The first error with its place, as a person should read it.
impl fmt::Display for Invalid<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Invalid::Errors(errors) => {
                let Some(error) = errors.first() else { return Ok(()) };
                match error.instance_path().to_string() {
                    path if path.is_empty() => write!(f, "{error}"),
                    path => write!(f, "at {path:?}: {error}"),
                }
            }
            Invalid::Somewhere => {
                f.write_str("it does not match the schema; the schema is too complex to find out where")
            }
            Invalid::TooManySteps => f.write_str(
                "checking it takes too long or nests too deeply; simplify the schema's references to itself",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    fn compile(schema: &Value) -> Result<SchemaValidator, String> {
        SchemaValidator::compile(schema, Dialect::Linear)
    }

    /// Returns a schema in which each part applies the next one twice.
    fn doubling(parts: usize, applicator: &str, leaf: Value) -> Value {
        let part = |number: usize| json!({"$ref": format!("#/$defs/part%20{number}")});
        let both = |number: usize| json!({applicator: [part(number + 1), part(number + 1)]});
        let mut defs: Map<String, Value> =
            (0..parts).map(|number| (format!("part {number}"), both(number))).collect();
        defs.insert(format!("part {parts}"), leaf);
        json!({"$defs": defs, "allOf": [part(0)]})
    }

    fn nested(levels: usize, innermost: Value) -> Value {
        (0..levels).fold(innermost, |inner, _| json!({"x": inner}))
    }

    fn is_abandoned(schema: &Value, value: &Value) -> bool {
        match compile(schema) {
            Err(why) => why.contains("more than"),
            Ok(schema) => matches!(schema.check(value), Err(Invalid::TooManySteps)),
        }
    }

    #[test]
    fn a_part_that_is_applied_exponentially_often_is_abandoned() {
        for applicator in ["allOf", "anyOf", "oneOf"] {
            for leaf in
                [json!({"type": "integer"}), json!({"const": "x"}), json!(true), json!(false), json!({})]
            {
                let few = doubling(6, applicator, leaf.clone());
                assert!(!is_abandoned(&few, &json!("x")), "{applicator} {leaf}");
                for value in [json!("x"), json!(1)] {
                    let passes_at_once = applicator == "anyOf"
                        && compile(&json!({"allOf": [leaf]})).unwrap().check(&value).is_ok();
                    let schema = doubling(60, applicator, leaf.clone());
                    assert!(is_abandoned(&schema, &value) || passes_at_once, "{applicator} {leaf} {value}");
                }
            }
        }
        for (id, reference) in [("$anchor", "#part"), ("$id", "http://local/part")] {
            let mut schema = doubling(60, "allOf", json!(true));
            schema["$defs"]["part 9"][id] = json!(reference.trim_start_matches('#').to_owned() + "9");
            schema["$defs"]["part 8"] =
                json!({"allOf": [{"$ref": format!("{reference}9")}, {"$ref": format!("{reference}9")}]});
            assert!(
                compile(&schema).is_err() || is_abandoned(&schema, &json!(1)),
                "{reference}: {:?}",
                compile(&schema)
            );
        }
    }

    #[test]
    fn a_recursive_part_that_is_applied_twice_is_remembered_or_abandoned() {
        let twice = json!({"properties": {"x": {"$ref": "#"}}});
        let schema = compile(&json!({"allOf": [twice, twice]})).unwrap();
        assert!(schema.check(&nested(100, json!({}))).is_ok(), "each part is validated once");
        let wrong = json!({"properties": {"x": {"$ref": "#"}, "y": false}});
        let schema = compile(&json!({"allOf": [twice, twice, wrong, wrong]})).unwrap();
        let value = nested(60, json!({"y": 1}));
        assert!(schema.check(&value).is_err());
        let closed = json!({"properties": {"x": {"$ref": "#"}}, "unevaluatedProperties": false});
        let schema =
            json!({"allOf": [twice, twice, {"anyOf": [twice, twice]}], "unevaluatedProperties": closed});
        let _ = compile(&schema).unwrap().check(&nested(60, json!(1)));
    }

    #[test]
    fn a_part_that_applies_itself_to_the_same_value_ends() {
        for schema in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            json!({"$dynamicAnchor": "a", "anyOf": [{"$dynamicRef": "#a"}, {"$dynamicRef": "#a"}]}),
            json!({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": true,
                   "allOf": [{"$recursiveRef": "#"}], "unevaluatedProperties": {"$recursiveRef": "#"}}),
        ] {
            if let Ok(schema) = compile(&schema) {
                let _ = schema.check(&nested(3, json!(1)));
            }
        }
    }

    #[test]
    fn looking_for_what_was_evaluated_is_bounded() {
        let closed = (0..14).fold(
            json!({"properties": {"a": true}}),
            |inner, _| json!({"allOf": [inner], "unevaluatedProperties": {"type": "integer"}}),
        );
        let value: Map<String, Value> =
            (0..500).map(|number| (format!("p{number}"), json!(number))).collect();
        let _ = compile(&closed).unwrap().check(&Value::Object(value));
    }

    #[test]
    fn a_chain_of_references_that_would_fill_the_stack_is_refused() {
        let part = |number: usize| json!({"$ref": format!("#/$defs/{}", number + 1)});
        let mut defs: Map<String, Value> =
            (0..5_000).map(|number| (number.to_string(), part(number))).collect();
        defs.insert("5000".to_owned(), json!({"type": "integer"}));
        let why = compile(&json!({"$defs": defs, "$ref": "#/$defs/0"})).unwrap_err();
        assert!(why.contains("one inside another"), "{why}");
        let part = |number: usize| json!({"properties": {"x": {"$ref": format!("#/$defs/{}", number + 1)}}});
        let mut defs: Map<String, Value> =
            (0..3_000).map(|number| (number.to_string(), part(number))).collect();
        defs.insert("3000".to_owned(), json!({"type": "integer"}));
        let schema = compile(&json!({"$defs": defs, "$ref": "#/$defs/0"})).unwrap();
        assert!(schema.check(&nested(100, json!({}))).is_ok(), "each is applied to another value");
    }

    /// Ordinary schemas must pass without being abandoned.
    #[test]
    fn ordinary_schemas_of_large_values_are_never_abandoned() {
        let point = json!({"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"], "additionalProperties": false});
        let points = json!({"$defs": {"point": point}, "type": "array", "items": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}});
        let many: Vec<Value> = (0..50_000).map(|number| json!({"x": number, "y": 0.5})).collect();
        let variants: Vec<Value> = (0..60)
            .map(|kind| {
                json!({"type": "object", "required": ["kind", "of"], "unevaluatedProperties": false, "allOf": [{"$ref": "#/$defs/base"}],
                    "properties": {"kind": {"const": format!("k{kind}")}, "of": {"type": "array", "items": {"$ref": "#/$defs/node"}}}})
            })
            .collect();
        let tree = json!({"$defs": {"base": {"properties": {"note": {"type": "string", "pattern": "^[a-z ]*$"}}}, "node": {"oneOf": variants}},
            "$ref": "#/$defs/node"});
        let leaf = |kind: usize| json!({"kind": format!("k{kind}"), "of": [], "note": "a leaf"});
        let branch = |kind: usize, of: Vec<Value>| json!({"kind": format!("k{kind}"), "of": of});
        let wide = (0..5).fold(leaf(59), |inner, _| branch(59, vec![inner; 6]));
        let deep = (0..40).fold(leaf(59), |inner, _| branch(58, vec![leaf(3), inner]));
        let list = json!({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"allOf": [{"$ref": "#"}]}}}]});
        let bundle = json!({"$id": "http://local/order", "type": "object", "properties": {"lines": {"items": {"$ref": "line"}}},
            "$defs": {"line": {"$id": "line", "$ref": "#amount", "$defs": {"amount": {"$anchor": "amount", "type": "integer", "minimum": 1}}}}});
        let lines = json!({"lines": vec![7; 20_000]});
        let words = json!({"items": {"pattern": "^[a-z]+$", "format": "email", "enum": ["a"]}});
        for (schema, value, passes) in [
            (&points, Value::from(many), true),
            (&tree, wide, true),
            (&tree, deep, true),
            (&tree, branch(1, vec![leaf(2), json!({"kind": "k99", "of": []})]), false),
            (&list, nested(100, json!({})), true),
            (&list, nested(100, json!(1)), false),
            (&bundle, lines, true),
            (&bundle, json!({"lines": [0]}), false),
            (&words, json!(vec!["nothing"; 10_000]), false),
            (&json!({"uniqueItems": true}), json!((0..100_000).collect::<Vec<_>>()), true),
        ] {
            let schema = compile(schema).unwrap();
            match schema.check(&value).and_then(|()| schema.check_all(&value)) {
                Ok(()) => assert!(passes),
                Err(Invalid::Errors(errors)) => assert!(!passes, "{:?}", errors[0].to_string()),
                Err(other) => panic!("{other}: {:.200}", value.to_string()),
            }
        }
    }

    /// The test's thread has less stack than a guest's fiber leaves to the host.
    #[test]
    fn the_deepest_value_fits_the_stack() {
        let list = json!({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"allOf": [{"$ref": "#"}]}}}]});
        let list = compile(&list).unwrap();
        let chain = |length| {
            let next = json!({"properties": {"x": {"$ref": "#"}}});
            compile(&(0..length).fold(next, |inner, _| json!({"anyOf": [inner, false]}))).unwrap()
        };
        let (short, long) = (chain(20), chain(120));
        let check = move || {
            assert!(list.check(&nested(125, json!({}))).is_ok());
            assert!(matches!(list.check(&nested(125, json!(1))), Err(Invalid::Errors(_))));
            assert!(short.check(&nested(125, json!({}))).is_ok());
            assert!(matches!(long.check(&nested(125, json!({}))), Err(Invalid::TooManySteps)));
        };
        std::thread::Builder::new().stack_size(1 << 20).spawn(check).unwrap().join().unwrap();
    }
}
