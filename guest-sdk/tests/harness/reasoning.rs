//! The reasoning of a model in the harness: of a generation, of a stream, and of the last answer of a run.

use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Replies with the model's reasoning as data.
#[agent]
async fn thinker(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let chat = cx.conversation().user(&message.text);
    let (text, reasoning) = match message.text.as_str() {
        "before" => (String::new(), cx.conversation().reasoning()?),
        "forget" => (String::new(), cx.conversation().clear().reasoning()?),
        "copy" => (String::new(), cx.conversation().fork("copy")?.reasoning()?),
        "run" => {
            let reply = chat.run().await?;
            (reply.text, cx.conversation().reasoning()?)
        }
        "stream" => {
            let generation = chat.stream().await?.finish().await?;
            (generation.text, generation.reasoning)
        }
        _ => {
            let generation = chat.generate().await?;
            (generation.text, generation.reasoning)
        }
    };
    Reply::json(text, &reasoning)
}

#[test]
fn the_reasoning_of_the_last_answer_can_be_read() {
    let model =
        ScriptedModel::new().reasoned("one", "1").text("2").reasoned("three", "3").reasoned("four", "4");
    let mut harness = Harness::new(thinker).model(model);
    for (message, text, reasoning) in [
        ("before", "", json!(null)),
        ("generate", "1", json!("one")),
        ("before", "", json!("one")),
        ("generate", "2", json!(null)),
        ("before", "", json!(null)),
        ("stream", "3", json!("three")),
        ("run", "4", json!("four")),
        ("copy", "", json!("four")),
        ("forget", "", json!(null)),
    ] {
        let reply = harness.send(message).unwrap().reply;
        assert_eq!((reply.text.as_str(), reply.data), (text, Some(reasoning)), "{message}");
    }
}
