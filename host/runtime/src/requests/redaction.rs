//! Takes secrets out of the texts of a request: the values of the vault in any encoding, and API keys, bearer tokens and
//! private keys by their form.
//!
//! A text is cut to its limit only afterwards, and the end of a text that was cut before is dropped, so that no part of a
//! secret remains at the cut.

use super::{
    LoggedBody, LoggedMessage,
    recording::{AnswerPart, MARGIN_BYTES, RawBody, floor},
};
use skep_outbound::Redactor;
use std::borrow::Cow;

/// The text that replaces a key or a token.
const REDACTED: &str = "[redacted]";
/// Prefixes of keys and tokens, each with the least number of characters that follow it.
const PREFIXES: [(&str, usize); 22] = [
    ("skep_", 64),
    ("sk-", 16),
    ("sk_live_", 16),
    ("sk_test_", 16),
    ("rk_live_", 16),
    ("ghp_", 30),
    ("gho_", 30),
    ("ghu_", 30),
    ("ghs_", 30),
    ("ghr_", 30),
    ("github_pat_", 30),
    ("glpat-", 16),
    ("xoxb-", 16),
    ("xoxp-", 16),
    ("xoxa-", 16),
    ("AKIA", 16),
    ("ASIA", 16),
    ("AIza", 30),
    ("hf_", 30),
    ("npm_", 30),
    ("whsec_", 16),
    ("pypi-", 30),
];
/// Schemes of the header `Authorization`, in lower case, before which a token stands.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];
/// Names of headers and fields with a key, in lower case.
const NAMES: [&str; 9] = [
    "authorization",
    "x-api-key",
    "api-key",
    "api_key",
    "apikey",
    "access_token",
    "access-token",
    "secret_key",
    "client_secret",
];
const KEY_BEGIN: &str = "-----BEGIN ";
const KEY_END: &str = "PRIVATE KEY-----";

/// Returns the texts without secrets and within their limits.
pub(super) fn redacted(raw: RawBody, secrets: &Redactor) -> LoggedBody {
    let RawBody { mut body, limit, answer_cut, .. } = raw;
    let messages = body.messages.iter_mut().chain([&mut body.answer]);
    for text in messages.flat_map(LoggedMessage::texts_mut).chain(&mut body.error) {
        redact(text, secrets);
    }
    if body.request_truncated
        && let Some(cut) = body.messages.first_mut()
        && let Some(text) = cut.texts_mut().rfind(|text| !text.is_empty())
    {
        drop_margin(text);
    }
    match answer_cut {
        Some(AnswerPart::Text) => drop_margin(&mut body.answer.text),
        Some(AnswerPart::Reasoning) => body.answer.reasoning.iter_mut().for_each(drop_margin),
        Some(AnswerPart::Call(index)) => {
            body.answer.calls.get_mut(index).into_iter().for_each(|call| drop_margin(&mut call.arguments));
        }
        None => {}
    }
    let (mut room, mut fitting) = (limit, 0);
    for message in body.messages.iter_mut().rev() {
        if room == 0 {
            break;
        }
        body.request_truncated |= fit(message, &mut room);
        fitting += 1;
    }
    let omitted = body.messages.len() - fitting;
    body.messages.drain(..omitted);
    body.omitted_messages += omitted as u64;
    room = limit;
    body.answer_truncated |= fit(&mut body.answer, &mut room);
    body
}

/// Cuts the texts of a message to the room that is left, and returns whether one was longer.
fn fit(message: &mut LoggedMessage, room: &mut usize) -> bool {
    let mut is_cut = false;
    for text in message.texts_mut() {
        let end = floor(text, *room);
        is_cut |= end < text.len();
        *room = if end < text.len() { 0 } else { *room - end };
        text.truncate(end);
    }
    is_cut
}

/// Drops the end of a text that was cut while it was recorded, which may hold a part of a secret.
fn drop_margin(text: &mut String) {
    text.truncate(floor(text, text.len().saturating_sub(MARGIN_BYTES)));
}

fn redact(text: &mut String, secrets: &Redactor) {
    if let Cow::Owned(redacted) = secrets.redacted(text.as_bytes()) {
        *text = String::from_utf8_lossy(&redacted).into_owned();
    }
    if let Some(redacted) = without_tokens(text) {
        *text = redacted;
    }
}

