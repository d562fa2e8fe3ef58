//! The tier on disk for KV pages, in the data folder.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use skep_engine::{DiskTier, PageNamer, SealingSecret, TierOptions, TierShares};
use skep_gateway::{ClusterKey, PageOptions, PageStage};
use skep_runtime::{HostRole, SealingKey};

use crate::cluster_cache::CacheOptions;
use crate::cluster_setup::ClusterSetup;
use crate::kv_transfer::TransferSettings;

/// The purpose of the key that names pages, which is derived from that of the cluster.
const NAMES: &str = "kv page names";
/// Number of tokens of a prompt from which on a prefill host may compute them, unless the settings say otherwise.
const DEFAULT_PREFILL_TOKENS: u32 = 256;
/// Bytes that may wait to be written.
const QUEUE_BYTES: u64 = 256 << 20;

/// The flag that bounds the tier.
#[derive(Args, Debug, Default, Clone)]
pub struct KvDiskFlag {
    /// Gigabytes of KV pages that are kept on disk, in the data folder; 0 keeps none [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_048_576))]
    pub kv_disk_gb: Option<u32>,
}

/// Bounds of the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvDiskOptions {
    pub gigabytes: u32,
    /// Percentage of the disk that stays free.
    pub free_percent: u8,
    pub write_mb_s: u32,
    /// Whether every prefix on disk is read, even if computing it is expected to be quicker.
    pub always_read: bool,
    /// Percentage of the tier in which pages of pinned sessions are evicted last.
    pub pin_percent: u8,
    /// Time before an alarm at which the pages of its session are read; zero reads none ahead.
    pub warm_ahead: Duration,
    /// Whether pages are encrypted with the key of the secrets.
    pub is_encrypted: bool,
    /// Whether the hosts of a cluster give each other pages.
    pub has_peers: bool,
    /// The lane that these pages take.
    pub transfer: TransferSettings,
    /// The cache that the hosts share in their memory, beside the disk.
    pub cluster_cache: Option<CacheOptions>,
    /// Percentage of the tier that a tenant's pages may take, by name.
    pub tenant_percent: BTreeMap<String, u8>,
    /// The same for each other tenant; `None` is the whole tier.
    pub other_tenants_percent: Option<u8>,
}

impl Default for KvDiskOptions {
    fn default() -> Self {
        KvDiskOptions {
            gigabytes: 4,
            free_percent: 10,
            write_mb_s: 200,
            always_read: false,
            pin_percent: TierShares::default().pinned,
            warm_ahead: Duration::from_secs(2),
            is_encrypted: false,
            has_peers: true,
            transfer: TransferSettings::default(),
            cluster_cache: None,
            tenant_percent: BTreeMap::new(),
            other_tenants_percent: None,
        }
    }
}

/// Opens the tier of a host in its data folder. Without one, a host works as well, only not as fast. `place` has the key of
/// the secrets, from which that of the pages is derived. `cluster` is the key of the hosts that name their pages alike.
pub(crate) async fn open(
    options: &KvDiskOptions,
    dir: &Path,
    place: &SealingKey,
    cluster: Option<&ClusterKey>,
) -> Option<Arc<DiskTier>> {
    if options.gigabytes == 0 {
        return None;
    }
    let opened = match page_key(options, place).await {
        Ok(key) => {
            let is_shared = options.has_peers || options.cluster_cache.is_some();
            let names = cluster.filter(|_| is_shared).map(|key| SealingSecret(key.derived(NAMES)));
            let options = TierOptions { name_key: names, ..tier_options(options, dir, key) };
            DiskTier::open(options).map_err(anyhow::Error::from)
        }
        Err(error) => Err(error),
    };
    match opened {
        Ok(tier) => Some(Arc::new(tier)),
        Err(error) => {
            tracing::warn!("KV pages stay in memory: {error:#}");
            None
        }
    }
}

