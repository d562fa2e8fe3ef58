//! The change that the constraint made to an answer, and the reason for it.
//!
//! The rule that is measured: if the free answer is valid and in the accepted set, the constrained answer has
//! the same text and the same tokens, except for white space at its ends.

use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::answer::CALL_OPENS;
use super::cases::Case;
use super::conforms::conforms;
use super::ours::{Pair, Produced};
use super::spelling::{Flaw, flaw};

const CALL_CLOSES: &str = "</tool_call>";
const BETWEEN_CALLS: &str = "\n";

/// Relation of a constrained answer to the free one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// The free answer does not have the requested form, so the constraint has to change it.
    FreeIsInvalid,
    None,
    /// The same text in other tokens.
    Tokens,
    /// The free answer is valid, but outside the accepted set: its properties are in another order than in
    /// the schema.
    KeyOrder,
    /// It is outside because of escapes that it does not need.
    Escape,
    /// It is outside because of white space.
    WhiteSpace,
    /// It is outside because of the markup around its calls, or of text beside them.
    Markup,
    /// The free answer is in the accepted set, but the constraint changed it.
    Text,
}

/// Returns the change that the constraint made to the answer of a case.
pub fn compare(case: &Case, pair: &Pair) -> Change {
    let Pair { free, constrained } = pair;
    if !is_valid(case, free) {
        return Change::FreeIsInvalid;
    }
    if free.raw.trim() == constrained.raw.trim() {
        let same = trimmed(&free.pieces) == trimmed(&constrained.pieces);
        return if same { Change::None } else { Change::Tokens };
    }
    outside(case, free).unwrap_or(Change::Text)
}

/// Returns whether a free answer has the requested form.
fn is_valid(case: &Case, free: &Produced) -> bool {
    if !free.answer.ended {
        return false;
    }
    if let Some(schema) = &case.family.schema {
        return serde_json::from_str::<Value>(free.raw.trim()).is_ok_and(|value| conforms(&value, schema));
    }
    if free.answer.calls.is_empty() {
        return !case.must_call() && !free.raw.contains(CALL_OPENS);
    }
    let says_more = !free.answer.text.trim().is_empty();
    if free.answer.text.contains(CALL_OPENS) || case.must_call() && says_more {
        return false;
    }
    free.answer.calls.iter().filter_map(|call| call.read()).all(|call| {
        let tool = case.family.tools.iter().find(|tool| tool.name == call.name);
        tool.is_some_and(|tool| conforms(&call.arguments, &tool.parameters))
    })
}

/// Returns why a valid answer is outside the accepted set.
fn outside(case: &Case, free: &Produced) -> Option<Change> {
    let text = free.raw.trim();
    if let Some(schema) = &case.family.schema {
        return flaw(text, schema).map(change);
    }
    if free.answer.calls.is_empty() {
        return None;
    }
    let mut flaws = Vec::new();
    let mut rest = text.find(CALL_OPENS).map_or("", |at| &text[at..]);
    for index in 0..free.answer.calls.len() {
        let opens = if index > 0 { BETWEEN_CALLS } else { "" };
        let Some((written, after)) = rest.strip_prefix(opens).and_then(split_call) else {
            return Some(Change::Markup);
        };
        rest = after;
        let call: Value = serde_json::from_str(written).unwrap_or_default();
        let tool = case.family.tools.iter().find(|tool| call["name"] == tool.name.as_str());
        let (Some(tool), Some(2), true) =
            (tool, call.as_object().map(Map::len), call["arguments"].is_object())
        else {
            return Some(Change::Markup);
        };
        let schema = json!({"properties": {"name": {"const": tool.name}, "arguments": tool.parameters}});
        flaws.extend(flaw(written, &schema));
    }
    if !rest.is_empty() {
        return Some(Change::Markup);
    }
    flaws.into_iter().min().map(change)
}

/// Returns the text between the markers that `text` begins with, and the text after them.
fn split_call(text: &str) -> Option<(&str, &str)> {
    let body = text.strip_prefix(CALL_OPENS)?;
    let mut values = serde_json::Deserializer::from_str(body).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    let end = values.byte_offset();
    let closes = end + body[end..].find(CALL_CLOSES)?;
    let is_blank = body[end..closes].trim().is_empty();
    is_blank.then(|| (&body[..closes], &body[closes + CALL_CLOSES.len()..]))
}

fn change(flaw: Flaw) -> Change {
    match flaw {
        Flaw::WhiteSpace => Change::WhiteSpace,
        Flaw::Escape => Change::Escape,
        Flaw::KeyOrder => Change::KeyOrder,
    }
}

