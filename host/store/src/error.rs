//! What can go wrong between a row and the disk.

use std::path::{Path, PathBuf};

/// An error of the store. None of them leaves half a transaction behind.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open the database {path}: {source}; check that the folder exists and is writable")]
    Open { path: PathBuf, source: sqlx::Error },
    #[error("the database has tables of another program and none of skep; use another data folder")]
    Foreign,
    #[error(
        "{path} is damaged or was not written by skep: {source}; put a backup of it in its place, or use another data folder"
    )]
    Damaged { path: PathBuf, source: sqlx::Error },
    #[error(
        "the database was written by a newer version of skep (schema {found}, this one knows {known}); \
         upgrade skep or use another data folder"
    )]
    NewerSchema { found: i64, known: i64 },
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
    #[error("no agent {name:?} is stored")]
    AgentMissing { name: String },
    #[error("no component {digest} is stored")]
    ComponentMissing { digest: String },
    #[error("{limit} API keys are stored, as many as there may be; nothing was written")]
    TooManyApiKeys { limit: i64 },
    #[error("the database failed while it {doing}: {source}")]
    Query { doing: &'static str, source: sqlx::Error },
}

impl StoreError {
    /// Found out by a statement that wrote nothing, so that the transaction may go on with other turns.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::TurnConflict { .. } | Self::AgentMissing { .. })
    }

    /// What keeps the file from being opened.
    pub(crate) fn opening(path: &Path, source: sqlx::Error) -> StoreError {
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
            Self::Query { source, .. } if is_damage(&source) => Self::opening(path, source),
            other => other,
        }
    }

    /// For `map_err`: names what the store was doing.
    pub(crate) fn while_it(doing: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
        move |source| StoreError::Query { doing, source }
    }
}

/// SQLite's `SQLITE_CORRUPT` and `SQLITE_NOTADB`. An extended code has the plain one in its low byte.
fn is_damage(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| matches!(code & 0xff, 11 | 26))
}
