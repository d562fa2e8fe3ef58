//! The host's shutdown: whether new work is admitted, and retries of writes until then.

use crate::RuntimeError;
use skep_store::StoreError;
use std::time::Duration;
use tokio::sync::watch;

/// Delay between the first two attempts of a write. It doubles up to the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Whether the host is shutting down. Clones share the state.
#[derive(Clone, Default)]
pub(crate) struct Shutdown(watch::Sender<bool>);

impl Shutdown {
    /// Fails if the host no longer accepts work.
    pub(crate) fn admit(&self) -> Result<(), RuntimeError> {
        if *self.0.borrow() { Err(RuntimeError::ShuttingDown) } else { Ok(()) }
    }

    /// Makes the host stop accepting work.
    pub(crate) fn begin(&self) {
        self.0.send_replace(true);
    }

    /// Resolves when the host stops accepting work.
    pub(crate) async fn begun(&self) {
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.0.subscribe().wait_for(|begun| *begun).await;
    }

    /// Retries a write of a result until the database accepts it, because the work has been done and nobody else would record
    /// that it is over. Returns `None` if the host stops first; the next host process then finds the started work.
    pub(crate) async fn stored<T, W>(&self, what: &'static str, write: impl Fn() -> W) -> Option<T>
    where
        W: Future<Output = Result<T, StoreError>>,
    {
        let mut wait = FIRST_WAIT;
        loop {
            match write().await {
                Ok(written) => return Some(written),
                // Another host finds the started work.
                Err(error) if error.is_fenced() => return None,
                Err(error) => tracing::error!("cannot store {what}, retrying in {wait:?}: {error}"),
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.begun() => return None,
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }
}