/// Returns the text with each key, token and private key replaced, or `None` if there is none.
fn without_tokens(text: &str) -> Option<String> {
    let mut redacted = String::new();
    let (mut from, mut at) = (0, 0);
    while at < text.len() {
        match secret_at(text, at) {
            Some((begin, end)) => {
                redacted.push_str(&text[from..begin]);
                redacted.push_str(REDACTED);
                (from, at) = (end, end);
            }
            None => at = next_word(text, at),
        }
    }
    (from > 0).then(|| redacted + &text[from..])
}

/// Returns the range of a secret that begins at a position, or after the name or the scheme there.
fn secret_at(text: &str, at: usize) -> Option<(usize, usize)> {
    let rest = &text[at..];
    if rest.starts_with(KEY_BEGIN) {
        let end = rest.find(KEY_END)? + KEY_END.len();
        // The second mark ends the key; without it, the rest of the text is a part of it.
        let last = rest[end..].find(KEY_END).map_or(rest.len(), |more| end + more + KEY_END.len());
        return rest[..end].lines().count().eq(&1).then_some((at, at + last));
    }
    let word = word(rest);
    let is_token = PREFIXES
        .iter()
        .any(|(prefix, least)| word.strip_prefix(prefix).is_some_and(|rest| rest.len() >= *least));
    if is_token || is_jwt(word) {
        return Some((at, at + word.len()));
    }
    let lower = word.to_ascii_lowercase();
    if SCHEMES.contains(&&*lower) {
        let begin = word.len() + spaces(&rest[word.len()..])?;
        let token = credential(&rest[begin..]);
        let is_token = token.len() >= 16 || token.len() >= 8 && token.bytes().any(|b| b.is_ascii_digit());
        return is_token.then_some((at + begin, at + begin + token.len()));
    }
    if !NAMES.contains(&&*lower) {
        return None;
    }
    let after = &rest[word.len()..];
    let begin = after.find(|c: char| !matches!(c, ' ' | '\t' | '"' | '\'' | '\\' | ':' | '='))?;
    if !after[..begin].contains([':', '=']) {
        return None;
    }
    let (mut begin, mut value) = (word.len() + begin, credential(&after[begin..]));
    if SCHEMES.contains(&&*value.to_ascii_lowercase()) {
        begin += value.len() + spaces(&rest[begin + value.len()..])?;
        value = credential(&rest[begin..]);
    }
    (value.len() >= 4).then_some((at + begin, at + begin + value.len()))
}

/// Returns the longest beginning of the text that a key or a token with a known form may consist of. A dot at its end ends
/// a sentence.
fn word(text: &str) -> &str {
    beginning(text, is_of_word).trim_end_matches('.')
}

/// Returns the same for a credential of any form, which may be in base64.
fn credential(text: &str) -> &str {
    beginning(text, |byte| is_of_word(byte) || byte == b'/' || byte == b'=').trim_end_matches('.')
}

fn beginning(text: &str, is_part: impl Fn(u8) -> bool) -> &str {
    &text[..text.bytes().position(|byte| !is_part(byte)).unwrap_or(text.len())]
}

/// Returns the beginning of the next word.
fn next_word(text: &str, at: usize) -> usize {
    let end = at + beginning(&text[at..], is_of_word).len();
    let gap = text.as_bytes()[end..].iter().position(|byte| is_of_word(*byte));
    gap.map_or(text.len(), |gap| end + gap)
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~+".contains(&byte)
}

/// Returns the number of spaces at the beginning of the text, if there are any.
fn spaces(text: &str) -> Option<usize> {
    let spaces = text.len() - text.trim_start_matches([' ', '\t']).len();
    (spaces > 0).then_some(spaces)
}

