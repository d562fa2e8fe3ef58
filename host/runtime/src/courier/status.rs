//! What something came to, stored however often that fails: it has begun, and nobody else would say that it is over.

use crate::agent_host::Services;
use skep_store::StoreError;
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
const MOST: Duration = Duration::from_secs(30);

/// Makes a write until the database takes it. `None`: the host ends first, and the next one finds what had begun.
pub(crate) async fn stored<T, W>(services: &Services, what: &'static str, write: impl Fn() -> W) -> Option<T>
where
    W: Future<Output = Result<T, StoreError>>,
{
    let mut wait = FIRST;
    loop {
        match write().await {
            Ok(written) => return Some(written),
            Err(error) => tracing::error!("{what} cannot be stored, and is tried again in {wait:?}: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = services.closing() => return None,
        }
        wait = (wait * 2).min(MOST);
    }
}
