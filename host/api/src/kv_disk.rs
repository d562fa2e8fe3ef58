//! KV pages on disk.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of the disk that keeps KV pages. All numbers are 0 if it is off.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvDisk {
    #[schema(inline)]
    pub object: marker::KvDisk,
    pub is_on: bool,
    pub max_bytes: u64,
    pub used_bytes: u64,
    pub pages: u64,
    /// Number of tenants that have pages.
    pub tenants: u64,
    /// Pages that were there when the host started.
    pub pages_at_start: u64,
    /// Bytes written since the host started, like the counts below.
    pub written_bytes: u64,
    pub written_pages: u64,
    pub read_bytes: u64,
    pub read_pages: u64,
    /// Pages that were evicted for others.
    pub evicted_pages: u64,
    /// Pages that were erased with their sessions, agents or tenants, or by a purge.
    pub erased_pages: u64,
    /// Pages whose bytes were not those that had been written. They were computed again.
    pub damaged_pages: u64,
    /// Pages that were not written, because the disk was full or too slow.
    pub dropped_pages: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
}

/// The result of a purge.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPurged {
    #[schema(inline)]
    pub object: marker::KvDisk,
    pub erased_pages: u64,
}
