//! What validating a value costs, found out before it is done: a JSON Schema whose parts refer to each other may apply one of
//! them to the same value exponentially often, or without end, and a validator that runs cannot be stopped.
//!
//! The schemas that a validator would apply are counted by walking as it does, up to a limit. Branches that it may skip are
//! counted too.

use serde_json::{Map, Value};

/// Schemas that may be applied to a small value: some milliseconds.
const STEPS: usize = 200_000;
/// As many more for each value inside it.
const STEPS_PER_VALUE: usize = 100;
/// Schemas that may be applied inside one another; a validator is as deep in its stack.
const MAX_DEPTH: usize = 1_000;

/// The costs of one schema.
#[derive(Clone, Debug)]
pub struct ValidationCost {
    schema: Value,
    values: usize,
    /// Without references each of its parts is applied to a value once.
    refers: bool,
}

struct Walk<'s> {
    root: &'s Value,
    left: usize,
    depth: usize,
    /// Parts that a reference may name otherwise than by their place: those with an id or an anchor.
    named: Option<Vec<&'s Value>>,
}

/// The limit was reached.
struct TooMuch;

impl ValidationCost {
    pub fn of(schema: &Value) -> Self {
        let (values, refers) = (count(schema), refers(schema));
        ValidationCost { schema: schema.clone(), values, refers }
    }

    /// Refuses a value whose validation would take too long.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        let limit = STEPS + STEPS_PER_VALUE * count(value);
        if !self.refers && self.values.saturating_mul(count(value)) <= limit {
            return Ok(());
        }
        let mut walk = Walk { root: &self.schema, left: limit, depth: 0, named: None };
        walk.apply(&self.schema, value).map_err(|TooMuch| {
            format!("checking it takes too long: its schema would apply more than {limit} schemas, or {MAX_DEPTH} inside one another")
        })
    }
}

impl<'s> Walk<'s> {
    fn spend(&mut self, steps: usize) -> Result<(), TooMuch> {
        self.left = self.left.checked_sub(steps).ok_or(TooMuch)?;
        Ok(())
    }

    fn apply(&mut self, schema: &'s Value, value: &Value) -> Result<(), TooMuch> {
        self.spend(1)?;
        let Value::Object(keywords) = schema else { return Ok(()) };
        if self.depth == MAX_DEPTH {
            return Err(TooMuch);
        }
        self.depth += 1;
        let before = self.left;
        for (keyword, argument) in keywords {
            self.apply_in_place(keyword, argument, value)?;
        }
        let in_place = before - self.left;
        let looks_again = ["unevaluatedProperties", "unevaluatedItems"];
        if looks_again.iter().any(|keyword| keywords.contains_key(*keyword)) {
            // What the others have evaluated is found out again for each property and item.
            self.spend(in_place.saturating_mul(children(value)))?;
        }
        for (keyword, argument) in keywords {
            self.apply_to_children(keyword, argument, value)?;
        }
        self.depth -= 1;
        Ok(())
    }

    /// What a keyword applies to the value itself.
    fn apply_in_place(&mut self, keyword: &str, argument: &'s Value, value: &Value) -> Result<(), TooMuch> {
        match (keyword, argument) {
            ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(reference)) => {
                let targets = self.targets(reference);
                targets.into_iter().try_for_each(|target| self.apply(target, value))
            }
            ("allOf" | "anyOf" | "oneOf", Value::Array(schemas)) => {
                schemas.iter().try_for_each(|schema| self.apply(schema, value))
            }
            ("not" | "if" | "then" | "else", schema) => self.apply(schema, value),
            ("dependentSchemas" | "dependencies", Value::Object(schemas)) => {
                let present = schemas.iter().filter(|(name, _)| value.get(name).is_some());
                present.into_iter().try_for_each(|(_, schema)| self.apply(schema, value))
            }
            ("enum", Value::Array(values)) => self.spend(values.len()),
            _ => Ok(()),
        }
    }

    /// What a keyword applies to the members and items of the value.
    fn apply_to_children(
        &mut self,
        keyword: &str,
        argument: &'s Value,
        value: &Value,
    ) -> Result<(), TooMuch> {
        let each = |walk: &mut Self, schema: &'s Value, value: &Value| match value {
            Value::Array(items) => items.iter().try_for_each(|item| walk.apply(schema, item)),
            Value::Object(members) => members.values().try_for_each(|member| walk.apply(schema, member)),
            _ => Ok(()),
        };
        match (keyword, argument, value) {
            ("properties", Value::Object(schemas), Value::Object(members)) => {
                let present = schemas.iter().filter_map(|(name, schema)| Some((schema, members.get(name)?)));
                self.spend(schemas.len().min(members.len()))?;
                present.into_iter().try_for_each(|(schema, member)| self.apply(schema, member))
            }
            ("patternProperties", Value::Object(schemas), Value::Object(_)) => {
                schemas.values().try_for_each(|schema| each(self, schema, value))
            }
            ("additionalProperties" | "unevaluatedProperties", schema, Value::Object(_)) => {
                each(self, schema, value)
            }
            ("propertyNames", schema, Value::Object(members)) => {
                members.iter().try_for_each(|_| self.apply(schema, &Value::Null))
            }
            ("items" | "prefixItems", Value::Array(schemas), Value::Array(items)) => {
                schemas.iter().zip(items).try_for_each(|(schema, item)| self.apply(schema, item))
            }
            ("items" | "additionalItems" | "unevaluatedItems" | "contains", schema, Value::Array(_)) => {
                each(self, schema, value)
            }
            _ => Ok(()),
        }
    }

    /// The parts that a reference may mean. All that have a name, if its place is not found.
    fn targets(&mut self, reference: &str) -> Vec<&'s Value> {
        let root = self.root;
        let named = self.named.get_or_insert_with(|| {
            let mut named = vec![root];
            collect_named(root, &mut named);
            named
        });
        let pointer = reference.split_once('#').map_or("", |(_, fragment)| fragment);
        let pointer = percent_decoded(pointer);
        if !pointer.is_empty() || reference == "#" {
            let found: Vec<&Value> = named.iter().filter_map(|part| part.pointer(&pointer)).collect();
            if !found.is_empty() {
                return found;
            }
        }
        named.clone()
    }
}

