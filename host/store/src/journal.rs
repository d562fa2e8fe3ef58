//! The journal of a turn: the results of its host calls and everything that its caller was shown, in order.
//!
//! Records are appended while the turn runs and never change. Records that a caller was shown outlive the
//! turn for a while; the others are removed when it finishes.

use crate::{
    Store, StoreError, TurnKey,
    row_groups::bounded,
    sql::{Connection, GivenRows, query},
    writer::JointKind,
};
use std::collections::HashMap;

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
        self.write_jointly(
            JointKind::Records,
            records.iter().map(|record| record.body.len()).sum(),
            (turn, records),
            |connection, (turn, records)| Box::pin(append(connection, *turn, records)),
            |connection, appends| {
                Box::pin(async move {
                    let appends: Vec<_> =
                        appends.iter().map(|(turn, records)| (*turn, records.as_slice())).collect();
                    append_all(connection, &appends).await
                })
            },
        )
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
    match append_all(connection, &[(turn, records)]).await?[..] {
        [Some(())] => Ok(()),
        _ => Err(StoreError::TurnNotOpen { key: turn.0 }),
    }
}

/// Appends to the journals of the turns that are open, and leaves the others.
async fn append_all(
    connection: &mut Connection,
    appends: &[(TurnKey, &[Record])],
) -> Result<Vec<Option<()>>, StoreError> {
    let failed = || StoreError::while_it("appended to the journal of a turn");
    let dialect = connection.dialect();
    let records: Vec<(i64, &Record)> =
        appends.iter().flat_map(|(turn, records)| records.iter().map(|record| (turn.0, record))).collect();
    let mut given: HashMap<i64, usize> = HashMap::new();
    records.iter().for_each(|(turn, _)| *given.entry(*turn).or_default() += 1);
    let mut missing = given.clone();
    for rows in bounded(&records, |(_, record)| record.body.len()) {
        let rows = GivenRows::new()
            .column("turn", rows.iter().map(|(turn, _)| *turn))
            .column("position", rows.iter().map(|(_, record)| record.position as i64))
            .column("call", rows.iter().map(|(_, record)| record.call))
            .column("shown", rows.iter().map(|(_, record)| record.shown))
            .column("body", rows.iter().map(|(_, record)| &record.body));
        // The records of a turn that has ended would come after its outcome.
        let insert = rows.query(
            dialect,
            "INSERT INTO turn_records (turn, position, call, shown, body)
             SELECT turn, position, call, shown, body FROM",
            "WHERE EXISTS (SELECT 1 FROM turns WHERE ended_at_ms IS NULL AND key = new.turn) RETURNING turn",
        );
        for row in insert.fetch_all(&mut *connection).await.map_err(failed())? {
            if let Some(left) = missing.get_mut(&row.get::<i64>(0)) {
                *left -= 1;
            }
        }
    }
    // Another host may have ended a turn between two statements, and then none of the records stays.
    let is_partial = |turn: &&i64| missing[*turn] > 0 && missing[*turn] < given[*turn];
    if let Some(turn) = given.keys().find(is_partial) {
        return Err(StoreError::TurnEndedMeanwhile { key: *turn });
    }
    let is_appended =
        |(turn, _): &(TurnKey, &[Record])| missing.get(&turn.0).is_none_or(|left| *left == 0).then_some(());
    Ok(appends.iter().map(is_appended).collect())
}

/// Removes the records that only running turns need.
pub(crate) async fn close(
    connection: &mut Connection,
    turns: impl IntoIterator<Item = TurnKey>,
) -> Result<(), StoreError> {
    let turns = GivenRows::new().column("turn", turns.into_iter().map(|turn| turn.0));
    let delete = turns.query(
        connection.dialect(),
        "DELETE FROM turn_records WHERE NOT shown AND turn IN (SELECT turn FROM",
        ")",
    );
    delete.execute(connection).await.map(drop).map_err(StoreError::while_it("closed the journal of a turn"))
}