/// Returns whether a word is a JSON Web Token: three parts in base64, of which the first is a JSON object.
fn is_jwt(word: &str) -> bool {
    let mut parts = word.split('.');
    let is_header = parts.next().is_some_and(|header| header.starts_with("eyJ") && header.len() >= 12);
    is_header && parts.next().is_some_and(|claims| claims.len() >= 8) && parts.next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::{Observation, PromptMessage};

    const VALUE: &str = "tangerine-8491-lamp";

    fn secrets() -> Redactor {
        Redactor::new([(VALUE, "[secret weather]")])
    }

    fn clean(text: &str) -> String {
        let mut text = text.to_owned();
        redact(&mut text, &secrets());
        text
    }

    fn raw(limit: usize, texts: &[&str]) -> RawBody {
        let said = texts.iter().rev().map(|text| PromptMessage {
            role: "user",
            text: (*text).into(),
            reasoning: None,
            name: None,
            call_id: None,
            calls: Vec::new(),
        });
        RawBody::new(limit, &mut said.collect::<Vec<_>>().into_iter())
    }

    #[test]
    fn values_of_the_vault_are_found_in_any_encoding() {
        let text = format!(
            "it is {VALUE}, in a URL tangerine%2D8491%2Dlamp, in base64 dGFuZ2VyaW5lLTg0OTEtbGFtcA=="
        );
        let redacted = clean(&text);
        assert!(!redacted.contains("tangerine") && !redacted.contains("dGFuZ2VyaW5l"), "{redacted}");
        assert!(redacted.starts_with("it is [secret weather], in a URL [secret weather]"), "{redacted}");
    }

    #[test]
    fn keys_and_tokens_are_found_by_their_format() {
        let own = format!("skep_{}", "0f".repeat(32));
        let jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl";
        let pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----";
        for (text, expected) in [
            (format!("my key is {own}, ok?"), "my key is [redacted], ok?"),
            ("Authorization: Bearer abc123def".into(), "Authorization: Bearer [redacted]"),
            ("authorization: Basic dXNlcjpwYXNz".into(), "authorization: Basic [redacted]"),
            ("{\"Authorization\": \"Bearer short\"}".into(), "{\"Authorization\": \"Bearer [redacted]\"}"),
            ("curl -H 'X-Api-Key: hunter2' x".into(), "curl -H 'X-Api-Key: [redacted]' x"),
            ("?api_key=1234abcd&x=1".into(), "?api_key=[redacted]&x=1"),
            ("{\"api_key\":\"1234abcd\"}".into(), "{\"api_key\":\"[redacted]\"}"),
            ("use bearer A1B2C3D4E5 there".into(), "use bearer [redacted] there"),
            ("sk-proj-abcdefghijklmnop12 and".into(), "[redacted] and"),
            (format!("token={jwt}."), "token=[redacted]."),
            ("https://x.example/sk-abcdefghijklmnop1234/y".into(), "https://x.example/[redacted]/y"),
            ("My key is sk-abcdefghijklmnop1234.".into(), "My key is [redacted]."),
            (format!("a\n{pem}\nb"), "a\n[redacted]\nb"),
            ("-----BEGIN PRIVATE KEY-----\nMIIE".into(), "[redacted]"),
            (format!("({jwt})"), "([redacted])"),
        ] {
            assert_eq!(clean(&text), expected);
        }
        for plain in [
            "the bearer of bad news",
            "Bearer certificates are old",
            "sk-short",
            "the api key: what is it?",
            "the task-force of 2024",
            "-----BEGIN CERTIFICATE-----\nMIIE",
        ] {
            assert_eq!(clean(plain), plain);
        }
    }

    #[test]
    fn a_body_keeps_the_newest_messages_and_says_what_it_lacks() {
        let (old, new) = ("o".repeat(60), "n".repeat(60));
        let body = redacted(raw(1_000, &[&old, &new]), &secrets());
        assert_eq!((body.messages.len(), body.omitted_messages, body.request_truncated), (2, 0, false));
        let body = redacted(raw(80, &["first", &old, &new]), &secrets());
        assert_eq!((body.messages.len(), body.omitted_messages, body.request_truncated), (2, 1, true));
        assert_eq!((body.messages[0].text.len(), &body.messages[1].text), (20, &new));
        let mut answered = raw(10, &["hi"]);
        for delta in ["12345678", "90abc"] {
            answered.add(Observation::Text(delta));
        }
        let body = redacted(answered, &secrets());
        assert_eq!(
            (&*body.answer.text, body.answer_truncated, body.request_truncated),
            ("1234567890", true, false)
        );
    }

    #[test]
    fn no_part_of_a_secret_remains_at_a_cut() {
        // Cuts while recording fall on every position of a value.
        for shift in 0..VALUE.len() {
            let text = format!("{}{VALUE} and more", "x".repeat(100 + MARGIN_BYTES - shift));
            let body = redacted(raw(100, &[&text]), &secrets());
            let said = &body.messages[0].text;
            assert!(body.request_truncated && said.chars().all(|c| c == 'x'), "{shift}: {said}");
            let mut answered = raw(100, &[]);
            answered.add(Observation::Text(&text));
            let body = redacted(answered, &secrets());
            assert!(body.answer_truncated && body.answer.text.chars().all(|c| c == 'x'), "{shift}");
            // Cuts at the limit, where values before it have become shorter texts.
            let text = format!("{}{}", format!("{VALUE} ").repeat(1_700), "y");
            let body = redacted(raw(100, &[&text[shift..]]), &secrets());
            let said = &body.messages[0].text;
            assert!(said.len() <= 100 && !said.contains("tanger"), "{said}");
        }
    }
}
