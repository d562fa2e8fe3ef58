//! Tests of several hosts on one database in one process. They ask each other by calls instead of HTTP, with what they send in the
//! form that it has on the way. Without a PostgreSQL server there is only one host, and they pass without a check.

mod batches;
mod certainty;
mod counts;
mod erasures;
mod handing_over;
mod logs;
mod models;
mod notices;
mod placing;
mod sending;
mod taking_over;

use super::fixture::{Host, Setup, tiny_engine};
use crate::{
    AgentHost, GenerationEvent, GenerationEvents, GenerationFailure, Member, PeerError, PeerGeneration,
    PeerInvocation, Peers, RemoteEvent, RemoteRun, RunEvent, RunHandle, RuntimeError, RuntimeOptions,
    TurnAddress, placement::Placement,
};
use futures::{StreamExt, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};
use skep_engine::ModelSet;
use skep_store::{Store, TEST_SERVER};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};
use tokio::sync::watch;

/// A database, and the hosts on it.
struct Cluster {
    /// The address of the schema.
    url: String,
    calls: Arc<Calls>,
    models: ModelSet,
}

/// Reaches the hosts that are there.
#[derive(Default)]
struct Calls {
    hosts: Mutex<BTreeMap<i64, AgentHost>>,
    /// Whether messages do not arrive for now.
    holds: watch::Sender<bool>,
    /// Number of questions to hosts that are not there.
    unreached: AtomicUsize,
    /// Number of messages that other hosts have refused.
    refusals: Arc<AtomicUsize>,
}

impl Cluster {
    /// Creates an empty database. Returns `None` without a server.
    async fn new() -> Option<Cluster> {
        let server = std::env::var(TEST_SERVER).ok()?;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("skep.db");
        Store::open_for_tests(&path).await.expect("a new schema").close().await;
        let schema = std::fs::read_to_string(path.with_extension("schema")).expect("its name");
        let separator = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{separator}options[search_path]={}", schema.trim());
        Some(Cluster { url, calls: Arc::default(), models: ModelSet::new(tiny_engine("tiny")) })
    }

    /// Creates a database with two hosts.
    async fn of_two(options: RuntimeOptions) -> Option<(Cluster, Host, Host)> {
        let cluster = Cluster::new().await?;
        let (one, other) = (cluster.host(options.clone()).await, cluster.host(options).await);
        Some((cluster, one, other))
    }

    /// Starts a host at which the sessions begin whose first messages it gets, so that a test knows where they are.
    async fn host(&self, setup: impl Into<Setup>) -> Host {
        self.host_with(self.models.clone(), setup).await
    }

    /// Starts such a host with models of its own.
    async fn host_with(&self, models: ModelSet, setup: impl Into<Setup>) -> Host {
        let mut setup: Setup = setup.into();
        setup.options.placement = Placement::Here;
        self.start(models, setup).await
    }

    /// Starts a host that may begin sessions at others, if its settings say so.
    async fn placing_host(&self, setup: impl Into<Setup>) -> Host {
        self.start(self.models.clone(), setup).await
    }

    async fn start(&self, models: ModelSet, setup: impl Into<Setup>) -> Host {
        let store = Store::connect_to_cluster(&self.url, "http://127.0.0.1:1").await.expect("it joins");
        let setup = Setup { peers: Some(self.calls.clone()), ..setup.into() };
        let host = Host::on(store, models, setup).await;
        self.calls.hosts().insert(number(&host), host.agents.clone());
        host
    }

    /// Ends a host without shutting it down, as when its process is killed.
    fn kill(&self, host: Host) {
        self.calls.hosts().remove(&number(&host));
        drop(host);
    }

    /// Waits until these hosts know each other.
    async fn met(&self, hosts: &[&Host]) {
        for host in hosts {
            super::fixture::until(async || {
                let known = host.agents.cluster_hosts().await.expect("listed");
                // A host reports its load once it has started.
                (known.iter().filter(|known| known.load_percent.is_some()).count() == hosts.len())
                    .then_some(())
            })
            .await;
        }
    }
}

