//! Orders in the words of guests: "two pizzas and a coffee".
//!
//! A small model copies words well and counts badly, so the tool accepts words that the model can copy. The
//! schema rejects everything that is not on the card, and the code counts.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The dishes with their prices in euros.
const CARD: [(&str, u32); 5] = [("soup", 7), ("pizza", 12), ("salad", 9), ("coffee", 4), ("tea", 4)];
/// Number words; the index of a word is its value.
const NUMBERS: [&str; 10] = ["no", "a", "two", "three", "four", "five", "six", "seven", "eight", "nine"];

/// An order in the words of the guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order(String);

/// A dish and how often it was ordered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OrderLine {
    pub dish: String,
    pub count: u32,
}

impl JsonSchema for Order {
    fn schema_name() -> Cow<'static, str> {
        "Order".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let dishes = CARD.map(|(dish, _)| dish).join("|");
        let line = format!("(one|{}) ({dishes})s?", NUMBERS[1..].join("|"));
        json_schema!({"type": "string", "pattern": format!("^{line}((,| and|, and) {line}){{0,4}}$")})
    }
}

impl Order {
    /// Returns the dishes of the order with their counts.
    pub fn lines(&self) -> Vec<OrderLine> {
        let words: Vec<&str> = self.0.split([' ', ',']).filter(|word| !matches!(*word, "" | "and")).collect();
        let line = |words: &[&str]| {
            let [number, dish] = words else { return None };
            let count = NUMBERS.iter().position(|known| known == number).unwrap_or(1) as u32;
            let (dish, _) = CARD.iter().find(|(known, _)| dish.trim_end_matches('s') == *known)?;
            Some(OrderLine { dish: (*dish).to_owned(), count })
        };
        words.chunks(2).filter_map(line).collect()
    }
}

/// Describes the lines with their total price: "two pizzas and a tea, 28 euros".
pub fn in_words(lines: &[OrderLine]) -> String {
    let words: Vec<String> = lines.iter().map(OrderLine::in_words).collect();
    let total: u32 = lines.iter().map(OrderLine::price_eur).sum();
    let words = match &words[..] {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        few => few.concat(),
    };
    format!("{words}, {total} euros")
}

impl OrderLine {
    fn in_words(&self) -> String {
        let OrderLine { dish, count } = self;
        let plural = if *count == 1 { "" } else { "s" };
        match NUMBERS.get(*count as usize) {
            Some(number) => format!("{number} {dish}{plural}"),
            None => format!("{count} {dish}{plural}"),
        }
    }

    fn price_eur(&self) -> u32 {
        CARD.iter().find(|(dish, _)| *dish == self.dish).map_or(0, |(_, price)| price * self.count)
    }
}
