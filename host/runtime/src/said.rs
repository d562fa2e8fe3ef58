//! Looks for words in what was said in a stored conversation.
//!
//! Messages of people, models and tools count, with the calls that models make. System messages, which all sessions of an agent
//! share, do not, and neither do reasoning and images.

use serde::Deserialize;
use skep_engine::chat::Role;
use std::{borrow::Cow, fmt::Write as _};

/// Maximum length of a text whose words are searched for.
const MAX_TEXT_BYTES: usize = 256;
/// Maximum number of its words.
const MAX_WORDS: usize = 16;
/// Number of characters of an excerpt before the first word.
const CHARS_BEFORE: usize = 40;
/// Number of characters of an excerpt from the first word on.
const CHARS_AFTER: usize = 120;

/// The words of a search, in lower case. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchWords(Vec<String>);

/// A message that has the words of a search.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Said {
    /// Number of the message in its conversation, from 1.
    pub(crate) number: u64,
    pub(crate) role: Role,
    /// The part of its text around the first word.
    pub(crate) excerpt: String,
}

/// A stored conversation without its tokens.
#[derive(Deserialize)]
struct SearchedConversation<'a> {
    #[serde(borrow)]
    transcript: SearchedTranscript<'a>,
}

#[derive(Deserialize)]
struct SearchedTranscript<'a> {
    #[serde(borrow)]
    messages: Vec<SearchedMessage<'a>>,
}

#[derive(Deserialize)]
struct SearchedMessage<'a> {
    role: Role,
    #[serde(borrow)]
    content: Cow<'a, str>,
    #[serde(borrow, default)]
    tool_calls: Vec<SearchedCall<'a>>,
}

#[derive(Deserialize)]
struct SearchedCall<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    arguments: Cow<'a, str>,
}

impl SearchWords {
    /// Returns the words of a text, which white space separates. The error says what is wrong with the text.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(format!("it has {} bytes; at most {MAX_TEXT_BYTES} are allowed", text.len()));
        }
        let words: Vec<String> = text.split_whitespace().map(lowercase).collect();
        match words.len() {
            0 => Err("it has no words; give at least one".to_owned()),
            1..=MAX_WORDS => Ok(SearchWords(words)),
            count => Err(format!("it has {count} words; at most {MAX_WORDS} are allowed")),
        }
    }

    /// Returns where the first word is in a text in lower case, if the text has all words.
    fn find(&self, lower: &str) -> Option<usize> {
        let first = lower.find(self.0[0].as_str())?;
        let has_others = self.0[1..].iter().all(|word| lower.contains(word.as_str()));
        has_others.then_some(first)
    }
}

impl SearchedMessage<'_> {
    /// Returns the text that is searched, if the message counts.
    fn text(&self) -> Option<Cow<'_, str>> {
        if self.role == Role::System {
            return None;
        }
        if self.tool_calls.is_empty() {
            return Some(Cow::Borrowed(&*self.content));
        }
        let mut text = self.content.clone().into_owned();
        for SearchedCall { name, arguments } in &self.tool_calls {
            let _ = write!(text, "\n{name} {arguments}");
        }
        Some(Cow::Owned(text))
    }
}

/// Returns the first message of a stored conversation that has all words.
pub(crate) fn said_in(body: &[u8], words: &SearchWords) -> Result<Option<Said>, serde_json::Error> {
    let SearchedConversation { transcript } = serde_json::from_slice(body)?;
    let found = (1..).zip(&transcript.messages).find_map(|(number, message)| {
        let text = message.text()?;
        let at = words.find(&lowercase(&text))?;
        Some(Said { number, role: message.role, excerpt: excerpt(&text, at) })
    });
    Ok(found)
}

/// Returns a text in lower case. Each character is mapped alone, so that its place is known.
fn lowercase(text: &str) -> String {
    match text.is_ascii() {
        true => text.to_ascii_lowercase(),
        false => text.chars().flat_map(char::to_lowercase).collect(),
    }
}

