//! Watches the GPUs for a failure that only a restart of the process fixes.

use std::time::Duration;

use skep_kernels::cuda::contexts;

/// Time between two looks at their contexts.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits until a GPU has failed in a way that only a restart of the process fixes, and returns the error.
pub(super) async fn wait() -> anyhow::Error {
    loop {
        if let Some((ordinal, error)) = contexts::spoiled() {
            return anyhow::Error::new(error).context(format!("cuda:{ordinal}"));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
