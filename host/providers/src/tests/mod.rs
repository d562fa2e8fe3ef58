//! Tests of whole answers, against scripted servers that fail in all the ways that real ones do.

mod faults;
mod forms;
mod golden;
mod keys;
mod load;
mod protection;
mod routes;
mod server;
mod splits;

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use serde_json::{Value, json};
use skep_engine::{
    EngineError, RemoteModel, UpstreamFault,
    chat::{ChatEvent, ChatMessage, ChatOptions, ChatOutcome, RemoteStream},
};

use crate::{RetryOptions, Upstream, UpstreamKind, UpstreamModel, UpstreamModelOptions, UpstreamOptions};

/// Returns options with short waits, for a server at `url`.
fn options(kind: UpstreamKind, url: &str) -> UpstreamOptions {
    let mut options = UpstreamOptions {
        models: vec![UpstreamModelOptions::new("m")],
        retries: RetryOptions { first_wait: Duration::from_millis(5), ..RetryOptions::default() },
        ..UpstreamOptions::new("there", kind, url)
    };
    options.timeouts.first_token = Duration::from_secs(20);
    options.timeouts.idle = Duration::from_secs(20);
    options
}

fn model(options: UpstreamOptions) -> Arc<UpstreamModel> {
    Upstream::new(options).expect("valid options").models().remove(0)
}

/// Everything that a caller received.
struct Heard {
    events: Vec<ChatEvent>,
    result: Result<ChatOutcome, EngineError>,
}

async fn hear(mut stream: RemoteStream) -> Heard {
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            Ok(ChatEvent::Finished(outcome)) => {
                assert!(stream.next().await.is_none(), "nothing follows the outcome");
                return Heard { events, result: Ok(outcome) };
            }
            Ok(event) => events.push(event),
            Err(error) => {
                assert!(stream.next().await.is_none(), "nothing follows an error");
                return Heard { events, result: Err(error) };
            }
        }
    }
    panic!("the stream ended without a result after {events:?}");
}

async fn ask(model: &dyn RemoteModel) -> Heard {
    hear(model.ask(vec![ChatMessage::user("Hello")].into(), ChatOptions::default())).await
}

impl Heard {
    /// Returns the text that was sent.
    fn text(&self) -> String {
        let text = |event: &ChatEvent| match event {
            ChatEvent::Text { delta, .. } => Some(delta.clone()),
            _ => None,
        };
        self.events.iter().filter_map(text).collect()
    }

    fn fault(&self) -> UpstreamFault {
        match &self.result {
            Err(EngineError::Upstream { fault, .. }) => *fault,
            other => panic!("not an error of the upstream: {other:?}"),
        }
    }

    fn error(&self) -> String {
        self.result.as_ref().expect_err("an error").to_string()
    }

    /// Returns the outcome, whose text has to be the text that was sent.
    fn outcome(&self) -> &ChatOutcome {
        let outcome = self.result.as_ref().expect("an answer");
        assert_eq!(outcome.text, self.text());
        outcome
    }
}

/// Returns a chunk of OpenAI's format.
fn chunk(delta: Value, finish: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
}

fn said(text: &str) -> Value {
    chunk(json!({"content": text}), Value::Null)
}

fn stopped() -> Value {
    chunk(json!({}), json!("stop"))
}
