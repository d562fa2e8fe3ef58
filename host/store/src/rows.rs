//! Decoding of rows. A row that cannot be read is reported in the log and does not prevent the others from
//! being read.

use crate::{StoreError, sql::Row};

/// Decodes one row.
pub(crate) type Decode<T> = fn(&Row) -> Result<T, sqlx::Error>;

/// Returns the rows that can be read. `what` describes one of them.
pub(crate) fn readable<T>(rows: &[Row], what: &'static str, decode: Decode<T>) -> Vec<T> {
    let read = |row: &Row| match one(row, what, decode) {
        Ok(value) => Some(value),
        Err(error) => {
            tracing::error!("{error}; it is skipped");
            None
        }
    };
    rows.iter().filter_map(read).collect()
}

/// Decodes a single row.
pub(crate) fn one<T>(row: &Row, what: &'static str, decode: Decode<T>) -> Result<T, StoreError> {
    decode(row).map_err(|error| StoreError::Unreadable { what, name: name(row), reason: error.to_string() })
}

/// Returns the first column, which is the name or the number of a row.
fn name(row: &Row) -> String {
    let text = row.try_get::<String>(0);
    text.or_else(|_| row.try_get::<i64>(0).map(|key| key.to_string())).unwrap_or_default()
}
