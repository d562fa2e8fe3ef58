//! What the model can do for the guest. Short schemas, because a small model has to follow them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{Context, ToolError, tool};

use crate::folio::{Booking, Folio, OrderLine, Service, When};

/// More dishes than this and the kitchen calls back.
const MAX_DISHES: u32 = 12;

/// What an order comes to.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Receipt {
    pub ordered: Vec<OrderLine>,
    pub total_eur: u32,
}

/// What was noted for the guest.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    pub ordered: Vec<OrderLine>,
    pub booked: Vec<Booking>,
    pub total_eur: u32,
}

/// Orders food or drinks from the kitchen.
#[tool]
pub async fn order_food(
    cx: &Context,
    #[schemars(length(min = 1, max = 3))] items: Vec<OrderLine>,
    #[schemars(length(max = 40))] note: Option<String>,
) -> Result<Receipt, ToolError> {
    let items = merged(items);
    let dishes: u32 = items.iter().map(|line| u32::from(line.count)).sum();
    if dishes > MAX_DISHES {
        return Err(
            format!("{dishes} dishes are too many for one order; ask for at most {MAX_DISHES}").into()
        );
    }
    if let Some(note) = note.filter(|note| !note.is_empty()) {
        cx.log().info(format!("note for the kitchen: {note}"));
    }
    let total_eur = Folio::update(cx, |folio| {
        folio.orders.extend(items.iter().cloned());
        folio.total_eur()
    })?;
    Ok(Receipt { ordered: items, total_eur })
}

/// Calls a service of the hotel.
#[tool]
pub async fn call_service(cx: &Context, service: Service, when: When) -> Result<Booking, ToolError> {
    let booking = Booking { service, when };
    Folio::update(cx, |folio| folio.services.push(booking.clone()))?;
    Ok(booking)
}

/// Reads what the guest ordered and booked so far.
#[tool]
pub fn read_folio(cx: &Context) -> Result<Summary, ToolError> {
    let folio = Folio::load(cx)?;
    Ok(Summary { total_eur: folio.total_eur(), ordered: folio.orders, booked: folio.services })
}

/// A dish that the model names twice counts once, as it was named first.
fn merged(items: Vec<OrderLine>) -> Vec<OrderLine> {
    let mut merged: Vec<OrderLine> = Vec::new();
    for line in items {
        if !merged.iter().any(|known| known.dish == line.dish) {
            merged.push(line);
        }
    }
    merged
}
