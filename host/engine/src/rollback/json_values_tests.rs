//! Tests of the values that are found in an output, however its bytes are cut.

use serde_json::Value;

use super::json_values::*;
use super::opener::Opener;
use crate::constraint::{PathStep, UnenforcedValue};

fn opener() -> Opener {
    Opener { start: "<tool_call>".to_owned(), text: "<tool_call>".to_owned(), ..Opener::default() }
}

fn wanted(tool: Option<&str>, path: &[PathStep]) -> UnenforcedValue {
    UnenforcedValue { tool: tool.map(str::to_owned), path: path.to_vec(), schema: Value::Bool(true) }
}

fn property(name: &str) -> PathStep {
    PathStep::Property(name.to_string())
}

/// Returns the completed values in order, each with its check, place and text.
fn values(wanted: &[UnenforcedValue], output: &str, piece: usize) -> Vec<(Check, String, String)> {
    let layout = match wanted.iter().partition::<Vec<_>, _>(|value| value.tool.is_none()) {
        (documents, calls) if documents.is_empty() == calls.is_empty() => Layout::DocumentOrCalls,
        (documents, _) if documents.is_empty() => Layout::Calls,
        _ => Layout::Document,
    };
    values_after(&opener(), layout, wanted, output, piece)
}

fn values_after(
    opener: &Opener,
    layout: Layout,
    wanted: &[UnenforcedValue],
    output: &str,
    piece: usize,
) -> Vec<(Check, String, String)> {
    let mut following = JsonValues::new(layout, opener);
    let mut complete = Vec::new();
    let ends = (0..output.len()).step_by(piece).skip(1).chain([output.len()]);
    for end in ends {
        complete.extend(following.follow(&output.as_bytes()[..end], wanted).0);
    }
    complete.extend(following.finish(output.as_bytes()));
    assert!(!following.is_within());
    let shown = |Complete { found, end }: Complete| {
        (found.check, found.pointer, output[found.start..end].to_string())
    };
    complete.into_iter().map(shown).collect()
}

fn check(wanted: &[UnenforcedValue], output: &str, expected: &[(usize, &str, &str)]) {
    let expected: Vec<_> =
        expected.iter().map(|(entry, pointer, text)| (Check::Schema(*entry), *pointer, *text)).collect();
    check_all(wanted, output, &expected);
}

fn check_all(wanted: &[UnenforcedValue], output: &str, expected: &[(Check, &str, &str)]) {
    for piece in 1..=output.len() {
        let found = values(wanted, output, piece);
        let found: Vec<_> =
            found.iter().map(|(e, pointer, text)| (*e, pointer.as_str(), text.as_str())).collect();
        assert_eq!(found, expected, "{output} in chunks of {piece}");
    }
}

#[test]
fn numbers_that_may_be_too_large_are_found_from_their_exponent_on() {
    let large = |pointer, text| (Check::FiniteNumber, pointer, text);
    let document = r#"{"a": [1.5, -1e5, true, "1e999"], "b": 2E+400 , "e": false}"#;
    check_all(&[], document, &[large("/a/1", "-1e5"), large("/b", "2E+400")]);
    check_all(&[], "1e999", &[large("", "1e999")]);
    let long = "7".repeat(MAX_PLAIN_NUMBER_BYTES + 1);
    check_all(&[], &format!("[{long},{}]", &long[1..]), &[large("/0", &long)]);
    let output = r#"12e5 <tool_call>{"name": "x", "arguments": {"a": 1e9}}</tool_call>"#;
    check_all(&[wanted(Some("x"), &[property("b")])], output, &[large("/a", "1e9")]);
    let both = [wanted(None, &[property("a")])];
    check_all(&both, r#"{"a": 1e1}"#, &[(Check::Schema(0), "/a", "1e1"), large("/a", "1e1")]);
}

#[test]
fn values_of_a_document_are_found_by_their_path() {
    let document = r#" {"a": [1, {"b": "x,\"]"}, [ ]], "c/d" : {"e":-2.53 }, "f": true}"#;
    for (path, expected) in [
        (vec![property("f")], vec![("/f", "true")]),
        (vec![property("c/d"), property("e")], vec![("/c~1d/e", "-2.53")]),
        (vec![property("a"), PathStep::Item(1), property("b")], vec![("/a/1/b", r#""x,\"]""#)]),
        (
            vec![property("a"), PathStep::AnyItem],
            vec![("/a/0", "1"), ("/a/1", r#"{"b": "x,\"]"}"#), ("/a/2", "[ ]")],
        ),
        (vec![property("missing")], vec![]),
    ] {
        let expected: Vec<_> = expected.into_iter().map(|(pointer, text)| (0, pointer, text)).collect();
        check(&[wanted(None, &path)], document, &expected);
    }
    let every = [wanted(None, &[]), wanted(None, &[PathStep::AnyProperty])];
    check(&every, r#"{"a":1,"b":"}"}"#, &[(1, "/a", "1"), (1, "/b", "\"}\""), (0, "", r#"{"a":1,"b":"}"}"#)]);
}

#[test]
fn a_number_at_the_end_of_the_output_is_complete() {
    check(&[wanted(None, &[])], "-12.5", &[(0, "", "-12.5")]);
    check(&[wanted(None, &[])], "\"a\" ", &[(0, "", "\"a\"")]);
}

#[test]
fn arguments_are_those_of_the_named_tool() {
    let wanted = [wanted(Some("x"), &[property("a")]), wanted(Some("y"), &[])];
    let output = concat!(
        "Let me {\"a\": 1} see <tool_call>\n{\"name\": \"x\", \"arguments\": {\"a\": [\"<tool_call>\"]}}\n",
        "</tool_call>\n<tool_call>{\"name\":\"y\",\"arguments\":{\"a\":2}}</tool_call>",
    );
    check(&wanted, output, &[(0, "/a", "[\"<tool_call>\"]"), (1, "", "{\"a\":2}")]);
}

#[test]
fn an_output_is_a_document_or_calls() {
    let both = [wanted(None, &[property("a")]), wanted(Some("x"), &[property("a")])];
    check(&both, r#" {"a": 1, "b": "<tool_call>"}"#, &[(0, "/a", "1")]);
    check(&both, r#"<tool_call>{"name": "x", "arguments": {"a": 2}}"#, &[(1, "/a", "2")]);
    check(&both, r#"<tool_call>{"name": "z", "arguments": {"a": 2}}"#, &[]);
}

#[test]
fn arguments_after_a_name_are_an_object_of_their_own() {
    let opener =
        Opener { start: "[CALLS]".into(), text: "<call>".into(), names_tool: true, ..Opener::default() };
    let wanted = [wanted(Some("x.y"), &[property("a")])];
    let output = "[CALLS]<call>x.y:3<args>{\"a\": {\"b\": 1}, \"c\": \"<call>\"}<call>z:4<args>{\"a\": 2}";
    for piece in 7..output.len() {
        for layout in [Layout::Calls, Layout::DocumentOrCalls] {
            let found = values_after(&opener, layout, &wanted, output, piece);
            assert_eq!(found, [(Check::Schema(0), "/a".to_owned(), "{\"b\": 1}".to_owned())], "{piece}");
        }
    }
    let document = [self::wanted(None, &[PathStep::Item(0)])];
    let found = values_after(&opener, Layout::DocumentOrCalls, &document, "[1, 2]", 1);
    assert_eq!(found, [(Check::Schema(0), "/0".to_owned(), "1".to_owned())]);
}
