//! Examples for the model and random numbers, from the view of an agent's author.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Context, Entry, InferenceError, Message, Output, Reply, ToolError, agent, tool};

mod dice {
    use super::*;

    /// Rolls dice.
    #[tool(
        example(user = "Two dice, please", call = {"count": 2}, result = [3, 4], answer = "3 and 4."),
        example(user = "Hi", answer = "Hello!")
    )]
    pub fn roll(
        cx: &Context,
        #[schemars(range(min = 1, max = 6))] count: u32,
    ) -> Result<Vec<u32>, ToolError> {
        Ok((0..count).map(|_| cx.random().number(1..=6)).collect())
    }

    /// Forgets what was rolled.
    #[tool(example(user = "Forget it", call = {}, result = null, answer = "Forgotten."))]
    pub fn forget() {}

    /// Rolls dice.
    #[agent(tools = [roll, forget])]
    pub async fn dice(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        cx.conversation().system("Roll.").user(message.text).run().await
    }
}
use dice::dice;

fn user(text: &str) -> Entry {
    Entry::User(text.to_owned())
}

fn said(text: &str) -> Entry {
    Entry::Assistant { text: text.to_owned(), tool_calls: Vec::new() }
}

#[test]
fn the_model_sees_examples_before_the_first_message_but_no_conversation_stores_them() {
    let model = ScriptedModel::new().call("roll", json!({"count": 1})).text("There you go.").text("Bye.");
    let mut harness = Harness::new(dice).model(model);
    let outcome = harness.send("One die").unwrap();
    assert_eq!(outcome.tool_calls.len(), 1, "the calls of examples do not count");
    harness.send("Thanks").unwrap();
    let prompt = &harness.prompts()[2];
    assert_eq!(prompt[..2], [Entry::System("Roll.".to_owned()), user("Two dice, please")]);
    let Entry::Assistant { tool_calls, .. } = &prompt[2] else { panic!("{:?}", prompt[2]) };
    assert_eq!((tool_calls[0].name.as_str(), &tool_calls[0].arguments), ("roll", &json!({"count": 2})));
    assert_eq!(prompt[3], Entry::Tool { call_id: tool_calls[0].id.clone(), outcome: Ok(json!([3, 4])) });
    // Examples of the tools alternate.
    assert_eq!(prompt[4..6], [said("3 and 4."), user("Forget it")]);
    assert_eq!(prompt[8..12], [said("Forgotten."), user("Hi"), said("Hello!"), user("One die")]);
    assert_eq!(harness.conversation("main").len(), 7);
    assert_eq!(harness.conversation("main")[1], user("One die"));
}

#[test]
fn random_numbers_are_in_their_range_and_the_same_for_the_same_seed() {
    let roll = |seed| {
        let model = ScriptedModel::new().call("roll", json!({"count": 6})).text("There.");
        let outcome = Harness::new(dice).model(model).random(seed).send("Six").unwrap();
        let rolled = outcome.tool_calls[0].outcome.clone().unwrap();
        serde_json::from_value::<Vec<u32>>(rolled).unwrap()
    };
    assert_eq!(roll(1), roll(1));
    let several: Vec<u32> = (0..50).flat_map(roll).collect();
    assert!((1..=6).all(|side| several.contains(&side)) && several.iter().all(|side| (1..=6).contains(side)));
}

#[test]
fn the_answer_format_depends_on_the_tool_results() {
    /// Says what was rolled.
    #[agent(tools = [dice::roll])]
    async fn honest(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        let chat = cx.conversation().user(message.text);
        let chat = chat.answer_format(|results| match results {
            [Ok(rolled)] => Output::JsonSchema(json!({"const": rolled})),
            _ => Output::Text,
        });
        chat.run().await
    }
    let rolled = |text: &str| {
        let model = ScriptedModel::new().call("roll", json!({"count": 1})).text(text);
        Harness::new(honest).model(model).send("One die")
    };
    let outcome = rolled("[2]").unwrap();
    assert_eq!(outcome.tool_calls[0].outcome, Ok(json!([2])));
    let lie = std::panic::catch_unwind(|| rolled("[4]").is_ok()).unwrap_err();
    assert!(lie.downcast_ref::<String>().unwrap().contains("is [4], not [2]"));
}

mod wrong {
    use super::*;

    /// Rolls dice.
    #[tool(
        example(user = "Hi", answer = "Hello!"),
        example(user = "Ten dice", call = {"count": 10}, result = [1], answer = "1.")
    )]
    pub fn roll(#[schemars(range(max = 6))] count: u32) -> Vec<u32> {
        vec![1; count as usize]
    }

    /// Rolls too many dice.
    #[agent(tools = [roll])]
    pub async fn too_many(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        cx.conversation().user(message.text).run().await
    }
}

#[test]
#[should_panic(
    expected = "tool `roll`: invalid arguments in its example 2 (\"Ten dice\"): /count: 10 is above maximum 6"
)]
fn an_example_that_breaks_the_schema_names_its_tool() {
    Harness::new(wrong::too_many);
}

mod guests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize, JsonSchema)]
    pub struct Guest {
        #[schemars(length(max = 8))]
        pub name: String,
    }

    /// Reads names; the message says in which way.
    #[agent]
    pub async fn guests(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        let chat = cx.conversation().system("Who?").user(&message.text);
        match message.text.as_str() {
            "long" => chat.example("I am Bartholomew.", "Bartholomew").extract::<Guest>().await?,
            "text" => {
                let chat = chat.example("I am Bob.", &Guest { name: "Bob".to_owned() });
                return chat.output(Output::Text).run().await;
            }
            _ => chat.example("I am Bob.", &Guest { name: "Bob".to_owned() }).extract::<Guest>().await?,
        };
        Reply::json("Read.", &())
    }
}
use guests::guests;

#[test]
fn extract_shows_its_examples_without_storing_them() {
    let mut harness = Harness::new(guests).model(ScriptedModel::new().json(&json!({"name": "Ada"})));
    harness.send("Ada here").unwrap();
    assert_eq!(
        harness.prompts()[0],
        [Entry::System("Who?".to_owned()), user("I am Bob."), said("{\"name\":\"Bob\"}"), user("Ada here")]
    );
    assert_eq!(harness.conversation("main").len(), 3);
}

#[test]
fn examples_of_an_answer_need_a_schema_and_validate_against_it() {
    let mut harness = Harness::new(guests).model(ScriptedModel::new().text("unused"));
    for (message, why) in [("long", "answer in the example \"I am Bartholomew.\""), ("text", "`extract`")] {
        match harness.send(message).unwrap_err() {
            AgentError::Inference(
                InferenceError::SchemaInvalid(found) | InferenceError::InvalidArgument(found),
            ) => assert!(found.contains(why), "{found}"),
            other => panic!("{other:?}"),
        }
    }
}
