//! A café whose sessions notify each other: an order of a customer is an event that wakes the session
//! `kitchen`, and a dish that is ready is an event that wakes the session of the customer.
//!
//! `agent.toml` says which topics the agent may emit, and which session gets which event.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::serde_json::Value;
use skep_sdk::{AgentError, Context, Event, Message, Output, Reply, ToolChoice, ToolError, agent, tool};

const PLACED: &str = "order.placed";
const READY: &str = "order.ready";

/// The data of both events.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Order {
    /// The session of the customer.
    customer: String,
    dish: String,
}

/// The dishes on the card.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Dish {
    Soup,
    Pizza,
    Salad,
    Coffee,
    Tea,
}

/// Orders one dish or drink for the customer.
#[tool(
    example(user = "A soup, please.", call = {"dish": "soup"}, result = "a soup", answer = "Certainly: a soup."),
    example(user = "I would like a coffee.", call = {"dish": "coffee"}, result = "a coffee", answer = "Certainly: a coffee."),
    example(user = "Can you bring me a salad?", call = {"dish": "salad"}, result = "a salad", answer = "Certainly: a salad."),
)]
fn order(cx: &Context, dish: Dish) -> Result<String, ToolError> {
    let dish = format!("{dish:?}").to_lowercase();
    cx.emit(PLACED, &Order { customer: cx.session().to_owned(), dish: dish.clone() })?;
    Ok(format!("a {dish}"))
}

/// Handles the events of a session. It runs at least once for each event, and its changes of the state are kept
/// exactly once.
async fn on_order(cx: &mut Context, event: Event) -> Result<(), AgentError> {
    let order: Order = event.json()?;
    match event.topic.as_str() {
        // In the session `kitchen`. The event that it emits leaves with the commit of this turn.
        PLACED => {
            let cooked: u32 = cx.state().get_or_default("cooked")?;
            cx.state().set("cooked", &(cooked + 1))?;
            cx.log().info(format!("the kitchen cooks a {} for {}", order.dish, order.customer));
            cx.emit(READY, &order)?;
        }
        // In the session of the customer.
        READY => {
            let mut ready: Vec<String> = cx.state().get_or_default("ready")?;
            ready.push(order.dish);
            cx.state().set("ready", &ready)?;
        }
        topic => cx.log().warn(format!("no handler for {topic}")),
    }
    Ok(())
}

/// Takes the orders of a café, and tells customers when their dishes are ready.
#[agent(tools = [order], on_event = on_order)]
async fn cafe(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let answer = cx
        .conversation()
        .system("You are the waiter of a small café. Answer in one short sentence.")
        .user(message.text)
        // Every message is an order, so the code names the tool. A model of the default's size decides badly by itself.
        .tool_choice(ToolChoice::named("order"))
        // The answer repeats what the tool returned.
        .answer_format(|results| match results {
            [Ok(Value::String(done))] => Output::Regex(format!("(Certainly|With pleasure): {done}\\.")),
            _ => Output::Regex("I am sorry, that did not work\\.".to_owned()),
        })
        .temperature(0.0)
        .max_tokens(80)
        .run()
        .await?;
    let ready: Vec<String> = cx.state().get_or_default("ready")?;
    Reply::json(answer.text, &ready)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    fn tea() -> Value {
        json!({"customer": "ada", "dish": "tea"})
    }

    #[test]
    fn an_order_is_an_event_for_the_kitchen() {
        let model = ScriptedModel::new().call("order", json!({"dish": "tea"})).text("At once.");
        let mut harness = Harness::new(cafe).session("ada").model(model);
        harness.send("A tea, please").unwrap();
        let emitted = harness.emitted();
        assert_eq!((emitted[0].topic.as_str(), emitted[0].data.clone()), (PLACED, Some(tea())));
    }

    #[test]
    fn the_kitchen_answers_an_order_with_an_event_for_the_customer() {
        let mut harness = Harness::new(cafe).session("kitchen");
        harness.event(PLACED, Some(tea())).unwrap();
        assert_eq!(harness.state::<u32>("cooked"), Some(1));
        assert_eq!(
            (harness.emitted()[0].topic.as_str(), harness.emitted()[0].data.clone()),
            (READY, Some(tea()))
        );
    }

    #[test]
    fn a_customer_learns_what_is_ready_with_the_next_answer() {
        let model = ScriptedModel::new().call("order", json!({"dish": "pizza"})).text("At once.");
        let mut harness = Harness::new(cafe).session("ada").model(model);
        harness.event(READY, Some(tea())).unwrap();
        assert_eq!(harness.send("And a pizza").unwrap().reply.data, Some(json!(["tea"])));
    }

    #[test]
    fn an_event_without_its_data_fails_and_changes_nothing() {
        let mut harness = Harness::new(cafe).session("kitchen");
        assert!(matches!(harness.event(PLACED, None), Err(AgentError::InvalidMessage(_))));
        assert_eq!(harness.state::<u32>("cooked"), None);
    }
}
