//! Group commit: one task owns the writing connection and makes all writes of the store. Writes that arrive
//! while a transaction runs go into the next one together, so that many writes share the cost of one commit.
//!
//! Invariant: writes are made in the order of their requests, except joint ones (below), and no caller learns that a write is
//! done before its transaction is committed. A write that is refused (a turn that is not the next one) has written nothing, so the
//! others of its transaction are committed without it. After an error of the database, each is repeated in a transaction of its
//! own, so nobody gets the error of another. No transaction accepts another write once it has lasted [`HOLD`]. A write that may
//! take long is split into several (see `chunks`).
//!
//! Each statement of PostgreSQL is a round trip, so what most turns write, one statement writes for many: the *joint* writes that
//! follow each other in the queue are sorted by their [`JointKind`] and made kind by kind. A write that this leaves, because it
//! is a special case, is made alone after the others of its kind.
//!
//! Several hosts may write to one PostgreSQL database. Two transactions that wait for each other cost a second, after which
//! the server ends one of them. So a transaction locks in this order:
//!
//! 1. the row of its own host, which nobody waits for who holds anything else,
//! 2. the *common lock*, if its first write is a common one ([`crate::Store::write_common`]),
//! 3. the rows of its writes,
//! 4. the counters that all hosts add to, in the order of their keys (see `sql::counts`).
//!
//! A common write changes rows that other hosts may change at the same time: batches, responses, deployments, API keys, owners
//! of sessions, whatever is old. It is the first write of its transaction, so nobody waits for the common lock who has changed
//! a row, and whoever has the lock does not wait for another one who needs it. Its statements see everything that earlier
//! holders of the lock have committed. Any other write changes only rows of its own host, or of sessions that its host owns;
//! where it meets rows of others, it skips those that are locked. What is left can still wait in a circle, such as events of
//! the same ids that two hosts publish in different orders; then the server ends one transaction, which is retried.

mod joint;
mod pending_write;

pub(crate) use joint::{Joint, JointKind, JointWork};

use crate::{
    StoreError,
    error::{SQLITE_IOERR, plain_code},
    faults::{Faults, Moment},
    postgres::{Reconnecting, TransactionId, take_common},
    sql::{AssertSqlSafe, Connection, Dialect, Pool, query, raw_sql},
};
use joint::{make, with_followers};
use pending_write::{AnyWrite, PendingWrite};
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

/// The histogram of the commit time of turns, in seconds. The crate that installs the recorder describes it.
pub const COMMIT_TIME: &str = "skep_store_commit_seconds";

/// Maximum number of writes in one transaction. More would only make the first of them wait.
const MAX_GROUP: usize = 256;
/// Maximum number of waiting writes. Further callers wait for room.
const QUEUE: usize = 1_024;
/// Time for which a write waits for a database that is away.
const RETRY_TIME: Duration = Duration::from_secs(10);
/// Time between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of a rollback on a server.
const ROLLBACK_TIME: Duration = Duration::from_secs(5);
/// A transaction that has lasted this long is committed, and the next writes go into a new one.
const HOLD: Duration = Duration::from_millis(20);

/// A write in progress.
pub(crate) type Working<'c, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'c>>;
/// The statements of a write. They run again from the first one if their transaction was rolled back because
/// of another write.
pub(crate) type Work<D, T> = for<'c> fn(&'c mut Connection, &'c D) -> Working<'c, T>;

/// Handle to the writer task. When the last clone is dropped, the task writes everything that waits and
/// terminates.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    requests: mpsc::Sender<Request>,
    longest_hold_us: Arc<AtomicU64>,
    /// Number of transactions that were retried.
    retries: Arc<AtomicU64>,
    faults: Faults,
}

/// The writing connection.
pub(crate) enum WriteConnection {
    /// The only connection that writes to an SQLite file.
    Own(Connection),
    /// An in-memory database has only one connection, which reads use too.
    Shared(Pool),
    Postgres(Box<Reconnecting>),
}

enum Request {
    Write(Box<dyn AnyWrite>),
    /// Closes the file after all earlier requests are written.
    Close(oneshot::Sender<()>),
}

