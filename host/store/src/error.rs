//! What can go wrong between a row and the disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// An error of the store. None of them leaves half a transaction behind.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open the database {path}: {source}; check that the folder exists and is writable")]
    Open { path: PathBuf, source: Arc<sqlx::Error> },
    #[error("the database has tables of another program and none of skep; use another data folder")]
    Foreign,
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
    /// Another turn of the session was committed in between; nothing was written.
    #[error("turn {turn} of session {agent}/{session} was committed already; nothing was written")]
    TurnConflict { agent: String, session: String, turn: u64 },
    /// The turn was ended or removed in between; nothing was written.
    #[error("turn {key} is not open any more; nothing was written")]
    TurnNotOpen { key: i64 },
    #[error("{what} has {bytes} bytes, over the {limit} that one row may have; nothing was written")]
    RowTooLarge { what: &'static str, bytes: usize, limit: usize },
    #[error("the database was closed; nothing was written")]
    Closed,
    #[error("a fault of the host ended the write; nothing was written")]
    Panicked,
    #[error("no agent {name:?} is stored")]
    AgentMissing { name: String },
    #[error("no component {digest} is stored")]
    ComponentMissing { digest: String },
    #[error("{limit} API keys are stored, as many as there may be; nothing was written")]
    TooManyApiKeys { limit: i64 },
    /// A row that this version cannot read. The others can be read.
    #[error("{what} {name:?} is stored in a form that cannot be read: {reason}")]
    Unreadable { what: &'static str, name: String, reason: String },
    #[error(
        "the disk is full, so nothing was written when the database {doing}; free space on the disk of the data folder"
    )]
    Full { doing: &'static str },
    /// The commit failed in a way that leaves open what is on the disk.
    #[error(
        "the database failed while it committed, so it is not known whether the change was written: {source}"
    )]
    Unconfirmed { source: Arc<sqlx::Error> },
    #[error("the database failed while it {doing}: {source}")]
    Query { doing: &'static str, source: Arc<sqlx::Error> },
}

impl StoreError {
    /// Found out by a statement that wrote nothing, so that the transaction may go on with other turns.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::TurnConflict { .. } | Self::AgentMissing { .. } | Self::TooManyApiKeys { .. })
    }

    /// What keeps the file from being opened.
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

    /// A statement that failed because of the file says so.
    pub(crate) fn of_file(self, path: &Path) -> StoreError {
        match self {
            Self::Query { source, .. } if is_damage(&source) => Self::opening_shared(path, source),
            other => other,
        }
    }

    /// For `map_err`: names what the store was doing.
    pub(crate) fn while_it(doing: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
        move |source| match plain_code(&source) {
            Some(SQLITE_FULL) => StoreError::Full { doing },
            _ => StoreError::Query { doing, source: Arc::new(source) },
        }
    }

    /// There is no room on the disk.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// The operating system refused to read or write, which is also how some full disks look.
    pub(crate) fn is_io(&self) -> bool {
        matches!(self, Self::Query { source, .. } | Self::Unconfirmed { source }
            if plain_code(source) == Some(SQLITE_IOERR))
    }
}

/// SQLite's `SQLITE_IOERR`, `SQLITE_CORRUPT`, `SQLITE_FULL` and `SQLITE_NOTADB`.
pub(crate) const SQLITE_IOERR: u32 = 10;
const SQLITE_CORRUPT: u32 = 11;
pub(crate) const SQLITE_FULL: u32 = 13;
const SQLITE_NOTADB: u32 = 26;

/// SQLite's code of an error. An extended code has the plain one in its low byte.
pub(crate) fn plain_code(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.code()?.parse::<u32>().ok()?;
    Some(code & 0xff)
}

fn is_damage(error: &sqlx::Error) -> bool {
    matches!(plain_code(error), Some(SQLITE_CORRUPT | SQLITE_NOTADB))
}
