//! Errors of the store.

use sqlx::postgres::PgDatabaseError;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// An error of the store. No error leaves half a transaction behind.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open the database {path}: {source}; check that the folder exists and is writable")]
    Open { path: PathBuf, source: Arc<sqlx::Error> },
    #[error("cannot connect to the database {database}: {source}\n  hint: {hint}")]
    Connect { database: String, source: Arc<sqlx::Error>, hint: &'static str },
    #[error("the database {database} cannot be used: {reason}\n  hint: {hint}")]
    Unsuitable { database: String, reason: String, hint: &'static str },
    #[error(
        "the connection to the database was lost, and it did not come back within {waited_s} s; nothing was written"
    )]
    Away { waited_s: u64 },
    #[error(
        "another host uses the database {database}\n  hint: one host at a time uses a database, unless all are started with \
         --cluster; stop that host, or start this one with --standby, which waits"
    )]
    InUse { database: String },
    /// Another host works with the database now. This host writes nothing anymore, until its process is started again.
    #[error(
        "another host has taken over the database {database}, because this one was cut off from it; nothing was written\n  \
         hint: start this host again"
    )]
    Fenced { database: String },
    #[error("the database has tables of another program and no tables of skep; use another data folder")]
    Foreign,
    #[error(
        "the database is not empty: its table {table} has {rows} rows; nothing was written\n  hint: use a database that no \
         host has used"
    )]
    NotEmpty { table: String, rows: u64 },
    #[error(
        "the tables of the two databases differ: {reason}; nothing was written\n  hint: bring both to this version with \
         `skep db migrate`"
    )]
    DifferentTables { reason: String },
    #[error("{row} of the table {table} cannot be moved: {reason}; nothing was written")]
    Unmovable { table: String, row: String, reason: String },
    #[error(
        "{path} is damaged or was not written by skep: {source}; put a backup of it in its place, or use another data folder"
    )]
    Damaged { path: PathBuf, source: Arc<sqlx::Error> },
    #[error(
        "the database was written by a newer version of skep (schema {found}, this one knows {known}); \
         upgrade skep or use another data folder"
    )]
    NewerSchema { found: i64, known: i64 },
    #[error(
        "the database was written by an older version of skep (schema {found}, this one has {known}), and a host may be using \
         it; use the version of that host, or stop it first"
    )]
    OlderSchema { found: i64, known: i64 },
    #[error(
        "the tables of the database belong to an older version of skep (schema {found}, this one has {known}), whose hosts could \
         not use them after the upgrade; nothing was changed\n  hint: make a backup of the database, with pg_dump for instance, and \
         run `skep db migrate`"
    )]
    NoWayBack { found: i64, known: i64 },
    #[error(
        "host {host} of the cluster is skep {release} and speaks version {} of the protocol between hosts, and this one is skep \
         {} and speaks version {}: hosts work together if these are at most one apart\n  hint: {}",
        .found, env!("CARGO_PKG_VERSION"), .own, apart(.found, .own)
    )]
    VersionsApart { host: i64, release: String, found: i64, own: i64 },
    #[error(
        "the tables of {path} belong to an older version of skep, and the copy that is made before they are changed needs \
         {needed_mb} MB where {free_mb} MB are free; nothing was changed\n  hint: free space on the disk of the data folder"
    )]
    NoRoomForCopy { path: PathBuf, needed_mb: u64, free_mb: u64 },
    #[error(
        "cannot copy the database to {path} before its tables are changed: {source}; nothing was changed\n  hint: make the \
         data folder writable"
    )]
    Copy { path: PathBuf, source: Arc<std::io::Error> },
    /// Another turn of the session was committed in the meantime. Nothing was written.
    #[error("turn {turn} of session {agent}/{session} has already been committed; nothing was written")]
    TurnConflict { agent: String, session: String, turn: u64 },
    /// The turn was finished or removed in the meantime. Nothing was written.
    #[error("turn {key} is no longer open; nothing was written")]
    TurnNotOpen { key: i64 },
    /// The turn was finished or removed by somebody else between two statements of the write. Nothing was written.
    #[error("turn {key} was ended while more of it was written; nothing was written")]
    TurnEndedMeanwhile { key: i64 },
    #[error("{what} has {bytes} bytes; a row can have at most {limit}; nothing was written")]
    RowTooLarge { what: &'static str, bytes: usize, limit: usize },
    #[error("the database was closed; nothing was written")]
    Closed,
    #[error("an internal error of the host aborted the write; nothing was written")]
    Panicked,
    #[error("no agent {name:?} is stored")]
    AgentMissing { name: String },
    #[error("no component {digest} is stored")]
    ComponentMissing { digest: String },
    #[error("{limit} API keys are stored, which is the maximum; nothing was written")]
    TooManyApiKeys { limit: i64 },
    /// A row that this version cannot read. Other rows are not affected.
    #[error("{what} {name:?} is stored in a form that cannot be read: {reason}")]
    Unreadable { what: &'static str, name: String, reason: String },
    #[error(
        "the disk is full, so nothing was written when the database {doing}; free space on the disk of the data folder"
    )]
    Full { doing: &'static str },
    /// The commit failed in a way that leaves it unknown what is on the disk.
    #[error(
        "the database failed while it committed, so it is not known whether the change was written: {source}"
    )]
    Unconfirmed { source: Arc<sqlx::Error> },
    #[error("the database failed while it {doing}: {source}")]
    Query { doing: &'static str, source: Arc<sqlx::Error> },
}

