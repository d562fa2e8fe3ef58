//! The log of requests to models: one record for each request, off by default.
//!
//! A request is observed where it enters the engine, whoever makes it: turns of agents, batches, and clients that name a
//! model. Its record goes through a bounded queue to a task that takes secrets out of it and stores it (`writer`), so
//! nothing ever waits for the log; what does not fit into the queue is dropped and counted. It is a log and not the accounting,
//! which is counted in the commit of a turn (`usage`).
//!
//! Invariant: the text of a message or of an answer leaves this module only after `redaction`, and is stored only where
//! the operator's setting is `full`.

mod follower;
mod options;
mod origin;
mod record;
mod recording;
mod redaction;
#[cfg(test)]
mod tests;
mod writer;

pub use follower::RequestFollower;
pub use options::{RequestLogMode, RequestLogOptions};
pub use origin::{RequestOrigin, Surface};
pub use record::{
    LoggedAttempt, LoggedBody, LoggedCall, LoggedCost, LoggedMessage, LoggedPage, LoggedRequest, LoggedUsage,
    RequestDetails,
};

use crate::{Clock, PriceList, RuntimeError, metric, shutdown::Shutdown, vault::Vault};
use recording::{Finished, Watcher};
use skep_engine::{LiveSetting, Observer};
use skep_store::{RequestBody, RequestFilter, RequestRange, Store};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};
use tokio::sync::{mpsc, oneshot, watch};
use writer::Writer;

/// Maximum number of records that wait to be stored.
const QUEUE: usize = 1_024;
/// Maximum size of their messages and answers.
const QUEUE_BYTES: usize = 32 << 20;

/// The log of requests to models. Clones refer to the same log.
#[derive(Clone)]
pub struct RequestLog {
    inner: Arc<Inner>,
}

struct Inner {
    options: LiveSetting<RequestLogOptions>,
    store: Store,
    clock: Clock,
    prices: LiveSetting<PriceList>,
    shutdown: Shutdown,
    queue: mpsc::Sender<Command>,
    /// Size of the messages and answers in the queue.
    waiting_bytes: Arc<AtomicUsize>,
    /// Size of the stored records, as of the last sweep and the writes since.
    stored_bytes: AtomicU64,
    grown: watch::Sender<()>,
}

/// A command for the task that writes.
enum Command {
    Record(Box<Finished>),
    /// Everything before this command is stored, and what these asked before it will not be.
    Forget(Askers, oneshot::Sender<()>),
    /// Everything before this command is stored.
    Flush(oneshot::Sender<()>),
}

/// Whose requests are removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Askers {
    Session { agent: String, session: String },
    Agent(String),
    Tenant(String),
}

impl RequestLog {
    /// Returns the log, and the task that writes it.
    pub(crate) fn new(
        options: RequestLogOptions,
        (store, clock, shutdown): (Store, Clock, Shutdown),
        prices: PriceList,
        vault: Arc<Vault>,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (queue, commands) = mpsc::channel(QUEUE);
        let inner = Inner {
            options: LiveSetting::new(options),
            store,
            clock,
            prices: LiveSetting::new(prices),
            shutdown,
            queue,
            waiting_bytes: Arc::default(),
            stored_bytes: AtomicU64::new(0),
            grown: watch::Sender::new(()),
        };
        let log = RequestLog { inner: Arc::new(inner) };
        let writer = Writer::new(&log, vault, commands);
        (log, writer.run())
    }

    /// Replaces the settings and the prices. Requests that have begun keep their settings.
    pub(crate) fn configure(&self, options: RequestLogOptions, prices: PriceList) {
        self.inner.options.replace(options);
        self.inner.prices.replace(prices);
    }

    fn options(&self) -> Arc<RequestLogOptions> {
        self.inner.options.now()
    }

    /// Returns the size of the stored records, and how large all of them may become before the oldest are removed.
    pub(crate) fn kept_bytes(&self) -> (u64, u64) {
        (self.inner.stored_bytes.load(Relaxed), self.options().max_bytes)
    }

