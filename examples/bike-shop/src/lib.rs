//! An agent without a function: instructions for the model, and a tool that it may call.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{agent, tool};

#[derive(Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Day {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

/// Tells when the shop is open.
#[tool(
    read_only,
    example(
        user = "Are you open on Sundays?",
        call = {"day": "sunday"},
        result = "closed",
        answer = "No, on Sunday we are closed.",
    ),
    example(
        user = "When can I come on Friday?",
        call = {"day": "friday"},
        result = "open from 9 to 18",
        answer = "On Friday we are open from 9 to 18.",
    ),
    example(user = "Hi!", answer = "Hello! What may I do for you?"),
)]
fn opening_hours(day: Day) -> String {
    let hours = match day {
        Day::Monday | Day::Tuesday | Day::Wednesday | Day::Thursday | Day::Friday => "open from 9 to 18",
        Day::Saturday => "open from 10 to 14",
        Day::Sunday => "closed",
    };
    hours.to_owned()
}

/// Answers the customers of a bicycle shop.
#[agent(
    instructions = "You answer the customers of a bicycle shop in one short, friendly sentence.",
    temperature = 0.0,
    max_tokens = 80,
    tools = [opening_hours],
)]
struct BikeShop;

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    #[test]
    fn the_model_looks_up_the_opening_hours() {
        let model = ScriptedModel::new()
            .call("opening_hours", json!({"day": "saturday"}))
            .text("On Saturday we are open from 10 to 14.")
            .text("See you then!");
        let mut harness = Harness::new(BikeShop).model(model);
        let outcome = harness.send("When can I come on Saturday?").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("open from 10 to 14")));
        assert_eq!(harness.send("Thanks").unwrap().reply.text, "See you then!");
        assert_eq!(harness.conversation("main").len(), 7, "one conversation for both messages");
    }
}
