//! Metrics for Prometheus. The recorder is global: a process has one, however many servers run in it.
//!
//! Each crate describes the metrics that it records, and this module collects them. `METRICS.md` is the list for
//! people.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use skep_engine::metric::{MetricKind, MetricSpec, SECONDS};
use std::{sync::OnceLock, time::Duration};

const UPKEEP: Duration = Duration::from_secs(5);

pub(crate) const REQUESTS: &str = "skep_http_requests_total";
pub(crate) const ANSWER_TIME: &str = "skep_http_answer_seconds";
pub(crate) const CONNECTIONS: &str = "skep_http_connections";
pub(crate) const CONNECTIONS_REFUSED: &str = "skep_http_connections_refused_total";
pub(crate) const CONNECTIONS_ENDED: &str = "skep_http_connections_ended_total";
pub(crate) const MCP_SESSIONS: &str = "skep_mcp_sessions";
pub(crate) const MCP_CALLS: &str = "skep_mcp_calls_total";
pub(crate) const CONFIG_RELOADS: &str = "skep_config_reloads_total";
pub(crate) const RATE_LIMITED: &str = "skep_rate_limited_total";
pub(crate) const CLUSTER_REQUESTS: &str = "skep_cluster_requests_total";
pub(crate) const CLUSTER_FORWARD_TIME: &str = "skep_cluster_forward_seconds";
pub(crate) const KV_FETCHES: &str = "skep_cluster_kv_fetches_total";
pub(crate) const KV_FETCH_TIME: &str = "skep_cluster_kv_fetch_seconds";
pub(crate) const KV_FETCHED_PAGES: &str = "skep_cluster_kv_fetched_pages_total";
pub(crate) const KV_FETCHED_BYTES: &str = "skep_cluster_kv_fetched_bytes_total";
pub(crate) const KV_GIVEN_PAGES: &str = "skep_cluster_kv_given_pages_total";
pub(crate) const KV_GIVEN_BYTES: &str = "skep_cluster_kv_given_bytes_total";
pub(crate) const KV_LANE_BYTES: &str = "skep_cluster_kv_lane_bytes_total";
pub(crate) const KV_LANE_TIME: &str = "skep_cluster_kv_lane_seconds";
pub(crate) const KV_LANE_ERRORS: &str = "skep_cluster_kv_lane_errors_total";
pub(crate) const PREFILL_ORDERS: &str = "skep_cluster_prefills_total";
pub(crate) const PREFILL_TOKENS: &str = "skep_cluster_prefill_tokens_total";
pub(crate) const PREFILL_TIME: &str = "skep_cluster_prefill_seconds";
pub(crate) const PREFILL_SERVED: &str = "skep_cluster_prefills_served_total";
pub(crate) const PREFILL_SERVED_TOKENS: &str = "skep_cluster_prefill_served_tokens_total";
pub(crate) const PREFILL_IN_FLIGHT: &str = "skep_cluster_prefill_tokens_in_flight";

pub(crate) const BUILD: &str = "skep_build_info";
pub(crate) const RESIDENT: &str = "process_resident_memory_bytes";
pub(crate) const CPU_TIME: &str = "process_cpu_seconds_total";
pub(crate) const OPEN_FILES: &str = "process_open_fds";
pub(crate) const MAX_FILES: &str = "process_max_fds";
pub(crate) const STARTED: &str = "process_start_time_seconds";
pub(crate) const EXPERT_SHARE: &str = "skep_engine_expert_busiest_share";
pub(crate) const EXPERT_RATIO: &str = "skep_engine_expert_peak_ratio";
pub(crate) const RANK_WAIT_SHARE: &str = "skep_engine_rank_wait_share";
pub(crate) const DEVICE_TEMPERATURE: &str = "skep_device_temperature_celsius";
pub(crate) const DEVICE_POWER: &str = "skep_device_power_watts";
pub(crate) const DEVICE_MEMORY_USED: &str = "skep_device_memory_used_bytes";
pub(crate) const DEVICE_MEMORY_TOTAL: &str = "skep_device_memory_total_bytes";
pub(crate) const DEVICE_UTILIZATION: &str = "skep_device_utilization_ratio";
pub(crate) const DEVICE_ECC_ERRORS: &str = "skep_device_uncorrected_ecc_errors_total";
pub(crate) const DATABASE_BYTES: &str = "skep_store_database_bytes";
pub(crate) const WAL_BYTES: &str = "skep_store_wal_bytes";
pub(crate) const FREE_BYTES: &str = "skep_store_free_disk_bytes";
pub(crate) const OPEN_TURNS: &str = "skep_open_turns";
pub(crate) const WAITING_APPROVALS: &str = "skep_waiting_approvals";
pub(crate) const DEAD_LETTERS: &str = "skep_dead_letters";

