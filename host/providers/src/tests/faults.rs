//! Every way in which a server fails, before and after the first output.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::json;
use skep_engine::{
    EngineError, RemoteModel as _, UpstreamFault,
    chat::{ChatMessage, ChatOptions},
};
use tokio::sync::Notify;

use super::{
    ask, chunk, hear, model, options, said,
    server::{Part, Reply, Server, chunked, chunked_head, event, status, stream, stream_head},
    stopped,
};
use crate::UpstreamKind::OpenAi;

/// A fault with its name.
type Fault = (&'static str, fn() -> Reply);

fn whole() -> Reply {
    stream(&[said("Hi"), said(" there"), stopped()])
}

/// Fails the first request like this, and answers the second.
async fn first(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Server {
    Server::start(move |number, _| if number == 0 { reply() } else { whole() }).await
}

fn cut_event() -> Part {
    Part::Bytes(b"data: {\"choices\": [{\"delta\": {\"content\": \"\xc3".to_vec())
}

#[tokio::test]
async fn a_failure_before_any_output_is_retried() {
    let faults: [Fault; 8] = [
        ("a status 500", || status(500, "", "oops")),
        ("a 429 without a wait", || status(429, "", "{}")),
        ("a 429 with a wait", || status(429, "retry-after-ms: 20\r\n", "{}")),
        ("a connection that ends at once", Vec::new),
        ("a stream that ends in an event and in a character", || vec![stream_head(), cut_event()]),
        ("a broken chunked stream", || vec![chunked_head(), chunked(b"data: {\"cho")]),
        ("garbage", || vec![stream_head(), Part::Bytes(b"data: nonsense\n\n".to_vec())]),
        ("an error in the stream", || stream(&[json!({"error": {"message": "overloaded", "code": 503}})])),
    ];
    for (name, fault) in faults {
        let server = first(fault).await;
        let heard = ask(&*model(options(OpenAi, &server.url))).await;
        assert_eq!(heard.outcome().text, "Hi there", "{name}");
        assert_eq!(server.count(), 2, "{name}");
    }
}

#[tokio::test]
async fn a_failure_after_text_was_sent_is_cut_off_and_not_retried() {
    let faults: [Fault; 5] = [
        ("an end in an event and in a character", || vec![stream_head(), event(&said("Hi")), cut_event()]),
        ("an end between events", || vec![stream_head(), event(&said("Hi"))]),
        ("a broken chunked stream", || {
            vec![chunked_head(), chunked(format!("data: {}\n\ndata: {{", said("Hi")).as_bytes())]
        }),
        ("garbage", || vec![stream_head(), event(&said("Hi")), Part::Bytes(b"data: }{\n\n".to_vec())]),
        ("an error", || stream(&[said("Hi"), json!({"error": {"message": "x", "code": 429}})])),
    ];
    for (name, fault) in faults {
        let server = Server::always(fault).await;
        let heard = ask(&*model(options(OpenAi, &server.url))).await;
        assert_eq!((heard.text().as_str(), heard.fault()), ("Hi", UpstreamFault::CutOff), "{name}");
        assert_eq!(server.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_refusal_after_text_was_sent_is_not_one_that_asking_again_changes() {
    let server = Server::always(|| stream(&[said("Hi"), chunk(json!({}), json!("content_filter"))])).await;
    let heard = ask(&*model(options(OpenAi, &server.url))).await;
    assert_eq!((heard.text().as_str(), heard.fault()), ("Hi", UpstreamFault::Refused));
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn a_server_that_stalls_is_given_up_and_its_connection_is_closed() {
    for has_output in [false, true] {
        let gone = Arc::new(Notify::new());
        let stall = gone.clone();
        let server = Server::always(move || {
            let mut reply = vec![stream_head(), Part::Bytes(b": still here\n\n".to_vec())];
            reply.extend(has_output.then(|| event(&said("Hi"))));
            reply.push(Part::Stall(stall.clone()));
            reply
        })
        .await;
        let mut options = options(OpenAi, &server.url);
        options.timeouts.first_token = Duration::from_secs(if has_output { 20 } else { 1 });
        options.timeouts.idle = Duration::from_millis(60);
        let heard = ask(&*model(options)).await;
        let expected = if has_output { UpstreamFault::CutOff } else { UpstreamFault::Unavailable };
        assert_eq!(heard.fault(), expected, "{}", heard.error());
        let closed = tokio::time::timeout(Duration::from_secs(20), gone.notified()).await;
        closed.expect("the server sees that its connection is closed");
        assert_eq!(server.count(), 1, "asking again would take as long");
    }
}

#[tokio::test]
async fn comments_and_bytes_that_never_become_an_event_are_not_progress() {
    let drip = |text: &str| Part::Drip(text.repeat(1000).into_bytes(), Duration::from_millis(5));
    let comments = Server::always(move || vec![stream_head(), drip(":\n\n")]).await;
    let mut slow = options(OpenAi, &comments.url);
    slow.timeouts.first_token = Duration::from_millis(100);
    assert_eq!(ask(&*model(slow)).await.fault(), UpstreamFault::Unavailable);
    let bytes = Server::always(move || vec![stream_head(), event(&said("Hi")), drip("data")]).await;
    let mut slow = options(OpenAi, &bytes.url);
    slow.timeouts.idle = Duration::from_millis(100);
    let heard = ask(&*model(slow)).await;
    assert_eq!((heard.text().as_str(), heard.fault()), ("Hi", UpstreamFault::CutOff));
}

#[tokio::test]
async fn a_storm_of_429_ends_with_the_wait_that_the_server_asked_for() {
    let storm = Server::always(|| status(429, "", "{\"error\": {\"message\": \"slow down\"}}")).await;
    let heard = ask(&*model(options(OpenAi, &storm.url))).await;
    assert!(matches!(heard.fault(), UpstreamFault::Busy { .. }) && heard.error().contains("slow down"));
    assert_eq!(storm.count(), 3, "the attempts are bounded");
    let patient = Server::always(|| status(429, "retry-after: 100\r\n", "{}")).await;
    let heard = ask(&*model(options(OpenAi, &patient.url))).await;
    assert_eq!(heard.fault(), UpstreamFault::Busy { retry_after_ms: 100_000 });
    assert_eq!(patient.count(), 1, "100 seconds are not waited for");
}

#[tokio::test]
async fn a_deadline_ends_the_retries_and_the_answer() {
    let storm = Server::always(|| status(503, "retry-after: 40\r\n", "")).await;
    let mut patient = options(OpenAi, &storm.url);
    patient.retries.max_wait = Duration::from_secs(60);
    let start = Instant::now();
    let deadline = Some(start + Duration::from_secs(20));
    let asked = ChatOptions { deadline, ..ChatOptions::default() };
    let heard = hear(model(patient).ask(vec![ChatMessage::user("x")].into(), asked)).await;
    assert_eq!(heard.fault(), UpstreamFault::Unavailable);
    assert!(start.elapsed() < Duration::from_secs(20), "the wait would end after the deadline");
    let stall = Server::always(|| vec![stream_head(), Part::Stall(Arc::default())]).await;
    let deadline = Some(Instant::now() + Duration::from_millis(80));
    let asked = ChatOptions { deadline, ..ChatOptions::default() };
    let heard =
        hear(model(options(OpenAi, &stall.url)).ask(vec![ChatMessage::user("x")].into(), asked)).await;
    assert!(matches!(heard.result, Err(EngineError::DeadlineExceeded)), "{:?}", heard.result);
}

#[tokio::test]
async fn rejects_malformed_answers() {
    let html = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<p>Hello";
    let page = Server::always(move || vec![Part::Bytes(html.as_bytes().to_vec())]).await;
    let heard = ask(&*model(options(OpenAi, &page.url))).await;
    assert_eq!(heard.fault(), UpstreamFault::Malformed);
    assert!(heard.error().contains("text/html"), "{}", heard.error());
    let elsewhere = Server::always(whole).await;
    let location = format!("location: {}\r\n", elsewhere.url);
    let moved = Server::always(move || status(307, &location, "")).await;
    let heard = ask(&*model(options(OpenAi, &moved.url))).await;
    assert!(heard.error().contains("redirects are not followed"), "{}", heard.error());
    assert_eq!((moved.count(), elsewhere.count()), (1, 0));
}

#[tokio::test]
async fn events_and_answers_are_bounded() {
    let long = Server::always(|| stream(&[said(&"x".repeat(5000)), stopped()])).await;
    let mut bounded = options(OpenAi, &long.url);
    bounded.bounds.event = 4000;
    let heard = ask(&*model(bounded)).await;
    assert_eq!(heard.fault(), UpstreamFault::Malformed);
    assert!(heard.error().contains("more than 4000 bytes"), "{}", heard.error());
    let endless = Server::always(|| {
        let many = format!("data: {}\n\n", said("xxxx")).repeat(5000);
        vec![stream_head(), Part::Bytes(many.into_bytes()), Part::Stall(Arc::default())]
    })
    .await;
    let mut bounded = options(OpenAi, &endless.url);
    bounded.bounds.answer = 100_000;
    let heard = ask(&*model(bounded)).await;
    assert_eq!(heard.fault(), UpstreamFault::CutOff);
    assert!(heard.error().contains("more than 100000 bytes") && heard.text().len() < 20_000);
    let mut bounded = options(OpenAi, &endless.url);
    bounded.bounds.request = 50;
    let error = ask(&*model(bounded)).await.error();
    assert!(error.contains("an upstream gets at most 50"), "{error}");
}

#[tokio::test]
async fn headers_are_bounded() {
    let many = format!("x-long: {}\r\n", "y".repeat(70_000));
    let server = Server::always(move || status(200, &many, "{}")).await;
    let heard = ask(&*model(options(OpenAi, &server.url))).await;
    assert!(heard.result.is_err(), "70 kB of headers are too many");
    assert!(heard.error().contains("header") || heard.error().contains("exchange"), "{}", heard.error());
}

#[tokio::test]
async fn an_answer_without_a_done_event_and_with_keep_alives_is_whole() {
    let server = Server::always(|| {
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}});
        let mut last = chunk(json!({}), json!("length"));
        last["usage"] = usage;
        let alive = || Part::Bytes(b": keep-alive\r\n\r\n".to_vec());
        vec![stream_head(), alive(), event(&said("Hi")), alive(), event(&last)]
    })
    .await;
    let heard = ask(&*model(options(OpenAi, &server.url))).await;
    let outcome = heard.outcome();
    assert_eq!(outcome.finish, skep_engine::chat::ChatFinish::Length);
    let usage = outcome.usage;
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (9, 8, 4));
}

#[tokio::test]
async fn a_server_that_does_not_stream_is_understood() {
    let body = json!({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}).to_string();
    let server = Server::always(move || status(200, "content-type: application/json\r\n", &body)).await;
    assert_eq!(ask(&*model(options(OpenAi, &server.url))).await.outcome().text, "Hi");
}

#[tokio::test]
async fn a_prompt_that_the_server_finds_too_long_is_an_overflow() {
    let message = "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.";
    let body = json!({"error": {"message": message, "code": "context_length_exceeded"}}).to_string();
    let server = Server::always(move || status(400, "", &body)).await;
    let heard = ask(&*model(options(OpenAi, &server.url))).await;
    let Err(EngineError::ContextOverflow { limit, prompt, .. }) = heard.result else {
        panic!("{:?}", heard.result)
    };
    assert_eq!((limit, prompt), (8192, 9000));
}

#[tokio::test]
async fn dropping_an_answer_closes_its_connection() {
    let gone = Arc::new(Notify::new());
    let stall = gone.clone();
    let server =
        Server::always(move || vec![stream_head(), event(&said("Hi")), Part::Stall(stall.clone())]).await;
    let mut answer =
        model(options(OpenAi, &server.url)).ask(vec![ChatMessage::user("x")].into(), ChatOptions::default());
    while !matches!(
        futures::StreamExt::next(&mut answer).await,
        Some(Ok(skep_engine::chat::ChatEvent::Text { .. }))
    ) {}
    drop(answer);
    gone.notified().await;
}