/// Returns the part of a text around the character that is at `at` in lower case, on one line.
fn excerpt(text: &str, at: usize) -> String {
    let mut lower = 0;
    let word = text.char_indices().find(|(_, character)| {
        let is_there = lower >= at;
        lower += character.to_lowercase().map(char::len_utf8).sum::<usize>();
        is_there
    });
    let word = word.map_or(text.len(), |(index, _)| index);
    let from = text[..word].char_indices().rev().nth(CHARS_BEFORE - 1).map_or(0, |(index, _)| index);
    let end = text[word..].char_indices().nth(CHARS_AFTER).map_or(text.len(), |(index, _)| word + index);
    let words: Vec<&str> = text[from..end].split_whitespace().collect();
    let before = if from > 0 { "… " } else { "" };
    let after = if end < text.len() { " …" } else { "" };
    format!("{before}{}{after}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skep_engine::chat::{ChatMessage, ToolCall, Transcript};

    fn body(messages: Vec<ChatMessage>) -> Vec<u8> {
        let mut transcript = Transcript::new();
        transcript.set_system("You know everything about hives.");
        messages.into_iter().for_each(|message| transcript.push(message));
        json!({ "model": "m", "transcript": transcript }).to_string().into_bytes()
    }

    fn found(body: &[u8], text: &str) -> Option<Said> {
        said_in(body, &SearchWords::new(text).expect("words")).expect("readable")
    }

    #[test]
    fn the_first_message_with_all_words_is_found_in_any_case_and_order() {
        let arguments = r#"{"hive": "north"}"#.to_owned();
        let call = ToolCall { id: "1".into(), name: "weigh".into(), arguments };
        let reasoning = Some("Secretly".to_owned());
        let thinking = ChatMessage { reasoning, ..ChatMessage::assistant("Of course.") };
        let body = body(vec![
            ChatMessage::user("How many BEES live in a \"Größe L\" hive?"),
            thinking,
            ChatMessage { tool_calls: vec![call], ..ChatMessage::assistant("") },
            ChatMessage::tool("1", "38 kg\nof bees"),
        ]);
        for (text, number) in [
            ("bees", 2),
            ("hive bees", 2),
            ("GRÖSSE", 0),
            ("GRÖßE \"größe", 2),
            ("weigh North", 4),
            ("kg bees", 5),
            ("kg hive", 0),
            ("everything", 0),
            ("secretly", 0),
        ] {
            assert_eq!(found(&body, text).map_or(0, |said| said.number), number, "{text}");
        }
        let said = found(&body, "KG").expect("said");
        assert_eq!((said.role, said.excerpt.as_str()), (Role::Tool, "38 kg of bees"));
        assert!(said_in(b"tokens", &SearchWords::new("x").expect("a word")).is_err());
    }

    #[test]
    fn an_excerpt_is_the_part_around_the_first_word() {
        let text = format!("{}İstanbul honey{}", "a b ".repeat(100), " c d".repeat(100));
        let said = found(&body(vec![ChatMessage::user(text)]), "honey").expect("said");
        let (before, after) = said.excerpt.split_once("İstanbul honey").expect("the words");
        assert!(before.starts_with("… ") && before.chars().count() <= CHARS_BEFORE + 2, "{before}");
        assert!(after.ends_with(" …") && after.chars().count() <= CHARS_AFTER + 2, "{after}");
    }

    #[test]
    fn a_text_needs_one_to_sixteen_words() {
        for (text, why) in [
            (" \n".to_owned(), "no words"),
            ("a ".repeat(17), "17 words; at most 16"),
            ("a".repeat(257), "257 bytes; at most 256"),
        ] {
            assert!(SearchWords::new(&text).expect_err(why).contains(why), "{text}");
        }
        assert_eq!(SearchWords::new("Ä b").expect("words"), SearchWords(vec!["ä".into(), "b".into()]));
    }
}
