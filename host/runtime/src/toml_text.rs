//! Parses `agent.toml` and `skep.toml` with uniform error messages: the line, the section and
//! field, the mistake, and for a misspelled field the likely intended one.

use crate::text::nearest_name;
use serde::de::DeserializeOwned;

/// Starts of messages that already name the field.
const ABOUT_FIELDS: [&str; 3] = ["unknown field", "missing field", "duplicate"];

/// Parses the text as a `T`. The error describes the mistake in one line.
pub fn parse_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| explain(text, error.message(), error.span().map(|span| span.start)))
}

fn explain(text: &str, message: &str, start: Option<usize>) -> String {
    let message = message.replace('\n', "; ");
    let message = suggestion(&message).unwrap_or(message);
    let Some(before) = start.and_then(|start| text.get(..start)) else {
        return message;
    };
    let line = before.matches('\n').count() + 1;
    match field_at(before) {
        Some(field) if !ABOUT_FIELDS.iter().any(|about| message.starts_with(about)) => {
            format!("line {line}: {field}: {message}")
        }
        _ => format!("line {line}: {message}"),
    }
}

/// Returns the message about an unknown field with the likely intended one first, and then the list of all, which
/// may be long. `None` if no known field resembles the unknown one.
fn suggestion(message: &str) -> Option<String> {
    let name = nearest_field(message)?;
    let (unknown, known) = message.split_once(", ")?;
    Some(format!("{unknown}; did you mean `{name}`? ({known})"))
}

/// Returns the section and field whose value starts after this text, such as `[engine] replicas`.
fn field_at(before: &str) -> Option<String> {
    // Otherwise the mistake is in a table or a field, not in a value.
    before.trim_end().ends_with(['=', '[', ',']).then_some(())?;
    let mut lines = before.rsplit('\n').map(str::trim);
    let mut key = None;
    // A list value may start several lines before the mistake in it.
    for line in lines.by_ref() {
        key = line.split_once('=').map(|(key, _)| key.trim());
        if key.is_some() || is_header(line) {
            break;
        }
    }
    let key = key.filter(|key| !key.is_empty())?;
    match lines.find(|line| is_header(line)) {
        Some(header) => Some(format!("{header} {key}")),
        None => Some(key.to_owned()),
    }
}

fn is_header(line: &str) -> bool {
    line.starts_with('[') && line.ends_with(']') && !line.contains([',', '=', '{'])
}

/// Returns the known field that resembles the unknown one, parsed from serde's "unknown field `x`,
/// expected one of `a`, `b`".
fn nearest_field(message: &str) -> Option<&str> {
    let mut quoted = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    nearest_name(unknown, quoted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct File {
        ai: Option<u8>,
        engine: Engine,
        named: BTreeMap<String, Engine>,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Engine {
        replicas: u8,
        kv_tokens: u8,
        names: Vec<u8>,
    }

    fn wrong(text: &str) -> String {
        parse_toml::<File>(text).expect_err(text)
    }

    #[test]
    fn an_invalid_value_is_reported_with_line_section_and_field() {
        for (text, expected) in [
            ("ai = -1", "line 1: ai: invalid value"),
            ("ai = 1\n[engine]\n\nreplicas = \"x\"", "line 4: [engine] replicas: invalid type"),
            ("[named.\"a b\"]\nreplicas=1\n  kv_tokens = 999", "line 3: [named.\"a b\"] kv_tokens: "),
            ("[engine]\nnames = [\n  1,\n  \"x\",\n]", "line 4: [engine] names: invalid type"),
            ("engine = { replicas = \"x\" }", "line 1: engine: invalid type"),
        ] {
            let message = wrong(text);
            assert!(message.starts_with(expected), "{text}\n→ {message}");
            assert!(!message.contains('\n'), "{message:?}");
        }
    }

    #[test]
    fn a_misspelled_field_suggests_only_a_similar_one() {
        for (unknown, meant) in
            [("replica", "replicas"), ("kv_token", "kv_tokens"), ("nmaes", "names"), ("kv", "")]
        {
            let message = wrong(&format!("ai = 1\n[engine]\n{unknown} = 1"));
            let (said, list) = match meant {
                "" => (
                    format!("line 3: unknown field `{unknown}`, "),
                    "expected one of `replicas`, `kv_tokens`, `names`",
                ),
                meant => (
                    format!("line 3: unknown field `{unknown}`; did you mean `{meant}`? "),
                    "(expected one of `replicas`, `kv_tokens`, `names`)",
                ),
            };
            assert_eq!(message, format!("{said}{list}"));
        }
        for unrelated in ["foo", "a", "xylophones_everywhere"] {
            let message = wrong(&format!("{unrelated} = 1"));
            assert!(!message.contains("did you mean"), "{message}");
        }
        let message = wrong("eng = 1");
        assert!(message.contains("`eng`; did you mean `engine`? (expected one of"), "{message}");
    }
}
