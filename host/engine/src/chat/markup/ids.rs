//! The ids of calls as templates expect them.
//!
//! Invariant: an id that is shown to a model follows from the conversation alone, so it is the same each time, and two
//! calls of a conversation have different ones.

use std::collections::HashMap;
use std::hash::Hasher;

use crate::chat::message::{ChatMessage, Role};

/// The form of the ids of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chat) enum CallIds {
    /// The id that the call has.
    Own,
    /// `functions.NAME:NUMBER`, counted over the conversation.
    Kimi,
    /// Nine letters and digits.
    Nine,
}

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

impl CallIds {
    /// Returns the id that the template gets for each call, by the message and the index of the call, and for each
    /// message that answers one.
    pub(in crate::chat) fn of(self, messages: &[&ChatMessage]) -> Shown {
        let mut shown = Shown { calls: HashMap::new(), answers: HashMap::new() };
        let (mut latest, mut taken, mut count) = (HashMap::new(), HashMap::new(), 0usize);
        for (at, message) in messages.iter().enumerate() {
            for (index, call) in message.tool_calls.iter().enumerate() {
                let id = match self {
                    CallIds::Own => call.id.clone(),
                    CallIds::Kimi => format!("functions.{}:{count}", call.name),
                    CallIds::Nine => nine(&call.id, &mut taken),
                };
                count += 1;
                latest.insert(call.id.as_str(), id.clone());
                shown.calls.insert((at, index), id);
            }
            if message.role == Role::Tool
                && let Some(asked) = &message.tool_call_id
            {
                let id = latest.get(asked.as_str()).cloned().unwrap_or_else(|| match self {
                    CallIds::Nine => nine(asked, &mut taken),
                    CallIds::Own | CallIds::Kimi => asked.clone(),
                });
                shown.answers.insert(at, id);
            }
        }
        shown
    }
}

/// The ids that a template gets.
pub(in crate::chat) struct Shown {
    calls: HashMap<(usize, usize), String>,
    answers: HashMap<usize, String>,
}

impl Shown {
    pub(in crate::chat) fn call(&self, message: usize, index: usize) -> &str {
        self.calls.get(&(message, index)).map_or("", String::as_str)
    }

    pub(in crate::chat) fn answer(&self, message: usize) -> Option<&str> {
        self.answers.get(&message).map(String::as_str)
    }
}

/// Returns an id of nine letters and digits, which no other id of the conversation has. An id that has the form is kept.
fn nine(id: &str, taken: &mut HashMap<String, String>) -> String {
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        taken.insert(id.to_owned(), id.to_owned());
        return id.to_owned();
    }
    for salt in 0u64.. {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325 ^ salt);
        hash.write(id.as_bytes());
        let mut rest = hash.finish();
        let mut short = String::with_capacity(9);
        for _ in 0..9 {
            short.push(char::from(DIGITS[(rest % 62) as usize]));
            rest /= 62;
        }
        if taken.entry(short.clone()).or_insert_with(|| id.to_owned()) == id {
            return short;
        }
    }
    unreachable!("one of 2^64 salts gives a free id")
}

/// The hash FNV-1a, whose results are the same everywhere.
struct Fnv(u64);

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ToolCall;

    fn calling(ids: &[&str]) -> ChatMessage {
        let call = |id: &&str| ToolCall { id: (*id).to_owned(), name: "look".into(), arguments: "{}".into() };
        ChatMessage { tool_calls: ids.iter().map(call).collect(), ..ChatMessage::assistant("") }
    }

    #[test]
    fn foreign_ids_are_rewritten_for_the_markup_in_calls_and_results() {
        let messages = [
            calling(&["call_a", "toolu_b"]),
            ChatMessage::tool("toolu_b", "2"),
            ChatMessage::tool("call_a", "1"),
            calling(&["call_a", "abcDEF123"]),
            ChatMessage::tool("call_a", "3"),
        ];
        let messages: Vec<&ChatMessage> = messages.iter().collect();
        let kimi = CallIds::Kimi.of(&messages);
        assert_eq!(
            (kimi.call(0, 0), kimi.call(0, 1), kimi.call(3, 0)),
            ("functions.look:0", "functions.look:1", "functions.look:2")
        );
        assert_eq!(
            (kimi.answer(1), kimi.answer(2), kimi.answer(4)),
            (Some("functions.look:1"), Some("functions.look:0"), Some("functions.look:2"))
        );
        let nine = CallIds::Nine.of(&messages);
        let ids = [nine.call(0, 0), nine.call(0, 1), nine.call(3, 1)];
        assert!(
            ids.iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())),
            "{ids:?}"
        );
        assert_eq!(ids[2], "abcDEF123");
        assert!(ids[0] != ids[1]);
        assert_eq!((nine.answer(1), nine.answer(2)), (Some(ids[1]), Some(ids[0])));
        assert_eq!(nine.call(0, 0), CallIds::Nine.of(&messages).call(0, 0), "the same each time");
    }
}
