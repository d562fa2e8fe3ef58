//! The cache that hosts share in their memory, if `[kv.cluster]` names one: Mooncake Store, as the engine asks for pages of
//! others and as the gateway shows it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use skep_api::KvClusterCache;
use skep_engine::{
    Digest, DiskTier, PageNamer, PagePeers, PageQuestion, PageStream, PrefillOrder, PrefillView,
    PrefilledPages, SealingSecret,
};
use skep_gateway::{ClusterKey, ClusterPages};
use skep_mooncake::{ClusterCache, Settings};
use skep_outbound::Url;

/// The purposes of the keys that are derived from the one that the hosts share.
const SEAL: &str = "kv pages in the cluster cache";
const NAMESPACE: &str = "kv namespace of the cluster cache";
/// The kind of the cache, as `[kv.cluster]` and `/v1/kv` name it.
const KIND: &str = "mooncake";

/// The operator's settings of Mooncake Store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder of the library; `None` leaves the search to the system.
    pub library: Option<PathBuf>,
    /// The address of the master, with its port.
    pub master: String,
    /// The address of the metadata server, or `P2PHANDSHAKE` for none.
    pub metadata: String,
    /// The name or the address under which other hosts reach this one; `None` takes it from those of the host itself.
    pub hostname: Option<String>,
    /// How bytes are moved: `tcp` or `rdma`.
    pub protocol: String,
    /// The devices that move them, separated by commas; empty for all.
    pub devices: String,
    /// Memory of this host for pages of all hosts.
    pub segment_mb: u32,
    /// Memory for pages on their way.
    pub buffer_mb: u32,
}

/// The cluster cache of this host.
#[derive(Debug)]
pub(crate) struct HostCache {
    cache: ClusterCache,
    master: String,
    segment_bytes: u64,
}

/// Opens the cluster cache of a host. `key` is the one that the hosts share, `url` the address at which they reach each other, if
/// it is set, and `address` the one that this host listens on.
pub(crate) fn open(
    options: &CacheOptions,
    disk: Option<&Arc<DiskTier>>,
    key: &ClusterKey,
    url: Option<&str>,
    address: SocketAddr,
) -> Result<Arc<HostCache>> {
    let Some(disk) = disk else {
        bail!(
            "the cluster cache under [kv.cluster] gets its pages from the disk, but this host keeps none there\n  hint: give it a \
             data folder and disk_gb under [kv], or remove [kv.cluster]"
        );
    };
    let settings = settings(options, url, address)?;
    let namespace = key.derived(NAMESPACE);
    let namespace = u64::from_le_bytes(std::array::from_fn(|at| namespace[at]));
    let secret = SealingSecret(key.derived(SEAL));
    let (master, segment_bytes) = (settings.master.clone(), settings.segment_bytes);
    let cache = ClusterCache::open(settings, (&secret, namespace), disk.clone())?;
    Ok(Arc::new(HostCache { cache, master, segment_bytes }))
}

fn settings(options: &CacheOptions, url: Option<&str>, address: SocketAddr) -> Result<Settings> {
    let of_url = url.and_then(|url| Url::parse(url).ok()?.host_str().map(str::to_owned));
    let listened = (!address.ip().is_unspecified()).then(|| address.ip().to_string());
    let Some(hostname) = options.hostname.clone().or(of_url).or(listened) else {
        bail!(
            "other hosts cannot reach this one's part of the cluster cache at {address}\n  hint: set hostname under [kv.cluster] \
             to the name or the address under which they can"
        );
    };
    Ok(Settings {
        library: options.library.clone(),
        master: options.master.clone(),
        metadata: options.metadata.clone(),
        hostname,
        protocol: options.protocol.clone(),
        devices: options.devices.clone(),
        segment_bytes: u64::from(options.segment_mb) << 20,
        buffer_bytes: u64::from(options.buffer_mb) << 20,
    })
}

impl HostCache {
    /// Takes leave of the other hosts, which can no longer get the pages in this one's memory.
    pub fn close(&self) {
        self.cache.close();
    }

