//! Fault injection: faults chosen by a test, at the moments at which a real database can fail.

use crate::sql::Connection;
use sqlx::error::{DatabaseError, ErrorKind};
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

/// The moments at which the writer can encounter a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before a transaction starts.
    Begin,
    /// Before the statements of one write.
    Write,
    /// Before a commit.
    Commit,
    /// After a commit, before any caller learns of it.
    Committed,
}

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails with this SQLite error code: 5 is busy, 10 is I/O, 13 is a full disk.
    Fails(u32),
    /// Interrupts the statement that is running after this many instructions of SQLite's virtual machine.
    /// Only at [`Moment::Write`].
    Interrupted(i32),
    /// Delays by this duration.
    Slow(Duration),
    /// Stops all writes and reports, as if the process had terminated.
    Ends,
}

const SQLITE_INTERRUPT: u32 = 9;

type Chooser = Box<dyn FnMut(Moment) -> Option<Fault> + Send>;

/// The faults of one store. Clones share them.
#[derive(Clone, Default)]
pub struct Faults(Arc<Inner>);

#[derive(Default)]
struct Inner {
    chooser: Mutex<Option<Chooser>>,
    /// Whether each write gets a separate transaction.
    one_by_one: AtomicBool,
    /// Whether the connection has a progress handler that interrupts statements.
    interrupts: AtomicBool,
}

impl Faults {
    /// Sets the function that chooses the fault for each moment.
    pub fn choose(&self, chooser: impl FnMut(Moment) -> Option<Fault> + Send + 'static) {
        *self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(chooser));
    }

    /// Stops injecting faults.
    pub fn end(&self) {
        *self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Gives each write a separate transaction from now on, so that a fault can occur between any two writes.
    pub fn separate_writes(&self) {
        self.0.one_by_one.store(true, Ordering::Release);
    }

    pub(crate) fn are_writes_separate(&self) -> bool {
        self.0.one_by_one.load(Ordering::Acquire)
    }

    pub(crate) async fn meet(&self, moment: Moment, connection: &mut Connection) -> Result<(), sqlx::Error> {
        let fault = match self.0.chooser.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(chooser) => chooser(moment),
            None => None,
        };
        // The handler was for one write only.
        if self.0.interrupts.swap(false, Ordering::AcqRel)
            && let Some(connection) = connection.sqlite_mut()
        {
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
                let Some(connection) = connection.sqlite_mut() else {
                    // PostgreSQL counts no instructions; its statement is interrupted at once.
                    return Err(sqlx::Error::Database(Box::new(Injected { code: SQLITE_INTERRUPT })));
                };
                self.0.interrupts.store(true, Ordering::Release);
                connection.lock_handle().await?.set_progress_handler(instructions.max(1), || false);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faults")
    }
}

/// An error that looks like one of SQLite's own.
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
