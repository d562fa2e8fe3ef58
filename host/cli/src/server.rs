//! A whole host in this process: model, engine, store, agents, HTTP.
//!
//! Everything is started before the parts that need it, and stopped in the reverse order: no new requests are
//! accepted, running ones finish, then the agents' turns, then the database.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use skep_engine::{EngineOptions, LiveSetting, PagePeers};
use skep_gateway::{
    ClusterOptions, ClusterPages, Configuration, ConsoleOptions, DrainRequests, GatewayOptions, HttpPeers,
    RateLimiter,
};
use skep_runtime::{
    AgentHost, HostParts, HostRole, Peers, RuntimeOptions, SealingKey, SharedCounts, check_sealed,
};
use skep_store::Store;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::agent_source::AgentSource;
use crate::cluster_cache::{self, CachePeers, HostCache};
use crate::cluster_setup::{ClusterPlace, KEY_VARIABLE};
use crate::data_lock::DataLock;
use crate::database_flag::DatabaseAddress;
use crate::kv_disk;
use crate::local_models;
use crate::memory_budget::MemoryBudget;
use crate::progress::{Progress, Silent};
use crate::server_options::{DataDir, ServerOptions};
use crate::settings::{self, Parts, Settings};
use crate::upstreams::VaultKeys;

/// The name under which the agents that a host is started with are deployed.
pub(crate) const DEPLOYER: &str = "operator";

/// Minimum time for which `/readyz` refuses before a host of a cluster stops accepting connections: balancers look every
/// second or two.
const NOTICED_AFTER: Duration = Duration::from_secs(2);

