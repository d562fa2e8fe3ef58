//! The customers' desk of a shop. Its tool calls a tool of another agent, `warehouse`, through a typed reference.
//!
//! The call is a turn of the other agent: durable, bounded by that agent's limits, and made once, even if the host
//! is killed in between.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use skep_sdk::serde_json::Value;
use skep_sdk::{
    AgentError, Context, HostTool, HostToolError, Message, Output, Reply, ToolChoice, ToolError, agent, tool,
};

/// Arguments of the warehouse's tool, as its schema has them.
#[derive(Serialize, Deserialize)]
struct FindParcel {
    order: u32,
}

/// A parcel, as the warehouse describes it. Fields that are not needed here are left out.
#[derive(Serialize, Deserialize)]
struct Parcel {
    place: String,
    days_left: u32,
}

const FIND_PARCEL: HostTool<FindParcel, Parcel> =
    HostTool::new("agent:warehouse/find_parcel").timeout(Duration::from_secs(5));

/// Tells where the parcel of an order is.
#[tool(
    read_only,
    example(
        user = "Where is my order 12?",
        call = {"order": 12},
        result = "12 is in Oslo and arrives in 2 days",
        answer = "Your order 12 is in Oslo and arrives in 2 days.",
    ),
    example(
        user = "When does 31 arrive?",
        call = {"order": 31},
        result = "31 is in Ulm and arrives in 1 days",
        answer = "Your order 31 is in Ulm and arrives in 1 days.",
    ),
)]
async fn where_is(
    cx: &Context,
    /// Number of the order.
    order: u32,
) -> Result<String, ToolError> {
    match FIND_PARCEL.call(cx, FindParcel { order }).await {
        Ok(parcel) => Ok(format!("{order} is in {} and arrives in {} days", parcel.place, parcel.days_left)),
        // The other tool's own error is a fact for the model. Any other error says what the operator has to do.
        Err(HostToolError::Failed(why)) => Err(why.into()),
        Err(error) => {
            cx.log().error(&error);
            Err("the warehouse does not answer now; ask the customer to try again later".into())
        }
    }
}

/// Tells customers where their orders are.
#[agent(tools = [where_is])]
async fn desk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation()
        .system("You tell customers of a shop where their orders are. Answer in one short sentence.")
        .user(message.text)
        // Every message is about one order, so the code names the tool. A model of the default's size decides badly by itself.
        .tool_choice(ToolChoice::named("where_is"))
        // The answer repeats what the tool returned.
        .answer_format(|results| match results {
            [Ok(Value::String(done))] => Output::Regex(format!("Your order {done}\\.")),
            _ => Output::Regex("I am sorry, I cannot find that order\\.".to_owned()),
        })
        .temperature(0.0)
        .max_tokens(80)
        .run()
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    fn asked(warehouse: impl Fn(FindParcel) -> Result<Parcel, HostToolError> + 'static) -> Harness {
        let model = ScriptedModel::new().call("where_is", json!({"order": 7})).text("Let me see.");
        Harness::new(desk).model(model).typed_host_tool(FIND_PARCEL, warehouse)
    }

    #[test]
    fn the_warehouse_is_asked_for_the_order() {
        let mut harness = asked(|asked| Ok(Parcel { place: format!("bay {}", asked.order), days_left: 3 }));
        let outcome = harness.send("Where is order 7?").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("7 is in bay 7 and arrives in 3 days")));
    }

    #[test]
    fn the_model_reads_what_the_warehouse_does_not_know() {
        let mut harness = asked(|_| Err(HostToolError::Failed("there is no order 7".into())));
        let outcome = harness.send("Where is order 7?").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Err("there is no order 7".to_owned()));
    }

    #[test]
    fn an_unreachable_warehouse_is_logged_for_the_operator() {
        let mut harness = asked(|_| Err(HostToolError::Unavailable("it is not deployed".into())));
        let outcome = harness.send("Where is order 7?").unwrap();
        assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("try again later"));
        assert!(harness.logs()[0].1.contains("it is not deployed"));
    }
}
