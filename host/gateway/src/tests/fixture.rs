//! A server without a socket, and requests to it.

use super::described;
use crate::{GatewayOptions, router};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode},
};
use serde_json::{Value, json};
use skep_engine::{Engine, EngineOptions, LocalModel, ModelSet, Priority};
use skep_model::{
    ChatTemplate, Checkpoint, ExecutorOptions, LoadedModel, ModelDigest, ModelWeights, Tokenizer,
};
use skep_runtime::{AgentHost, HostParts, RuntimeOptions, ToolServer};
use skep_store::Store;
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};
use tower::ServiceExt;

/// A timeout longer than any step takes, so that a test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Server {
    pub router: Router,
    pub engine: Engine,
    pub host: AgentHost,
    pub store: Store,
}

pub struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl TestResponse {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Returns the error of a response, after checking that it has OpenAI's shape and a fitting status.
    pub fn error(&self) -> Value {
        let mut body = self.json();
        let error = body["error"].take();
        assert!(self.status.as_u16() >= 400, "{}", self.text);
        for key in ["message", "type", "code"] {
            assert!(error[key].is_string(), "{key} of {}", self.text);
        }
        error
    }

    /// Returns the `data:` lines, after checking that the last one is `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self.text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.text);
        data.into_iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }
}

impl Server {
    pub async fn start() -> Server {
        Server::with(GatewayOptions::default()).await
    }

    pub async fn with(options: GatewayOptions) -> Server {
        Server::with_runtime(options, RuntimeOptions::default()).await
    }

    pub async fn with_runtime(options: GatewayOptions, runtime: RuntimeOptions) -> Server {
        Server::with_tool_servers(options, runtime, BTreeMap::new()).await
    }

    pub async fn with_tool_servers(
        options: GatewayOptions,
        runtime: RuntimeOptions,
        tool_servers: BTreeMap<String, Arc<dyn ToolServer>>,
    ) -> Server {
        let engine = tiny_engine("tiny");
        let models = ModelSet::new(engine.clone());
        let store = Store::in_memory().await.unwrap();
        let parts = HostParts { tool_servers, ..HostParts::new(store.clone(), models) };
        let host = AgentHost::start(parts, runtime).await.unwrap();
        Server { router: router(host.clone(), options), engine, host, store }
    }

    /// Starts a server with the model `tiny` and these models.
    pub async fn with_models(more: Vec<LocalModel>) -> Server {
        let server = Server::start().await;
        for model in more {
            let _ = server.host.models().clone().with(model);
        }
        server
    }

    /// Sends a request. The response must be one that the OpenAPI document describes.
    pub async fn send(&self, request: Request<Body>) -> TestResponse {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.into()).unwrap();
        let answer = TestResponse { status: parts.status, headers: parts.headers, text };
        described::check(&method, &path, &answer);
        answer
    }

    pub async fn get(&self, path: &str) -> TestResponse {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> TestResponse {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(Body::from(body.to_string())).unwrap()).await
    }

    /// Sends a request whose response must be 200.
    pub async fn ok(&self, path: &str, body: &Value) -> TestResponse {
        let answer = self.post(path, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer
    }
}

pub fn tiny_engine(name: &str) -> Engine {
    let model = LoadedModel { name: name.into(), ..tiny_model() };
    Engine::start(model, EngineOptions::default()).unwrap()
}

/// Waits until an engine has no interactive request. A request counts from the moment at which it is sent to the engine.
pub async fn until_idle(engine: &Engine) {
    let until_idle = async {
        while engine.free_slots(Priority::Interactive) < engine.max_sequences() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, until_idle).await.expect("all requests end");
}

/// Starts a model with this many replicas.
pub fn tiny_replicas(count: usize) -> Engine {
    Engine::start_replicas((0..count).map(|_| tiny_model()).collect(), EngineOptions::default()).unwrap()
}

/// Starts a model that is divided among ranks.
pub fn tiny_ranks(tensor_parallel: usize, pipeline_parallel: usize) -> Engine {
    let model = tiny_model_of_ranks("llama-gqa", tensor_parallel, pipeline_parallel);
    Engine::start(model, EngineOptions::default()).unwrap()
}

/// Starts the model `experts`, a mixture of eight experts of which each token passes through two, in three layers. Each of this
/// many replicas is divided among two ranks.
pub fn tiny_experts(replicas: usize) -> Engine {
    let model = || LoadedModel { name: "experts".into(), ..tiny_model_of_ranks("qwen3-moe", 2, 1) };
    Engine::start_replicas((0..replicas).map(|_| model()).collect(), EngineOptions::default()).unwrap()
}

fn tiny_model() -> LoadedModel {
    tiny_model_of_ranks("llama-gqa", 1, 1)
}

/// Returns a model with random weights and a byte tokenizer, with room for prompts that describe tools.
fn tiny_model_of_ranks(fixture: &str, tensor_parallel: usize, pipeline_parallel: usize) -> LoadedModel {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let source = fixtures.join("tiny").join(fixture);
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(4096);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = ExecutorOptions {
        threads: Some(1),
        kv_tokens: Some(16 << 10),
        tensor_parallel,
        pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let executor = ModelWeights::load(&checkpoint, &options).unwrap().executor(options).unwrap();
    let tokenizer = std::fs::read(fixtures.join("tokenizer/byte-level-chatml.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&tokenizer).unwrap();
    let template = ChatTemplate::chatml_default();
    LoadedModel {
        name: "tiny".into(),
        config: checkpoint.config().clone(),
        digest: ModelDigest::new(&checkpoint, &tokenizer, &template),
        tokenizer: Arc::new(tokenizer),
        template: Arc::new(template),
        executor,
        weights: checkpoint.weight_format(),
        device: "cpu".into(),
        fallback: None,
        restart: None,
        sampling: None,
    }
}