fn children(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.len(),
        Value::Object(members) => members.len(),
        _ => 0,
    }
}

/// The value and all values inside it.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(members) => members.values().map(count).sum(),
        _ => 0,
    }
}

fn refers(schema: &Value) -> bool {
    let is_reference = |members: &Map<String, Value>| {
        ["$ref", "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"]
            .iter()
            .any(|keyword| members.contains_key(*keyword))
    };
    match schema {
        Value::Array(items) => items.iter().any(refers),
        Value::Object(members) => is_reference(members) || members.values().any(refers),
        _ => false,
    }
}

fn collect_named<'s>(schema: &'s Value, named: &mut Vec<&'s Value>) {
    match schema {
        Value::Array(items) => items.iter().for_each(|item| collect_named(item, named)),
        Value::Object(members) => {
            for member in members.values() {
                let has = |keyword: &str| member.get(keyword).is_some();
                if ["$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"].into_iter().any(has) {
                    named.push(member);
                }
                collect_named(member, named);
            }
        }
        _ => {}
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((16 * high + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Each part applies the next one twice.
    fn doubling(parts: usize) -> Value {
        let part = |number: usize| json!({"$ref": format!("#/$defs/part%20{number}")});
        let defs = (0..parts)
            .map(|number| (format!("part {number}"), json!({"allOf": [part(number + 1), part(number + 1)]})));
        let mut defs: Map<String, Value> = defs.collect();
        defs.insert(format!("part {parts}"), json!({"type": "integer"}));
        json!({"$defs": defs, "allOf": [part(0)]})
    }

    fn nested(levels: usize) -> Value {
        (0..levels).fold(json!({}), |inner, _| json!({"x": inner}))
    }

    fn is_refused(schema: &Value, value: &Value) -> bool {
        jsonschema::validator_for(schema).expect("valid");
        ValidationCost::of(schema).check(value).is_err()
    }

    #[test]
    fn parts_that_are_applied_exponentially_often_are_refused() {
        assert!(!is_refused(&doubling(12), &json!(3)));
        assert!(is_refused(&doubling(60), &json!(3)));
        let twice = json!({"properties": {"x": {"$ref": "#"}}});
        let schema = json!({"allOf": [twice, twice]});
        assert!(!is_refused(&schema, &nested(10)));
        assert!(is_refused(&schema, &nested(60)));
        let named = json!({"$defs": {"a": {"$anchor": "here", "anyOf": [twice, twice]}}, "$ref": "#here"});
        assert!(is_refused(&named, &nested(60)), "a reference by name");
        let again = json!({"$defs": {"a": {"$id": "http://local/a", "allOf": [twice, twice]}}, "$ref": "http://local/a"});
        assert!(is_refused(&again, &nested(60)), "a reference to a part with an id");
    }

    #[test]
    fn a_part_that_applies_itself_to_the_same_value_is_refused() {
        assert!(is_refused(&json!({"allOf": [{"$ref": "#"}]}), &json!(1)));
        assert!(is_refused(
            &json!({"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
            &json!(1)
        ));
    }

    #[test]
    fn what_was_evaluated_is_looked_for_again_by_each_property() {
        let closed = (0..12).fold(
            json!({"properties": {"a": true}}),
            |inner, _| json!({"allOf": [inner], "unevaluatedProperties": {"type": "integer"}}),
        );
        let value: Map<String, Value> = (0..20).map(|number| (format!("p{number}"), json!(number))).collect();
        assert!(is_refused(&closed, &Value::Object(value)));
    }

    #[test]
    fn large_values_of_ordinary_schemas_pass() {
        let point = json!({"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"], "additionalProperties": false});
        let schema = json!({"$defs": {"point": point}, "type": "array", "items": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}});
        let points: Vec<Value> = (0..50_000).map(|number| json!({"x": number, "y": 0.5})).collect();
        assert!(!is_refused(&schema, &Value::Array(points)));
    }

    /// On the smallest stack of the threads that validate.
    #[test]
    fn the_deepest_value_that_passes_is_validated_without_harm() {
        let list = json!({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"allOf": [{"$ref": "#"}]}}}]});
        let validator = jsonschema::validator_for(&list).expect("valid");
        let value = nested(120);
        ValidationCost::of(&list).check(&value).expect("not too deep");
        let validate = move || {
            assert!(validator.is_valid(&value));
            let mut wrong = json!({"x": 1});
            for _ in 0..119 {
                wrong = json!({"x": wrong});
            }
            assert!(validator.validate(&wrong).is_err());
        };
        std::thread::Builder::new()
            .stack_size(2 << 20)
            .spawn(validate)
            .expect("started")
            .join()
            .expect("no harm");
    }
}
