//! The warehouse: an agent whose tool other agents call.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{Context, ToolError, agent, tool};

/// A parcel on its way to a customer.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Parcel {
    place: String,
    days_left: u32,
    weight_grams: u32,
}

/// Finds the parcel of an order.
#[tool(
    read_only,
    example(
        user = "Where is the parcel of order 12?",
        call = {"order": 12},
        result = {"place": "Oslo", "days_left": 2, "weight_grams": 300},
        answer = "It is in Oslo.",
    ),
    example(user = "Hello!", answer = "Hello! Which order do you want to know about?"),
)]
fn find_parcel(
    cx: &Context,
    /// Number of the order.
    order: u32,
) -> Result<Parcel, ToolError> {
    cx.log().info(format!("order {order} is looked up in session {}", cx.session()));
    let parcel =
        |place: &str, days_left, weight_grams| Parcel { place: place.to_owned(), days_left, weight_grams };
    match order {
        7 => Ok(parcel("Bergen", 2, 1200)),
        8 => Ok(parcel("Porto", 5, 350)),
        _ => Err(format!("there is no order {order}").into()),
    }
}

/// Knows where all parcels are.
#[agent(
    instructions = "You work in a warehouse and know where the parcels are. Answer in one short sentence.",
    temperature = 0.0,
    max_tokens = 80,
    tools = [find_parcel],
)]
struct Warehouse;

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::Harness;

    #[test]
    fn a_parcel_is_found_by_its_order() {
        let mut harness = Harness::new(Warehouse);
        assert_eq!(harness.call_tool("find_parcel", json!({"order": 7})).unwrap()["place"], "Bergen");
        let error = harness.call_tool("find_parcel", json!({"order": 9})).unwrap_err();
        assert_eq!(error.message(), "there is no order 9");
    }
}
