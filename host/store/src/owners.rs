//! The owners of sessions in a cluster.
//!
//! A host claims a session before it loads it. A claim succeeds if the session has no owner, or one that is gone; the mark that
//! says so is set while the old owner has no transaction open, so nothing that it writes comes after the claim. An
//! ownership ends when the owner releases the session or is gone, and not with the session: while a host lives, it may act on
//! what it has claimed without asking again. Epochs come from one sequence, so that of a session grows with each owner, even
//! if its row was removed in between.
//!
//! All of these are common writes: one host at a time changes owners, and sees all hosts that have registered before.

use crate::{
    Store, StoreError,
    hosts::{GONE, is_left, is_owned_since},
    losses,
    membership::LossRule,
    sql::{AssertSqlSafe, Connection, query, query_as, query_scalar},
};
use std::sync::Arc;

/// Number of sessions that one transaction releases or forgets.
const SESSIONS_AT_ONCE: usize = 200;

/// The outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// This host owns the session, until it releases it. The epoch is larger than those of all earlier owners.
    Ours { epoch: u64 },
    /// Another host owns the session.
    Elsewhere { host: i64 },
}

/// A session that a host takes.
struct Taking {
    agent: String,
    session: String,
    host: i64,
    losses: Option<Arc<LossRule>>,
}

impl Store {
    /// Claims a session for this host. Without a cluster, every session is that of the only host.
    pub async fn claim_session(&self, agent: &str, session: &str) -> Result<Claim, StoreError> {
        let (Some(membership), Some(host)) = (&self.membership, self.host) else {
            return Ok(Claim::Ours { epoch: 0 });
        };
        // Most claims that fail need no transaction.
        if let Some(owner) = self.owner_of(agent, session).await?
            && owner != host
        {
            return Ok(Claim::Elsewhere { host: owner });
        }
        let (agent, session) = (agent.to_owned(), session.to_owned());
        let taking = Taking { agent, session, host, losses: membership.loss_rule() };
        self.write_common(taking, |connection, taking| Box::pin(claim(connection, taking))).await
    }

    /// Returns the live host that owns the session, if any. Without a cluster it is this one, which has a number if the
    /// database is on a server.
    pub async fn owner_of(&self, agent: &str, session: &str) -> Result<Option<i64>, StoreError> {
        if self.membership.is_none() {
            return Ok(self.host);
        }
        query_scalar(
            "SELECT host FROM session_owners JOIN hosts ON number = host
             WHERE agent = ? AND session = ? AND state != ?",
        )
        .bind(agent)
        .bind(session)
        .bind(GONE)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for the owner of a session"))
    }

    /// Gives sessions back, as agents with sessions. No actor of this host may have them loaded. Their open turns do not count
    /// as lost. Sessions of other hosts are left alone.
    pub async fn release_sessions(&self, sessions: Vec<(String, String)>) -> Result<(), StoreError> {
        let (Some(_), Some(host)) = (&self.membership, self.host) else { return Ok(()) };
        for some in sessions.chunks(SESSIONS_AT_ONCE) {
            self.write_common((host, some.to_vec()), |connection, (host, sessions)| {
                Box::pin(release(connection, *host, sessions))
            })
            .await?;
        }
        Ok(())
    }

    /// Claims at most `limit` sessions that have open turns which are not held, and no owner that lives. Counts a loss for their
    /// running turns, as [`Store::count_losses`] does, unless their last owner ended in order. Returns them as agents with
    /// sessions.
    pub async fn take_over(
        &self,
        called: &str,
        aside: &[&str],
        limit: u32,
    ) -> Result<Vec<(String, String)>, StoreError> {
        let (Some(membership), Some(host)) = (&self.membership, self.host) else { return Ok(Vec::new()) };
        let rule = membership.count_losses_by(called, aside);
        // There is seldom anything to take, and nobody waits for a look.
        let orphans = format!("SELECT EXISTS (SELECT 1 FROM turns WHERE {})", orphaned());
        let is_there: bool = query_scalar(AssertSqlSafe(orphans))
            .fetch_one(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for turns without a host"))?;
        if !is_there {
            return Ok(Vec::new());
        }
        self.write_common((host, rule, limit), |connection, (host, rule, limit)| {
            Box::pin(take_orphans(connection, *host, rule, *limit))
        })
        .await
    }

    /// Forgets owners that are gone, except of sessions that will be taken over.
    pub(crate) async fn tidy_owners(&self) -> Result<(), StoreError> {
        if self.membership.is_none() {
            return Ok(());
        }
        let forgotten = self.in_chunks((), |connection, ()| {
            Box::pin(async move {
                let forget = format!(
                    "DELETE FROM session_owners WHERE (agent, session) IN (SELECT agent, session FROM session_owners AS left_over
                         WHERE {} AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.agent = left_over.agent
                             AND turns.session = left_over.session AND ended_at_ms IS NULL)
                         LIMIT {SESSIONS_AT_ONCE})",
                    is_left("left_over.host")
                );
                let gone = query(AssertSqlSafe(forget)).execute(connection).await;
                Ok(gone.map_err(StoreError::while_it("forgot owners that are gone"))?.rows_affected())
            })
        });
        forgotten.await.map(drop)
    }
}

