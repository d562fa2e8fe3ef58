//! A host with a tiny model of random weights, and helpers for invoking its agents.

use super::{durability::QUESTION, guest::Guest};
use crate::{
    AgentHost, AgentSummary, Clock, HostParts, Invocation, Manifest, Origin, Outcome, Peers, RunHandle,
    RuntimeError, RuntimeOptions, SharedCounts, ToolServer,
};
use skep_engine::{DiskTier, Engine, EngineOptions, ModelSet, Priority};
use skep_model::{
    ChatTemplate, Checkpoint, CpuExecutor, ExecutorOptions, LoadedModel, ModelDigest, Tokenizer,
};
use skep_store::{AgentRow, Store};
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

/// The options of a host, and the parts that a test replaces.
#[derive(Clone, Default)]
pub(super) struct Setup {
    pub(super) options: RuntimeOptions,
    pub(super) clock: Clock,
    pub(super) tool_servers: BTreeMap<String, Arc<dyn ToolServer>>,
    /// The tier of the engines.
    pub(super) disk: Option<Arc<DiskTier>>,
    pub(super) peers: Option<Arc<dyn Peers>>,
    pub(super) counts: Option<Arc<dyn SharedCounts>>,
    pub(super) default_model: Option<String>,
}

impl Setup {
    /// Returns the setup of a host whose clock the test moves.
    pub(super) fn at(clock: &Clock, options: RuntimeOptions) -> Self {
        Setup { clock: clock.clone(), ..Setup::from(options) }
    }
}

impl From<RuntimeOptions> for Setup {
    fn from(options: RuntimeOptions) -> Self {
        Setup { options, ..Setup::default() }
    }
}

pub(super) struct Host {
    pub(super) agents: AgentHost,
    store: Store,
    models: ModelSet,
}

impl Host {
    pub(super) async fn start() -> Host {
        Host::with(RuntimeOptions::default()).await
    }

    pub(super) async fn with(setup: impl Into<Setup>) -> Host {
        Host::with_models(ModelSet::new(tiny_engine("tiny")), setup).await
    }

    pub(super) async fn with_models(models: ModelSet, setup: impl Into<Setup>) -> Host {
        let store = Store::for_tests().await.expect("a database in memory");
        Host::on(store, models, setup).await
    }

    /// Starts a host on an existing database.
    pub(super) async fn on(store: Store, models: ModelSet, setup: impl Into<Setup>) -> Host {
        Host { agents: start(&store, &models, setup.into()).await, store, models }
    }

    /// Starts another host on the same store, as after a restart.
    pub(super) async fn restart(self) -> Host {
        self.restart_with(RuntimeOptions::default()).await
    }

    pub(super) async fn restart_with(self, setup: impl Into<Setup>) -> Host {
        self.stop().await.start(setup).await
    }

    /// Shuts the host down and returns what is left of it.
    pub(super) async fn stop(self) -> Stopped {
        let Host { agents, store, models } = self;
        agents.drain(Duration::ZERO).await;
        Stopped { store, models }
    }

    /// Drops the host without shutting it down, as when the process is killed.
    pub(super) async fn crash(self) -> Stopped {
        let Host { agents, store, models } = self;
        drop(agents);
        Stopped { store, models }
    }

    /// Restarts the host after deploying this many versions of an agent, each with the component of
    /// `guest`.
    pub(super) async fn restart_with_versions(self, name: &str, guest: Guest, versions: usize) -> Host {
        let Host { agents, store, models } = self;
        agents.drain(Duration::ZERO).await;
        drop(agents);
        let row = AgentRow {
            name: name.into(),
            manifest: format!("name = \"{name}\""),
            digest: "of another component".into(),
            deployed_at_ms: 1,
            deployed_by: "tester".into(),
        };
        for _ in 0..versions {
            store.put_agent(&row, &guest.component(), &[]).await.expect("stored");
        }
        Host::on(store, models, Setup::default()).await
    }

    /// Restarts the host after the version that a turn ran with has been removed.
    pub(super) async fn restart_with_other_component(self, name: &str, guest: Guest) -> Host {
        self.restart_with_versions(name, guest, 30).await
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the number of turns that are waiting or running in the store.
    pub(super) async fn open_turns(&self) -> usize {
        self.store.open_turns().await.expect("readable").len()
    }

    /// Returns whether all these tokens have a text. The tiny model has more tokens than its
    /// tokenizer; a conversation in which it produced one of those is encoded again.
    pub(super) fn have_text(&self, tokens: &[u32]) -> bool {
        let engine = self.agents.models().engines().next().expect("the tiny model");
        tokens.iter().all(|id| engine.tokenizer().token_bytes(*id).is_some())
    }

    /// Returns the journals of the open turns as text.
    pub(super) async fn journals(&self) -> String {
        let mut text = String::new();
        for turn in self.store.open_turns().await.expect("readable") {
            for record in self.store.records(turn.key).await.expect("readable") {
                text.push_str(&String::from_utf8_lossy(&record.body));
            }
        }
        text
    }

    pub(super) async fn deploy(
        &self,
        name: &str,
        more: &str,
        guest: Guest,
    ) -> Result<AgentSummary, RuntimeError> {
        let manifest = Manifest::from_toml(&format!("name = \"{name}\"\n{more}"))?;
        self.agents.deploy(manifest, guest.component(), "tester").await
    }

    pub(super) async fn invoke(
        &self,
        agent: &str,
        session: &str,
        text: &str,
    ) -> Result<RunHandle, RuntimeError> {
        self.agents.invoke(invocation(agent, session, text)).await
    }

    pub(super) async fn ask(&self, agent: &str, session: &str, text: &str) -> Result<Outcome, RuntimeError> {
        self.invoke(agent, session, text).await?.outcome().await
    }

    /// Returns the reply of a turn that must succeed.
    pub(super) async fn answer(&self, agent: &str, session: &str, text: &str) -> String {
        self.ask(agent, session, text).await.expect("the turn succeeds").text
    }
}

/// A host that has stopped.
pub(super) struct Stopped {
    store: Store,
    models: ModelSet,
}

impl Stopped {
    pub(super) async fn start(self, setup: impl Into<Setup>) -> Host {
        let models = self.models.clone();
        self.start_with(models, setup).await
    }

