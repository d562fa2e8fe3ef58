//! Selects the topic of a message by its words, and the form of the answer. A larger model would not need
//! this.

use skep_sdk::serde_json::Value;
use skep_sdk::{Output, ToolChoice};

/// The topic of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topic {
    Folio,
    Service,
    Food,
    Talk,
}

impl Topic {
    pub fn of(text: &str) -> Self {
        const WORDS: [(Topic, &[&str]); 3] = [
            (Topic::Folio, &["so far", "my order", "my bill", "remember", "did i"]),
            (Topic::Service, &["taxi", "towel", "clean", "wake"]),
            (Topic::Food, &["order", "eat", "drink", "soup", "pizza", "salad", "coffee", "tea"]),
        ];
        WORDS.iter().find(|(_, words)| mentions(text, words)).map_or(Topic::Talk, |(topic, _)| *topic)
    }

    /// Returns the tool that has to be called first. After the call the model answers; see
    /// `Conversation::tool_choice`.
    pub fn tool(self) -> ToolChoice {
        match self {
            Topic::Folio => ToolChoice::named("read_folio"),
            Topic::Service => ToolChoice::named("call_service"),
            Topic::Food => ToolChoice::named("order_food"),
            Topic::Talk => ToolChoice::None,
        }
    }

    /// Returns the form of the answer. It is built from the result of the tool, so that the guest is told
    /// what was really done.
    pub fn answer(self, guest: &str, results: &[Result<Value, String>]) -> Output {
        let name = address(guest);
        Output::Regex(match results {
            [Ok(Value::String(words))] if self == Topic::Folio => {
                format!("So far you have {}\\.", literal(words))
            }
            [Ok(Value::String(words))] => format!("(With pleasure|Of course){name}: {}\\.", literal(words)),
            [Err(why)] => format!("I am sorry{name}: {}\\.", literal(why)),
            _ => "I am sorry, that did not work\\.".to_owned(),
        })
    }
}

/// Returns the form of an answer to a message that needs no tool.
pub fn small_talk(text: &str, guest: &str) -> Output {
    let name = address(guest);
    Output::Regex(if mentions(text, &["thank"]) {
        format!("You are very welcome{name}!")
    } else if mentions(text, &["how are you"]) {
        format!("I am very well, thank you{name}! What may I do for you\\?")
    } else if mentions(text, &["bye", "goodbye", "good night"]) {
        format!("Goodbye{name}, and see you soon!")
    } else {
        format!(
            "(Welcome to the Beehive Hotel|Hello|Good (morning|evening)){name}! What may I (do for|bring) you\\?"
        )
    })
}

/// Returns whether a word of the text starts with one of these beginnings.
pub fn mentions(text: &str, beginnings: &[&str]) -> bool {
    let words: Vec<&str> =
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let text = format!(" {}", words.join(" ").to_lowercase());
    beginnings.iter().any(|beginning| text.contains(&format!(" {beginning}")))
}

fn address(guest: &str) -> String {
    let name: String = guest.chars().filter(|c| c.is_alphanumeric()).collect();
    if name.is_empty() { name } else { format!(", {name}") }
}

/// Returns a regular expression that matches only this text.
fn literal(text: &str) -> String {
    let escape = |c: char| if c.is_alphanumeric() || c == ' ' { c.to_string() } else { format!("\\{c}") };
    text.chars().map(escape).collect()
}
