//! The bill of upstreams, through a whole host: answers that were refused or abandoned, routes in a budget, every route of the
//! API, and a load test in which an upstream dies.

use crate::{
    harness::{Host, MODEL, client, content},
    scripted_upstream::{Asked, ScriptedUpstream, answered, chunk},
    upstreams::options,
};
use axum::{
    body::Body,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use serde_json::{Value, json};
use std::time::Duration;

/// Starts a host with upstreams that have a model `m` each. Every model costs 1 USD for a million input tokens and 10 USD for a
/// million output tokens.
fn host_beside(upstreams: &[(&str, &str)], more: &str) -> Host {
    let mut settings = format!("{more}\n[grants]\nmodels = [\"*\"");
    for (name, _) in upstreams {
        settings.push_str(&format!(", \"{name}/*\""));
    }
    settings.push_str("]\n");
    for (name, url) in upstreams {
        settings.push_str(&format!(
            "[[upstream]]\nname = \"{name}\"\nkind = \"openai\"\nurl = \"{url}\"\nattempts = 1\nbreaker_failures = 1000\n\
             [[upstream.models]]\nname = \"m\"\ncontext_length = 1000\n\
             [upstream.models.prices]\ninput = 1\ncached_input = 1\noutput = 10\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n"
        ));
    }
    Host::start_with(options(&settings))
}

fn question(model: &str) -> Value {
    json!({"model": model, "max_tokens": 20, "messages": [{"role": "user", "content": "Count."}]})
}

/// Returns the same with a schema for the answer, which is held back until it was checked.
fn structured(model: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let mut question = question(model);
    question["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    question
}

/// Waits until this many requests are counted, which happens in the background, and returns the lines by model.
async fn billed(host: &Host, requests: u64) -> Vec<Value> {
    for _ in 0..1_000 {
        let report = host.get("/v1/usage?by=model").await.1;
        if report["total"]["requests"].as_u64() >= Some(requests) {
            return report["data"].as_array().unwrap().clone();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{requests} requests were not counted");
}

fn line<'a>(lines: &'a [Value], model: &str) -> &'a Value {
    lines.iter().find(|line| line["name"] == model).unwrap_or_else(|| panic!("{model}: {lines:?}"))
}

/// Returns the number of requests, input tokens, output tokens and estimated requests, and the cost.
fn counts(line: &Value) -> (u64, u64, u64, u64, String) {
    let count = |value: &Value| value.as_u64().unwrap();
    (
        count(&line["requests"]),
        count(&line["input_tokens"]),
        count(&line["output_tokens"]),
        count(&line["estimated"]["requests"]),
        line["cost"][0]["amount"].as_str().unwrap().to_owned(),
    )
}

/// Returns a response that begins with these deltas and never ends.
fn stalled(deltas: &[Value]) -> Response {
    let begun: String = deltas.iter().cloned().map(chunk).collect();
    let begun = futures::stream::iter([Ok::<_, std::io::Error>(begun)]);
    let body = Body::from_stream(begun.chain(futures::stream::pending()));
    ([("content-type", "text/event-stream")], body).into_response()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_never_match_their_schema_are_billed() {
    let upstream = ScriptedUpstream::start(|_| answered(&[json!({"content": "never"})])).await;
    let host = host_beside(&[("far", &upstream.url)], "[requests]\nlog = \"metadata\"\n");
    let (status, refused) = host.post("/v1/chat/completions", structured("far/m")).await;
    assert_eq!((status, &refused["error"]["code"]), (422, &json!("schema_unsatisfied")), "{refused}");
    assert_eq!(upstream.asked().len(), 3);
    // Three times 9 × 1 + 3 × 10 = 39 millionths.
    let lines = billed(&host, 3).await;
    assert_eq!(counts(line(&lines, "far/m")), (3, 27, 9, 0, "0.000117".to_owned()));
    let logged = loop {
        let logged = host.get("/v1/requests").await.1;
        if let Some(request) = logged["data"].get(0) {
            break request.clone();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let usage = &logged["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(27), &json!(9)), "{logged}");
}

/// Returns Anthropic's answer "Hi" to a prompt of 100 tokens, of which 40 came from the cache and 50 were written to it.
fn message() -> Response {
    let usage = json!({"input_tokens": 10, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 50, "output_tokens": 1});
    let events = [
        json!({"type": "message_start", "message": {"usage": usage}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
        json!({"type": "message_stop"}),
    ];
    let event = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    let text: String = events.iter().map(event).collect();
    ([("content-type", "text/event-stream")], text).into_response()
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_a_provider_wrote_to_its_cache_have_a_price_of_their_own() {
    let upstream = ScriptedUpstream::start(|_| message()).await;
    let url = upstream.url.strip_suffix("/v1").unwrap();
    let price = "input = 1\ncached_input = 0.1\noutput = 10\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n";
    let far = format!(
        "[requests]\nlog = \"metadata\"\n[tenants.local]\nmoney_per_day = \"1 USD\"\n[grants]\nmodels = [\"*\", \"far/*\"]\n\
         [[upstream]]\nname = \"far\"\nkind = \"anthropic\"\nurl = \"{url}\"\n\
         [[upstream.models]]\nname = \"priced\"\ncontext_length = 1000\n[upstream.models.prices]\n{price}cache_write = 2\n\
         [[upstream.models]]\nname = \"partly\"\ncontext_length = 1000\n[upstream.models.prices]\n{price}"
    );
    let host = Host::start_with(options(&far));
    for model in ["far/priced", "far/partly"] {
        let answer = host.ok("/v1/chat/completions", question(model)).await;
        let prompt = &answer["usage"]["prompt_tokens_details"];
        assert_eq!(prompt, &json!({"cached_tokens": 40, "cache_write_tokens": 50}), "{answer}");
    }
    let lines = billed(&host, 2).await;
    // 10 × 1 + 40 × 0.1 + 50 × 2 + 2 × 10 = 134 millionths.
    assert_eq!(counts(line(&lines, "far/priced")), (1, 100, 2, 0, "0.000134".to_owned()));
    assert_eq!(line(&lines, "far/priced")["unknown_cost"], Value::Null);
    // Without a price for what was written, only 10 × 1 + 40 × 0.1 + 2 × 10 = 34 millionths are known.
    let partly = line(&lines, "far/partly");
    assert_eq!(counts(partly), (1, 100, 2, 0, "0.000034".to_owned()));
    assert_eq!(partly["cache_write_input_tokens"], 50);
    assert_eq!(
        partly["unknown_cost"],
        json!({"models": ["far/partly"], "requests": 0, "input_tokens": 50, "cached_input_tokens": 0,
            "cache_write_input_tokens": 50, "output_tokens": 0})
    );
    let logged = loop {
        let logged = host.get("/v1/requests").await.1["data"].as_array().unwrap().clone();
        if logged.len() == 2 {
            break logged;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let of = |model: &str| logged.iter().find(|record| record["model"]["answered"] == model).unwrap();
    assert_eq!(of("far/priced")["cost"]["amount"], "0.000134");
    assert_eq!(
        (&of("far/partly")["cost"], &of("far/partly")["usage"]["cache_write_tokens"]),
        (&Value::Null, &json!(50))
    );
    // A budget in money cannot continue with a cost that is unknown.
    host.ok("/v1/chat/completions", question("far/priced")).await;
    let (status, refused) = host.post("/v1/chat/completions", question("far/partly")).await;
    assert_eq!((status, &refused["error"]["code"]), (403, &json!("price_unknown")), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("`cache_write`"), "{refused}");
    // Clients of Anthropic's API see the counts as the provider sent them.
    let asked =
        json!({"model": "far/priced", "max_tokens": 20, "messages": [{"role": "user", "content": "Count."}]});
    let usage = host.ok("/v1/messages", asked).await["usage"].clone();
    assert_eq!(
        usage,
        json!({"input_tokens": 10, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 40, "output_tokens": 2})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_its_client_abandons_before_it_was_checked_is_an_estimate() {
    let upstream = ScriptedUpstream::start(|_| stalled(&[json!({"content": "{\"n\": 1, "})])).await;
    let host = host_beside(&[("far", &upstream.url)], "");
    let leaves = client().post(host.at("/v1/chat/completions")).json(&structured("far/m"));
    let leaves = tokio::spawn(leaves.send());
    while upstream.asked().is_empty() {
        assert!(!leaves.is_finished(), "the client has an answer");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The beginning of the answer arrives meanwhile.
    tokio::time::sleep(Duration::from_secs(2)).await;
    leaves.abort();
    assert!(leaves.await.unwrap_err().is_cancelled(), "the client leaves");
    let lines = billed(&host, 1).await;
    let (requests, input, output, estimated, _) = counts(line(&lines, "far/m"));
    assert_eq!((requests, output, estimated), (1, 3, 1));
    assert!(input > 0, "{lines:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_answer_is_billed_with_the_one_that_followed_and_a_broken_one_by_itself() {
    let upstream = ScriptedUpstream::start(|asked: &Asked| match asked.number {
        0 => answered(&[json!({"content": "{}"})]),
        _ => answered(&[json!({"content": "{\"n\": 1}"})]),
    })
    .await;
    let breaks = ScriptedUpstream::start(|_| {
        let cut = chunk(json!({"content": "{\"n\": 1, "}));
        ([("content-type", "text/event-stream")], cut).into_response()
    })
    .await;
    let route = "[[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"breaks/m\"\n[[route.models]]\nmodel = \"far/m\"\n";
    let host = host_beside(&[("far", &upstream.url), ("breaks", &breaks.url)], route);
    let answer = host.ok("/v1/chat/completions", structured("smart")).await;
    assert_eq!((content(&answer), &answer["usage"]["completion_tokens"]), ("{\"n\": 1}", &json!(3)));
    let lines = billed(&host, 2).await;
    assert_eq!(counts(line(&lines, "far/m")), (1, 18, 6, 0, "0.000078".to_owned()));
    let (requests, _, output, estimated, _) = counts(line(&lines, "breaks/m"));
    assert_eq!((requests, output, estimated), (1, 3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_money_budget_counts_all_models_of_a_route_and_all_requests_for_a_schema() {
    let upstream = ScriptedUpstream::start(|_| answered(&[json!({"content": "{\"n\": 1}"})])).await;
    let route = |name: &str, other: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\n[[route.models]]\nmodel = \"far/m\"\n[[route.models]]\nmodel = \"{other}\"\n"
        )
    };
    // "Count." has 6 bytes, and its template at most 288 tokens, so a request with 20 tokens of output reserves 494 millionths.
    let more = format!(
        "{}{}[tenants.local]\nmoney_per_day = \"0.001 USD\"\n",
        route("mixed", MODEL),
        route("priced", "far/m")
    );
    let host = host_beside(&[("far", &upstream.url)], &more);
    let (status, refused) = host.post("/v1/chat/completions", question("mixed")).await;
    assert_eq!((status, &refused["error"]["code"]), (403, &json!("price_unknown")), "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains(&format!("[prices.\"{MODEL}\"]")), "{message}");
    host.ok("/v1/chat/completions", question("priced")).await;
    let lines = billed(&host, 1).await;
    assert_eq!(counts(line(&lines, "far/m")), (1, 9, 3, 0, "0.000039".to_owned()));
    for model in ["priced", "far/m"] {
        let (status, refused) = host.post("/v1/chat/completions", structured(model)).await;
        assert_eq!((status, &refused["error"]["code"]), (429, &json!("money_used_up")), "{refused}");
    }
    assert_eq!(upstream.asked().len(), 1, "nothing that was refused was sent");
}

/// Uploads the requests of a batch, and returns the id of the file.
async fn upload(host: &Host, lines: &str) -> String {
    let body = format!(
        "--cut\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"requests.jsonl\"\r\n\
         content-type: application/jsonl\r\n\r\n{lines}\r\n--cut--\r\n"
    );
    let post =
        client().post(host.at("/v1/files")).header("content-type", "multipart/form-data; boundary=cut");
    let uploaded: Value = post.body(body).send().await.unwrap().json().await.unwrap();
    uploaded["id"].as_str().unwrap_or_else(|| panic!("{uploaded}")).to_owned()
}

/// Reads a resource until its status is none of those that pass.
async fn settled(host: &Host, path: &str) -> Value {
    for _ in 0..1_000 {
        let read = host.get(path).await.1;
        if !["queued", "in_progress", "finalizing"].contains(&read["status"].as_str().unwrap_or_default()) {
            return read;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{path} does not end");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_interface_gets_the_answers_of_an_upstream_and_bills_them() {
    let upstream =
        ScriptedUpstream::start(|_| answered(&[json!({"content": "far "}), json!({"content": "away"})]))
            .await;
    let host = host_beside(&[("far", &upstream.url)], "");
    let question = question("far/m");
    let messages = &question["messages"];

    let message =
        host.ok("/v1/messages", json!({"model": "far/m", "max_tokens": 20, "messages": messages})).await;
    assert_eq!(message["content"][0]["text"], "far away", "{message}");
    assert_eq!(
        (&message["usage"]["input_tokens"], &message["usage"]["output_tokens"]),
        (&json!(9), &json!(3))
    );

    let stored = host.ok("/v1/responses", json!({"model": "far/m", "input": "Count.", "store": true})).await;
    let path = format!("/v1/responses/{}", stored["id"].as_str().unwrap());
    assert_eq!(host.get(&path).await.1["output"], stored["output"], "{stored}");
    assert_eq!(stored["output"][0]["content"][0]["text"], "far away", "{stored}");
    let next =
        json!({"model": "far/m", "input": "More.", "previous_response_id": stored["id"], "background": true});
    let queued = host.ok("/v1/responses", next).await;
    let ended = settled(&host, &format!("/v1/responses/{}", queued["id"].as_str().unwrap())).await;
    assert_eq!(
        (&ended["status"], &ended["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("far away"))
    );
    let last = upstream.asked().last().unwrap().body["messages"].clone();
    let said: Vec<&str> = last.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect();
    assert_eq!(said, ["Count.", "far away", "More."], "the stored conversation is sent");

    let request =
        json!({"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": question});
    let file = upload(&host, &request.to_string()).await;
    let batch =
        json!({"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    let batch = host.ok("/v1/batches", batch).await;
    let batch = settled(&host, &format!("/v1/batches/{}", batch["id"].as_str().unwrap())).await;
    let output = batch["output_file_id"].as_str().unwrap_or_else(|| panic!("{batch}"));
    let output = client().get(host.at(&format!("/v1/files/{output}/content"))).send().await.unwrap();
    let output: Value = output.json().await.expect("one line");
    assert_eq!(content(&output["response"]["body"]), "far away", "{output}");

    let queued =
        host.ok("/ai/run/far/m?queueRequest=true", json!({"requests": [{"prompt": "Count."}]})).await;
    let id = &queued["result"]["request_id"];
    let responses = loop {
        let polled = host.ok("/ai/run/far/m", json!({"request_id": id})).await;
        if let Some(responses) = polled["result"].get("responses") {
            break responses.clone();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(responses.to_string().contains("far away"), "{responses}");

    // Each costs 9 × 1 + 3 × 10 = 39 millionths.
    let lines = billed(&host, 5).await;
    assert_eq!(counts(line(&lines, "far/m")), (5, 45, 15, 0, "0.000195".to_owned()));
}

/// Number of streams of the load test; half of them get two parts of an answer before their upstream dies.
const STREAMS: usize = 64;

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_dies_under_load_loses_nothing_and_the_bill_is_that_of_its_servers() {
    let number =
        |asked: &Asked| -> usize { asked.body["messages"][0]["content"].as_str().unwrap().parse().unwrap() };
    let (dies, death) = tokio::sync::watch::channel(false);
    let first = ScriptedUpstream::start(move |asked| {
        let parts = if number(asked).is_multiple_of(2) { 2 } else { 0 };
        let begun: String = (0..parts).map(|part| chunk(json!({"content": format!("a{part} ")}))).collect();
        let mut death = death.clone();
        let ended = async move {
            let _ = death.wait_for(|dead| *dead).await;
            Err(std::io::Error::other("the server dies"))
        };
        let body = futures::stream::iter([Ok(begun)]).chain(futures::stream::once(ended));
        ([("content-type", "text/event-stream")], Body::from_stream(body)).into_response()
    })
    .await;
    let second =
        ScriptedUpstream::start(|_| answered(&[json!({"content": "b0 "}), json!({"content": "b1 "})])).await;
    let route = "[[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"first/m\"\n[[route.models]]\nmodel = \"second/m\"\n";
    let host = host_beside(&[("first", &first.url), ("second", &second.url)], route);
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..STREAMS {
        let (url, begun) = (host.at("/v1/chat/completions"), begun.clone());
        callers.spawn(async move {
            let messages = json!([{"role": "user", "content": caller.to_string()}]);
            let body = json!({"model": "smart", "stream": true, "max_tokens": 20, "messages": messages});
            let response = client().post(url).json(&body).send().await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            let (mut stream, mut text) = (response.bytes_stream(), String::new());
            while let Some(bytes) = stream.next().await {
                let before = text.contains("a1 ");
                text.push_str(std::str::from_utf8(&bytes.unwrap()).unwrap());
                if !before && text.contains("a1 ") {
                    begun.send(caller).unwrap();
                }
            }
            (caller, text)
        });
    }
    for _ in 0..STREAMS / 2 {
        has_begun.recv().await.unwrap();
    }
    while first.asked().len() < STREAMS {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    dies.send(true).unwrap();
    while let Some(answer) = callers.join_next().await {
        let (caller, text) = answer.unwrap();
        let parts: String =
            ["a0 ", "a1 ", "b0 ", "b1 "].map(|part| text.matches(part).count().to_string()).concat();
        match caller % 2 {
            0 => assert!(parts == "1100" && text.contains("upstream_cut_off"), "{text}"),
            _ => assert!(parts == "0011" && text.contains("[DONE]"), "{text}"),
        }
    }
    assert_eq!(second.asked().len(), STREAMS / 2);
    // The second server counted 9 and 3 tokens for each answer; of the first, the two parts that it sent are estimated.
    let half = STREAMS as u64 / 2;
    let lines = billed(&host, STREAMS as u64).await;
    let (requests, input, output, estimated, _) = counts(line(&lines, "second/m"));
    assert_eq!((requests, input, output, estimated), (half, 9 * half, 3 * half, 0));
    let (requests, input, output, estimated, _) = counts(line(&lines, "first/m"));
    assert_eq!((requests, output, estimated), (half, 2 * half, half));
    assert!(input >= half, "{input} tokens of prompts");
}
