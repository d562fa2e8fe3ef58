//! The names of the metrics of the tier on disk. The engine describes them with its own.

/// Counter of the bytes of pages that were written.
pub const WRITTEN_BYTES: &str = "skep_kv_written_bytes_total";
/// Counter of the pages that were written.
pub const WRITTEN_PAGES: &str = "skep_kv_written_pages_total";
/// Counter of the bytes of pages that were read.
pub const READ_BYTES: &str = "skep_kv_read_bytes_total";
/// Counter of the pages that were removed, by reason.
pub const REMOVED_PAGES: &str = "skep_kv_removed_pages_total";
/// Counter of the pages that were not written, because the disk was full or too slow.
pub const DROPPED_PAGES: &str = "skep_kv_dropped_pages_total";
/// Gauge of the bytes of pages on the disk.
pub const DISK_BYTES: &str = "skep_kv_disk_bytes";
/// Gauge of the pages on the disk.
pub const DISK_PAGES: &str = "skep_kv_disk_pages";
/// Gauge of the bytes of pages that were written on the current UTC day, by earlier processes too.
pub const WRITTEN_TODAY_BYTES: &str = "skep_kv_written_today_bytes";
/// Counter of the pages that were read and used instead of being computed.
pub const PROMOTED_PAGES: &str = "skep_kv_promoted_pages_total";

/// Counter of the promoted pages that were read before a request needed them.
pub const WARMED_PAGES: &str = "skep_kv_warmed_pages_total";

/// Makes all counters visible before anything has happened.
pub(crate) fn begin() {
    for name in [WRITTEN_BYTES, WRITTEN_PAGES, READ_BYTES, DROPPED_PAGES, PROMOTED_PAGES, WARMED_PAGES] {
        metrics::counter!(name).increment(0);
    }
    for reason in ["damaged", "evicted", "erased"] {
        metrics::counter!(REMOVED_PAGES, "reason" => reason).increment(0);
    }
}
