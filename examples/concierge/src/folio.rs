//! The folio: what the hotel knows of a guest. It is the session's state, so it outlives turns and restarts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{Context, StateError};

const KEY: &str = "folio";

/// Everything noted for one guest.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Folio {
    pub guest: Option<String>,
    pub visits: u32,
    pub orders: Vec<OrderLine>,
    pub services: Vec<Booking>,
}

/// One dish of an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OrderLine {
    pub dish: Dish,
    #[schemars(range(min = 1, max = 9))]
    pub count: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dish {
    Soup,
    Pizza,
    Salad,
    Coffee,
    Tea,
}

impl Dish {
    pub fn price_eur(self) -> u32 {
        match self {
            Dish::Soup => 7,
            Dish::Pizza => 12,
            Dish::Salad => 9,
            Dish::Coffee | Dish::Tea => 4,
        }
    }
}

/// A service that was called.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Booking {
    pub service: Service,
    pub when: When,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    Taxi,
    Towels,
    Cleaning,
    WakeUpCall,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum When {
    Now,
    Tonight,
    Tomorrow,
}

impl Folio {
    pub fn load(cx: &Context) -> Result<Self, StateError> {
        cx.state().get_or_default(KEY)
    }

    /// Loads, changes and saves. Tools of one round run side by side, but none of them waits in between.
    pub fn update<T>(cx: &Context, change: impl FnOnce(&mut Self) -> T) -> Result<T, StateError> {
        let mut folio = Self::load(cx)?;
        let outcome = change(&mut folio);
        cx.state().set(KEY, &folio)?;
        Ok(outcome)
    }

    pub fn total_eur(&self) -> u32 {
        self.orders.iter().map(|line| line.dish.price_eur() * u32::from(line.count)).sum()
    }
}
