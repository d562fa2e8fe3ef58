//! Tracks parcels at an HTTP API that wants a key. The agent sends the key and never sees it: what it holds is a
//! placeholder, which the host replaces on the way out and puts back on the way in.

use std::time::Duration;

use serde::Deserialize;
use skep_sdk::serde_json::Value;
use skep_sdk::{AgentError, Context, Message, Output, Reply, ToolChoice, ToolError, agent, tool};

const API: &str = "http://127.0.0.1:9473";

/// The API's answer.
#[derive(Deserialize)]
struct Parcel {
    place: String,
    /// The API repeats the key that it got, as some servers do in errors and debug output.
    your_key: String,
}

/// Tells where a parcel is.
#[tool(
    read_only,
    open_world,
    example(
        user = "Where is parcel P31?",
        call = {"parcel": "P31"},
        result = "P31 is in Oslo",
        answer = "Parcel P31 is in Oslo.",
    ),
    example(user = "I am waiting for P5.", call = {"parcel": "P5"}, result = "P5 is in Ulm", answer = "Parcel P5 is in Ulm."),
)]
async fn track(
    cx: &Context,
    /// Id of the parcel: the letter P and a number.
    #[schemars(regex(pattern = r"^P[0-9]{1,6}$"))]
    parcel: String,
) -> Result<String, ToolError> {
    let request = cx.http().get(format!("{API}/parcels")).query("id", &parcel).bearer(cx.secret("POST_KEY")?);
    let response = request.timeout(Duration::from_secs(5)).send().await?;
    if response.status == 404 {
        return Err(format!("there is no parcel {parcel}").into());
    }
    let found: Parcel = response.error_for_status()?.json()?;
    // This shows the placeholder: the value was taken out of the response before the agent got it.
    cx.log().info(format!("the server was sent {}", found.your_key));
    Ok(format!("{parcel} is in {}", found.place))
}

/// Tells where parcels are.
#[agent(tools = [track])]
async fn tracker(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation()
        .system("You tell customers of the post where their parcels are. Answer in one short sentence.")
        .user(message.text)
        // Every message is about one parcel, so the code names the tool. A model of the default's size decides badly by itself.
        .tool_choice(ToolChoice::named("track"))
        // The answer repeats what the tool returned.
        .answer_format(|results| match results {
            [Ok(Value::String(done))] => Output::Regex(format!("Parcel {done}\\.")),
            _ => Output::Regex("I am sorry, I cannot find that parcel\\.".to_owned()),
        })
        .temperature(0.0)
        .max_tokens(80)
        .run()
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::HttpError;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel, ScriptedWeb};

    const URL: &str = "http://127.0.0.1:9473/parcels?id=P7";

    fn asked(web: ScriptedWeb) -> Harness {
        let model = ScriptedModel::new().call("track", json!({"parcel": "P7"})).text("One moment.");
        Harness::new(tracker).model(model).web(web)
    }

    #[test]
    fn the_request_has_the_placeholder_of_the_key() {
        let answer = json!({"place": "Bergen", "your_key": "Bearer secret.POST_KEY.test"});
        let mut harness = asked(ScriptedWeb::new().json("GET", URL, 200, &answer));
        let outcome = harness.send("Where is P7?").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Ok(json!("P7 is in Bergen")));
        let headers = &harness.requests()[0].headers;
        assert!(
            headers.contains(&("authorization".into(), "Bearer secret.POST_KEY.test".into())),
            "{headers:?}"
        );
    }

    #[test]
    fn errors_of_the_api_reach_the_model() {
        for (web, said) in [
            (ScriptedWeb::new().json("GET", URL, 404, &json!({})), "there is no parcel P7"),
            (ScriptedWeb::new().json("GET", URL, 401, &json!({})), "401"),
            (ScriptedWeb::new().fail("GET", URL, HttpError::Timeout), "time"),
        ] {
            let outcome = asked(web).send("Where is P7?").unwrap();
            let error = outcome.tool_calls[0].outcome.clone().unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
