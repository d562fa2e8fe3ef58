//! Gives sessions back to the cluster: those that were not used for long, and all when this host hands over.

use super::Dispatch;
use std::sync::Arc;

/// Number of sessions that are given back in one transaction.
const AT_ONCE: usize = 256;

impl Dispatch {
    /// Gives up to `limit` sessions back that nobody uses, those first that were not used for the longest time. Returns their
    /// number.
    pub(crate) async fn release(self: &Arc<Self>, limit: usize) -> usize {
        let mut count = 0;
        while count < limit {
            let ownership = self.host.cluster.ownership.clone();
            let chosen = ownership.begin_release(AT_ONCE.min(limit - count));
            if chosen.is_empty() {
                break;
            }
            count += chosen.len();
            self.sessions.unload(&chosen);
            // Others may wait for these sessions, so this is finished even if the caller gives up.
            if let Err(error) = tokio::spawn(async move { ownership.end_release(chosen).await }).await {
                tracing::error!("sessions could not be given back: {error}");
            }
        }
        count
    }
}