    /// Returns the observer of requests from this origin, unless the tenant's are not logged.
    pub fn observer(&self, origin: RequestOrigin) -> Option<Arc<dyn Observer>> {
        let options = self.options();
        let body_bytes = match options.mode_of(&origin.source.tenant) {
            RequestLogMode::Off => return None,
            RequestLogMode::Metadata => None,
            RequestLogMode::Full => Some(options.body_bytes),
        };
        Some(Arc::new(Watcher::new(self.clone(), origin, body_bytes)))
    }

    /// Hands a record to the writer, or drops it if too many wait.
    fn submit(&self, record: Finished) {
        let (bytes, waiting) = (record.bytes(), &self.inner.waiting_bytes);
        let fits = waiting.fetch_add(bytes, Relaxed) + bytes <= QUEUE_BYTES;
        if !fits || self.inner.queue.try_send(Command::Record(Box::new(record))).is_err() {
            waiting.fetch_sub(bytes, Relaxed);
            count_dropped(Reason::Full, 1);
        }
    }

    /// Waits until all records so far are stored.
    pub(crate) async fn flush(&self) {
        let (done, stored) = oneshot::channel();
        if self.inner.queue.send(Command::Flush(done)).await.is_ok() {
            let _ = stored.await;
        }
    }

    /// Waits until all records so far are stored, and drops later ones of what these asked before. It is called before
    /// their rows are removed.
    pub(crate) async fn forget(&self, askers: Askers) {
        let (done, stored) = oneshot::channel();
        if self.inner.queue.send(Command::Forget(askers, done)).await.is_ok() {
            let _ = stored.await;
        }
    }

    /// Returns at most `limit` records. A page may end before it has as many.
    pub async fn page(
        &self,
        filter: &RequestFilter,
        range: RequestRange,
        limit: u32,
        with_bodies: bool,
    ) -> Result<LoggedPage, RuntimeError> {
        // The store searches the encoded body, which has more than what was said.
        let reads_bodies = with_bodies || filter.text.is_some();
        let encoded = RequestFilter { text: filter.text.as_deref().map(record::encoded), ..filter.clone() };
        let page = self.inner.store.requests(&encoded, range, limit, reads_bodies).await?;
        let requests = page.rows.into_iter().map(LoggedRequest::read);
        let found = requests.filter(|request| filter.text.as_ref().is_none_or(|text| request.says(text)));
        let without_body = |mut request: LoggedRequest| {
            if !with_bodies {
                request.body = None;
            }
            request
        };
        Ok(LoggedPage { requests: found.map(without_body).collect(), next: page.next })
    }

    /// Returns a record with its body.
    pub async fn request(&self, id: &str) -> Result<Option<LoggedRequest>, RuntimeError> {
        Ok(self.inner.store.request(id).await?.map(LoggedRequest::read))
    }

    /// Follows the records after the position `after` as they are stored; without one, those from now on.
    pub async fn follow(
        &self,
        filter: RequestFilter,
        after: Option<i64>,
        with_bodies: bool,
    ) -> Result<RequestFollower, RuntimeError> {
        let after = match after {
            Some(after) => after,
            None => self.inner.store.newest_request().await?,
        };
        Ok(follower::follow(self.clone(), filter, after, with_bodies))
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLog").field("options", &self.options()).finish_non_exhaustive()
    }
}

/// The reason why a record is dropped.
#[derive(Clone, Copy)]
enum Reason {
    Full,
    Store,
}

fn count_dropped(reason: Reason, count: u64) {
    let reason = match reason {
        Reason::Full => "full",
        Reason::Store => "store",
    };
    metrics::counter!(metric::REQUESTS_DROPPED, "reason" => reason).increment(count);
}

/// Returns whether a stored request has a body.
fn has_body(body: &RequestBody) -> bool {
    *body != RequestBody::None
}
