//! Group commit: one task owns the connection that writes, and makes every write of the store. What comes while a
//! transaction runs goes into the next one together, so that many writes share the price of one.
//!
//! Invariant: writes are made in the order in which they were asked for, and nobody is told that a write is done before
//! its transaction is. A write that is refused (a turn that is not the next one) takes no other with it. No transaction
//! takes up another write once it has lasted [`HOLD`]; a write that may be long is made of several (see `pieces`).

use crate::{
    COMMIT_TIME, Store, StoreError,
    error::{SQLITE_IOERR, plain_code},
    faults::{Faults, Moment},
};
use sqlx::{Connection as _, Sqlite, SqliteConnection, SqlitePool, pool::PoolConnection, query};
use std::{
    collections::VecDeque,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, oneshot};

/// Writes of one transaction. More would only make the first of them wait.
const MAX_GROUP: usize = 256;
/// Writes that may wait; who comes then waits for room.
const QUEUE: usize = 1_024;
/// A transaction that has lasted this long is committed, and the next writes go into another one.
const HOLD: Duration = Duration::from_millis(20);

/// What a write comes to, while it is made.
pub(crate) type Working<'c, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'c>>;
/// The statements of a write. They are made again, from the first one, if their transaction was undone because of another.
pub(crate) type Work<D, T> = for<'c> fn(&'c mut SqliteConnection, &'c D) -> Working<'c, T>;

/// The way to the task. The last clone ends it when everything is written.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    requests: mpsc::Sender<Request>,
    longest_hold_us: Arc<AtomicU64>,
    faults: Faults,
}

/// The connection that writes.
pub(crate) enum Line {
    Own(Box<SqliteConnection>),
    /// A database in memory has one connection, which those who read use too.
    Shared(SqlitePool),
}

enum Request {
    Write(Box<dyn Asked>),
    /// Everything before this is written; then the file is closed.
    Close(oneshot::Sender<()>),
}

/// A write with its data and with whoever waits for it.
trait Asked: Send {
    /// Makes the statements. An error undoes the transaction; a refusal is none.
    fn make<'c>(&'c mut self, connection: &'c mut SqliteConnection) -> Working<'c, ()>;
    /// Tells what came of it. Nobody may wait for it any more; it is written all the same.
    fn tell(self: Box<Self>, committed: Result<(), StoreError>);
}

struct Asking<D, T> {
    data: D,
    work: Work<D, T>,
    came_to: Option<Result<T, StoreError>>,
    done: oneshot::Sender<Result<T, StoreError>>,
}

impl<D: Send + Sync, T: Send> Asked for Asking<D, T> {
    fn make<'c>(&'c mut self, connection: &'c mut SqliteConnection) -> Working<'c, ()> {
        Box::pin(async move {
            match (self.work)(connection, &self.data).await {
                Err(error) if !error.is_refusal() => Err(error),
                result => {
                    self.came_to = Some(result);
                    Ok(())
                }
            }
        })
    }

    fn tell(self: Box<Self>, committed: Result<(), StoreError>) {
        let Asking { came_to, done, .. } = *self;
        let _ = done.send(committed.and_then(|()| came_to.unwrap_or(Err(StoreError::Closed))));
    }
}

impl Store {
    /// Makes these statements with this data, in a transaction, after all writes that were asked for before. Resolves when
    /// they are durable. They are made even if nobody waits for it any more.
    pub(crate) async fn write<D, T>(&self, data: D, work: Work<D, T>) -> Result<T, StoreError>
    where
        D: Send + Sync + 'static,
        T: Send + 'static,
    {
        let (done, written) = oneshot::channel();
        let asking = Asking { data, work, came_to: None, done };
        let request = Request::Write(Box::new(asking));
        self.writer.requests.send(request).await.map_err(|_closed| StoreError::Closed)?;
        match written.await.map_err(|_closed| StoreError::Closed)? {
            Err(error) => Err(self.diagnosed(error)),
            written => written,
        }
    }

    /// For how long a transaction has held up other writes at most, since the store was opened.
    pub fn longest_hold(&self) -> Duration {
        Duration::from_micros(self.writer.longest_hold_us.load(Ordering::Relaxed))
    }

