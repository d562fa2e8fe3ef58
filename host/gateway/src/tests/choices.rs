//! Tests of several choices of a model that another server computes.

use super::fixture::Server;
use crate::GatewayOptions;
use futures::{StreamExt, future::ready, stream};
use serde_json::json;
use skep_engine::{
    Model, ModelDigest, RemoteInfo, RemoteModel, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, Input, RemoteStream},
};
use std::{sync::Arc, time::Duration};
use tokio::sync::Barrier;

/// A model of another server, whose answers end once as many of them are awaited at the same time as the barrier lets pass.
pub(super) struct Together(RemoteInfo, Arc<Barrier>);

impl Together {
    /// Returns a model of the name `far/model`.
    pub(super) fn model(barrier: &Arc<Barrier>) -> Model {
        let info = RemoteInfo {
            name: "far/model".to_owned(),
            digest: ModelDigest::remote("http://far", "far/model"),
            context_length: Some(8192),
            created_unix_s: 0,
        };
        Model::Remote(Arc::new(Together(info, barrier.clone())))
    }
}

impl RemoteModel for Together {
    fn info(&self) -> &RemoteInfo {
        &self.0
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        let all = self.1.clone();
        let started = ChatEvent::Started { prompt_tokens: 5, cached_tokens: 0, cache_write_tokens: 0 };
        let usage = Usage { prompt_tokens: 5, completion_tokens: 2, ..Usage::default() };
        let outcome = ChatOutcome { usage, ..ChatOutcome::remote("Hi.".to_owned(), ChatFinish::Stop) };
        let ended = stream::once(async move {
            all.wait().await;
            Ok(ChatEvent::Finished(outcome))
        });
        Box::pin(stream::once(ready(Ok(started))).chain(ended))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

#[tokio::test]
async fn the_choices_of_a_remote_model_are_awaited_together() {
    let server = Server::with(GatewayOptions::default()).await;
    let _ = server.host.models().clone().with(Together::model(&Arc::new(Barrier::new(3))));
    let messages = json!([{"role": "user", "content": "hello"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "far/model", "messages": messages, "n": 3})),
        ("/v1/completions", json!({"model": "far/model", "prompt": ["a", "b", "c"]})),
    ] {
        let answer = tokio::time::timeout(Duration::from_secs(60), server.post(path, &body)).await;
        let answer = answer.expect("no choice waits for the end of another one").json();
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(3), "{answer}");
        assert_eq!(answer["choices"][2]["index"], 2, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 6, "{answer}");
    }
}
