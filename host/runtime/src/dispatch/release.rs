//! Gives sessions back to the cluster: those that were not used for long, those whose first message was refused, and all when this
//! host hands over.

use super::Dispatch;
use crate::{RunHandle, RuntimeError, name::SessionKey};
use std::sync::Arc;

/// Number of sessions that are given back in one transaction.
const AT_ONCE: usize = 256;

impl Dispatch {
    /// Gives up to `limit` sessions back that nobody uses, those first that were not used for the longest time. Returns their
    /// number.
    pub(crate) async fn release(self: &Arc<Self>, limit: usize) -> usize {
        let mut count = 0;
        while count < limit {
            let chosen = self.host.cluster.ownership.begin_release(AT_ONCE.min(limit - count));
            if chosen.is_empty() {
                break;
            }
            count += chosen.len();
            self.give_back(chosen).await;
        }
        count
    }

    /// Passes on whether a message was accepted. A session that was claimed for a message that was then refused is given back
    /// first, unless somebody else uses it by now: this host may refuse the next message, too, and another one has room.
    pub(super) async fn unless_refused(
        &self,
        accepted: Result<RunHandle, RuntimeError>,
        key: &SessionKey,
        was_owned: bool,
    ) -> Result<RunHandle, RuntimeError> {
        if accepted.is_err() && !was_owned && self.host.cluster.ownership.begin_release_of(key) {
            self.give_back(vec![key.clone()]).await;
        }
        accepted
    }

    /// Gives sessions back that were chosen for it.
    async fn give_back(&self, chosen: Vec<SessionKey>) {
        let ownership = self.host.cluster.ownership.clone();
        self.sessions.unload(&chosen);
        // Others may wait for these sessions, so this is finished even if the caller gives up.
        if let Err(error) = tokio::spawn(async move { ownership.end_release(chosen).await }).await {
            tracing::error!("sessions could not be given back: {error}");
        }
    }
}
