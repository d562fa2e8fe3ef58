//! Calls that are written as a JSON object with a name and arguments.

use serde_json::Value;

use super::json_scan::JsonScan;

/// The reason that the beginning of an object cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// More text may complete it.
    Partial,
    Other,
}

/// Reads `{"name": "…"` with any white space between. Returns the name and the text after it.
pub(super) fn read_name(body: &str) -> Result<(String, &str), Unread> {
    let rest = skip(body, &["{", "\"name\"", ":"])?.trim_start();
    if rest.is_empty() {
        return Err(Unread::Partial);
    }
    if !rest.starts_with('"') {
        return Err(Unread::Other);
    }
    let mut scan = JsonScan::default();
    // The scan treats the string as a whole value: it ends where the scan leaves the string state.
    let end = rest.char_indices().skip(1).find_map(|(at, c)| scan.push_in_string(c).then_some(at + 1));
    let (name, rest) = rest.split_at(end.ok_or(Unread::Partial)?);
    let name = serde_json::from_str(name).map_err(|_| Unread::Other)?;
    Ok((name, rest))
}

/// Skips texts with any white space before each, and returns what follows them.
pub(super) fn skip<'a>(text: &'a str, wanted: &[&str]) -> Result<&'a str, Unread> {
    let mut rest = text;
    for want in wanted {
        rest = rest.trim_start();
        match rest.strip_prefix(want) {
            Some(after) => rest = after,
            None if want.starts_with(rest) => return Err(Unread::Partial),
            None => return Err(Unread::Other),
        }
    }
    Ok(rest)
}

/// Returns whether the beginning of an object has the keys of a call's name and of its arguments, in any order.
pub(super) fn begins_call(body: &str) -> bool {
    // The keys under which the open objects and lists stand, and the string that was read last.
    let (mut open, mut key, mut last) = (Vec::new(), String::new(), String::new());
    let (mut string, mut is_escaped) = (None::<String>, false);
    let (mut has_name, mut has_arguments) = (false, false);
    for c in body.chars() {
        if let Some(mut text) = string.take() {
            match c {
                '"' if !is_escaped => last = text,
                c => {
                    is_escaped = c == '\\' && !is_escaped;
                    text.push(c);
                    string = Some(text);
                }
            }
            continue;
        }
        match c {
            '"' => string = Some(String::new()),
            '{' | '[' => open.push(std::mem::take(&mut key)),
            '}' | ']' => {
                open.pop();
            }
            ':' => {
                let is_own = open.len() == 1 || open.len() == 2 && open[1] == "function";
                has_name |= is_own && matches!(last.as_str(), "name" | "function");
                has_arguments |= is_own && matches!(last.as_str(), "arguments" | "parameters");
                key = std::mem::take(&mut last);
            }
            ',' => key.clear(),
            _ => {}
        }
    }
    has_name && has_arguments
}

/// Returns the JSON of arguments, which models write as an object, as the text of one, or as `null`.
pub(super) fn arguments(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("{}".to_owned()),
        Value::String(text) => {
            serde_json::from_str::<Value>(text).ok().filter(Value::is_object)?;
            Some(text.clone())
        }
        value => value.is_object().then(|| value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::begins_call;

    #[test]
    fn the_beginning_of_a_call_has_a_name_and_arguments() {
        for (body, begins) in [
            ("{\"arguments\": {\"a\": 1}, \"name\": \"f", true),
            ("{\"name\": \"f\", \"parameters\": [", true),
            ("{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {", true),
            ("{\"function\": \"f\", \"arguments\": {", true),
            ("{\"name\": \"f\", \"arguments\"", false),
            ("{\"name\": \"Ann\", \"age\": 4", false),
            ("{\"people\": [{\"name\": \"Ann\", \"arguments\": 3", false),
            ("{\"name\": \"a \\\" arguments: \\\"arguments\\\": \"", false),
            ("no object: \"name\": \"arguments\":", false),
            ("", false),
        ] {
            assert_eq!(begins_call(body), begins, "{body}");
        }
    }
}
