//! A shop's desk that pays money back, once a person has approved it.
//!
//! The host keeps the call until somebody has decided: the turn is set aside, survives restarts, and `refund` runs
//! only after an approval, with exactly the arguments that the person saw.

use serde::{Deserialize, Serialize};
use skep_sdk::serde_json::Value;
use skep_sdk::{AgentError, Context, Message, Output, Reply, ToolChoice, ToolError, agent, tool};

/// A refund that was paid.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Refund {
    order: u32,
    euros: u32,
}

/// Refunds money for an order. A person decides first.
#[tool(
    destructive,
    needs_approval,
    example(
        user = "Please refund 20 euros for order 11.",
        call = {"order": 11, "euros": 20},
        result = "20 euros were refunded for order 11",
        answer = "Done: 20 euros were refunded for order 11.",
    ),
    example(
        user = "My order 38 arrived broken, I want my 95 euros back.",
        call = {"order": 38, "euros": 95},
        result = "95 euros were refunded for order 38",
        answer = "Done: 95 euros were refunded for order 38.",
    ),
)]
fn refund(
    cx: &Context,
    /// Number of the order.
    order: u32,
    /// Amount in euros.
    #[schemars(range(min = 1, max = 500))]
    euros: u32,
) -> Result<String, ToolError> {
    let mut refunds: Vec<Refund> = cx.state().get_or_default("refunds")?;
    if refunds.iter().any(|refund| refund.order == order) {
        return Err(format!("order {order} was refunded before").into());
    }
    refunds.push(Refund { order, euros });
    cx.state().set("refunds", &refunds)?;
    Ok(format!("{euros} euros were refunded for order {order}"))
}

/// Refunds orders of a shop, after a person has approved each refund.
#[agent(tools = [refund])]
async fn desk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation()
        .system("You work at the desk of a shop and refund money. Answer in one short sentence.")
        .user(message.text)
        // Every message is a request for a refund, so the code names the tool. A model of the default's size decides badly by itself.
        .tool_choice(ToolChoice::named("refund"))
        // The answer repeats what the tool returned.
        .answer_format(|results| match results {
            [Ok(Value::String(done))] => Output::Regex(format!("(Done|Certainly): {done}\\.")),
            _ => Output::Regex("I am sorry, I may not refund that\\.".to_owned()),
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

    fn asked() -> ScriptedModel {
        ScriptedModel::new().call("refund", json!({"order": 7, "euros": 40})).text("As you say.")
    }

    #[test]
    fn an_approved_refund_is_paid() {
        let mut harness = Harness::new(desk).model(asked());
        harness.send("40 euros back for order 7, please").unwrap();
        assert_eq!(harness.state::<Vec<Refund>>("refunds").unwrap(), [Refund { order: 7, euros: 40 }]);
    }

    #[test]
    fn a_denied_refund_is_not_paid_and_the_model_reads_the_reason() {
        let mut harness = Harness::new(desk).model(asked()).approval_decision(Err("no receipt"));
        let outcome = harness.send("40 euros back for order 7, please").unwrap();
        assert!(outcome.tool_calls[0].outcome.as_ref().unwrap_err().contains("no receipt"));
        assert_eq!(harness.state::<Vec<Refund>>("refunds"), None);
    }

    #[test]
    fn an_order_is_refunded_once() {
        let mut harness = Harness::new(desk).model(asked());
        harness.send("40 euros back for order 7, please").unwrap();
        harness.set_model(asked());
        let outcome = harness.send("And again").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Err("order 7 was refunded before".to_owned()));
    }
}
