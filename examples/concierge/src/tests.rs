//! Tests of the concierge with a scripted model, without a host.

use skep_sdk::serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Entry, InferenceError, Level};

use crate::concierge;
use crate::folio::Folio;
use crate::order::OrderLine;
use crate::topic::Topic;

fn order(words: &str) -> skep_sdk::serde_json::Value {
    json!({"order": words})
}

#[test]
fn an_order_is_added_to_the_folio() {
    let model = ScriptedModel::new().call("order_food", order("two pizzas")).text("Of course!");
    let mut harness = Harness::new(concierge).model(model);
    let outcome = harness.send("Two pizzas please").unwrap();
    assert_eq!(outcome.reply.text, "Of course!");
    assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("two pizzas, 24 euros")));
    let folio: Folio = harness.state("folio").unwrap();
    assert_eq!(folio.orders, [OrderLine { dish: "pizza".into(), count: 2 }]);
    assert_eq!(outcome.reply.data.unwrap()["visits"], 1);
}

#[test]
fn remembers_the_guest_and_the_bookings() {
    let model = ScriptedModel::new()
        .json(&json!({"name": "Ada"}))
        .text("Welcome, Ada!")
        .call("call_service", json!({"request": "a taxi tomorrow"}))
        .text("A taxi is booked.")
        .call("read_folio", json!({}))
        .text("A taxi for tomorrow.");
    let mut harness = Harness::new(concierge).model(model);
    harness.send("Hello, my name is Ada").unwrap();
    harness.send("A taxi for tomorrow, please").unwrap();
    let outcome = harness.send("What did I book so far?").unwrap();
    assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("a taxi tomorrow")));
    let folio: Folio = harness.state("folio").unwrap();
    assert_eq!((folio.guest.as_deref(), folio.visits), (Some("Ada"), 3));
    assert!(harness.logs().contains(&(Level::Info, "the guest is Ada".into())));
}

#[test]
fn the_name_is_read_in_a_separate_conversation() {
    let model = ScriptedModel::new().json(&json!({"name": "Ada"})).text("Welcome!");
    let mut harness = Harness::new(concierge).model(model);
    harness.send("My name is Ada").unwrap();
    assert_eq!(harness.prompts()[1].last(), Some(&Entry::User("My name is Ada".into())));
    assert_eq!(harness.conversation("main").len(), 3);
}

#[test]
fn an_oversized_order_is_an_error_and_is_not_stored() {
    let model =
        ScriptedModel::new().call("order_food", order("nine teas and four soups")).text("That is too much.");
    let mut harness = Harness::new(concierge).model(model);
    let outcome = harness.send("Order tea and soup for everyone").unwrap();
    assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("13 dishes"));
    assert_eq!(harness.state::<Folio>("folio").unwrap().orders, []);
}

#[test]
fn a_failed_turn_changes_nothing() {
    let busy = InferenceError::Busy { retry_after_ms: 100 };
    let model = ScriptedModel::new().call("order_food", order("a pizza")).fail(busy.clone());
    let mut harness = Harness::new(concierge).model(model);
    assert_eq!(harness.send("One pizza").unwrap_err(), AgentError::Inference(busy));
    assert_eq!(harness.state::<Folio>("folio"), None);
    assert!(harness.conversation("main").is_empty());
}

#[test]
fn parses_orders_in_the_words_of_guests() {
    for (words, expected) in [
        ("a soup", "a soup, 7 euros"),
        ("two pizzas and one coffee", "two pizzas and a coffee, 28 euros"),
        ("a salad, three teas, and a soup", "a salad, three teas and a soup, 28 euros"),
    ] {
        let model = ScriptedModel::new().call("order_food", order(words)).text("Of course!");
        let outcome = Harness::new(concierge).model(model).send("I want to eat").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Ok(json!(expected)), "{words}");
    }
}

#[test]
fn words_select_the_topic() {
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
