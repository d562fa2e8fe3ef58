//! The tools that the model can call for the guest. Their comments and examples are what the model reads.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::serde_json::{Value, json};
use skep_sdk::{Context, ToolError, tool};

use crate::folio::Folio;
use crate::order::{OrderLine, in_words};

/// Maximum number of dishes per order.
const MAX_DISHES: u32 = 12;

/// A service of the hotel.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    Taxi,
    FreshTowels,
    RoomCleaning,
    WakeUpCall,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Time {
    Now,
    Tonight,
    Tomorrow,
}

/// Orders food or drinks from the kitchen, when the guest asks for them.
#[tool(
    example(
        user = "We would like three coffees and a pizza.",
        call = {"lines": [{"dish": "coffee", "count": 3}, {"dish": "pizza", "count": 1}]},
        result = "3 coffee and 1 pizza, 24 euros",
        answer = "With pleasure: three coffees and a pizza for 24 euros.",
    ),
    example(user = "Hi!", answer = "Hello! What may I do for you?"),
)]
pub fn order_food(
    cx: &Context,
    /// The dishes that the guest orders, one entry for each dish.
    #[schemars(length(min = 1, max = 5))]
    lines: Vec<OrderLine>,
) -> Result<String, ToolError> {
    let dishes: u32 = lines.iter().map(|line| line.count).sum();
    if dishes > MAX_DISHES {
        let why = format!("{dishes} dishes are too many for one order, please ask for at most {MAX_DISHES}");
        return Err(why.into());
    }
    let words = in_words(&lines);
    Folio::update(cx, |folio| folio.order(lines))?;
    Ok(words)
}

/// Books a service of the hotel, when the guest asks for it.
#[tool(
    example(
        user = "Wake me tomorrow.",
        call = {"service": "wake-up-call", "time": "tomorrow"},
        result = "wake-up-call, tomorrow",
        answer = "Of course: a wake-up call tomorrow.",
    ),
    example(user = "Thanks!", answer = "You are very welcome!"),
)]
pub fn call_service(
    cx: &Context,
    service: Service,
    /// The time at which the guest wants it; `now` if they do not say.
    time: Time,
) -> Result<String, ToolError> {
    let word = |value: Value| value.as_str().unwrap_or_default().to_owned();
    let booked = format!("{}, {}", word(json!(service)), word(json!(time)));
    Folio::update(cx, |folio| folio.services.push(booked.clone()))?;
    Ok(booked)
}

/// Reads what the guest ordered and booked so far, and the amount of the bill.
#[tool(
    read_only,
    example(
        user = "What have I ordered?",
        call = {},
        result = "3 coffee and 1 pizza, 24 euros",
        answer = "So far you have three coffees and a pizza for 24 euros.",
    ),
)]
pub fn read_folio(cx: &Context) -> Result<String, ToolError> {
    Ok(Folio::load(cx)?.in_words())
}
