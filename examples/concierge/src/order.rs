//! Dishes, orders and their prices.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A dish on the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dish {
    Soup,
    Pizza,
    Salad,
    Coffee,
    Tea,
}

/// A dish and how often it is ordered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OrderLine {
    pub dish: Dish,
    /// Number of servings.
    #[schemars(range(min = 1, max = 12))]
    pub count: u32,
}

impl Dish {
    fn price_eur(self) -> u32 {
        match self {
            Dish::Soup => 7,
            Dish::Pizza => 12,
            Dish::Salad => 9,
            Dish::Coffee | Dish::Tea => 4,
        }
    }
}

/// Describes the lines with their total price: "2 pizza and 1 tea, 28 euros".
pub fn in_words(lines: &[OrderLine]) -> String {
    let word = |line: &OrderLine| format!("{} {}", line.count, format!("{:?}", line.dish).to_lowercase());
    let words: Vec<String> = lines.iter().map(word).collect();
    let total: u32 = lines.iter().map(|line| line.dish.price_eur() * line.count).sum();
    format!("{}, {total} euros", words.join(" and "))
}
