//! Topics of events, such as `order.paid`, and patterns that match them.
//!
//! A topic consists of parts separated by dots. In a pattern, `*` matches one part, or all
//! remaining parts if it is the last one. The host's own topics start with `skep.`; a pattern
//! matches them only if it starts with `skep.` too.

use crate::text::excerpt;
use serde::{Deserialize, Serialize};
use std::fmt;

const MAX_BYTES: usize = 128;
/// The first part of topics that only the host publishes.
const HOST: &str = "skep";

/// The topics that a subscriber receives, or that an agent may publish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TopicPattern(String);

impl TopicPattern {
    /// Parses a pattern of at most 128 bytes. The error is a message for its author.
    pub fn new(pattern: &str) -> Result<Self, String> {
        let parts = |part: &str| part == "*" || is_part(part);
        if pattern.len() > MAX_BYTES || !pattern.split('.').all(parts) {
            let shown = excerpt(pattern);
            return Err(format!(
                "{shown:?} is not a valid topic pattern; write a topic in which * may replace a part, such as order.*"
            ));
        }
        Ok(TopicPattern(pattern.to_owned()))
    }

    /// Returns the pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn matches(&self, topic: &str) -> bool {
        if is_host(topic) && !is_host(&self.0) {
            return false;
        }
        let mut parts = topic.split('.');
        let mut patterns = self.0.split('.').peekable();
        while let Some(pattern) = patterns.next() {
            let Some(part) = parts.next() else { return false };
            match pattern {
                "*" if patterns.peek().is_none() => return true,
                "*" => {}
                pattern if pattern == part => {}
                _ => return false,
            }
        }
        parts.next().is_none()
    }
}

/// Checks the syntax of a topic.
pub(crate) fn check(topic: &str) -> Result<(), String> {
    if topic.len() > MAX_BYTES || !topic.split('.').all(is_part) {
        let shown = excerpt(topic);
        return Err(format!(
            "{shown:?} is not a valid topic; a topic has up to {MAX_BYTES} bytes, in parts of letters, digits, - and _ \
             with dots between them, such as order.paid"
        ));
    }
    Ok(())
}

/// Returns whether only the host may publish a topic. These are its own topics and those of
/// batches, which everyone may subscribe to.
pub(crate) fn is_reserved(topic: &str) -> bool {
    is_host(topic) || topic.starts_with("cf.workersAi.")
}

/// Returns whether a topic is one of the host's own.
pub(crate) fn is_host(topic: &str) -> bool {
    topic.split('.').next() == Some(HOST)
}

fn is_part(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

impl fmt::Display for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for TopicPattern {
    type Error = String;
    fn try_from(pattern: String) -> Result<Self, String> {
        Self::new(&pattern)
    }
}

impl From<TopicPattern> for String {
    fn from(pattern: TopicPattern) -> Self {
        pattern.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_one_part_or_all_remaining_parts() {
        for (pattern, topic, matches) in [
            ("order.paid", "order.paid", true),
            ("order.paid", "order.paid.late", false),
            ("order.*", "order.paid", true),
            ("order.*", "order.paid.late", true),
            ("order.*", "order", false),
            ("order.*", "orders.paid", false),
            ("*.paid", "order.paid", true),
            ("*.paid", "order.item.paid", false),
            ("*", "anything.at.all", true),
            ("*", "skep.turn.done", false),
            ("*.turn.*", "skep.turn.done", false),
            ("skep.*", "skep.turn.done", true),
        ] {
            assert_eq!(
                TopicPattern::new(pattern).expect("valid").matches(topic),
                matches,
                "{pattern} {topic}"
            );
        }
    }

    #[test]
    fn invalid_topics_are_rejected_with_an_example() {
        for bad in ["", ".", "a.", "a b", "a.*", "ä", &"x".repeat(129)] {
            assert!(check(bad).expect_err(bad).contains("such as order.paid"));
        }
        for bad in ["", "a.", "or*", "a..b", "**"] {
            assert!(TopicPattern::new(bad).expect_err(bad).contains("such as order.*"));
        }
        check("com.example.order_paid-2").expect("valid");
    }
}
