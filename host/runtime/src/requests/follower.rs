//! A reader that follows the log. It reads records from the store and is only woken, so a slow one costs nothing.

use super::{LoggedRequest, RequestLog};
use crate::RuntimeError;
use skep_store::{RequestFilter, RequestRange};
use tokio::sync::watch;

/// Maximum number of records returned at once.
const PAGE: u32 = 100;

/// A position in the log.
pub struct RequestFollower {
    log: RequestLog,
    filter: RequestFilter,
    after: i64,
    with_bodies: bool,
    grown: watch::Receiver<()>,
}

impl RequestFollower {
    pub(super) fn new(log: RequestLog, filter: RequestFilter, after: i64, with_bodies: bool) -> Self {
        let grown = log.inner.grown.subscribe();
        RequestFollower { log, filter, after, with_bodies, grown }
    }

    /// Returns the next records, once there are any.
    pub async fn next(&mut self) -> Result<Vec<LoggedRequest>, RuntimeError> {
        loop {
            // Records that are stored from here on wake the follower again.
            self.grown.borrow_and_update();
            let newest = self.log.inner.store.newest_request().await?;
            let page =
                self.log.page(&self.filter, RequestRange::After(self.after), PAGE, self.with_bodies).await?;
            // Records that the filter excludes are skipped for good.
            self.after = match page.next {
                Some(RequestRange::After(next) | RequestRange::Before(next)) => next,
                None => page.requests.last().map_or(newest, |last| last.key.max(newest)).max(self.after),
            };
            if !page.requests.is_empty() {
                return Ok(page.requests);
            }
            if page.next.is_some() {
                continue;
            }
            self.grown.changed().await.expect("the follower holds the log, which owns the sender");
            self.log.inner.shutdown.admit()?;
        }
    }
}
