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
