//! The concierge against a scripted model: no host, no model.

use skep_sdk::serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Entry, InferenceError, Level};

use crate::concierge;
use crate::folio::{Dish, Folio, OrderLine};
use crate::topic::Topic;

fn pizza_for(count: u8) -> skep_sdk::serde_json::Value {
    json!({"items": [{"dish": "pizza", "count": count}]})
}

#[test]
fn an_order_goes_through_the_tool_into_the_folio() {
    let model = ScriptedModel::new().call("order_food", pizza_for(2)).text("Two pizzas are on the way!");
    let mut harness = Harness::new(concierge).model(model);
    let outcome = harness.send("Two pizzas please").unwrap();
    assert_eq!(outcome.reply.text, "Two pizzas are on the way!");
    assert_eq!(outcome.tool_calls[0].outcome.as_ref().unwrap()["total_eur"], 24);
    let folio: Folio = harness.state("folio").unwrap();
    assert_eq!(folio.orders, [OrderLine { dish: Dish::Pizza, count: 2 }]);
    assert_eq!(outcome.reply.data.unwrap()["visits"], 1);
}

#[test]
fn it_remembers_the_guest_and_what_was_ordered() {
    let model = ScriptedModel::new()
        .json(&json!({"name": "Ada"}))
        .text("Welcome, Ada!")
        .call("call_service", json!({"service": "taxi", "when": "tomorrow"}))
        .text("A taxi is booked.")
        .call("read_folio", json!({}))
        .text("A taxi for tomorrow.");
    let mut harness = Harness::new(concierge).model(model);
    harness.send("Hello, my name is Ada").unwrap();
    harness.send("A taxi for tomorrow, please").unwrap();
    let outcome = harness.send("What did I book so far?").unwrap();
    let folio = outcome.tool_calls[0].outcome.as_ref().unwrap();
    assert_eq!(folio["booked"], json!([{"service": "taxi", "when": "tomorrow"}]));
    let folio: Folio = harness.state("folio").unwrap();
    assert_eq!((folio.guest.as_deref(), folio.visits), (Some("Ada"), 3));
    assert!(harness.logs().contains(&(Level::Info, "the guest is Ada".into())));
}

#[test]
fn the_name_is_read_in_a_conversation_of_its_own() {
    let model = ScriptedModel::new().json(&json!({"name": "Ada"})).text("Welcome!");
    let mut harness = Harness::new(concierge).model(model);
    harness.send("My name is Ada").unwrap();
    assert_eq!(harness.prompts()[1].last(), Some(&Entry::User("My name is Ada".into())));
    assert_eq!(harness.conversation("main").len(), 3);
}

#[test]
fn too_large_an_order_is_told_to_the_model_and_not_noted() {
    let items = json!({"items": [{"dish": "tea", "count": 9}, {"dish": "soup", "count": 4}]});
    let model = ScriptedModel::new().call("order_food", items).text("That is too much at once.");
    let mut harness = Harness::new(concierge).model(model);
    let outcome = harness.send("Order tea and soup for everyone").unwrap();
    assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("13 dishes"));
    assert_eq!(harness.state::<Folio>("folio").unwrap().orders, []);
}

#[test]
fn a_failed_turn_leaves_no_trace() {
    let busy = InferenceError::Busy { retry_after_ms: 100 };
    let model = ScriptedModel::new().call("order_food", pizza_for(1)).fail(busy.clone());
    let mut harness = Harness::new(concierge).model(model);
    assert_eq!(harness.send("One pizza").unwrap_err(), AgentError::Inference(busy));
    assert_eq!(harness.state::<Folio>("folio"), None);
    assert!(harness.conversation("main").is_empty());
}

#[test]
#[should_panic(expected = "not one of \"soup\"")]
fn a_dish_that_is_not_on_the_card_breaks_the_schema() {
    let model = ScriptedModel::new().call("order_food", json!({"items": [{"dish": "caviar", "count": 1}]}));
    let _ = Harness::new(concierge).model(model).send("I want to eat caviar");
}

#[test]
fn words_choose_the_topic() {
    for (text, topic) in [
        ("Could I get fresh towels?", Topic::Service),
        ("I would like to order a soup", Topic::Food),
        ("What did I order so far?", Topic::Folio),
        ("Where is my order?", Topic::Folio),
        ("Great weather this evening!", Topic::Talk),
    ] {
        assert_eq!(Topic::of(text), topic, "{text}");
    }
}