/// Returns the condition on a row of `turns` that it is open and that no host will run it.
fn orphaned() -> String {
    format!(
        "ended_at_ms IS NULL AND NOT held AND NOT EXISTS (SELECT 1 FROM session_owners AS owned
             JOIN hosts ON hosts.number = owned.host
             WHERE owned.agent = turns.agent AND owned.session = turns.session AND hosts.state != {GONE})"
    )
}

async fn claim(connection: &mut Connection, taking: &Taking) -> Result<Claim, StoreError> {
    let failed = || StoreError::while_it("claimed a session");
    let Taking { agent, session, host, losses } = taking;
    let owner: Option<(i64, i64)> =
        query_as("SELECT host, epoch FROM session_owners WHERE agent = ? AND session = ?")
            .bind(agent)
            .bind(session)
            .fetch_optional(&mut *connection)
            .await
            .map_err(failed())?;
    if let Some((owner, epoch)) = owner
        && owner == *host
    {
        return Ok(Claim::Ours { epoch: epoch as u64 });
    }
    let claim = format!(
        "INSERT INTO session_owners (agent, session, host) VALUES (?, ?, ?)
         ON CONFLICT (agent, session) DO UPDATE SET host = excluded.host, epoch = excluded.epoch WHERE {}
         RETURNING epoch",
        is_left("session_owners.host")
    );
    let epoch: Option<i64> = query_scalar(AssertSqlSafe(claim))
        .bind(agent)
        .bind(session)
        .bind(host)
        .fetch_optional(&mut *connection)
        .await
        .map_err(failed())?;
    match (epoch, owner) {
        (Some(epoch), _) => {
            // A caller may come before the search for what a dead host has left.
            let open =
                "SELECT EXISTS (SELECT 1 FROM turns WHERE agent = ? AND session = ? AND ended_at_ms IS NULL)";
            let open: Result<bool, _> =
                query_scalar(open).bind(agent).bind(session).fetch_one(&mut *connection).await;
            if open.map_err(failed())? {
                lose(connection, *host, epoch, losses.as_deref()).await?;
            }
            Ok(Claim::Ours { epoch: epoch as u64 })
        }
        (None, Some((owner, _))) => Ok(Claim::Elsewhere { host: owner }),
        (None, None) => Err(failed()(sqlx::Error::RowNotFound)),
    }
}

async fn release(
    connection: &mut Connection,
    host: i64,
    sessions: &[(String, String)],
) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("released a session");
    for (agent, session) in sessions {
        let released = query("DELETE FROM session_owners WHERE agent = ? AND session = ? AND host = ?")
            .bind(agent)
            .bind(session)
            .bind(host)
            .execute(&mut *connection)
            .await
            .map_err(failed())?;
        if released.rows_affected() == 0 {
            continue;
        }
        query("UPDATE turns SET runs = FALSE WHERE agent = ? AND session = ? AND ended_at_ms IS NULL")
            .bind(agent)
            .bind(session)
            .execute(&mut *connection)
            .await
            .map_err(failed())?;
    }
    Ok(())
}

async fn take_orphans(
    connection: &mut Connection,
    host: i64,
    rule: &LossRule,
    limit: u32,
) -> Result<Vec<(String, String)>, StoreError> {
    let take = format!(
        "INSERT INTO session_owners (agent, session, host)
             SELECT agent, session, {host} FROM turns WHERE {}
             GROUP BY agent, session ORDER BY MIN(key) LIMIT ?
         ON CONFLICT (agent, session) DO UPDATE SET host = excluded.host, epoch = excluded.epoch WHERE {}
         RETURNING agent, session, epoch",
        orphaned(),
        is_left("session_owners.host")
    );
    let taken: Vec<(String, String, i64)> = query_as(AssertSqlSafe(take))
        .bind(limit)
        .fetch_all(&mut *connection)
        .await
        .map_err(StoreError::while_it("took over sessions"))?;
    if let Some(first) = taken.iter().map(|(_, _, epoch)| *epoch).min() {
        lose(connection, host, first, Some(rule)).await?;
    }
    Ok(taken.into_iter().map(|(agent, session, _)| (agent, session)).collect())
}

/// Counts losses for the turns of the sessions that this transaction has taken, and that nobody runs now. The first session
/// got this epoch, so those that the host owned before have smaller ones.
async fn lose(
    connection: &mut Connection,
    host: i64,
    first: i64,
    rule: Option<&LossRule>,
) -> Result<(), StoreError> {
    let taken = is_owned_since("turns", host, first);
    if let Some(rule) = rule {
        losses::count(connection, &rule.called, &rule.aside, &taken).await?;
    }
    losses::leave(connection, &taken).await
}
