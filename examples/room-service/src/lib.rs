//! Takes orders for a hotel's kitchen, with the default model of 135 million parameters.
//!
//! A model of that size copies words well, and decides badly whether to call a tool. So every message is an order: the
//! code names the tool, examples teach the model to fill in its arguments, and the answer repeats the result.

mod order;

use skep_sdk::serde_json::Value;
use skep_sdk::{AgentError, Context, Message, Output, Reply, ToolChoice, ToolError, agent, tool};

use order::{Order, OrderLine, in_words};

/// Maximum number of dishes per order.
const MAX_DISHES: u32 = 12;

/// Orders food or drinks from the kitchen.
#[tool(
    example(
        user = "We would like three coffees and a pizza.",
        call = {"order": "three coffees and a pizza"},
        result = "three coffees and a pizza, 24 euros",
        answer = "With pleasure: three coffees and a pizza, 24 euros.",
    ),
    example(
        user = "Please send a pizza, two teas and a soup.",
        call = {"order": "a pizza, two teas and a soup"},
        result = "a pizza, two teas and a soup, 27 euros",
        answer = "With pleasure: a pizza, two teas and a soup, 27 euros.",
    ),
    example(
        user = "Can I get two salads?",
        call = {"order": "two salads"},
        result = "two salads, 18 euros",
        answer = "With pleasure: two salads, 18 euros.",
    ),
    example(
        user = "A soup, please.",
        call = {"order": "a soup"},
        result = "a soup, 7 euros",
        answer = "With pleasure: a soup, 7 euros.",
    ),
)]
fn order_food(cx: &Context, order: Order) -> Result<String, ToolError> {
    let lines = order.lines();
    let dishes: u32 = lines.iter().map(|line| line.count).sum();
    if dishes > MAX_DISHES {
        let why = format!("{dishes} dishes are too many for one order, please ask for at most {MAX_DISHES}");
        return Err(why.into());
    }
    let mut bill: Vec<OrderLine> = cx.state().get_or_default("bill")?;
    bill.extend(lines.iter().cloned());
    cx.state().set("bill", &bill)?;
    Ok(in_words(&lines))
}

/// Takes orders for the kitchen of a hotel and keeps the bill of each room.
#[agent(tools = [order_food])]
async fn room_service(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let answer = cx
        .conversation()
        .system("You take orders for the kitchen of a hotel. Answer in one short, friendly sentence.")
        .user(&message.text)
        .tool_choice(ToolChoice::named("order_food"))
        .answer_format(|results| match results {
            [Ok(Value::String(words))] => Output::Regex(format!("(With pleasure|Of course): {words}\\.")),
            [Err(why)] => Output::Regex(format!("I am sorry: {why}\\.")),
            _ => Output::Text,
        })
        .temperature(0.0)
        .max_tokens(120)
        .run()
        .await?;
    let bill: Vec<OrderLine> = cx.state().get_or_default("bill")?;
    Reply::json(answer.text.trim(), &bill)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::InferenceError;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    fn ordered(words: &str) -> ScriptedModel {
        ScriptedModel::new().call("order_food", json!({"order": words})).text("Of course!")
    }

    #[test]
    fn orders_in_words_are_counted() {
        for (words, expected) in [
            ("a soup", "a soup, 7 euros"),
            ("two pizzas and one coffee", "two pizzas and a coffee, 28 euros"),
            ("a salad, three teas, and a soup", "a salad, three teas and a soup, 28 euros"),
        ] {
            let outcome = Harness::new(room_service).model(ordered(words)).send("I want to eat").unwrap();
            assert_eq!(outcome.tool_calls[0].outcome, Ok(json!(expected)), "{words}");
        }
    }

    #[test]
    fn the_bill_of_a_room_grows_with_each_order() {
        let mut harness = Harness::new(room_service).model(ordered("two pizzas"));
        harness.send("Two pizzas please").unwrap();
        harness.set_model(ordered("a tea"));
        let bill = harness.send("And a tea").unwrap().reply.data.unwrap();
        assert_eq!(bill, json!([{"dish": "pizza", "count": 2}, {"dish": "tea", "count": 1}]));
    }

    #[test]
    fn an_oversized_order_is_an_error_for_the_model() {
        let mut harness = Harness::new(room_service).model(ordered("nine teas and four soups"));
        let outcome = harness.send("Tea and soup for everyone").unwrap();
        assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("13 dishes"));
        assert_eq!(outcome.reply.data, Some(json!([])));
    }

    #[test]
    fn a_failed_turn_changes_nothing() {
        let busy = InferenceError::Busy { retry_after_ms: 100 };
        let model = ScriptedModel::new().call("order_food", json!({"order": "a pizza"})).fail(busy.clone());
        let mut harness = Harness::new(room_service).model(model);
        assert_eq!(harness.send("One pizza").unwrap_err(), AgentError::Inference(busy));
        assert_eq!(harness.state::<Vec<OrderLine>>("bill"), None);
        assert!(harness.conversation("main").is_empty());
    }
}
