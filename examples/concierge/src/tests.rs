//! Tests of the concierge with a scripted model, without a host.

use skep_sdk::serde_json::{Value, json};
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, InferenceError};

use crate::Concierge;
use crate::folio::Folio;
use crate::order::{Dish, OrderLine};

fn order(lines: &[(&str, u32)]) -> Value {
    json!({"lines": lines.iter().map(|(dish, count)| json!({"dish": dish, "count": count})).collect::<Vec<_>>()})
}

#[test]
fn orders_and_services_are_in_the_folio() {
    let model = ScriptedModel::new()
        .calls([
            ("order_food", order(&[("pizza", 2), ("tea", 1)])),
            ("call_service", json!({"service": "taxi", "time": "tomorrow"})),
        ])
        .text("Of course!")
        .call("read_folio", json!({}))
        .text("Two pizzas, a tea and a taxi.");
    let mut harness = Harness::new(Concierge).model(model);
    harness.send("Two pizzas, a tea, and a taxi tomorrow please").unwrap();
    let outcome = harness.send("What did I order so far?").unwrap();
    assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("2 pizza and 1 tea, 28 euros; taxi, tomorrow")));
}

#[test]
fn dishes_that_were_ordered_before_are_added_up() {
    let model = ScriptedModel::new()
        .call("order_food", order(&[("tea", 1)]))
        .text("Of course!")
        .call("order_food", order(&[("tea", 2)]))
        .text("Of course!");
    let mut harness = Harness::new(Concierge).model(model);
    harness.send("A tea").unwrap();
    harness.send("Two more").unwrap();
    assert_eq!(harness.state::<Folio>("folio").unwrap().orders, [OrderLine { dish: Dish::Tea, count: 3 }]);
}

#[test]
fn an_oversized_order_is_an_error_and_is_not_stored() {
    let model =
        ScriptedModel::new().call("order_food", order(&[("tea", 9), ("soup", 4)])).text("That is too much.");
    let mut harness = Harness::new(Concierge).model(model);
    let outcome = harness.send("Order tea and soup for everyone").unwrap();
    assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("13 dishes"));
    assert_eq!(harness.state::<Folio>("folio"), None);
}

#[test]
fn a_failed_turn_changes_nothing() {
    let busy = InferenceError::Busy { retry_after_ms: 100 };
    let model = ScriptedModel::new().call("order_food", order(&[("pizza", 1)])).fail(busy.clone());
    let mut harness = Harness::new(Concierge).model(model);
    assert_eq!(harness.send("One pizza").unwrap_err(), AgentError::Inference(busy));
    assert_eq!(harness.state::<Folio>("folio"), None);
    assert!(harness.conversation("main").is_empty());
}
