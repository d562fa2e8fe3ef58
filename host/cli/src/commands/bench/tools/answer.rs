//! The answer to a case, and whether it is right.
//!
//! Invariant: an answer is judged by its values. The spelling of JSON and the order of calls do not matter.

use serde::Serialize;
use serde_json::Value;

use super::cases::{Call, Case, Right};
use super::conforms::same;

/// Start of a tool call in a text.
pub const CALL_OPENS: &str = "<tool_call>";

/// The answer in one column.
#[derive(Debug, Clone, Serialize)]
pub struct ModelAnswer {
    /// The text without its calls.
    pub text: String,
    pub calls: Vec<WrittenCall>,
    /// Whether the model ended the answer, and not a limit.
    pub ended: bool,
    /// Time from the request to the end, with the prompt in the cache.
    pub ms: f64,
    pub tokens: u64,
}

/// A call as the model wrote it.
#[derive(Debug, Clone, Serialize)]
pub struct WrittenCall {
    pub name: String,
    pub arguments: String,
}

impl WrittenCall {
    /// Parses the arguments; `None` if they are not JSON.
    pub fn read(&self) -> Option<Call> {
        let arguments = serde_json::from_str(&self.arguments).ok()?;
        Some(Call { name: self.name.clone(), arguments })
    }
}

impl Case {
    /// Returns whether `answer` is right.
    pub fn is_answered_by(&self, answer: &ModelAnswer) -> bool {
        match &self.right {
            Right::Json(right) => {
                let value = serde_json::from_str::<Value>(answer.text.trim());
                answer.calls.is_empty() && value.is_ok_and(|value| same(&value, right))
            }
            Right::Calls(right) if right.is_empty() => {
                let text = answer.text.trim();
                answer.calls.is_empty() && !text.is_empty() && !text.contains(CALL_OPENS)
            }
            Right::Calls(right) => are_same(&answer.calls, right),
            Right::Text(right) => answer.calls.is_empty() && answer.text.trim() == right,
        }
    }
}

/// Returns whether the calls are the right ones, in any order.
fn are_same(written: &[WrittenCall], right: &[Call]) -> bool {
    let mut left: Vec<&Call> = right.iter().collect();
    let each_is_right = written.iter().all(|call| {
        let Some(call) = call.read() else { return false };
        let place =
            left.iter().position(|right| right.name == call.name && same(&right.arguments, &call.arguments));
        place.map(|place| left.swap_remove(place)).is_some()
    });
    each_is_right && left.is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::cases::{AskedSpelling, Group, of_group};
    use super::*;
    use serde_json::json;

    fn answer(text: &str, calls: &[(&str, &str)]) -> ModelAnswer {
        let calls = calls.iter().map(|(name, arguments)| WrittenCall {
            name: (*name).to_owned(),
            arguments: (*arguments).to_owned(),
        });
        ModelAnswer { text: text.to_owned(), calls: calls.collect(), ended: true, ms: 1.0, tokens: 1 }
    }

    fn case(right: Right) -> Case {
        let cases = of_group(Group::Refusals, 1, AskedSpelling::Own).expect("the cases can be read");
        Case { right, ..cases[0].clone() }
    }

    #[test]
    fn an_object_is_right_by_its_values() {
        let case = case(Right::Json(json!({"a": 1, "b": "x"})));
        for right in ["{\"b\": \"x\",\n\"a\": 1.0}", "\n{\"a\":1,\"b\":\"\\u0078\"} "] {
            assert!(case.is_answered_by(&answer(right, &[])), "{right}");
        }
        for wrong in ["{\"a\": 1}", "Here: {\"a\": 1, \"b\": \"x\"}", "{\"a\": 1, \"b\": \"x\"", ""] {
            assert!(!case.is_answered_by(&answer(wrong, &[])), "{wrong}");
        }
    }

    #[test]
    fn calls_are_right_in_any_order_and_each_once() {
        let call = |name: &str, arguments: Value| Call { name: name.to_owned(), arguments };
        let case = case(Right::Calls(vec![call("f", json!({"a": 1})), call("g", json!({}))]));
        assert!(case.is_answered_by(&answer("", &[("g", "{}"), ("f", "{ \"a\":1}")])));
        for wrong in [
            [("f", "{\"a\": 1}")].as_slice(),
            &[("f", "{\"a\": 1}"), ("f", "{\"a\": 1}")],
            &[("f", "{\"a\": 2}"), ("g", "{}")],
            &[("f", "{\"a\": 1}"), ("g", "{}"), ("g", "{}")],
            &[("f", "{\"a\": 1"), ("g", "{}")],
            &[],
        ] {
            assert!(!case.is_answered_by(&answer("", wrong)), "{wrong:?}");
        }
    }

    #[test]
    fn a_refusal_is_text_without_a_call_or_its_markup() {
        let case = case(Right::Calls(Vec::new()));
        assert!(case.is_answered_by(&answer("I have no tool for that.", &[])));
        for (text, calls) in [("", [].as_slice()), ("No.", &[("f", "{}")]), ("<tool_call>{", &[])] {
            assert!(!case.is_answered_by(&answer(text, calls)), "{text}");
        }
    }
}