/// Returns what a host exchanges of its pages with others, by its role; `None` without a disk, unless its role is about pages.
pub(crate) fn page_options(
    cluster: &ClusterKey,
    disk: Option<&Arc<DiskTier>>,
    setup: &ClusterSetup,
) -> Option<PageOptions> {
    let stage = match setup.role {
        HostRole::Prefill => PageStage::Prefill,
        HostRole::Decode => {
            let min_tokens = setup.prefill_tokens.unwrap_or(DEFAULT_PREFILL_TOKENS);
            PageStage::Decode { min_tokens: min_tokens as usize }
        }
        HostRole::All | HostRole::Gateway | HostRole::Balancer => PageStage::Whole,
    };
    match disk {
        Some(disk) => Some(PageOptions { stage, ..PageOptions::of(disk.clone()) }),
        None if stage == PageStage::Whole => None,
        None => {
            let names = PageNamer::new(cluster.derived(NAMES));
            Some(PageOptions { disk: None, names, stage })
        }
    }
}

/// Returns the key that pages are encrypted with, if they are. No key is created, because the one that sealed secrets may
/// only be missing.
async fn page_key(options: &KvDiskOptions, place: &SealingKey) -> Result<Option<SealingSecret>> {
    if !options.is_encrypted {
        return Ok(None);
    }
    let Some(key) = place.derived("kv pages").await? else {
        bail!(
            "`encrypt` in [kv] needs the key of the secrets, {place}, which does not exist yet\n  hint: the first `skep \
             secret set` creates it; without secrets, so does (umask 077; head -c 32 /dev/urandom > FILE)"
        );
    };
    Ok(Some(SealingSecret(key)))
}

fn tier_options(options: &KvDiskOptions, dir: &Path, key: Option<SealingSecret>) -> TierOptions {
    TierOptions {
        folder: dir.join("kv"),
        max_bytes: u64::from(options.gigabytes) << 30,
        min_free_percent: options.free_percent,
        write_bytes_per_s: u64::from(options.write_mb_s) << 20,
        read_bytes_per_s: None,
        queue_bytes: QUEUE_BYTES,
        reads_always: options.always_read,
        shares: TierShares {
            tenants: options.tenant_percent.clone(),
            other_tenants: options.other_tenants_percent,
            pinned: options.pin_percent,
        },
        key,
        name_key: None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn encrypted_pages_need_the_key_of_the_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secrets.key");
        let place = SealingKey::File(file.clone());
        let options = KvDiskOptions { is_encrypted: true, ..KvDiskOptions::default() };
        assert!(open(&options, folder.path(), &place, None).await.is_none(), "there is no key yet");
        assert!(!file.exists() && !folder.path().join("kv").exists());
        std::fs::write(&file, [7; 32]).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let sealed = || std::fs::read_to_string(folder.path().join("kv/sealed")).unwrap_or_default();
        drop(open(&options, folder.path(), &place, None).await.unwrap());
        let first = sealed();
        assert!(!first.is_empty());
        drop(open(&options, folder.path(), &place, None).await.unwrap());
        assert_eq!(sealed(), first);
        std::fs::write(&file, [8; 32]).unwrap();
        drop(open(&options, folder.path(), &place, None).await.unwrap());
        assert_ne!(sealed(), first, "the pages of another key are gone");
        drop(open(&KvDiskOptions::default(), folder.path(), &place, None).await.unwrap());
        assert_eq!(sealed(), "");
    }

    #[tokio::test]
    async fn hosts_of_a_cluster_name_pages_alike_unless_they_do_not_share_them() {
        let place = SealingKey::InMemory;
        let key = ClusterKey::new(&[b'k'; 32]).unwrap();
        let name = async |options: &KvDiskOptions, key: Option<&ClusterKey>| {
            let folder = tempfile::tempdir().unwrap();
            let tier = open(options, folder.path(), &place, key).await.unwrap();
            tier.keys().layout("weights", "form")
        };
        let (on, off) =
            (KvDiskOptions::default(), KvDiskOptions { has_peers: false, ..KvDiskOptions::default() });
        assert_eq!(name(&on, Some(&key)).await, name(&on, Some(&key)).await);
        assert_ne!(name(&off, Some(&key)).await, name(&off, Some(&key)).await);
        assert_ne!(name(&on, None).await, name(&on, None).await);
    }
}
