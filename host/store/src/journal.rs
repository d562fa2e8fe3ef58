//! The journal of a turn: the results of its host calls and everything that its caller was shown, in order.
//!
//! Records are appended while the turn runs and never change. Records that a caller was shown outlive the
//! turn for a while; the others are removed when it finishes.

use crate::{
    Store, StoreError, TurnKey,
    sql::{Connection, QueryBuilder, query},
};

/// Maximum size of a record in bytes. An append with a larger record is refused before anything is written.
pub const MAX_RECORD_BYTES: usize = 2 << 20;

/// One step of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Position of the record in the turn, counting from 1.
    pub position: u64,
    /// The host call of the turn that the record belongs to.
    pub call: u32,
    /// Whether the turn's callers see the record.
    pub shown: bool,
    pub body: Vec<u8>,
}

impl Store {
    /// Appends records to the journal of an open turn, either all or none.
    pub async fn append_records(&self, turn: TurnKey, records: Vec<Record>) -> Result<(), StoreError> {
        if let Some(large) = records.iter().find(|record| record.body.len() > MAX_RECORD_BYTES) {
            let (what, bytes) = ("a record of the turn's journal", large.body.len());
            return Err(StoreError::RowTooLarge { what, bytes, limit: MAX_RECORD_BYTES });
        }
        self.write((turn, records), |connection, (turn, records)| {
            Box::pin(append(connection, *turn, records))
        })
        .await
    }

    /// Returns the journal in order.
    pub async fn records(&self, turn: TurnKey) -> Result<Vec<Record>, StoreError> {
        let rows =
            query("SELECT position, call, shown, body FROM turn_records WHERE turn = ? ORDER BY position")
                .bind(turn.0)
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("read the journal of a turn"))?;
        Ok(rows
            .into_iter()
            .map(|row| Record {
                position: row.get::<i64>(0) as u64,
                call: row.get::<i64>(1) as u32,
                shown: row.get(2),
                body: row.get(3),
            })
            .collect())
    }
}

async fn append(connection: &mut Connection, turn: TurnKey, records: &[Record]) -> Result<(), StoreError> {
    // SQLite limits the number of parameters of one statement.
    for chunk in records.chunks(1_000) {
        // The records of a turn that has ended would come after its outcome.
        let mut insert =
            QueryBuilder::new("INSERT INTO turn_records (turn, position, call, shown, body) SELECT * FROM (");
        insert.push_values(chunk, |mut row, record| {
            row.push_bind(turn.0)
                .push_bind(record.position as i64)
                .push_bind(record.call)
                .push_bind(record.shown)
                .push_bind(&record.body);
        });
        insert.push(") AS records WHERE EXISTS (SELECT 1 FROM turns WHERE ended_at_ms IS NULL AND key = ");
        insert.push_bind(turn.0).push(")");
        let appended = insert.build().execute(&mut *connection).await;
        let appended = appended.map_err(StoreError::while_it("appended to the journal of a turn"))?;
        if appended.rows_affected() != chunk.len() as u64 {
            return Err(StoreError::TurnNotOpen { key: turn.0 });
        }
    }
    Ok(())
}

/// Removes the records that only a running turn needs.
pub(crate) async fn close(connection: &mut Connection, turn: TurnKey) -> Result<(), StoreError> {
    query("DELETE FROM turn_records WHERE turn = ? AND NOT shown")
        .bind(turn.0)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("closed the journal of a turn"))?;
    Ok(())
}