const METRICS: &[MetricSpec] = &[
    MetricSpec {
        name: BUILD,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Constant 1, labeled with the version of this host",
    },
    MetricSpec {
        name: RESIDENT,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Resident memory of the process",
    },
    MetricSpec {
        name: CPU_TIME,
        kind: MetricKind::Counter,
        unit: Unit::Seconds,
        help: "CPU time of the process, in whole seconds",
    },
    MetricSpec {
        name: OPEN_FILES,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Open files and sockets of the process",
    },
    MetricSpec {
        name: MAX_FILES,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Maximum number of open files and sockets of the process",
    },
    MetricSpec {
        name: STARTED,
        kind: MetricKind::Gauge,
        unit: Unit::Seconds,
        help: "Start time of the process, in seconds since 1970",
    },
    MetricSpec {
        name: EXPERT_SHARE,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Share of the work of a layer's experts that the busiest one has done since the model was loaded",
    },
    MetricSpec {
        name: EXPERT_RATIO,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Tokens of the busiest expert of a layer, divided by the mean of all its experts",
    },
    MetricSpec {
        name: RANK_WAIT_SHARE,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Share of the time in steps that a rank has waited for others since the model was loaded",
    },
    MetricSpec {
        name: DEVICE_TEMPERATURE,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Temperature of a GPU in degrees Celsius",
    },
    MetricSpec {
        name: DEVICE_POWER,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Power that a GPU draws, in watts",
    },
    MetricSpec {
        name: DEVICE_MEMORY_USED,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Memory of a GPU that is in use by all programs",
    },
    MetricSpec {
        name: DEVICE_MEMORY_TOTAL,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Size of the memory of a GPU",
    },
    MetricSpec {
        name: DEVICE_UTILIZATION,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Share of the last sampling period in which a kernel of any program ran on a GPU",
    },
    MetricSpec {
        name: DEVICE_ECC_ERRORS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Memory errors of a GPU that could not be corrected, since its driver was loaded",
    },
    MetricSpec {
        name: DATABASE_BYTES,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Size of the database file",
    },
    MetricSpec {
        name: WAL_BYTES,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Size of the write-ahead log: commits that are not in the database file yet",
    },
    MetricSpec {
        name: FREE_BYTES,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Free space on the database's disk",
    },
    MetricSpec {
        name: OPEN_TURNS,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Turns that are waiting or running",
    },
    MetricSpec {
        name: WAITING_APPROVALS,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Tool calls that are waiting for an approval",
    },
    MetricSpec {
        name: DEAD_LETTERS,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Deliveries that failed permanently",
    },
    MetricSpec {
        name: REQUESTS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "HTTP requests by route and status",
    },
    MetricSpec {
        name: ANSWER_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from a request's head to its response's head; a stream continues after it",
    },
    MetricSpec {
        name: CONNECTIONS,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Open client connections",
    },
    MetricSpec {
        name: CONNECTIONS_REFUSED,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Refused connections by the exceeded bound: all, address, or files of the process",
    },
    MetricSpec {
        name: CONNECTIONS_ENDED,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Connections that the host closed, by reason: slow_head, idle or slow_reader",
    },
    MetricSpec {
        name: MCP_SESSIONS,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Sessions of MCP clients",
    },
    MetricSpec {
        name: MCP_CALLS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Tool calls by MCP clients",
    },
    MetricSpec {
        name: RATE_LIMITED,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Requests refused by a rate limit",
    },
    MetricSpec {
        name: CLUSTER_REQUESTS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Requests to other hosts of the cluster by outcome: answered, unreached or broken",
    },
    MetricSpec {
        name: CLUSTER_FORWARD_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time until the owner of a session answers a request that was passed on, including waits for a take-over",
    },
    MetricSpec {
        name: KV_FETCHES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Requests to the other hosts of the cluster for KV pages, by outcome",
    },
    MetricSpec {
        name: KV_FETCH_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from a request for KV pages to its last page, or to the miss",
    },
    MetricSpec {
        name: KV_FETCHED_PAGES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "KV pages that came from other hosts of the cluster",
    },
    MetricSpec {
        name: KV_FETCHED_BYTES,
        kind: MetricKind::Counter,
        unit: Unit::Bytes,
        help: "Bytes of KV pages that came from other hosts of the cluster",
    },
    MetricSpec {
        name: KV_GIVEN_PAGES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "KV pages that other hosts of the cluster got",
    },
    MetricSpec {
        name: KV_GIVEN_BYTES,
        kind: MetricKind::Counter,
        unit: Unit::Bytes,
        help: "Bytes of KV pages that other hosts of the cluster got",
    },
    MetricSpec {
        name: KV_LANE_BYTES,
        kind: MetricKind::Counter,
        unit: Unit::Bytes,
        help: "Bytes of KV pages that came from other hosts of the cluster, by the lane that they took",
    },
    MetricSpec {
        name: KV_LANE_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time in which KV pages of a transfer came, without waits for the engine, by lane",
    },
    MetricSpec {
        name: KV_LANE_ERRORS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Transfers of KV pages that failed, by lane; those of `nixl` continue over HTTP",
    },
    MetricSpec {
        name: PREFILL_ORDERS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Prompts that a decode host had computed elsewhere, by outcome: used, fetched, or the reason to compute the rest here",
    },
    MetricSpec {
        name: PREFILL_TOKENS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Tokens of used prompts that the prefill hosts computed or had cached",
    },
    MetricSpec {
        name: PREFILL_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from the order of a prompt to its last page, or to the failure",
    },
    MetricSpec {
        name: PREFILL_SERVED,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Prompts that decode hosts ordered at this prefill host, accepted or by the code of the refusal",
    },
    MetricSpec {
        name: PREFILL_SERVED_TOKENS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Tokens that this prefill host computed for others",
    },
    MetricSpec {
        name: PREFILL_IN_FLIGHT,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Tokens of the prompts that this prefill host computes at the moment",
    },
    MetricSpec {
        name: CONFIG_RELOADS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Reloads of the configuration",
    },
];