impl Drop for Cluster {
    /// Hosts and the way to reach them own each other, and would keep their connections of the server.
    fn drop(&mut self) {
        self.calls.hosts().clear();
    }
}

fn number(host: &Host) -> i64 {
    host.store().host_number().expect("a host of a cluster has a number")
}

async fn owner(host: &Host, agent: &str, session: &str) -> Option<i64> {
    host.store().owner_of(agent, session).await.expect("readable")
}

impl Calls {
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<i64, AgentHost>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn host(&self, member: &Member) -> Result<AgentHost, PeerError> {
        self.hosts().get(&member.number).cloned().ok_or_else(|| {
            self.unreached.fetch_add(1, Ordering::AcqRel);
            PeerError::Unreached("nobody listens".to_owned())
        })
    }
}

impl Peers for Calls {
    fn invoke(
        &self,
        member: Member,
        invocation: PeerInvocation,
    ) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        let (host, mut holds) = (self.host(&member), self.holds.subscribe());
        let refusals = self.refusals.clone();
        Box::pin(async move {
            let _ = holds.wait_for(|holds| !*holds).await;
            let invocation = sent(&invocation).into_invocation();
            let accepted = host?.invoke_here(invocation).await;
            refusals.fetch_add(usize::from(accepted.is_err()), Ordering::AcqRel);
            accepted.map(remote).map_err(refused)
        })
    }

    fn follow(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        let host = self.host(&member);
        Box::pin(async move {
            let TurnAddress { agent, session, turn } = sent(&turn);
            host?.follow_here(&agent, &session, &turn).await.map(remote).map_err(refused)
        })
    }

    fn cancel(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<(), PeerError>> {
        let host = self.host(&member);
        Box::pin(async move {
            let TurnAddress { agent, session, turn } = sent(&turn);
            host?.cancel_here(&agent, &session, &turn).await.map_err(refused)
        })
    }

    fn generate(
        &self,
        member: Member,
        generation: PeerGeneration,
    ) -> BoxFuture<'static, Result<GenerationEvents, PeerError>> {
        let host = self.host(&member);
        Box::pin(async move {
            let events = host?.generate_here(sent(&generation)).map(|event| {
                Ok(match event {
                    GenerationEvent::Event(event) => GenerationEvent::Event(sent(&event)),
                    GenerationEvent::Failed(failure) => {
                        GenerationEvent::Failed(sent::<GenerationFailure>(&failure))
                    }
                })
            });
            Ok(events.boxed())
        })
    }
}

/// Returns a value as it arrives.
fn sent<T: Serialize + DeserializeOwned>(value: &T) -> T {
    let text = serde_json::to_string(value).expect("what hosts send is JSON");
    serde_json::from_str(&text).expect("what hosts send can be read")
}

fn remote(run: RunHandle) -> RemoteRun {
    let turn_id = run.turn_id().to_owned();
    let events = futures::stream::unfold(run, |mut run| async move {
        let event: RemoteEvent = sent(&run.next_remote().await?);
        Some((Ok::<_, PeerError>(event), run))
    });
    RemoteRun { turn_id, events: Box::pin(events) }
}

fn refused(error: RuntimeError) -> PeerError {
    match error {
        RuntimeError::SessionElsewhere { .. } => PeerError::Moved,
        error => PeerError::Refused {
            code: error.code().to_owned(),
            message: error.to_string(),
            status: 400,
            retry_after_ms: error.retry_after_ms(),
        },
    }
}

/// Reads all events of a turn that succeeds, with their numbers.
async fn events(mut run: RunHandle) -> Vec<(u64, RunEvent)> {
    let mut events = Vec::new();
    while let Some(event) = run.next().await {
        let event = event.expect("the turn succeeds");
        events.push((run.last_id().expect("an event has a number"), event));
    }
    events
}
