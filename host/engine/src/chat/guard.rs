//! Protection of text from people and tools: what it contains never becomes a special token.

use std::borrow::Cow;

use serde_json::Value;
use skep_model::Tokenizer;
use uuid::Uuid;

use super::dialect::Dialect;
use super::markup::{CLOSE, OPEN};
use super::render::Rendering;

/// Replaces the text of special tokens in messages by placeholders that nobody can guess, and restores it once
/// the template has produced its text.
pub(super) struct Guard {
    specials: Vec<String>,
    /// Whether any special token begins with the byte.
    first: [bool; 256],
    nonce: String,
    replaced: Vec<String>,
}

/// A private-use character. No vocabulary contains it as a part of words, and no template looks for it.
pub(super) const EDGE: char = '\u{F8F0}';

impl Guard {
    /// Creates a guard for the special tokens of a vocabulary, and for the tokens of a dialect that are written by its
    /// template alone.
    pub(super) fn new(tokenizer: &Tokenizer, dialect: &Dialect) -> Self {
        // With Hermes, messages may contain the markers: every system message that describes tools does.
        let is_open = |text: &str| dialect.markup.is_hermes() && (text == OPEN || text == CLOSE);
        let marks = dialect.own_tokens().into_iter().filter(|text| tokenizer.token_id(text).is_some());
        let mut specials: Vec<String> = (0..tokenizer.vocabulary_size() as u32)
            .filter(|&id| tokenizer.is_special(id))
            .filter_map(|id| tokenizer.token_text(id))
            .chain(marks)
            .filter(|text| !text.is_empty() && !is_open(text))
            .map(str::to_owned)
            .collect();
        // A tokenizer finds the longer one of two special tokens that begin at the same position.
        specials.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let mut first = [false; 256];
        for text in &specials {
            first[usize::from(text.as_bytes()[0])] = true;
        }
        Guard { specials, first, nonce: Uuid::now_v7().simple().to_string(), replaced: Vec::new() }
    }

    /// Returns a mark with this number, which nobody can guess either.
    pub(super) fn mark(&self, number: usize) -> String {
        format!("{EDGE}{}#{number}{EDGE}", self.nonce)
    }

    pub(super) fn protect<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        let mut out = String::new();
        let (mut copied, mut at) = (0, 0);
        while at < text.len() {
            let found = self.first[usize::from(text.as_bytes()[at])]
                .then(|| {
                    self.specials.iter().find(|special| text.as_bytes()[at..].starts_with(special.as_bytes()))
                })
                .flatten();
            let Some(special) = found else {
                at += 1;
                continue;
            };
            out.push_str(&text[copied..at]);
            out.push_str(&format!("{EDGE}{}:{}{EDGE}", self.nonce, self.replaced.len()));
            at += special.len();
            copied = at;
            self.replaced.push(special.clone());
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[copied..]);
        Cow::Owned(out)
    }

    pub(super) fn protect_json(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(safe) = self.protect(text) {
                    *text = safe;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.protect_json(item)),
            Value::Object(map) => {
                let entries = std::mem::take(map);
                for (key, mut value) in entries {
                    self.protect_json(&mut value);
                    map.insert(self.protect(&key).into_owned(), value);
                }
            }
            _ => {}
        }
    }

    pub(super) fn restore(&self, text: &str) -> Rendering {
        if self.replaced.is_empty() {
            return Rendering { text: text.to_owned(), literals: Vec::new() };
        }
        let open = format!("{EDGE}{}:", self.nonce);
        let (mut out, mut literals) = (String::with_capacity(text.len()), Vec::new());
        let mut rest = text;
        while let Some(at) = rest.find(&open) {
            let (before, after) = rest.split_at(at);
            let after = &after[open.len()..];
            let Some(end) = after.find(EDGE) else { break };
            let special = after[..end].parse::<usize>().ok().and_then(|index| self.replaced.get(index));
            let Some(special) = special else { break };
            out.push_str(before);
            literals.push(out.len()..out.len() + special.len());
            out.push_str(special);
            rest = &after[end + EDGE.len_utf8()..];
        }
        out.push_str(rest);
        Rendering { text: out, literals }
    }
}