/// A running host.
pub struct RunningServer {
    pub address: SocketAddr,
    pub keys_required: bool,
    pub has_console: bool,
    pub host: AgentHost,
    pub configuration: Arc<dyn Configuration>,
    /// The host's number in its cluster and the address at which the others reach it, for people.
    pub place: Option<String>,
    pub(crate) cluster_cache: Option<Arc<HostCache>>,
    drain_requests: DrainRequests,
    store: Store,
    /// Held until everything else is closed.
    locks: Vec<DataLock>,
    drain: Duration,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

/// Starts a host, without printing progress.
pub async fn start(options: ServerOptions) -> Result<RunningServer> {
    start_with(options, Vec::new(), Arc::new(Silent)).await
}

/// Starts a host with these agents deployed, and reports its progress. It answers requests only once they are
/// deployed.
pub async fn start_with(
    options: ServerOptions,
    agents: Vec<AgentSource>,
    progress: Arc<dyn Progress + Send>,
) -> Result<RunningServer> {
    skep_gateway::start_metrics();
    let access = options.auth.at(options.listen.ip())?;
    if options.standby && !matches!(options.database, Some(DatabaseAddress::Postgres(_))) {
        bail!(
            "a host can stand by only for a PostgreSQL database\n  hint: --database postgres://USER@HOST:5432/DATABASE, or \
             start it without --standby"
        );
    }
    options.cluster.check_pages(options.kv_disk.has_peers)?;
    options.cluster.check_agents(!agents.is_empty())?;
    let is_open = access.keys_required || !options.listen.ip().is_loopback();
    let rates = Arc::new(RateLimiter::new(settings::rates_of(&options, is_open)));
    // The port comes first, because a port in use is the most common failure and loading the model takes
    // longest.
    let listener = TcpListener::bind(options.listen).await.with_context(|| {
        format!(
            "cannot listen on {}\n  hint: choose another address with --listen; port 0 picks a free one",
            options.listen
        )
    })?;
    let address = listener.local_addr()?;
    let environment = std::env::var(KEY_VARIABLE).ok();
    let cluster =
        options.cluster.place(address, options.database.as_ref(), options.standby, environment.clone())?;
    let shared_key = match &cluster {
        Some(place) => Some(place.key.clone()),
        // Hosts with databases of their own can share a cache.
        None if options.kv_disk.cluster_cache.is_some() => Some(options.cluster.key(environment)?),
        None => None,
    };
    let locks = take_locks(&options)?;
    let vault = VaultKeys::default();
    let weights = LiveSetting::new(options.weights.clone());
    let disk = match &options.data {
        DataDir::Path(dir) => {
            let place = sealing_key(&options.data, &options.runtime.sealing_key);
            kv_disk::open(&options.kv_disk, dir, &place, shared_key.as_ref()).await
        }
        DataDir::InMemory => None,
    };
    let pages = cluster.as_ref().filter(|_| options.kv_disk.has_peers);
    let pages = pages.and_then(|place| {
        let options = kv_disk::page_options(&place.key, disk.as_ref(), &options.cluster)?;
        Some(ClusterPages::new(&place.key, options))
    });
    // A host without a model has no pages.
    let computes = options.cluster.role.computes();
    if let Some((place, pages)) = cluster.as_ref().zip(pages.as_ref()).filter(|_| computes)
        && let Some(agent) = options.kv_disk.transfer.start(&place.url)?
    {
        pages.transfer_by(agent);
    }
    let cache = options.kv_disk.cluster_cache.as_ref().filter(|_| computes);
    let cache = match cache.zip(shared_key.as_ref()) {
        Some((cache, key)) => {
            let url = options.cluster.url.as_deref();
            Some(cluster_cache::open(cache, disk.as_ref(), key, url, address)?)
        }
        None => None,
    };
    let engine = EngineOptions {
        meter: Some(rates.clone()),
        weights: weights.clone(),
        disk: disk.clone(),
        peers: match cache.clone() {
            Some(cache) => Some(Arc::new(CachePeers::new(cache, pages.clone()))),
            None => pages.clone().map(|pages| -> Arc<dyn PagePeers> { Arc::new(pages) }),
        },
        ..options.engine.clone()
    };
    let budget = Arc::<MemoryBudget>::default();
    let models = local_models::declare(&options, &engine, &progress, &budget)?;
    let models = options.remote.add_to(models, &options.runtime.prices, &vault)?;
    for warning in settings::warnings(&options, &models) {
        tracing::warn!("{warning}");
    }
    local_models::load_at_start(&options.local_models(), &models, &budget, &progress).await?;
    let store = open_store(&options, cluster.as_ref()).await?;
    let artifact_dir = match &options.data {
        DataDir::Path(dir) => Some(dir.join("artifacts")),
        DataDir::InMemory => None,
    };
    let sealing_key = sealing_key(&options.data, &options.runtime.sealing_key);
    if cluster.is_some() && options.runtime.sealing_key == SealingKey::InMemory {
        check_own_key(&store, &sealing_key).await?;
    }
    let (warm_ahead, kept_pages) = (options.kv_disk.warm_ahead, disk.is_some());
    let placement = options.cluster.placement;
    let runtime =
        RuntimeOptions { artifact_dir, sealing_key, warm_ahead, placement, ..options.runtime.clone() };
    let tool_servers = options.tool_servers.clone();
    let peers = cluster.as_ref().map(|place| HttpPeers::new(place.key.clone()));
    let peers = peers.map(|peers| -> Arc<dyn Peers> { Arc::new(peers) });
    // Requests and tokens per minute are those of all hosts.
    let counts = cluster.as_ref().map(|_| -> Arc<dyn SharedCounts> { rates.clone() });
    let parts = HostParts {
        tool_servers,
        disk,
        role: options.cluster.role,
        default_model: options.cluster.default_model.clone(),
        gives_pages: pages.is_some() && kept_pages,
        peers,
        counts,
        ..HostParts::new(store.clone(), models)
    };
    let host = AgentHost::start(parts, runtime).await.context("cannot start the agent host")?;
    vault.open(host.secret_reader());
    if let Some(pages) = &pages {
        let (others, prefilling) = (host.other_hosts(), host.other_hosts());
        pages.meet(move || others.with_pages());
        pages.meet_prefill(move |model| prefilling.with_prefill(model));
    }
    for agent in agents {
        let name = agent.manifest.name.as_str().to_owned();
        host.deploy(agent.manifest, agent.component, DEPLOYER)
            .await
            .with_context(|| format!("deploying {name}"))?;
    }
    for warning in settings::unknown_to_host(&options, &host).await {
        tracing::warn!("{warning}");
    }
    let model_names = LiveSetting::new(options.model_names.clone());
    let gateway_options = options.gateway.clone();
    let parts = Parts {
        rates: rates.clone(),
        is_open,
        weights,
        model_names: model_names.clone(),
        vault,
        engine,
        budget,
        progress,
    };
    let configuration: Arc<dyn Configuration> = Arc::new(Settings::new(host.clone(), parts, options));
    let drain_requests = DrainRequests::default();
    let cluster = match cluster {
        Some(ClusterPlace { url, key, role, .. }) => {
            let number = store.host_number().context("the database gave this host no number")?;
            let drain = drain_requests.clone();
            let place = match role {
                HostRole::All => format!("host {number} at {url}"),
                HostRole::Gateway => format!("host {number} at {url}, a gateway without a model"),
                HostRole::Prefill => format!("host {number} at {url}, which computes prompts for others"),
                HostRole::Decode => format!("host {number} at {url}, with long prompts at prefill hosts"),
                HostRole::Balancer => format!("host {number} at {url}, a balancer"),
            };
            Some((place, ClusterOptions { key, number, drain, pages, role }))
        }
        None => None,
    };
    let (place, cluster) = cluster.unzip();
    let gateway = GatewayOptions {
        cluster,
        cluster_cache: cache.clone().map(|cache| -> Arc<dyn skep_gateway::ClusterCache> { cache }),
        access,
        rates,
        model_names,
        configuration: Some(configuration.clone()),
        ..gateway_options
    };
    let drain = gateway.drain;
    let has_console = !matches!(gateway.console, ConsoleOptions::Off);
    let (stop, stopped) = oneshot::channel::<()>();
    let shutdown = async move {
        // A sender that was dropped stops the server as well.
        let _ = stopped.await;
    };
    let serving = tokio::spawn(skep_gateway::serve(listener, host.clone(), gateway, shutdown));
    Ok(RunningServer {
        address,
        keys_required: access.keys_required,
        has_console,
        host,
        configuration,
        place,
        cluster_cache: cache,
        drain_requests,
        store,
        locks,
        drain,
        stop,
        serving,
    })
}

/// Returns the path of the database in a host's data folder.
pub(crate) fn database(dir: &Path) -> PathBuf {
    dir.join("skep.db")
}

/// Returns the place of the keys that seal secrets: the configured one, or the file in the data folder.
pub(crate) fn sealing_key(data: &DataDir, configured: &SealingKey) -> SealingKey {
    match (configured, data) {
        (SealingKey::InMemory, DataDir::Path(dir)) => SealingKey::File(dir.join("secrets.key")),
        (configured, _) => configured.clone(),
    }
}

/// Returns the folder of a database file.
pub(crate) fn folder_of(database: &Path) -> PathBuf {
    match database.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Takes the locks of the data folder and of the folder that the database is in.
fn take_locks(options: &ServerOptions) -> Result<Vec<DataLock>> {
    let mut folders = Vec::new();
    if let DataDir::Path(dir) = &options.data {
        folders.push(dir.clone());
    }
    if let Some(DatabaseAddress::Sqlite(path)) = &options.database {
        folders.push(folder_of(path));
    }
    let mut taken: Vec<(PathBuf, DataLock)> = Vec::new();
    for folder in folders {
        let is_taken = |(other, _): &(PathBuf, DataLock)| same_folder(other, &folder);
        if !taken.iter().any(is_taken) {
            let lock = DataLock::take(&folder)?;
            taken.push((folder, lock));
        }
    }
    Ok(taken.into_iter().map(|(_, lock)| lock).collect())
}

fn same_folder(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// Opens the database. A host that stands by has loaded its models by now, and waits here.
async fn open_store(options: &ServerOptions, cluster: Option<&ClusterPlace>) -> Result<Store> {
    if let Some(ClusterPlace { database, url, .. }) = cluster {
        return Ok(Store::connect_to_cluster(database, url).await?);
    }
    let durability = options.durability;
    Ok(match (&options.database, &options.data) {
        (Some(DatabaseAddress::Postgres(url)), _) if options.standby => {
            Store::connect_as_standby(url).await?
        }
        (Some(DatabaseAddress::Postgres(url)), _) => Store::connect(url).await?,
        (Some(DatabaseAddress::Sqlite(path)), _) => Store::open(path, durability).await?,
        (None, DataDir::InMemory) => Store::in_memory().await?,
        (None, DataDir::Path(dir)) => Store::open(&database(dir), durability).await?,
    })
}

/// Checks that a host of a cluster can read the secrets with a key of its own, which the other hosts may not have.
async fn check_own_key(store: &Store, key: &SealingKey) -> Result<()> {
    let sealed = check_sealed(store, key).await?;
    if sealed.unreadable > 0 {
        bail!(
            "{} of the {} secrets in the database do not open with this host's own key ({key})\n  hint: all hosts of a cluster \
             need the same key: set key_file or key_command under [secrets] in skep.toml",
            sealed.unreadable,
            sealed.values
        );
    }
    tracing::warn!(
        "this host would seal secrets with a key of its own ({key}); if the cluster is to have secrets, set key_file or \
         key_command under [secrets] in skep.toml at all hosts"
    );
    Ok(())
}

impl RunningServer {
    /// Returns the base URL of the running host.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Resolves when another host has taken over the database, so that this one has to end.
    pub async fn until_fenced(&self) {
        self.store.until_fenced().await;
    }

    /// Resolves when somebody has asked, over HTTP, that this host hands its sessions over and ends.
    pub async fn until_drain_asked(&self) {
        self.drain_requests.asked().await;
    }

    /// Stops accepting requests, lets running ones finish within the drain time, and closes everything. A host of a cluster
    /// hands its sessions over before, and answers requests meanwhile.
    pub async fn shutdown(self) {
        if self.host.is_clustered() {
            let began = Instant::now();
            self.host.hand_over(self.drain).await;
            tokio::time::sleep(NOTICED_AFTER.saturating_sub(began.elapsed())).await;
        }
        // The receiver is gone only if serving has already ended.
        let _ = self.stop.send(());
        match self.serving.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "serving ended with an error"),
            Err(error) => tracing::error!(%error, "serving panicked"),
        }
        self.host.drain(self.drain).await;
        if let Some(cache) = self.cluster_cache {
            // It waits for calls of the store, which have other hosts at their ends.
            let closing = tokio::task::spawn_blocking(move || cache.close());
            if let Err(error) = closing.await {
                tracing::error!(%error, "closing the cluster cache panicked");
            }
        }
        self.store.close().await;
        drop(self.locks);
    }
}