impl Writer {
    pub(crate) fn start(connection: WriteConnection) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        let (longest_hold_us, retries, faults) = (Arc::default(), Arc::default(), Default::default());
        let writer = Writer { requests, longest_hold_us, retries, faults };
        let task = Task {
            connection,
            longest_hold_us: writer.longest_hold_us.clone(),
            retries: writer.retries.clone(),
            faults: writer.faults.clone(),
        };
        tokio::spawn(task.run(queue));
        writer
    }

    /// Makes a write after all writes that were requested before (see [`crate::Store::write`]), together with others if it is a
    /// joint one. A common one changes rows that other hosts may change at the same time.
    pub(crate) async fn write<D, T>(
        &self,
        data: D,
        work: Work<D, T>,
        joint: Option<Joint<D, T>>,
        is_common: bool,
    ) -> Result<T, StoreError>
    where
        D: Send + Sync + 'static,
        T: Send + 'static,
    {
        let (reply, written) = oneshot::channel();
        let pending = PendingWrite { data, work, joint, is_common, result: None, reply };
        let request = Request::Write(Box::new(pending));
        self.requests.send(request).await.map_err(|_closed| StoreError::Closed)?;
        written.await.map_err(|_closed| StoreError::Closed)?
    }

    /// Returns the longest time that a transaction has held up other writes.
    pub(crate) fn longest_hold(&self) -> Duration {
        Duration::from_micros(self.longest_hold_us.load(Ordering::Relaxed))
    }

    /// Returns how often a transaction was retried.
    #[cfg(test)]
    pub(crate) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Resolves when all requested writes are made and the connection is closed.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Request::Close(reply)).await.is_ok() {
            let _ = closed.await;
        }
    }
}

struct Task {
    connection: WriteConnection,
    longest_hold_us: Arc<AtomicU64>,
    retries: Arc<AtomicU64>,
    faults: Faults,
}

/// The outcome of a transaction.
enum TransactionEnd {
    Committed,
    /// All writes of the transaction were refused, and it was rolled back.
    Refused,
    /// The transaction could not start.
    NotStarted(StoreError),
    /// The transaction was rolled back.
    RolledBack(StoreError),
    /// It is unknown whether the transaction was committed.
    Unconfirmed(StoreError),
}

impl Task {
    async fn run(mut self, mut queue: mpsc::Receiver<Request>) {
        let mut requests = Vec::with_capacity(MAX_GROUP);
        let mut waiting = VecDeque::with_capacity(MAX_GROUP);
        loop {
            let receiving = queue.recv_many(&mut requests, MAX_GROUP);
            let received = match &mut self.connection {
                WriteConnection::Own(_) | WriteConnection::Shared(_) => receiving.await,
                WriteConnection::Postgres(connection) => {
                    let Ok(received) = timeout(connection.renewal(), receiving).await else {
                        renew(connection).await;
                        continue;
                    };
                    received
                }
            };
            if received == 0 {
                break;
            }
            let mut closing = None;
            for request in requests.drain(..) {
                match request {
                    Request::Write(write) if closing.is_none() => waiting.push_back(write),
                    // A request after the close gets `StoreError::Closed`.
                    Request::Write(_) => {}
                    Request::Close(reply) => closing = Some(reply),
                }
            }
            while !waiting.is_empty() {
                self.write_some(&mut waiting).await;
                // Writes that were refused have renewed nothing.
                if let WriteConnection::Postgres(connection) = &mut self.connection
                    && connection.is_connected()
                {
                    renew(connection).await;
                }
            }
            if let Some(reply) = closing {
                drop(queue);
                self.connection.close().await;
                let _ = reply.send(());
                return;
            }
        }
        self.connection.close().await;
    }

    /// Writes as many requests as one transaction takes, in order, and reports their outcomes.
    async fn write_some(&mut self, waiting: &mut VecDeque<Box<dyn AnyWrite>>) {
        let mut taken = Vec::with_capacity(waiting.len());
        match self.attempt(waiting, &mut taken).await {
            TransactionEnd::Committed | TransactionEnd::Refused => report_all(taken, || Ok(())),
            // An error at the start would affect all requests, and may have taken long to occur.
            TransactionEnd::NotStarted(error) => report_all(waiting.drain(..), || Err(error.clone())),
            TransactionEnd::Unconfirmed(error) => report_all(taken, || Err(error.clone())),
            // One of the writes failed. When made separately, the others do not.
            TransactionEnd::RolledBack(_) if taken.len() > 1 => {
                let mut left: VecDeque<_> = taken.into();
                while let Some(write) = left.pop_front() {
                    let (mut one, mut taken) = (VecDeque::from([write]), Vec::with_capacity(1));
                    match self.attempt(&mut one, &mut taken).await {
                        TransactionEnd::Committed | TransactionEnd::Refused => report_all(taken, || Ok(())),
                        TransactionEnd::RolledBack(error) | TransactionEnd::Unconfirmed(error) => {
                            report_all(taken, || Err(error.clone()));
                        }
                        TransactionEnd::NotStarted(error) => {
                            report_all(one.into_iter().chain(left.drain(..)), || Err(error.clone()));
                        }
                    }
                }
            }
            TransactionEnd::RolledBack(error) => report_all(taken, || Err(error.clone())),
        }
    }