/// Returns the pieces without white space at the ends of the whole text.
fn trimmed(pieces: &[Vec<u8>]) -> Vec<&[u8]> {
    let mut pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    while let Some(first) = pieces.first_mut() {
        *first = first.trim_ascii_start();
        if !first.is_empty() {
            break;
        }
        pieces.remove(0);
    }
    while let Some(last) = pieces.last_mut() {
        *last = last.trim_ascii_end();
        if !last.is_empty() {
            break;
        }
        pieces.pop();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::super::answer::{ModelAnswer, WrittenCall};
    use super::super::cases::{AskedSpelling, Group, of_group};
    use super::*;

    /// Makes an answer of these tokens, with the calls that a parser would find in it.
    fn produced(pieces: &[&str], calls: &[(&str, &str)]) -> Produced {
        let raw = pieces.concat();
        let text = if calls.is_empty() { raw.clone() } else { String::new() };
        let calls = calls.iter().map(|(name, arguments)| WrittenCall {
            name: (*name).to_owned(),
            arguments: (*arguments).to_owned(),
        });
        let answer = ModelAnswer { text, calls: calls.collect(), ended: true, ms: 1.0, tokens: 1 };
        let pieces = pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect();
        Produced { answer, raw, pieces, prompt_tokens: 1 }
    }

    fn case(group: Group) -> Case {
        of_group(group, 1, AskedSpelling::Own).expect("the cases can be read").remove(0)
    }

    fn check(case: &Case, free: Produced, constrained: Produced, expected: Change) {
        let raw = free.raw.clone();
        assert_eq!(compare(case, &Pair { free, constrained }), expected, "{raw}");
    }

    #[test]
    fn a_changed_object_has_a_reason() {
        let case = case(Group::Extraction);
        let other = || produced(&["{\"name\": \"B\", \"age\": 1, \"city\": \"C\"}"], &[]);
        for (free, expected) in [
            ("\n{\"name\": \"B\", \"age\": 1, \"city\": \"C\"} ", Change::None),
            ("{\"name\": \"A\", \"age\": 1, \"city\": \"C\"}", Change::Text),
            ("{\"name\": \"A\",\n\n \"age\": 1, \"city\": \"C\"}", Change::WhiteSpace),
            ("{\"n\\u0061me\": \"A\", \"age\": 1, \"city\": \"C\"}", Change::Escape),
            ("{\"age\": 1, \"name\": \"A\", \"city\": \"C\"}", Change::KeyOrder),
            ("{\"name\": \"A\", \"age\": \"1\", \"city\": \"C\"}", Change::FreeIsInvalid),
            ("Here you are: {}", Change::FreeIsInvalid),
        ] {
            check(&case, produced(&[free], &[]), other(), expected);
        }
        let split = produced(&[" ", "{\"name\": \"B\", \"age\"", ": 1, \"city\": \"C\"}"], &[]);
        check(&case, split, other(), Change::Tokens);
        let mut cut = other();
        cut.answer.ended = false;
        check(&case, cut, other(), Change::FreeIsInvalid);
    }

    #[test]
    fn changed_calls_have_a_reason() {
        let case = case(Group::Choice);
        let arguments = "{\"room\":\"hall\",\"on\":true}";
        let other = || produced(&["<tool_call>…"], &[]);
        let call = |head: &str, tail: &str, name: &str, arguments: &str| {
            produced(&[&format!("{head}{arguments}{tail}")], &[(name, arguments)])
        };
        let (head, tail) = ("<tool_call>\n{\"name\": \"set_light\", \"arguments\": ", "}\n</tool_call>");
        check(&case, call(head, tail, "set_light", arguments), other(), Change::Text);
        let turned = "{\"on\": true, \"room\": \"hall\"}";
        check(&case, call(head, tail, "set_light", turned), other(), Change::KeyOrder);
        let compact = "<tool_call>{\"name\":\"set_light\",\"arguments\":";
        check(&case, call(compact, "}</tool_call>", "set_light", arguments), other(), Change::Text);
        check(&case, call(compact, "}\n\n</tool_call>", "set_light", arguments), other(), Change::WhiteSpace);
        let more = ", \"id\": 1}</tool_call>";
        check(&case, call(compact, more, "set_light", arguments), other(), Change::Markup);
        check(&case, call(head, "}\n</tool_call>\nDone.", "set_light", arguments), other(), Change::Markup);
        check(&case, call(head, tail, "set_lamp", arguments), other(), Change::FreeIsInvalid);
        check(&case, call(head, tail, "set_light", "{\"on\": 1}"), other(), Change::FreeIsInvalid);
        check(&case, produced(&["I will."], &[]), other(), Change::FreeIsInvalid);
    }

    #[test]
    fn plain_text_is_valid_where_no_call_is_required() {
        let case = case(Group::Refusals);
        check(&case, produced(&["Sorry", "."], &[]), produced(&["Sorry", ".", "\n"], &[]), Change::None);
        check(&case, produced(&["Sorry."], &[]), produced(&["No."], &[]), Change::Text);
        check(&case, produced(&["<tool_call>{"], &[]), produced(&["No."], &[]), Change::FreeIsInvalid);
    }
}
