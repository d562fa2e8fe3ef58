//! The tier on disk for KV pages, in the data folder.

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use skep_engine::{DiskTier, TierOptions};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvDiskOptions {
    pub gigabytes: u32,
    /// Percentage of the disk that stays free.
    pub free_percent: u8,
    pub write_mb_s: u32,
    /// Whether every prefix on disk is read, even if computing it is expected to be quicker.
    pub always_read: bool,
}

impl Default for KvDiskOptions {
    fn default() -> Self {
        KvDiskOptions { gigabytes: 4, free_percent: 10, write_mb_s: 200, always_read: false }
    }
}

/// Opens the tier of a host in its data folder. Without one, a host works as well, only not as fast.
pub(crate) fn open(options: &KvDiskOptions, dir: &Path) -> Option<Arc<DiskTier>> {
    if options.gigabytes == 0 {
        return None;
    }
    match DiskTier::open(tier_options(options, dir)) {
        Ok(tier) => Some(Arc::new(tier)),
        Err(error) => {
            tracing::warn!(%error, "KV pages stay in memory");
            None
        }
    }
}

fn tier_options(options: &KvDiskOptions, dir: &Path) -> TierOptions {
    TierOptions {
        folder: dir.join("kv"),
        max_bytes: u64::from(options.gigabytes) << 30,
        min_free_percent: options.free_percent,
        write_bytes_per_s: u64::from(options.write_mb_s) << 20,
        queue_bytes: QUEUE_BYTES,
        reads_always: options.always_read,
    }
}
