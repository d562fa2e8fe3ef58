//! Faults that a test chooses, at the moments at which a database has them.

use crate::{Store, StoreError};
use sqlx::{
    AssertSqlSafe, SqliteConnection,
    error::{DatabaseError, ErrorKind},
    query, query_scalar,
};
use std::{
    borrow::Cow,
    error::Error,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// When the writer can meet a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before a transaction.
    Begin,
    /// Before the statements of one write.
    Write,
    /// Before a commit.
    Commit,
    /// After a commit, before anyone is told of it.
    Committed,
}

/// What happens then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error with this code of SQLite: 5 is busy, 10 is I/O, 13 is a full disk.
    Fails(u32),
    /// The statement that runs after so many instructions of SQLite's machine is interrupted. Only at
    /// [`Moment::Write`].
    Interrupted(i32),
    /// It takes so much longer.
    Slow(Duration),
    /// Nothing more is ever written, and nobody hears of what was: the process ended.
    Ends,
}

type Chooser = Box<dyn FnMut(Moment) -> Option<Fault> + Send>;

/// The faults of one store; clones are the same.
#[derive(Clone, Default)]
pub struct Faults(Arc<Inner>);

#[derive(Default)]
struct Inner {
    chooser: Mutex<Option<Chooser>>,
    /// Each write has a transaction of its own.
    one_by_one: AtomicBool,
    /// The connection has a handler that interrupts statements.
    interrupts: AtomicBool,
}

impl Faults {
    /// Asks this from now on which fault there is.
    pub fn choose(&self, chooser: impl FnMut(Moment) -> Option<Fault> + Send + 'static) {
        *self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(chooser));
    }

    /// No more of them.
    pub fn end(&self) {
        *self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// From now on each write has a transaction of its own, so that a fault can come between any two of them.
    pub fn separate_writes(&self) {
        self.0.one_by_one.store(true, Ordering::Release);
    }

    pub(crate) fn are_writes_separate(&self) -> bool {
        self.0.one_by_one.load(Ordering::Acquire)
    }

    pub(crate) async fn meet(
        &self,
        moment: Moment,
        connection: &mut SqliteConnection,
    ) -> Result<(), sqlx::Error> {
        let fault = match self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(chooser) => chooser(moment),
            None => None,
        };
        // It was for one write.
        if self.0.interrupts.swap(false, Ordering::AcqRel) {
            connection.lock_handle().await?.remove_progress_handler();
        }
        match fault {
            Some(Fault::Fails(code)) => Err(sqlx::Error::Database(Box::new(Injected { code }))),
            Some(Fault::Slow(time)) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Some(Fault::Ends) => std::future::pending().await,
            Some(Fault::Interrupted(instructions)) => {
                self.0.interrupts.store(true, Ordering::Release);
                connection.lock_handle().await?.set_progress_handler(instructions.max(1), || false);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Store {
    /// Writes what the store itself would not.
    pub async fn spoil(&self, sql: &'static str) -> Result<(), StoreError> {
        self.write(sql, |connection, sql| {
            Box::pin(async move {
                let done = query(AssertSqlSafe(*sql)).execute(connection).await;
                done.map(drop).map_err(StoreError::while_it("spoiled a row"))
            })
        })
        .await
    }

    /// Copies and deletions are made in the smallest pieces.
    pub fn in_small_pieces(self) -> Store {
        Store { piece: Duration::ZERO, ..self }
    }

    /// What a query that counts says.
    pub async fn count(&self, sql: &'static str) -> Result<i64, StoreError> {
        let counted = query_scalar(AssertSqlSafe(sql)).fetch_one(&self.readers).await;
        counted.map_err(StoreError::while_it("counted rows"))
    }

    /// Makes the disk full once the database has so many pages more than now. `None`: there is room again.
    pub async fn leave_room(&self, pages: Option<i64>) -> Result<(), StoreError> {
        self.write(pages, |connection, pages| {
            Box::pin(async move {
                let failed = || StoreError::while_it("bounded the file");
                let now: i64 =
                    query_scalar("PRAGMA page_count").fetch_one(&mut *connection).await.map_err(failed())?;
                let most = pages.map_or(1 << 30, |pages| now + pages);
                let sql = AssertSqlSafe(format!("PRAGMA max_page_count = {most}"));
                query(sql).execute(connection).await.map(drop).map_err(failed())
            })
        })
        .await
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faults")
    }
}

/// An error that looks like one of SQLite's.
#[derive(Debug)]
struct Injected {
    code: u32,
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "(code: {}) injected by a test", self.code)
    }
}

impl Error for Injected {}

impl DatabaseError for Injected {
    fn message(&self) -> &str {
        "injected by a test"
    }

    fn code(&self) -> Option<Cow<'_, str>> {
        Some(self.code.to_string().into())
    }

    fn as_error(&self) -> &(dyn Error + Send + Sync + 'static) {
        self
    }

    fn as_error_mut(&mut self) -> &mut (dyn Error + Send + Sync + 'static) {
        self
    }

    fn into_error(self: Box<Self>) -> Box<dyn Error + Send + Sync + 'static> {
        self
    }

    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}