    /// Makes a transaction, several times if the database is away or another transaction was in the way.
    async fn attempt(
        &mut self,
        waiting: &mut VecDeque<Box<dyn AnyWrite>>,
        taken: &mut Vec<Box<dyn AnyWrite>>,
    ) -> TransactionEnd {
        let begun = Instant::now();
        loop {
            let ended = self.transaction(waiting, taken).await;
            let (TransactionEnd::NotStarted(error) | TransactionEnd::RolledBack(error)) = &ended else {
                return ended;
            };
            let WriteConnection::Postgres(connection) = &mut self.connection else { return ended };
            if !error.is_passing() {
                return ended;
            }
            tracing::warn!(%error, "retrying a transaction");
            self.retries.fetch_add(1, Ordering::Relaxed);
            // While a host has no connection, the lock of its number is free, and others may count it as dead.
            if !error.is_contention() {
                connection.drop_connection();
            }
            taken.drain(..).rev().for_each(|write| waiting.push_front(write));
            if begun.elapsed() >= RETRY_TIME {
                return TransactionEnd::NotStarted(StoreError::Away { waited_s: RETRY_TIME.as_secs() });
            }
            tokio::time::sleep(RETRY_PAUSE).await;
            // A transaction that was rolled back has renewed nothing.
            if connection.is_connected() {
                renew(connection).await;
            }
        }
    }

    /// Moves the requests that it tries to write from `waiting` to `taken`.
    async fn transaction(
        &mut self,
        waiting: &mut VecDeque<Box<dyn AnyWrite>>,
        taken: &mut Vec<Box<dyn AnyWrite>>,
    ) -> TransactionEnd {
        let Task { connection, longest_hold_us, faults, .. } = self;
        let (mut begun, id) = match connection.begin(faults).await {
            Ok(begun) => begun,
            Err(error) => return TransactionEnd::NotStarted(error),
        };
        let began = Instant::now();
        let mut ended = fill(faults, begun.get(), began, waiting, taken).await;
        drop(begun);
        let held_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        longest_hold_us.fetch_max(held_us, Ordering::Relaxed);
        if let (TransactionEnd::Unconfirmed(_), Some(id), WriteConnection::Postgres(connection)) =
            (&ended, id, &mut self.connection)
        {
            ended = outcome(connection, id, ended).await;
        }
        if let TransactionEnd::Committed = ended {
            if let (Some(id), WriteConnection::Postgres(connection)) = (id, &mut self.connection) {
                connection.confirm(id);
            }
            metrics::histogram!(COMMIT_TIME).record(began.elapsed().as_secs_f64());
        }
        ended
    }
}

/// Renews the lease of a host that has committed nothing for a while.
async fn renew(connection: &mut Reconnecting) {
    if let Err(error) = connection.renew().await
        && !error.is_fenced()
    {
        tracing::warn!(%error, "the host could not renew its lease of the database");
    }
}

fn report_all(
    write: impl IntoIterator<Item = Box<dyn AnyWrite>>,
    result: impl Fn() -> Result<(), StoreError>,
) {
    write.into_iter().for_each(|write| write.report(result()));
}

/// Begins a transaction of SQLite.
async fn begin_in_file(connection: &mut Connection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("started a transaction");
    // Get the write lock here, so that waiting for another process happens now and not in the middle.
    let begun = query("BEGIN IMMEDIATE").execute(&mut *connection).await;
    if begun.is_err() && roll_back(connection).await {
        // An earlier transaction could not be rolled back when it failed.
        return query("BEGIN IMMEDIATE").execute(connection).await.map(drop).map_err(failed());
    }
    begun.map(drop).map_err(failed())
}

/// Asks for the outcome of a transaction whose commit was not confirmed.
async fn outcome(
    connection: &mut Reconnecting,
    id: TransactionId,
    unconfirmed: TransactionEnd,
) -> TransactionEnd {
    let begun = Instant::now();
    while begun.elapsed() < RETRY_TIME {
        connection.drop_connection();
        let asked = timeout(RETRY_TIME, connection.outcome(id)).await;
        match asked.unwrap_or(Ok(None)) {
            Ok(Some(true)) => return TransactionEnd::Committed,
            Ok(Some(false)) => {
                let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
                let failed = StoreError::while_it("committed a group of writes");
                return TransactionEnd::RolledBack(failed(lost.into()));
            }
            Err(error) if error.is_fenced() => return unconfirmed,
            Ok(None) | Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
        }
    }
    unconfirmed
}

