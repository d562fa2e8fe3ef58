//! The folio: the hotel's record of a guest. It is the session's state, so it outlives turns and restarts.

use serde::{Deserialize, Serialize};
use skep_sdk::{Context, StateError};

use crate::order::{OrderLine, in_words};

const KEY: &str = "folio";

/// Everything noted for one guest.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Folio {
    pub orders: Vec<OrderLine>,
    /// The booked services, such as "taxi, tomorrow".
    pub services: Vec<String>,
}

impl Folio {
    pub fn load(cx: &Context) -> Result<Self, StateError> {
        cx.state().get_or_default(KEY)
    }

    /// Loads, changes and saves the folio. Tools of one round run concurrently, but none of them waits
    /// between load and save.
    pub fn update(cx: &Context, change: impl FnOnce(&mut Self)) -> Result<(), StateError> {
        let mut folio = Self::load(cx)?;
        change(&mut folio);
        cx.state().set(KEY, &folio)
    }

    /// Adds an order. Dishes that were ordered before are added up.
    pub fn order(&mut self, lines: Vec<OrderLine>) {
        for line in lines {
            match self.orders.iter_mut().find(|known| known.dish == line.dish) {
                Some(known) => known.count += line.count,
                None => self.orders.push(line),
            }
        }
    }

    /// Describes the orders and bookings: "1 soup, 7 euros; taxi, tomorrow".
    pub fn in_words(&self) -> String {
        let orders = (!self.orders.is_empty()).then(|| in_words(&self.orders));
        let all: Vec<String> = orders.into_iter().chain(self.services.iter().cloned()).collect();
        if all.is_empty() { "nothing yet".to_owned() } else { all.join("; ") }
    }
}