    /// What goes wrong in this store.
    #[cfg(any(test, feature = "faults"))]
    pub fn faults(&self) -> &crate::Faults {
        &self.writer.faults
    }
}

impl Writer {
    pub(crate) fn start(line: Line) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        let (longest_hold_us, faults) = (Arc::default(), Faults::default());
        let writer = Writer { requests, longest_hold_us, faults };
        let task =
            Task { line, longest_hold_us: writer.longest_hold_us.clone(), faults: writer.faults.clone() };
        tokio::spawn(task.run(queue));
        writer
    }

    /// Resolves when everything that was asked for is written and the connection is closed.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.requests.send(Request::Close(done)).await.is_ok() {
            let _ = closed.await;
        }
    }
}

struct Task {
    line: Line,
    longest_hold_us: Arc<AtomicU64>,
    faults: Faults,
}

/// What became of a transaction.
enum Ended {
    Committed,
    /// It could not begin.
    NotBegun(StoreError),
    /// Nothing of it was written.
    Undone(StoreError),
    /// Whether it was written is not known.
    Unconfirmed(StoreError),
}

impl Task {
    async fn run(mut self, mut queue: mpsc::Receiver<Request>) {
        let mut requests = Vec::with_capacity(MAX_GROUP);
        let mut waiting = VecDeque::with_capacity(MAX_GROUP);
        while queue.recv_many(&mut requests, MAX_GROUP).await > 0 {
            let mut closing = None;
            for request in requests.drain(..) {
                match request {
                    Request::Write(asked) if closing.is_none() => waiting.push_back(asked),
                    // Who asks after the end is told that it has come.
                    Request::Write(_) => {}
                    Request::Close(done) => closing = Some(done),
                }
            }
            while !waiting.is_empty() {
                self.write_some(&mut waiting).await;
            }
            if let Some(done) = closing {
                drop(queue);
                self.line.close().await;
                let _ = done.send(());
                return;
            }
        }
        self.line.close().await;
    }

    /// Writes as many as one transaction takes, in their order, and tells what came of them.
    async fn write_some(&mut self, waiting: &mut VecDeque<Box<dyn Asked>>) {
        let mut taken = Vec::with_capacity(waiting.len());
        match self.transaction(waiting, &mut taken).await {
            Ended::Committed => tell_all(taken, || Ok(())),
            // What keeps one from beginning keeps all of them, and may have taken long.
            Ended::NotBegun(error) => tell_all(waiting.drain(..), || Err(error.clone())),
            Ended::Unconfirmed(error) => tell_all(taken, || Err(error.clone())),
            // One of them failed; alone, the others do not.
            Ended::Undone(_) if taken.len() > 1 => {
                let mut left: VecDeque<_> = taken.into();
                while let Some(asked) = left.pop_front() {
                    let (mut one, mut taken) = (VecDeque::from([asked]), Vec::with_capacity(1));
                    match self.transaction(&mut one, &mut taken).await {
                        Ended::Committed => tell_all(taken, || Ok(())),
                        Ended::Undone(error) | Ended::Unconfirmed(error) => {
                            tell_all(taken, || Err(error.clone()));
                        }
                        Ended::NotBegun(error) => {
                            tell_all(one.into_iter().chain(left.drain(..)), || Err(error.clone()));
                        }
                    }
                }
            }
            Ended::Undone(error) => tell_all(taken, || Err(error.clone())),
        }
    }

    /// Moves from `waiting` to `taken` what it tries to write.
    async fn transaction(
        &mut self,
        waiting: &mut VecDeque<Box<dyn Asked>>,
        taken: &mut Vec<Box<dyn Asked>>,
    ) -> Ended {
        let Task { line, longest_hold_us, faults } = self;
        let mut connection = match line.connection().await {
            Ok(connection) => connection,
            Err(error) => return Ended::NotBegun(error),
        };
        let connection = connection.get();
        if let Err(error) = begin(faults, connection).await {
            return Ended::NotBegun(error);
        }
        let began = Instant::now();
        let ended = fill(faults, connection, began, waiting, taken).await;
        let held_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        longest_hold_us.fetch_max(held_us, Ordering::Relaxed);
        if let Ended::Committed = ended {
            metrics::histogram!(COMMIT_TIME).record(began.elapsed().as_secs_f64());
        }
        ended
    }
}

