//! An upstream with OpenAI's API, or with Anthropic's, that answers as a test says.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::{Value, json};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

/// One request as it arrived.
#[derive(Clone)]
pub struct Asked {
    /// Number of the request, from 0.
    pub number: usize,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
}

type Script = Arc<dyn Fn(&Asked) -> Response + Send + Sync>;

/// A server that runs as long as the runtime of its test.
#[derive(Clone)]
pub struct ScriptedUpstream {
    /// Its base URL, as `url` of an upstream in `skep.toml`.
    pub url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

#[derive(Clone)]
struct Shared {
    script: Script,
    asked: Arc<Mutex<Vec<Asked>>>,
    count: Arc<AtomicUsize>,
}

impl ScriptedUpstream {
    pub async fn start(script: impl Fn(&Asked) -> Response + Send + Sync + 'static) -> Self {
        async fn answer(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
            let number = shared.count.fetch_add(1, Ordering::AcqRel);
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let asked = Asked { number, path: uri.path().to_owned(), headers, body };
            shared.asked.lock().unwrap().push(asked.clone());
            (shared.script)(&asked)
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::default());
        let shared = Shared { script: Arc::new(script), asked: Arc::clone(&asked), count: Arc::default() };
        let routes = Router::new()
            .route("/v1/chat/completions", post(answer))
            .route("/v1/completions", post(answer))
            .route("/v1/messages", post(answer))
            .layer(DefaultBodyLimit::max(64 << 20))
            .with_state(shared);
        tokio::spawn(async move { axum::serve(listener, routes).await });
        ScriptedUpstream { url, asked }
    }

    /// Returns the requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

/// Returns an event of a stream with this delta.
pub fn chunk(delta: Value) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": null});
    format!("data: {}\n\n", json!({"object": "chat.completion.chunk", "choices": [choice]}))
}

/// Returns a whole answer with these deltas, and with 9 tokens of the prompt and 3 of the answer.
pub fn answered(deltas: &[Value]) -> Response {
    let mut text: String = deltas.iter().cloned().map(chunk).collect();
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}});
    text.push_str(&format!("data: {end}\n\ndata: [DONE]\n\n"));
    streamed(Body::from(text))
}

/// Returns a continued text in these pieces, with 4 tokens of the prompt and 2 of the answer.
pub fn continued(pieces: &[&str]) -> Response {
    let piece = |text: &str, finish: Value| {
        format!("data: {}\n\n", json!({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}))
    };
    let mut text: String = pieces.iter().map(|text| piece(text, Value::Null)).collect();
    text.push_str(&piece("", json!("length")));
    let usage =
        json!({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}});
    text.push_str(&format!("data: {usage}\n\ndata: [DONE]\n\n"));
    streamed(Body::from(text))
}

/// Returns an error in OpenAI's shape.
pub fn refused(status: StatusCode, message: &str) -> Response {
    (status, axum::Json(json!({"error": {"message": message, "type": "error", "code": null}})))
        .into_response()
}

fn streamed(body: Body) -> Response {
    ([("content-type", "text/event-stream")], body).into_response()
}
