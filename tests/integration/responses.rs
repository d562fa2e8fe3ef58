//! Stored responses: a chain keeps its prefix in the cache, and what runs in the background survives kills of the host.

use crate::{
    durability::{Process, deploy_ledger, tiny_model},
    harness::{MODEL, client, parse_events, shared},
};
use futures::StreamExt;
use serde_json::{Value, json};

const KILLS: usize = 3;
const RESPONSES: usize = 4;

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

#[tokio::test]
async fn a_chain_finds_its_answers_in_the_cache_and_answers_as_the_whole_history_does() {
    let host = shared();
    let ask = |more: Value| {
        let mut body = json!({"model": MODEL, "temperature": 0, "max_output_tokens": 60,
                              "instructions": "You keep bees, and you answer in one sentence."});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let first = host.ok("/v1/responses", ask(json!({"input": "Tell me a story about bees."}))).await;
    let next = ask(json!({"input": "How does it end?", "previous_response_id": first["id"]}));
    let second = host.ok("/v1/responses", next).await;
    let cached = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let before = first["usage"]["total_tokens"].as_u64().unwrap();
    // Whole pages are cached, and the last token of an answer was not computed.
    assert!(cached + 16 >= before, "{cached} of {before} tokens were cached");
    let history = json!([{"role": "user", "content": "Tell me a story about bees."},
                         {"role": "assistant", "content": text(&first)},
                         {"role": "user", "content": "How does it end?"}]);
    let whole = host.ok("/v1/responses", ask(json!({"input": history, "store": false}))).await;
    assert_eq!(text(&whole), text(&second));
}

/// Reads the events of a response until `most` of them have come or the stream has ended.
async fn events(url: &str, id: &str, after: Option<u64>, most: usize) -> Vec<Value> {
    let after = after.map(|after| format!("&starting_after={after}")).unwrap_or_default();
    let response = client().get(format!("{url}/v1/responses/{id}?stream=true{after}")).send().await.unwrap();
    assert_eq!(response.status(), 200);
    // A chunk of the body may end within a character, so bytes are collected and whole events are decoded.
    let (mut body, mut read, mut ends) = (response.bytes_stream(), Vec::new(), 0);
    while ends < most {
        let Some(Ok(bytes)) = body.next().await else { break };
        let new = read.len().saturating_sub(1);
        read.extend_from_slice(&bytes);
        ends += read[new..].windows(2).filter(|pair| pair == b"\n\n").count();
    }
    let end = read.windows(2).rposition(|pair| pair == b"\n\n").map_or(0, |end| end + 2);
    let whole = std::str::from_utf8(&read[..end]).unwrap();
    let events = parse_events(whole).into_iter().filter(|(_, data)| !data.is_empty());
    events.map(|(_, data)| serde_json::from_str(&data).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_in_the_background_continues_its_stream_after_kills() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let start = || {
        let (model, data) = (model.path().to_owned(), data.path().to_owned());
        tokio::task::spawn_blocking(move || Process::start(&model, &data))
    };
    let mut process = start().await.unwrap();
    deploy_ledger(&process.url).await;
    let mut responses = Vec::new();
    for index in 0..RESPONSES {
        // Answers are sampled, so that they are the same only because their seeds are.
        let mut body = json!({"input": format!("question {index}"), "background": true});
        match index {
            0 => body["model"] = json!("agent:ledger"),
            _ => (body["max_output_tokens"], body["ignore_eos"]) = (json!(600), json!(true)),
        }
        let url = format!("{}/v1/responses", process.url);
        let queued: Value = client().post(url).json(&body).send().await.unwrap().json().await.unwrap();
        responses.push((queued["id"].as_str().unwrap().to_owned(), Vec::<Value>::new()));
    }
    for kill in 1..=KILLS {
        // Each kill finds the streams a bit further.
        for (id, seen) in &mut responses {
            let after = seen.last().map(|event| event["sequence_number"].as_u64().unwrap());
            seen.extend(events(&process.url, id, after, 30 * kill).await);
        }
        process.kill();
        process = start().await.unwrap();
    }
    for (id, mut seen) in responses {
        let after = seen.last().map(|event| event["sequence_number"].as_u64().unwrap());
        seen.extend(events(&process.url, &id, after, usize::MAX).await);
        let numbers: Vec<u64> = seen.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>(), "{id}");
        let url = format!("{}/v1/responses/{id}", process.url);
        let response: Value = client().get(url).send().await.unwrap().json().await.unwrap();
        assert!(["completed", "incomplete"].contains(&response["status"].as_str().unwrap()), "{response}");
        let deltas: String = seen.iter().filter_map(|event| event["delta"].as_str()).collect();
        assert_eq!(deltas, text(&response), "{id}: what was streamed over the kills is the answer");
        assert_eq!(seen.last().unwrap()["response"]["output"], response["output"]);
    }
    let sessions: Value = client()
        .get(format!("{}/v1/agents/ledger/sessions", process.url))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(sessions["data"].as_array().unwrap().len(), 1, "{sessions}");
    assert_eq!(sessions["data"][0]["turns"], 1);
    process.kill();
}