impl StoreError {
    /// Returns whether the error is a refusal: the write that it ends wrote nothing, so the transaction can continue with
    /// other writes.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::TurnConflict { .. }
                | Self::TurnNotOpen { .. }
                | Self::AgentMissing { .. }
                | Self::TooManyApiKeys { .. }
        )
    }

    /// Returns the error for a file that cannot be opened.
    pub(crate) fn opening(path: &Path, source: sqlx::Error) -> StoreError {
        Self::opening_shared(path, Arc::new(source))
    }

    fn opening_shared(path: &Path, source: Arc<sqlx::Error>) -> StoreError {
        let path = path.to_owned();
        if is_damage(&source) {
            StoreError::Damaged { path, source }
        } else {
            StoreError::Open { path, source }
        }
    }

    /// Converts a failed statement to [`StoreError::Damaged`] if the file is the cause.
    pub(crate) fn of_file(self, path: &Path) -> StoreError {
        match self {
            Self::Query { source, .. } if is_damage(&source) => Self::opening_shared(path, source),
            other => other,
        }
    }

    /// Returns a function for `map_err` that adds what the store was doing.
    pub(crate) fn while_it(doing: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
        move |source| match is_full(&source) {
            true => StoreError::Full { doing },
            false => StoreError::Query { doing, source: Arc::new(source) },
        }
    }

    /// Returns whether another host has taken over the database, so that no write of this one will ever succeed.
    pub fn is_fenced(&self) -> bool {
        matches!(self, Self::Fenced { .. })
    }

    /// Returns whether the database cannot be reached now.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::InUse { .. })
    }

    /// Returns whether the database did not answer, although it may later: it is away, its connection was lost, or another transaction
    /// was in the way.
    pub fn is_unreachable(&self) -> bool {
        self.is_away() || self.is_passing()
    }

    /// Returns whether the disk is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Returns whether the write may succeed on PostgreSQL if its transaction is retried.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Query { source, .. } => is_passing(source),
            // The server may not have noticed yet that an earlier connection of this host is gone.
            Self::InUse { .. } => true,
            _ => false,
        }
    }

    /// Returns whether another transaction was in the way of this one, whose connection is as good as before.
    pub(crate) fn is_contention(&self) -> bool {
        matches!(self, Self::Query { source, .. } if is_contention(source))
    }

    /// Returns whether the operating system failed to read or write, which is also how some full disks
    /// appear.
    pub(crate) fn is_io(&self) -> bool {
        matches!(self, Self::Query { source, .. } | Self::Unconfirmed { source }
            if plain_code(source) == Some(SQLITE_IOERR))
    }
}

/// Returns what helps if the other hosts of a cluster are too old or too new for this one.
fn apart(found: &i64, own: &i64) -> &'static str {
    if found < own {
        "upgrade the cluster one version after the other: start a version between both first, or end the older hosts; one that \
         was killed counts for ten seconds"
    } else {
        "start a newer version of skep here, or end the newer hosts; one that was killed counts for ten seconds"
    }
}

/// SQLite's `SQLITE_IOERR`, `SQLITE_CORRUPT`, `SQLITE_FULL` and `SQLITE_NOTADB`.
pub(crate) const SQLITE_IOERR: u32 = 10;
const SQLITE_CORRUPT: u32 = 11;
pub(crate) const SQLITE_FULL: u32 = 13;
const SQLITE_NOTADB: u32 = 26;

/// Returns SQLite's primary code of an error, which is the low byte of an extended code.
pub(crate) fn plain_code(error: &sqlx::Error) -> Option<u32> {
    if sql_state(error).is_some() {
        return None;
    }
    let code = error.as_database_error()?.code()?.parse::<u32>().ok()?;
    Some(code & 0xff)
}

/// Returns the code of an error that PostgreSQL reported.
pub(crate) fn sql_state(error: &sqlx::Error) -> Option<&str> {
    Some(error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?.code())
}

fn is_full(error: &sqlx::Error) -> bool {
    plain_code(error) == Some(SQLITE_FULL) || sql_state(error) == Some("53100")
}

/// Returns whether the same transaction may succeed if it is retried, because the connection was lost, the server
/// shut down or is not ready, or another transaction was in the way.
pub(crate) fn is_passing(error: &sqlx::Error) -> bool {
    match sql_state(error) {
        Some(state) => {
            let (class, passing) = (&state[..2], ["40001", "40P01", "55P03", "25P03", "25006"]);
            class == "08" || class == "57" && state != "57014" || state == "53300" || passing.contains(&state)
        }
        None => matches!(
            error,
            sqlx::Error::Io(_)
                | sqlx::Error::Tls(_)
                | sqlx::Error::Protocol(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::WorkerCrashed
        ),
    }
}

/// Returns whether a statement failed because another transaction was in the way: it would not have been serializable, it was in a
/// deadlock, or it waited for a lock for too long.
pub(crate) fn is_contention(error: &sqlx::Error) -> bool {
    sql_state(error).is_some_and(|state| ["40001", "40P01", "55P03"].contains(&state))
}

/// Returns whether a statement failed because it refers to a row that does not exist.
pub(crate) fn is_foreign_key(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.is_foreign_key_violation())
}

fn is_damage(error: &sqlx::Error) -> bool {
    matches!(plain_code(error), Some(SQLITE_CORRUPT | SQLITE_NOTADB))
}