    /// Starts the host with other models, as after they were exchanged.
    pub(super) async fn start_with(self, models: ModelSet, setup: impl Into<Setup>) -> Host {
        Host::on(self.store, models, setup).await
    }
}

/// Checks that the tokens of the session `s` are those of the host's model and that it has seen the
/// first question.
pub(super) async fn check_tokens(host: &Host, agent: &str) {
    let exported = host.agents.export_session(agent, "s").await.expect("the session exists");
    let transcript = &exported.conversations[0].transcript;
    let engine = host.agents.models().engines().next().expect("the host has a model");
    transcript.check(&engine).expect("the tokens spell the text");
    assert!(!transcript.tokens().is_empty() && transcript.rendered().contains(QUESTION));
}

/// Polls until `look` returns a value.
pub(super) async fn until<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let looking = async move {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), looking).await.expect("the value appears in time")
}

pub(crate) fn invocation(agent: &str, session: &str, text: &str) -> Invocation {
    Invocation {
        principal: "local".into(),
        key: None,
        agent: agent.into(),
        session: session.into(),
        text: text.into(),
        data: None,
        origin: Origin::Direct,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: None,
        detached: false,
    }
}

async fn start(store: &Store, models: &ModelSet, setup: Setup) -> AgentHost {
    let Setup { options, clock, tool_servers, disk, peers, counts, default_model } = setup;
    let parts = HostParts::new(store.clone(), models.clone());
    let parts = HostParts { clock, tool_servers, disk, peers, counts, default_model, ..parts };
    // The future is large, and would be moved up to the test, whose stack is small.
    Box::pin(AgentHost::start(parts, small(options))).await.expect("the host starts")
}

/// Limits the instances per host, because tests run many hosts at once and each reserves address
/// space for its instances.
fn small(options: RuntimeOptions) -> RuntimeOptions {
    RuntimeOptions { max_instances: options.max_instances.min(16), ..options }
}

pub(crate) fn tiny_engine(name: &str) -> Engine {
    Engine::start(tiny_model(name, |text| text), EngineOptions::default()).expect("the engine starts")
}

/// Starts the model for so many sequences at once.
pub(super) fn narrow_engine(name: &str, max_sequences: usize) -> Engine {
    let options = EngineOptions { max_sequences, ..EngineOptions::default() };
    Engine::start(tiny_model(name, |text| text), options).expect("the engine starts")
}

/// Starts the model with KV pages on disk.
pub(super) fn engine_with_disk(name: &str, disk: &Arc<DiskTier>) -> Engine {
    let options = EngineOptions { disk: Some(disk.clone()), ..EngineOptions::default() };
    Engine::start(tiny_model(name, |text| text), options).expect("the engine starts")
}

/// Starts the same model with a vocabulary in which two letters have exchanged their ids.
pub(super) fn permuted_engine(name: &str) -> Engine {
    let permute = |text: String| {
        let (e, o, none) = ("\"e\": ", "\"o\": ", "\"\u{1}\": ");
        assert!(text.contains(e) && text.contains(o), "the fixture lists its vocabulary in this form");
        text.replace(e, none).replace(o, e).replace(none, o)
    };
    Engine::start(tiny_model(name, permute), EngineOptions::default()).expect("the engine starts")
}

/// Loads the tiny model. `tokenizer` changes the text of the tokenizer's file.
fn tiny_model(name: &str, tokenizer: impl FnOnce(String) -> String) -> LoadedModel {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let checkpoint = Checkpoint::open(&fixtures.join("tiny/llama-gqa")).expect("the fixture is a model");
    let options =
        ExecutorOptions { threads: Some(1), kv_tokens: Some(8 << 10), ..ExecutorOptions::default() };
    let file = fixtures.join("tokenizer/byte-level-chatml.json");
    let text = tokenizer(std::fs::read_to_string(file).expect("the fixture exists"));
    let tokenizer = Tokenizer::from_json(text.as_bytes()).expect("the fixture is a tokenizer");
    let template = ChatTemplate::chatml_default();
    LoadedModel {
        name: name.into(),
        config: checkpoint.config().clone(),
        digest: ModelDigest::new(&checkpoint, &tokenizer, &template),
        tokenizer: Arc::new(tokenizer),
        template: Arc::new(template),
        executor: Box::new(CpuExecutor::load(&checkpoint, options).expect("the fixture runs")),
        weights: checkpoint.weight_format(),
        device: "cpu".into(),
        fallback: None,
        restart: None,
        sampling: None,
    }
}
