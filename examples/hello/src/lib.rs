//! The smallest agent that uses a model: it greets, and counts visits.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Greets you and remembers how often you visited.
#[agent]
async fn hello(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let visits: u32 = cx.state().get_or_default("visits")?;
    cx.state().set("visits", &(visits + 1))?;
    let system = "You are a friendly host. Answer in one short sentence.";
    let chat = cx.conversation().system(system).user(message.text);
    let reply = chat.temperature(0.0).max_tokens(60).run().await?;
    Ok(Reply::text(format!("{} (visit {})", reply.text.trim(), visits + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::testing::{Harness, ScriptedModel};

    #[test]
    fn counts_visits() {
        let mut harness =
            Harness::new(hello).model(ScriptedModel::new().text("Welcome!").text("Good to see you."));
        assert_eq!(harness.send("Hi").unwrap().reply.text, "Welcome! (visit 1)");
        assert_eq!(harness.send("Me again").unwrap().reply.text, "Good to see you. (visit 2)");
    }
}