fn tell_all(asked: impl IntoIterator<Item = Box<dyn Asked>>, result: impl Fn() -> Result<(), StoreError>) {
    asked.into_iter().for_each(|asked| asked.tell(result()));
}

async fn begin(faults: &Faults, connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("began a transaction");
    faults.meet(Moment::Begin, connection).await.map_err(failed())?;
    // It will write: whoever else writes to the file is waited for here, and not in the middle.
    let begun = query("BEGIN IMMEDIATE").execute(&mut *connection).await;
    if begun.is_err() && roll_back(connection).await {
        // An earlier transaction could not be undone in its time.
        query("BEGIN IMMEDIATE").execute(connection).await.map_err(failed())?;
        return Ok(());
    }
    begun.map(drop).map_err(failed())
}

/// The statements of what waits, until the transaction has lasted long enough, and its commit.
async fn fill(
    faults: &Faults,
    connection: &mut SqliteConnection,
    began: Instant,
    waiting: &mut VecDeque<Box<dyn Asked>>,
    taken: &mut Vec<Box<dyn Asked>>,
) -> Ended {
    let failed = || StoreError::while_it("committed a group of writes");
    while let Some(mut asked) = waiting.pop_front() {
        let made = match faults.meet(Moment::Write, connection).await {
            Ok(()) => caught(asked.make(connection)).await,
            Err(error) => Err(failed()(error)),
        };
        taken.push(asked);
        if let Err(error) = made {
            roll_back(connection).await;
            return Ended::Undone(error);
        }
        if began.elapsed() >= HOLD || faults.are_writes_separate() {
            break;
        }
    }
    let committed = match faults.meet(Moment::Commit, connection).await {
        Ok(()) => query("COMMIT").execute(&mut *connection).await.map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = committed {
        // SQLite may have undone it already. An error of the disk leaves open how much of it got there.
        let was_open = roll_back(connection).await;
        let is_open_question = !was_open && matches!(plain_code(&error), None | Some(SQLITE_IOERR));
        return match is_open_question {
            true => Ended::Unconfirmed(StoreError::Unconfirmed { source: Arc::new(error) }),
            false => Ended::Undone(failed()(error)),
        };
    }
    match faults.meet(Moment::Committed, connection).await {
        Ok(()) => Ended::Committed,
        Err(error) => Ended::Unconfirmed(StoreError::Unconfirmed { source: Arc::new(error) }),
    }
}

/// What it came to. A panic is its own error, and does not end the task that writes for everyone.
async fn caught<T>(mut work: Working<'_, T>) -> Result<T, StoreError> {
    poll_fn(|task| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(task)));
        polled.unwrap_or(Poll::Ready(Err(StoreError::Panicked)))
    })
    .await
}

/// Whether there was anything to be undone.
async fn roll_back(connection: &mut SqliteConnection) -> bool {
    query("ROLLBACK").execute(connection).await.is_ok()
}

/// A connection for one transaction.
enum Borrowed<'l> {
    Own(&'l mut SqliteConnection),
    Shared(PoolConnection<Sqlite>),
}

impl Line {
    async fn connection(&mut self) -> Result<Borrowed<'_>, StoreError> {
        match self {
            Line::Own(connection) => Ok(Borrowed::Own(connection)),
            Line::Shared(pool) => {
                let connection = pool.acquire().await;
                connection.map(Borrowed::Shared).map_err(StoreError::while_it("waited for the connection"))
            }
        }
    }

    async fn close(self) {
        match self {
            // What is committed is in the file, or in the log beside it, whatever comes of this.
            Line::Own(connection) => drop(connection.close().await),
            Line::Shared(pool) => pool.close().await,
        }
    }
}

impl Borrowed<'_> {
    fn get(&mut self) -> &mut SqliteConnection {
        match self {
            Borrowed::Own(connection) => connection,
            Borrowed::Shared(connection) => connection,
        }
    }
}
