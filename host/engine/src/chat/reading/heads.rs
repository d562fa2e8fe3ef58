//! The beginnings of calls: what stands between the text that begins a call and its arguments.
//!
//! Invariant: a head is decided with the character that completes it, so it is read the same in every chunking.

use serde_json::Value;

use crate::chat::call_object::{self, Unread, read_name, skip};
use crate::chat::markup::HeadForm;

/// Maximum size of a head. It is read again for each of its characters, so it must stay short.
const MAX_HEAD_BYTES: usize = 512;

const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";

/// The result of reading a head.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    Partial,
    /// The arguments begin with the last character, which is a brace.
    Arguments {
        name: String,
        in_object: bool,
    },
    /// Arguments begin with the last character, but the tool has no name.
    Nameless,
    /// A list of objects begins after the last character.
    List,
    /// Parameters come next; `rest` is the part of them that was read.
    Parameters {
        name: String,
        rest: String,
    },
    Other,
}

pub(super) fn read_head(form: HeadForm, body: &str) -> Head {
    if body.len() > MAX_HEAD_BYTES {
        return Head::Other;
    }
    match form {
        HeadForm::Kimi => kimi(body),
        HeadForm::DeepSeek => deepseek(body),
        HeadForm::Mistral => mistral(body),
        HeadForm::Object => object(body),
        HeadForm::Function => function(body),
        HeadForm::Pairs => pairs(body),
        HeadForm::Invoke => invoke(body),
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 64 && text.chars().all(is_name_char)
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn arguments(name: &str) -> Head {
    match is_name(name) {
        true => Head::Arguments { name: name.to_owned(), in_object: false },
        false => Head::Other,
    }
}

/// Reads `functions.NAME:NUMBER`, without the prefix or the number too, or a bare number.
fn kimi(body: &str) -> Head {
    let (id, marker) = body.split_at(body.find(['<', '{']).unwrap_or(body.len()));
    let id = id.trim();
    if id.chars().any(|c| !is_name_char(c) && c != ':') {
        return Head::Other;
    }
    if !body.ends_with('{') {
        return match KIMI_ARGUMENTS.starts_with(marker.trim_end()) {
            true => Head::Partial,
            false => Head::Other,
        };
    }
    if !["", KIMI_ARGUMENTS].contains(&marker[..marker.len() - 1].trim_end()) {
        return Head::Other;
    }
    let id = id.strip_prefix("functions.").unwrap_or(id);
    if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()) {
        return Head::Nameless;
    }
    let name = match id.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => id,
    };
    arguments(name)
}

fn deepseek(body: &str) -> Head {
    let Some((first, second)) = body.split_once(DEEPSEEK_SEPARATOR) else {
        let name = &body[..body.find('<').unwrap_or(body.len())];
        let possible =
            name.trim().chars().all(is_name_char) && DEEPSEEK_SEPARATOR.starts_with(&body[name.len()..]);
        return if possible { Head::Partial } else { Head::Other };
    };
    let Some(second) = second.strip_suffix('{') else {
        let possible = second.chars().all(|c| is_name_char(c) || c == '`' || c.is_whitespace());
        return if possible { Head::Partial } else { Head::Other };
    };
    let unfenced = second.trim().trim_end_matches("json").trim_end_matches("```").trim();
    match unfenced.is_empty() {
        true => arguments(first.trim()),
        false => arguments(unfenced),
    }
}

fn mistral(body: &str) -> Head {
    let start = body.trim_start();
    if start.starts_with('{') {
        return object(start);
    }
    if start == "[" {
        return Head::List;
    }
    let (name, markers) = start.split_at(start.find(['[', '{', ' ', '\n']).unwrap_or(start.len()));
    if !name.is_empty() && !is_name(name) {
        return Head::Other;
    }
    let Some(markers) = markers.strip_suffix('{') else {
        let markers = markers.trim_start();
        let id =
            markers.strip_prefix("[CALL_ID]").map_or(markers, |rest| rest.trim_start_matches(is_name_char));
        let possible = "[CALL_ID]".starts_with(markers) || "[ARGS]".starts_with(id.trim_end());
        return if possible { Head::Partial } else { Head::Other };
    };
    match markers.trim().is_empty() || markers.trim_end().ends_with("[ARGS]") {
        true => arguments(name),
        false => Head::Other,
    }
}

/// Reads `{"name": "…", "arguments": {` with any white space between; `parameters` may stand for `arguments`.
fn object(body: &str) -> Head {
    let (name, rest) = match read_name(body).and_then(|(name, rest)| Ok((name, skip(rest, &[","])?))) {
        Ok((name, rest)) => (name, rest.trim_start()),
        Err(Unread::Partial) => return Head::Partial,
        Err(Unread::Other) => return Head::Other,
    };
    for key in ["\"arguments\"", "\"parameters\""] {
        if key.starts_with(rest) {
            return Head::Partial;
        }
        let Some(after) = rest.strip_prefix(key) else { continue };
        return match after.trim_start().strip_prefix(':').map(str::trim_start) {
            Some("{") => Head::Arguments { name, in_object: true },
            Some("") => Head::Partial,
            None if after.trim().is_empty() => Head::Partial,
            _ => Head::Other,
        };
    }
    Head::Other
}

fn function(body: &str) -> Head {
    match body.strip_suffix('>') {
        Some(name) if is_name(name.trim_matches('"')) => {
            Head::Parameters { name: name.trim_matches('"').to_owned(), rest: String::new() }
        }
        None if body.trim_start_matches('"').chars().all(|c| is_name_char(c) || c == '"') => Head::Partial,
        _ => Head::Other,
    }
}

fn pairs(body: &str) -> Head {
    let start = body.trim_start();
    let Some(end) = start.find(['\n', '<']) else {
        return match start.chars().all(is_name_char) {
            true => Head::Partial,
            false => Head::Other,
        };
    };
    let (name, rest) = start.split_at(end);
    match is_name(name) {
        true => Head::Parameters { name: name.to_owned(), rest: rest.to_owned() },
        false => Head::Other,
    }
}

fn invoke(body: &str) -> Head {
    match body.strip_suffix("\">") {
        Some(name) if is_name(name) => Head::Parameters { name: name.to_owned(), rest: String::new() },
        None if body.trim_end_matches('"').chars().all(is_name_char) => Head::Partial,
        _ => Head::Other,
    }
}

/// Parses the name and arguments of an object in any order and spelling that models use.
pub(super) fn read_object(body: &str) -> Option<(String, String)> {
    let Value::Object(call) = serde_json::from_str::<Value>(body.trim()).ok()? else { return None };
    let call = match call.get("function") {
        Some(Value::Object(function)) => function,
        _ => &call,
    };
    let name = call.get("name").or_else(|| call.get("function"))?.as_str()?.to_owned();
    let arguments = call_object::arguments(call.get("arguments").or_else(|| call.get("parameters"))?)?;
    Some((name, arguments))
}