/// Returns every metric that this process can record.
fn all() -> impl Iterator<Item = &'static MetricSpec> {
    let below = skep_engine::metric::METRICS.iter().chain(skep_providers::METRICS);
    below.chain(skep_runtime::metric::METRICS).chain(METRICS)
}

/// Begins to record metrics. What was recorded before is lost, so a host calls it first.
pub fn start() {
    recorder();
}

/// Returns the recorder's handle, or `None` if the embedding program installed a different recorder.
pub(crate) fn recorder() -> Option<&'static PrometheusHandle> {
    static RECORDER: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    let install = || match install() {
        Ok(handle) => Some(handle),
        Err(error) => {
            tracing::warn!(%error, "another metrics recorder is installed; /metrics stays empty");
            None
        }
    };
    RECORDER.get_or_init(install).as_ref()
}

/// Moves recorded observations into buckets, forever. Until that happens each observation takes memory, whether or
/// not it is scraped.
pub(crate) async fn upkeep() {
    let Some(recorder) = recorder() else { return };
    let mut ticks = tokio::time::interval(UPKEEP);
    loop {
        ticks.tick().await;
        recorder.run_upkeep();
    }
}

fn install() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in all() {
        if let MetricKind::Histogram(bounds) = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds)?;
        }
    }
    let handle = builder.install_recorder()?;
    for metric in all() {
        match metric.kind {
            MetricKind::Counter => describe_counter!(metric.name, metric.unit, metric.help),
            MetricKind::Gauge => describe_gauge!(metric.name, metric.unit, metric.help),
            MetricKind::Histogram(_) => describe_histogram!(metric.name, metric.unit, metric.help),
        }
    }
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_documentation_lists_every_metric() {
        let documented: BTreeMap<String, String> = include_str!("../METRICS.md")
            .lines()
            .filter_map(|line| {
                let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
                Some((cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned()))
            })
            .collect();
        let known: BTreeMap<String, String> = all()
            .map(|metric| {
                let kind = match metric.kind {
                    MetricKind::Counter => "counter",
                    MetricKind::Gauge => "gauge",
                    MetricKind::Histogram(_) => "histogram",
                };
                (metric.name.to_owned(), kind.to_owned())
            })
            .collect();
        assert_eq!(documented, known);
    }

    #[test]
    fn alerts_use_only_existing_metrics() {
        let expressions: Vec<&str> = include_str!("../alerts.yml")
            .lines()
            .filter_map(|line| line.trim().strip_prefix("expr: "))
            .collect();
        assert!(expressions.len() > 10, "too few expressions were found in alerts.yml");
        for expression in expressions {
            let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let named: Vec<&str> =
                words.filter(|word| word.starts_with("skep_") || word.starts_with("process_")).collect();
            assert!(!named.is_empty(), "{expression}");
            for name in named {
                let known = all().any(|metric| match metric.kind {
                    MetricKind::Histogram(_) => ["bucket", "sum", "count"]
                        .iter()
                        .any(|part| name == format!("{}_{part}", metric.name)),
                    MetricKind::Counter | MetricKind::Gauge => name == metric.name,
                });
                assert!(known, "{name} is not a metric: {expression}");
            }
        }
    }

    #[test]
    fn buckets_ascend() {
        for metric in all() {
            if let MetricKind::Histogram(bounds) = metric.kind {
                assert!(bounds.is_sorted() && !bounds.is_empty(), "{}", metric.name);
            }
        }
    }
}
