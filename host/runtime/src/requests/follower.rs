//! The records of the log as a log that can be followed.

use super::{LoggedRequest, RequestLog};
use crate::{
    RuntimeError,
    follower::{Follower, LogPage, StoredLog},
};
use skep_store::{RequestFilter, RequestRange};

/// Maximum number of records returned at once.
const PAGE: u32 = 100;

/// A reader that follows the log.
pub type RequestFollower = Follower<FilteredRequests>;

/// The records of the log that a filter lets through.
pub struct FilteredRequests {
    log: RequestLog,
    filter: RequestFilter,
    with_bodies: bool,
}

/// Creates a reader of the records after a position.
pub(super) fn follow(
    log: RequestLog,
    filter: RequestFilter,
    after: i64,
    with_bodies: bool,
) -> RequestFollower {
    let (grown, shutdown) = (log.inner.grown.subscribe(), log.inner.shutdown.clone());
    Follower::new(FilteredRequests { log, filter, with_bodies }, after, grown, shutdown)
}

impl StoredLog for FilteredRequests {
    type Entry = LoggedRequest;

    async fn newest(&self) -> Result<i64, RuntimeError> {
        Ok(self.log.inner.store.newest_request().await?)
    }

    async fn entries_after(&self, position: i64) -> Result<LogPage<LoggedRequest>, RuntimeError> {
        let range = RequestRange::After(position);
        let page = self.log.page(&self.filter, range, PAGE, self.with_bodies).await?;
        let next = page.next.map(|(RequestRange::After(next) | RequestRange::Before(next))| next);
        Ok(LogPage { last: page.requests.last().map(|last| last.key), entries: page.requests, next })
    }

    fn position(request: &LoggedRequest) -> i64 {
        request.key
    }

    fn has_several_writers(&self) -> bool {
        self.log.inner.store.is_clustered()
    }
}
