//! The names of the metrics of the tier on disk and of a cache that hosts share. The engine describes them with its own.

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

/// Counter of the promoted pages that were read while their request computed the pages before them.
pub const HEAD_START_PAGES: &str = "skep_kv_head_start_pages_total";

/// Counter of the questions to the cluster cache for the pages of a prompt, by outcome.
pub const CLUSTER_FETCHES: &str = "skep_kv_cluster_fetches_total";
/// Histogram of the time of such a question, with the pages that came.
pub const CLUSTER_FETCH_TIME: &str = "skep_kv_cluster_fetch_seconds";
/// Counter of the pages that came from the cluster cache and were not computed.
pub const CLUSTER_FETCHED_PAGES: &str = "skep_kv_cluster_fetched_pages_total";
/// Counter of the bytes of these pages.
pub const CLUSTER_FETCHED_BYTES: &str = "skep_kv_cluster_fetched_bytes_total";
/// Counter of the pages that this host put into the cluster cache.
pub const CLUSTER_PUT_PAGES: &str = "skep_kv_cluster_put_pages_total";
/// Counter of the bytes of these pages.
pub const CLUSTER_PUT_BYTES: &str = "skep_kv_cluster_put_bytes_total";
/// Counter of the pages that the cluster cache lacks and that were not put, because it was away, full or slow, or the disk was slow.
pub const CLUSTER_DROPPED_PAGES: &str = "skep_kv_cluster_dropped_pages_total";
/// Counter of the pages that left the cluster cache because this host erased them, or because they were damaged.
pub const CLUSTER_REMOVED_PAGES: &str = "skep_kv_cluster_removed_pages_total";
/// Gauge that is 1 while the cluster cache can be used.
pub const CLUSTER_UP: &str = "skep_kv_cluster_up";

/// Makes all counters visible before anything has happened.
pub(crate) fn begin() {
    let of_reads = [READ_BYTES, PROMOTED_PAGES, WARMED_PAGES, HEAD_START_PAGES];
    for name in [WRITTEN_BYTES, WRITTEN_PAGES, DROPPED_PAGES].into_iter().chain(of_reads) {
        metrics::counter!(name).increment(0);
    }
    for reason in ["damaged", "evicted", "erased"] {
        metrics::counter!(REMOVED_PAGES, "reason" => reason).increment(0);
    }
}
