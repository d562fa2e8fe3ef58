//! Drops the oldest messages of a chat that is too long for its model.
//!
//! Invariant: system messages stay, the last message stays, and a call stays or goes with its results.

use std::borrow::Cow;

use super::message::{ChatMessage, Role};
use crate::EngineError;

/// The part of the context, and the maximum number of tokens, that dropping messages leaves to an answer without
/// a limit of its own.
const ANSWER_PART: usize = 4;
const MAX_ANSWER_TOKENS: usize = 2048;
/// Number of units from which on a template may refuse to begin, one after another.
const MAX_REFUSED: usize = 8;

/// Returns the messages without the oldest ones, if all of them and the answer need more than `limit` tokens.
/// `tokens` measures messages. If the newest messages do not fit either, these are returned.
pub(crate) fn fitting(
    messages: &[ChatMessage],
    (limit, max_tokens): (usize, Option<usize>),
    tokens: impl Fn(&[ChatMessage]) -> Result<usize, EngineError>,
) -> Result<Cow<'_, [ChatMessage]>, EngineError> {
    let fits = |messages: &[ChatMessage], answer: usize| match tokens(messages) {
        Ok(prompt) => Ok(prompt.saturating_add(answer) <= limit),
        Err(EngineError::ContextOverflow { .. }) => Ok(false),
        Err(error) => Err(error),
    };
    if fits(messages, max_tokens.unwrap_or(1))? {
        return Ok(Cow::Borrowed(messages));
    }
    let answer = max_tokens.unwrap_or((limit / ANSWER_PART).min(MAX_ANSWER_TOKENS));
    let units = units(messages);
    let from = |first: usize| {
        let kept = messages.iter().zip(&units).filter(|(_, unit)| unit.is_none_or(|unit| unit >= first));
        kept.map(|(message, _)| message.clone()).collect::<Vec<_>>()
    };
    let Some(last) = units.iter().flatten().copied().max() else { return Ok(Cow::Borrowed(messages)) };
    // A template may refuse messages that begin in the middle of an exchange, but not those of one of the next units.
    let fits_from = |first: usize| {
        let mut found = (first..=last).take(MAX_REFUSED).map(|unit| (unit, fits(&from(unit), answer)));
        found
            .find(|(_, fits)| fits.is_ok())
            .filter(|(_, fits)| matches!(fits, Ok(true)))
            .map(|(unit, _)| unit)
    };
    let (mut low, mut high, mut found) = (1.min(last), last, last);
    while low < high {
        let middle = low.midpoint(high);
        match fits_from(middle) {
            Some(unit) => (high, found) = (middle, unit),
            None => low = middle + 1,
        }
    }
    Ok(Cow::Owned(from(found)))
}

/// Numbers the parts of a conversation that can only be dropped together. A system message has no number.
fn units(messages: &[ChatMessage]) -> Vec<Option<usize>> {
    let mut units: Vec<Option<usize>> = Vec::with_capacity(messages.len());
    let mut next = 0;
    for (index, message) in messages.iter().enumerate() {
        let call = match message.role {
            Role::System => {
                units.push(None);
                continue;
            }
            Role::Tool => messages[..index].iter().rposition(|earlier| calls(earlier, message)),
            Role::User | Role::Assistant => None,
        };
        match call.and_then(|call| Some((call, units[call]?))) {
            // Everything since the call belongs to it, too.
            Some((call, unit)) => {
                units[call..].iter_mut().flatten().for_each(|later| *later = unit);
                units.push(Some(unit));
                next = unit + 1;
            }
            None => {
                units.push(Some(next));
                next += 1;
            }
        }
    }
    units
}

fn calls(message: &ChatMessage, result: &ChatMessage) -> bool {
    message.tool_calls.iter().any(|call| Some(&call.id) == result.tool_call_id.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ToolCall;

    fn call(id: &str) -> ChatMessage {
        let call = ToolCall { id: id.into(), name: "look".into(), arguments: "{}".into() };
        ChatMessage { tool_calls: vec![call], ..ChatMessage::assistant("") }
    }

    fn result(id: &str) -> ChatMessage {
        ChatMessage::tool(id, "found")
    }

    fn conversation() -> Vec<ChatMessage> {
        vec![
            ChatMessage::system("rules"),
            ChatMessage::user("one"),
            ChatMessage::assistant("first"),
            ChatMessage::user("two"),
            call("a"),
            result("a"),
            ChatMessage::assistant("second"),
            ChatMessage::user("three"),
        ]
    }

    /// Keeps what fits into this many messages, each of which is a token.
    fn kept(messages: &[ChatMessage], limit: usize) -> Vec<String> {
        let found = fitting(messages, (limit, Some(0)), |messages| Ok(messages.len())).unwrap();
        found
            .iter()
            .map(|message| match message.tool_calls.first() {
                Some(call) => format!("call {}", call.id),
                None => message.content.clone(),
            })
            .collect()
    }

    #[test]
    fn the_oldest_messages_go_until_the_rest_fits() {
        let all = conversation();
        assert_eq!(kept(&all, 8).len(), 8);
        assert_eq!(kept(&all, 7)[..2], ["rules", "first"]);
        assert_eq!(kept(&all, 6)[..2], ["rules", "two"]);
        // The call goes with its result.
        assert_eq!(kept(&all, 5), ["rules", "call a", "found", "second", "three"]);
        for limit in [4, 3] {
            assert_eq!(kept(&all, limit), ["rules", "second", "three"]);
        }
        // The last message stays, even if it does not fit.
        for limit in [2, 1, 0] {
            assert_eq!(kept(&all, limit), ["rules", "three"]);
        }
    }

    #[test]
    fn messages_between_a_call_and_its_result_are_dropped_with_them() {
        let messages = vec![
            call("a"),
            call("b"),
            ChatMessage::user("wait"),
            result("b"),
            result("a"),
            ChatMessage::user("end"),
        ];
        assert_eq!(units(&messages), [Some(0), Some(0), Some(0), Some(0), Some(0), Some(1)]);
        assert_eq!(kept(&messages, 5), ["end"]);
    }

    #[test]
    fn the_answer_has_room_only_where_something_had_to_go() {
        let messages: Vec<_> = (0..100).map(|index| ChatMessage::user(index.to_string())).collect();
        let count = |limit: usize, max_tokens| {
            fitting(&messages, (limit, max_tokens), |messages| Ok(messages.len())).unwrap().len()
        };
        assert_eq!(count(101, None), 100);
        assert_eq!(count(100, None), 75);
        assert_eq!((count(100, Some(10)), count(110, Some(10))), (90, 100));
    }

    #[test]
    fn messages_that_a_template_rejects_are_skipped() {
        let messages = conversation();
        let begins_with_user = |messages: &[ChatMessage]| match messages[1].role {
            Role::User => Ok(messages.len()),
            _ => Err(EngineError::invalid("messages", "the first one must be of the user".to_owned())),
        };
        let kept = fitting(&messages, (7, Some(0)), begins_with_user).unwrap();
        assert_eq!((kept.len(), kept[1].content.as_str()), (6, "two"));
    }
}