/// Runs the statements of waiting requests until the transaction has lasted long enough, and commits it.
async fn fill(
    faults: &Faults,
    connection: &mut Connection,
    mut began: Instant,
    waiting: &mut VecDeque<Box<dyn AnyWrite>>,
    taken: &mut Vec<Box<dyn AnyWrite>>,
) -> TransactionEnd {
    let failed = || StoreError::while_it("committed a group of writes");
    let is_shared = connection.dialect() == Dialect::Postgres;
    let mut has_common_lock = false;
    // A transaction that was rolled back has left its counts.
    drop(connection.take_counts());
    while let Some(write) = waiting.pop_front() {
        if is_shared && write.is_common() && !has_common_lock {
            if !taken.is_empty() {
                waiting.push_front(write);
                break;
            }
            if let Err(error) = raw_sql(AssertSqlSafe(take_common()), &mut *connection).await {
                waiting.push_front(write);
                roll_back(connection).await;
                return TransactionEnd::NotStarted(StoreError::while_it("waited for other hosts")(error));
            }
            has_common_lock = true;
            began = Instant::now();
        }
        let is_joint = is_shared && write.joint_kind().is_some() && !faults.are_writes_separate();
        let mut writes = if is_joint { with_followers(write, waiting) } else { vec![write] };
        let made = make(faults, connection, &mut writes).await;
        taken.append(&mut writes);
        if let Err(error) = made {
            roll_back(connection).await;
            return TransactionEnd::RolledBack(error);
        }
        if began.elapsed() >= HOLD || faults.are_writes_separate() {
            break;
        }
    }
    // PostgreSQL ends a transaction in which a statement failed, such as one that referred to a row that was removed meanwhile. Then
    // the next statement fails as well, at the latest the one before the commit.
    if taken.iter().all(|write| write.is_refused()) {
        roll_back(connection).await;
        return TransactionEnd::Refused;
    }
    for count in connection.take_counts() {
        if let Err(error) = count.execute(&mut *connection).await {
            roll_back(connection).await;
            return TransactionEnd::RolledBack(StoreError::while_it("counted the use of models")(error));
        }
    }
    let committed = match faults.meet(Moment::Commit, connection).await {
        Ok(()) => commit(connection).await,
        Err(error) => Err(error),
    };
    if let Err(error) = committed {
        // SQLite may have rolled back already. After an I/O error it is unknown how much reached the disk.
        let was_open = roll_back(connection).await;
        let is_open_question = !was_open && matches!(plain_code(&error), None | Some(SQLITE_IOERR));
        return match is_open_question {
            true => TransactionEnd::Unconfirmed(StoreError::Unconfirmed { source: Arc::new(error) }),
            false => TransactionEnd::RolledBack(failed()(error)),
        };
    }
    match faults.meet(Moment::Committed, connection).await {
        Ok(()) => TransactionEnd::Committed,
        Err(error) => TransactionEnd::Unconfirmed(StoreError::Unconfirmed { source: Arc::new(error) }),
    }
}

async fn commit(connection: &mut Connection) -> Result<(), sqlx::Error> {
    // After a failed statement, PostgreSQL reports a commit as successful although it rolls back. The query reports that.
    let sql = connection.dialect().pick("COMMIT", "SELECT 1; COMMIT");
    raw_sql(sql, connection).await
}

/// Rolls back. Returns whether there was an open transaction. A server that does not answer soon has lost the connection.
async fn roll_back(connection: &mut Connection) -> bool {
    let is_shared = connection.dialect() == Dialect::Postgres;
    let rolling_back = query("ROLLBACK").execute(connection);
    match is_shared {
        true => timeout(ROLLBACK_TIME, rolling_back).await.is_ok_and(|ended| ended.is_ok()),
        false => rolling_back.await.is_ok(),
    }
}

/// A connection borrowed for one transaction.
enum Borrowed<'l> {
    Own(&'l mut Connection),
    Shared(Connection),
}

impl WriteConnection {
    /// Begins a transaction. Returns the number under which PostgreSQL knows it.
    async fn begin(&mut self, faults: &Faults) -> Result<(Borrowed<'_>, Option<TransactionId>), StoreError> {
        let failed = || StoreError::while_it("started a transaction");
        let mut connection = match self {
            WriteConnection::Own(connection) => Borrowed::Own(connection),
            WriteConnection::Shared(pool) => {
                let connection = pool.acquire().await;
                Borrowed::Shared(connection.map_err(StoreError::while_it("waited for the connection"))?)
            }
            WriteConnection::Postgres(server) => {
                faults.meet(Moment::Begin, server.get().await?).await.map_err(failed())?;
                let id = server.begin().await?;
                return Ok((Borrowed::Own(server.get().await?), Some(id)));
            }
        };
        faults.meet(Moment::Begin, connection.get()).await.map_err(failed())?;
        begin_in_file(connection.get()).await?;
        Ok((connection, None))
    }

    async fn close(self) {
        // Committed data is safe, even if closing fails.
        match self {
            WriteConnection::Own(connection) => connection.close().await,
            WriteConnection::Shared(pool) => pool.close().await,
            WriteConnection::Postgres(connection) => connection.close().await,
        }
    }
}

impl Borrowed<'_> {
    fn get(&mut self) -> &mut Connection {
        match self {
            Borrowed::Own(connection) => connection,
            Borrowed::Shared(connection) => connection,
        }
    }
}
