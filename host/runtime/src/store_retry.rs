//! What something came to, stored however often that fails: it has begun, and nobody else would say that it is over.

use crate::agent_host::Services;
use skep_store::StoreError;
use std::time::Duration;

/// Between two tries. It doubles, up to the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Makes a write until the database takes it. `None`: the host ends first, and the next one finds what had begun.
pub(crate) async fn stored<T, W>(services: &Services, what: &'static str, write: impl Fn() -> W) -> Option<T>
where
    W: Future<Output = Result<T, StoreError>>,
{
    let mut wait = FIRST_WAIT;
    loop {
        match write().await {
            Ok(written) => return Some(written),
            Err(error) => tracing::error!("{what} cannot be stored, and is tried again in {wait:?}: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = services.closing() => return None,
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}