    /// Describes the cache for people.
    pub fn described(&self) -> String {
        let given = indicatif::HumanBytes(self.segment_bytes);
        format!("Mooncake at {}, {given} of this host's memory", self.master)
    }
}

/// The cluster cache as the engine asks it, beside the prefill hosts of the cluster.
#[derive(Debug)]
pub(crate) struct CachePeers {
    cache: Arc<HostCache>,
    hosts: Option<ClusterPages>,
}

impl CachePeers {
    /// Creates the peers of an engine that gets pages from the cache, and has its prompts computed by these hosts.
    pub fn new(cache: Arc<HostCache>, hosts: Option<ClusterPages>) -> Self {
        CachePeers { cache, hosts }
    }
}

impl PagePeers for CachePeers {
    fn are_there(&self) -> bool {
        self.cache.cache.is_up()
    }

    fn fetch_time(&self, bytes: u64) -> Duration {
        self.cache.cache.fetch_time(bytes)
    }

    fn fetch(&self, question: PageQuestion) -> Option<PageStream> {
        self.cache.cache.fetch(question)
    }

    fn keep(&self, layout: Digest, payload_bytes: usize, names: &[Digest]) {
        self.cache.cache.keep(layout, payload_bytes, names.to_vec());
    }

    fn names(&self) -> Option<&PageNamer> {
        self.hosts.as_ref()?.names()
    }

    fn prefill_view(&self, model: &str) -> Option<PrefillView> {
        self.hosts.as_ref()?.prefill_view(model)
    }

    fn prefill(&self, order: PrefillOrder) -> Option<PrefilledPages> {
        self.hosts.as_ref()?.prefill(order)
    }
}

impl skep_gateway::ClusterCache for HostCache {
    fn status(&self) -> KvClusterCache {
        let status = self.cache.status();
        KvClusterCache {
            kind: KIND.to_owned(),
            master: self.master.clone(),
            segment_bytes: self.segment_bytes,
            is_up: status.is_up,
            problem: status.problem,
            questions: status.questions,
            missed: status.missed,
            fetched_pages: status.fetched_pages,
            fetched_bytes: status.fetched_bytes,
            put_pages: status.put_pages,
            put_bytes: status.put_bytes,
            dropped_pages: status.dropped_pages,
            removed_pages: status.removed_pages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(hostname: Option<&str>) -> CacheOptions {
        CacheOptions {
            library: None,
            master: "10.0.0.5:50051".to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
            hostname: hostname.map(str::to_owned),
            protocol: "tcp".to_owned(),
            devices: String::new(),
            segment_mb: 3,
            buffer_mb: 16,
        }
    }

    #[test]
    fn a_host_gives_its_memory_under_the_name_that_others_reach_it_at() {
        let of = |hostname, url, listen: &str| {
            let settings = settings(&options(hostname), url, listen.parse().expect("an address"))?;
            Ok::<_, anyhow::Error>((settings.hostname, settings.segment_bytes, settings.buffer_bytes))
        };
        let url = Some("http://skep-1.internal:8080");
        let named = |name: &str| (name.to_owned(), 3 << 20, 16 << 20);
        assert_eq!(of(Some("ib-1"), url, "10.0.0.2:1").expect("a name"), named("ib-1"));
        assert_eq!(of(None, url, "0.0.0.0:1").expect("a name"), named("skep-1.internal"));
        assert_eq!(of(None, None, "10.0.0.2:1").expect("a name"), named("10.0.0.2"));
        let error = of(None, None, "0.0.0.0:1").expect_err("no name").to_string();
        assert!(error.contains("hint: set hostname under [kv.cluster]"), "{error}");
    }

    #[test]
    fn a_cluster_cache_needs_a_disk() {
        let address = "127.0.0.1:1".parse().expect("an address");
        let key = ClusterKey::new(&[b'k'; 32]).expect("a key");
        let error = open(&options(None), None, &key, None, address).expect_err("no disk").to_string();
        assert!(error.contains("hint: give it a data folder"), "{error}");
    }
}
