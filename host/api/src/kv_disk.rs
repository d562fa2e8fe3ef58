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
    /// Number of tenants that have pages. Public pages count as those of a tenant of their own.
    pub tenants: u64,
    /// Pages that were there when the host started.
    pub pages_at_start: u64,
    #[serde(flatten)]
    pub totals: KvDiskTotals,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
    /// Bytes written on the current UTC day, before a restart too.
    pub written_today_bytes: u64,
    /// Bytes written on the UTC day before.
    pub written_yesterday_bytes: u64,
    /// Sessions whose pages are evicted last, in the order in which they were pinned.
    pub pins: Vec<KvPin>,
    /// Pages that went to and came from the other hosts of the cluster; none if they are not shared.
    #[schema(required)]
    pub peers: Option<KvPeers>,
    /// The cache that the hosts share in their memory; none if there is none.
    #[schema(required)]
    pub cluster_cache: Option<KvClusterCache>,
}

/// The state of the cluster cache, and what went to and came from it since this host started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvClusterCache {
    /// The program that keeps the pages: `mooncake`.
    pub kind: String,
    /// The address of its master.
    pub master: String,
    /// Bytes of this host's memory for pages of all hosts.
    pub segment_bytes: u64,
    /// Whether it can be used now. Otherwise pages are computed.
    pub is_up: bool,
    /// The reason that it cannot be used, if it is known.
    #[schema(required)]
    pub problem: Option<String>,
    /// Number of prompts for whose pages it was asked.
    pub questions: u64,
    /// Number of these for which not all pages came, or none was there.
    pub missed: u64,
    /// Pages that came from it and were not computed.
    pub fetched_pages: u64,
    pub fetched_bytes: u64,
    /// Pages that this host put into it.
    pub put_pages: u64,
    pub put_bytes: u64,
    /// Pages that it lacks and that were not put, because it was away, full or slow, or the disk was slow.
    pub dropped_pages: u64,
    /// Pages that left it because this host erased them, or because they were damaged.
    pub removed_pages: u64,
}

/// KV pages that the hosts of a cluster gave each other since this one started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPeers {
    /// Number of prompts for whose pages this host asked the others.
    pub questions: u64,
    /// Number of these for which not all pages came that another host had, or none had any.
    pub missed: u64,
    /// Pages that came from other hosts and were not computed.
    pub fetched_pages: u64,
    pub fetched_bytes: u64,
    /// Pages that other hosts got from this one.
    pub given_pages: u64,
    pub given_bytes: u64,
    /// The lane on which this host fetches pages of hosts that have it too: `nixl` while its process runs, otherwise `http`.
    pub lane: String,
}

/// Work of the disk that keeps KV pages since the host started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvDiskTotals {
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
}

/// A pinned session.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPin {
    pub tenant: String,
    pub agent: String,
    /// The id of the session, as an admin writes it.
    pub session: String,
    /// Bytes of its pages on disk; what it shares with others counts whole.
    pub bytes: u64,
    /// Whether its pages are evicted last. Otherwise the pins before it take the share of pins.
    pub is_protected: bool,
}

/// The result of a purge.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPurged {
    #[schema(inline)]
    pub object: marker::KvDisk,
    pub erased_pages: u64,
}

/// A session whose pages were read into memory before its next turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WarmedSession {
    #[schema(inline)]
    pub object: marker::WarmedSession,
    pub agent: String,
    pub session: String,
    /// Conversations ordered by name.
    pub conversations: Vec<WarmedConversation>,
}

/// The tokens of a conversation, and where their pages were found.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WarmedConversation {
    pub name: String,
    pub model: String,
    /// Tokens that the model saw and produced.
    pub tokens: u64,
    /// Tokens whose pages were in memory.
    pub in_memory_tokens: u64,
    /// Tokens after these whose pages were on disk.
    pub on_disk_tokens: u64,
    /// Tokens whose pages were read into memory, as far as there was room.
    pub read_tokens: u64,
    /// Tokens that the next turn has to compute.
    pub missing_tokens: u64,
    /// The reason that no page was looked up, if none was.
    #[schema(required)]
    pub skipped: Option<String>,
}

/// Whether the pages of a session are evicted last.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SessionPin {
    #[schema(inline)]
    pub object: marker::SessionPin,
    pub agent: String,
    pub session: String,
    pub is_pinned: bool,
    /// Whether the request changed that.
    pub has_changed: bool,
}
