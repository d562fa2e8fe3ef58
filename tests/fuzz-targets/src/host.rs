//! The host that the targets share: a tiny model with random weights, agents, and routes without a socket.

use crate::guest;
use axum::Router;
use skep_engine::{Engine, EngineOptions, ModelSet};
use skep_gateway::GatewayOptions;
use skep_model::{
    ChatTemplate, Checkpoint, CpuExecutor, ExecutorOptions, LoadedModel, ModelDigest, Tokenizer,
};
use skep_runtime::{AgentHost, HostParts, Manifest, RuntimeOptions};
use skep_store::Store;
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};
use tokio::runtime::Runtime;

pub(crate) struct SharedHost {
    pub(crate) runtime: Runtime,
    pub(crate) agents: AgentHost,
    pub(crate) router: Router,
}

const EVERYTHING: &str = "[grants]\nhosts = [\"*\"]\ntools = [\"agent:*/*\"]\n[limits]\ncpu_ms = 2000\nturn_ms = 2000\n\
                          tokens_per_turn = 64\nlog_kb = 16\n";

pub(crate) fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::start(tiny_model(), EngineOptions::default()).expect("the engine starts"))
}

pub(crate) fn host() -> &'static SharedHost {
    static HOST: OnceLock<SharedHost> = OnceLock::new();
    HOST.get_or_init(|| {
        let runtime = Runtime::new().expect("threads can be started");
        let agents = runtime.block_on(start());
        let router = skep_gateway::router(agents.clone(), GatewayOptions::default());
        SharedHost { runtime, agents, router }
    })
}

async fn start() -> AgentHost {
    let store = Store::in_memory().await.expect("a database in memory");
    let options = RuntimeOptions { max_instances: 32, ..RuntimeOptions::default() };
    let parts = HostParts::new(store, ModelSet::new(engine().clone()));
    let agents = AgentHost::start(parts, options).await.expect("the host starts");
    for (name, more, component) in [("caller", EVERYTHING, guest::caller()), ("chat", "", guest::chatter())] {
        let manifest = Manifest::from_toml(&format!("name = \"{name}\"\n{more}")).expect("valid");
        agents.deploy(manifest, component, "fuzz").await.expect("the agent deploys");
    }
    agents
}

fn tiny_model() -> LoadedModel {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let checkpoint = Checkpoint::open(&fixtures.join("tiny/llama-gqa")).expect("the fixture is a model");
    let options =
        ExecutorOptions { threads: Some(1), kv_tokens: Some(8 << 10), ..ExecutorOptions::default() };
    let tokenizer =
        std::fs::read(fixtures.join("tokenizer/byte-level-chatml.json")).expect("the fixture is there");
    let tokenizer = Tokenizer::from_json(&tokenizer).expect("the fixture is a tokenizer");
    let template = ChatTemplate::chatml_default();
    LoadedModel {
        name: "tiny".into(),
        config: checkpoint.config().clone(),
        digest: ModelDigest::new(&checkpoint, &tokenizer, &template),
        tokenizer: Arc::new(tokenizer),
        template: Arc::new(template),
        executor: Box::new(CpuExecutor::load(&checkpoint, options).expect("the fixture runs")),
        weights: checkpoint.weight_format(),
        device: "cpu".into(),
        fallback: None,
        sampling: None,
        restart: None,
    }
}
