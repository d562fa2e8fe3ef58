//! Calls that wait for a person's approval.
//!
//! A row belongs to an open turn and is removed with it. It is decided once; later callers get the first
//! decision.

use crate::{
    SessionFolder, Store, StoreError, TurnKey,
    sql::{AssertSqlSafe, Row, query, query_as},
};

/// A call that a person has to decide about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewApproval {
    /// Unique id, which stays the same when the turn asks again after a restart.
    pub id: String,
    pub turn: TurnKey,
    pub tool: String,
    /// The arguments, as JSON.
    pub arguments: String,
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
}

/// A stored call that waits for a decision, or has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRow {
    pub id: String,
    pub agent: String,
    pub session: String,
    /// The turn's id, as clients know it.
    pub turn_id: String,
    pub tool: String,
    /// The arguments, as JSON.
    pub arguments: String,
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
    /// Whether the turn is still open.
    pub is_open: bool,
    /// The decision, if there is one.
    pub decision: Option<Decision>,
}

/// The decision about a call, which never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub verdict: Verdict,
    /// The reason that the person gave. A denied call passes it to the model.
    pub reason: Option<String>,
    /// The name of the caller who decided, or `host` when the time limit passed.
    pub decided_by: String,
    pub decided_at_ms: u64,
}

/// The result of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The call is made.
    Approved,
    /// The call is refused.
    Denied,
    /// The time limit passed without a decision.
    Expired,
}

const COLUMNS: &str = "approvals.id, agent, session, turns.id, tool, arguments, created_at_ms, expires_at_ms, \
                       turns.ended_at_ms IS NULL, verdict, reason, decided_by, decided_at_ms";

impl Store {
    /// Stores a request for approval, unless the same request is already stored.
    pub async fn ask_approval(&self, approval: &NewApproval) -> Result<(), StoreError> {
        self.write(approval.clone(), |connection, approval| {
            Box::pin(async move {
                query(
                    "INSERT INTO approvals (id, turn, tool, arguments, created_at_ms, expires_at_ms)
             VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                )
                .bind(&approval.id)
                .bind(approval.turn.0)
                .bind(&approval.tool)
                .bind(&approval.arguments)
                .bind(approval.created_at_ms as i64)
                .bind(approval.expires_at_ms as i64)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("requested an approval"))?;
                Ok(())
            })
        })
        .await
    }

    /// Returns the approval with this id, unless its turn was removed.
    pub async fn approval(&self, id: &str) -> Result<Option<ApprovalRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM approvals JOIN turns ON turns.key = turn WHERE approvals.id = ?");
        let row = query(AssertSqlSafe(sql))
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read an approval"))?;
        Ok(row.as_ref().map(approval_row))
    }

    /// Returns the agent and the session of an approval, unless its turn was removed.
    pub async fn session_of_approval(&self, id: &str) -> Result<Option<(String, String)>, StoreError> {
        query_as("SELECT agent, session FROM approvals JOIN turns ON turns.key = turn WHERE approvals.id = ?")
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for the session of an approval"))
    }

    /// Returns the requests that open turns wait for, the oldest first, for the sessions in a folder or for
    /// all.
    pub async fn pending_approvals(
        &self,
        folder: Option<&SessionFolder>,
        limit: u32,
    ) -> Result<Vec<ApprovalRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM approvals JOIN turns ON turns.key = turn
             WHERE verdict IS NULL AND turns.ended_at_ms IS NULL
             AND (?1 IS NULL OR (session >= ?1 AND session < ?2 AND (?3 OR instr(session, '/') = 0)))
             ORDER BY created_at_ms, approvals.id LIMIT ?4"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(folder.map(|folder| &folder.begin))
            .bind(folder.map(|folder| &folder.end))
            .bind(folder.is_some_and(|folder| folder.has_slash))
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed approvals"))?;
        Ok(rows.iter().map(approval_row).collect())
    }

    /// Decides a request that is still undecided, while the turn is open. Returns whether this call decided
    /// it.
    pub async fn decide_approval(&self, id: &str, decision: &Decision) -> Result<bool, StoreError> {
        self.write((id.to_owned(), decision.clone()), |connection, (id, decision)| {
            Box::pin(async move {
                let verdict = match decision.verdict {
                    Verdict::Approved => APPROVED,
                    Verdict::Denied => DENIED,
                    Verdict::Expired => EXPIRED,
                };
                let decided = query(
                    "UPDATE approvals SET verdict = ?, reason = ?, decided_by = ?, decided_at_ms = ?
             WHERE id = ? AND verdict IS NULL
             AND EXISTS (SELECT 1 FROM turns WHERE turns.key = turn AND turns.ended_at_ms IS NULL)",
                )
                .bind(verdict)
                .bind(&decision.reason)
                .bind(&decision.decided_by)
                .bind(decision.decided_at_ms as i64)
                .bind(id)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("decided about an approval"))?;
                Ok(decided.rows_affected() == 1)
            })
        })
        .await
    }
}

const APPROVED: i64 = 1;
const DENIED: i64 = 2;
const EXPIRED: i64 = 3;

fn approval_row(row: &Row) -> ApprovalRow {
    let decision = row.get::<Option<i64>>(9).map(|verdict| Decision {
        verdict: match verdict {
            APPROVED => Verdict::Approved,
            DENIED => Verdict::Denied,
            _ => Verdict::Expired,
        },
        reason: row.get(10),
        decided_by: row.get::<Option<String>>(11).unwrap_or_default(),
        decided_at_ms: row.get::<Option<i64>>(12).unwrap_or_default() as u64,
    });
    ApprovalRow {
        id: row.get(0),
        agent: row.get(1),
        session: row.get(2),
        turn_id: row.get(3),
        tool: row.get(4),
        arguments: row.get(5),
        created_at_ms: row.get::<i64>(6) as u64,
        expires_at_ms: row.get::<i64>(7) as u64,
        is_open: row.get(8),
        decision,
    }
}
