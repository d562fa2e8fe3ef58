//! What a message is about, by its words. A larger model would find out by itself.

use skep_sdk::{Output, ToolChoice};

/// What the guest wants.
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

    /// The tool that is called first. When it has run the model answers; see `Conversation::tool_choice`.
    pub fn tool(self) -> ToolChoice {
        match self {
            Topic::Folio => ToolChoice::named("read_folio"),
            Topic::Service => ToolChoice::named("call_service"),
            Topic::Food => ToolChoice::named("order_food"),
            Topic::Talk => ToolChoice::None,
        }
    }

    /// The form of the answer: how it begins, with the guest's name if it is known, one sentence, and no markup. It does
    /// not bind tool calls.
    pub fn answer(self, guest: Option<&str>) -> Output {
        let name: String = guest.unwrap_or_default().chars().filter(|c| c.is_alphanumeric()).collect();
        let name = if name.is_empty() { name } else { format!(" {name},") };
        let begins = match self {
            Topic::Folio => format!("So far,{name} you"),
            Topic::Service => format!("Certainly,{name} the"),
            Topic::Food => format!("With pleasure,{name} your order of"),
            Topic::Talk => format!("(Welcome to the Beehive Hotel|You are welcome|I am glad to help),{name}"),
        };
        Output::Regex(format!("{begins} [a-zA-Z0-9 ,'-]{{5,120}}[.!]"))
    }
}

/// Whether a word of the text begins with one of these.
pub fn mentions(text: &str, beginnings: &[&str]) -> bool {
    let words: Vec<&str> =
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let text = format!(" {}", words.join(" ").to_lowercase());
    beginnings.iter().any(|beginning| text.contains(&format!(" {beginning}")))
}
