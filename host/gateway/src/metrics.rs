//! Figures for Prometheus. The recorder is the one thing that a process has once, however many servers live in it.

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use std::sync::OnceLock;

/// Seconds: from a cached token to a long turn.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// The recorder's handle, or `None` where the embedding program installed a recorder of its own.
pub(crate) fn recorder() -> Option<&'static PrometheusHandle> {
    static RECORDER: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    let install = || {
        let builder = PrometheusBuilder::new().set_buckets(SECONDS).ok()?;
        match builder.install_recorder() {
            Ok(handle) => Some(handle),
            Err(error) => {
                tracing::warn!(%error, "metrics are recorded elsewhere; /metrics stays empty");
                None
            }
        }
    };
    RECORDER.get_or_init(install).as_ref()
}
