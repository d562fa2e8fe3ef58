//! Answers that an upstream breaks off after a part of them was passed on: agents get whole ones, and every interface says
//! what is void.

use crate::{
    harness::{Host, client},
    scripted_upstream::{ScriptedUpstream, answered, chunk, continued},
    upstreams::options,
};
use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use serde_json::{Value, json};
use std::time::Duration;

const QUESTION: &str = "Name a colour.";

/// Starts a host whose upstream `far` is scripted, and deploys a guest with its model.
async fn host_with(upstream: &ScriptedUpstream, guest: &str) -> Host {
    let host = Host::start_with(options(&format!(
        "[grants]\nmodels = [\"far/*\"]\n\
         [[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\nbreaker_failures = 1000\n\
         [[upstream.models]]\nname = \"m\"\n",
        upstream.url
    )));
    let (status, deployed) = host.deploy_guest(guest, guest, "model = \"far/m\"").await;
    assert_eq!(status, 201, "{deployed}");
    host
}

/// Returns a response that ends in the middle of its stream.
fn broken(events: &str) -> Response {
    ([("content-type", "text/event-stream")], events.to_owned()).into_response()
}

/// Starts a server of which every second answer, beginning with the first, breaks off.
async fn breaking() -> ScriptedUpstream {
    ScriptedUpstream::start(|asked| match asked.number % 2 {
        0 => broken(&chunk(json!({"content": "Blue "}))),
        _ => answered(&[json!({"content": "Red "}), json!({"content": "is one."})]),
    })
    .await
}

/// Sends a message to the agent `generate`. Returns the text of its deltas, with `~` for reasoning and `|` where what was sent
/// is void.
async fn shown(host: &Host, message: Value) -> String {
    let events = host.events("/v1/agents/generate/sessions/s/messages", message).await;
    assert_eq!(events.last().unwrap().0, "done", "{events:?}");
    let part = |(name, data): &(String, String)| match name.as_str() {
        "delta" => serde_json::from_str::<Value>(data).unwrap()["text"].as_str().unwrap().to_owned(),
        "thinking" => "~".to_owned(),
        "generation_restarted" => "|".to_owned(),
        _ => String::new(),
    };
    events.iter().map(part).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_gets_a_whole_answer_and_every_interface_says_what_is_void() {
    let upstream = breaking().await;
    let host = host_with(&upstream, "generate").await;
    assert_eq!(shown(&host, json!({"text": QUESTION})).await, "Blue |Red is one.");
    let asked = upstream.asked();
    assert_eq!((asked.len(), &asked[1].body), (2, &asked[0].body), "the same request is made");
    let messages = host.get("/v1/agents/generate/sessions/s/messages").await.1;
    assert_eq!(messages["data"].as_array().map(Vec::len), Some(2), "{messages}");
    assert!(!messages.to_string().contains("Blue"), "{messages}");
    let report = host.get("/v1/usage?by=model").await.1;
    let line = &report["data"][0];
    assert_eq!((&line["name"], &line["requests"]), (&json!("far/m"), &json!(2)), "{report}");
    assert_eq!(line["estimated"]["requests"], 1, "{report}");

    let output = |response: &Value| -> String {
        let items = response["output"].as_array().unwrap().iter();
        items.map(|item| item["content"][0]["text"].as_str().unwrap()).collect()
    };
    let ask = |streams: bool| json!({"model": "agent:generate", "input": QUESTION, "stream": streams});
    let whole = host.ok("/v1/responses", ask(false)).await;
    assert_eq!(output(&whole), "Red is one.", "{whole}");
    let events = host.events("/v1/responses", ask(true)).await;
    let data = |name: &str| -> Vec<Value> {
        let named = events.iter().filter(|(event, _)| event == name);
        named.map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    };
    let done = data("response.output_item.done");
    assert_eq!(
        done.iter().map(|event| &event["item"]["status"]).collect::<Vec<_>>(),
        ["incomplete", "completed"]
    );
    assert_eq!(output(&data("response.completed")[0]["response"]), "Red is one.", "{events:?}");

    // A stream of chat completions cannot take anything back.
    let messages = json!([{"role": "user", "content": QUESTION}]);
    let ask = |streams: bool| json!({"model": "agent:generate", "stream": streams, "messages": messages});
    let whole = host.ok("/v1/chat/completions", ask(false)).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "Red is one.", "{whole}");
    let events = host.events("/v1/chat/completions", ask(true)).await;
    let (last, before) = events.split_last().unwrap();
    assert!(last.1.contains("upstream_cut_off"), "{events:?}");
    assert!(before.iter().all(|(_, data)| !data.contains("Red")), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn structured_output_and_continued_texts_begin_again() {
    let thought = json!({"reasoning_content": "hm ".repeat(100)});
    let upstream = ScriptedUpstream::start(move |asked| match asked.number {
        // The text is held back until it is whole.
        0 => broken(&(chunk(thought.clone()) + &chunk(json!({"content": "{\"city\":\"Os"})))),
        1 => answered(&[json!({"content": "{\"city\":\"Oslo\"}"})]),
        2 => {
            let choice = json!({"index": 0, "text": "blue", "finish_reason": null});
            broken(&format!("data: {}\n\n", json!({"choices": [choice]})))
        }
        _ => continued(&["clear ", "today"]),
    })
    .await;
    let host = host_with(&upstream, "generate").await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false});
    let structured = json!({"text": "Name a city.", "data": {"schema": schema}});
    assert_eq!(shown(&host, structured).await, "~|{\"city\":\"Oslo\"}");
    let continues = json!({"text": "The sky is ", "data": {"complete": true, "max_tokens": 8}});
    assert_eq!(shown(&host, continues).await, "blue|clear today");
    let asked = upstream.asked();
    assert_eq!((asked.len(), &asked[1].body, &asked[3].body), (4, &asked[0].body, &asked[2].body));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_which_the_agent_has_read_some_is_interrupted() {
    let upstream = ScriptedUpstream::start(|_| {
        let begun = futures::stream::iter([Ok(chunk(json!({"content": "Blue "})))]);
        let ended = futures::stream::once(async {
            // The agent reads the beginning meanwhile.
            tokio::time::sleep(Duration::from_secs(5)).await;
            Err(std::io::Error::other("the server dies"))
        });
        ([("content-type", "text/event-stream")], Body::from_stream(begun.chain(ended))).into_response()
    })
    .await;
    let host = host_with(&upstream, "stream").await;
    let (status, failed) = host.message("stream", "s", QUESTION).await;
    assert_eq!((status, &failed["error"]["code"]), (500, &json!("agent_failed")), "{failed}");
    let message = failed["error"]["message"].as_str().unwrap();
    assert!(message.contains("interrupted: the upstream far broke off its answer"), "{message}");
    assert!(message.contains("the agent had read some of the answer"), "{message}");
    assert_eq!(upstream.asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_an_agent_gets_the_error_in_its_stream() {
    let upstream = breaking().await;
    let host = host_with(&upstream, "generate").await;
    let messages = json!([{"role": "user", "content": QUESTION}]);
    let ask = json!({"model": "far/m", "stream": true, "messages": messages});
    let response = client().post(host.at("/v1/chat/completions")).json(&ask).send().await.unwrap();
    let text = response.text().await.unwrap();
    assert!(text.contains("Blue ") && text.contains("upstream_cut_off"), "{text}");
    assert_eq!(upstream.asked().len(), 1);
}
