//! Retries writes of results until the store accepts them: the work has been done, and nobody else
//! would record that it is over.

use crate::agent_host::Services;
use skep_store::StoreError;
use std::time::Duration;

/// Delay between the first two attempts. It doubles up to the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Retries a write until the database accepts it. Returns `None` if the host stops first; the next
/// host process then finds the started work.
pub(crate) async fn stored<T, W>(services: &Services, what: &'static str, write: impl Fn() -> W) -> Option<T>
where
    W: Future<Output = Result<T, StoreError>>,
{
    let mut wait = FIRST_WAIT;
    loop {
        match write().await {
            Ok(written) => return Some(written),
            Err(error) => tracing::error!("cannot store {what}, retrying in {wait:?}: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = services.closing() => return None,
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}
