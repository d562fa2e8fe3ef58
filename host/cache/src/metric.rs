//! The names of the metrics of the tier on disk. The engine describes them with its own.

pub const WRITTEN_BYTES: &str = "skep_kv_written_bytes_total";
pub const WRITTEN_PAGES: &str = "skep_kv_written_pages_total";
pub const READ_BYTES: &str = "skep_kv_read_bytes_total";
pub const REMOVED_PAGES: &str = "skep_kv_removed_pages_total";
pub const DROPPED_PAGES: &str = "skep_kv_dropped_pages_total";
pub const DISK_BYTES: &str = "skep_kv_disk_bytes";
pub const DISK_PAGES: &str = "skep_kv_disk_pages";
pub const PROMOTED_PAGES: &str = "skep_kv_promoted_pages_total";

/// Makes all counters visible before anything has happened.
pub(crate) fn begin() {
    for name in [WRITTEN_BYTES, WRITTEN_PAGES, READ_BYTES, DROPPED_PAGES, PROMOTED_PAGES] {
        metrics::counter!(name).increment(0);
    }
    for reason in ["damaged", "evicted", "erased"] {
        metrics::counter!(REMOVED_PAGES, "reason" => reason).increment(0);
    }
}
