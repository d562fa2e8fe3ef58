//! Group commit: one task writes all that turns write. What comes while a transaction runs goes into the next one
//! together, so that many turns share the price of one.
//!
//! Invariant: writes are made in the order in which they were asked for, and nobody is told that a write is done before
//! its transaction is. A write that is refused (a turn that is not the next one) takes no other with it.

use crate::{
    Acceptance, COMMIT_TIME, NewTurn, Record, StoreError, TokenUse, TurnCommit, TurnFailure, TurnKey,
    journal, sessions, standing, token_use, turns,
};
use sqlx::{SqliteConnection, SqlitePool};
use std::{sync::Arc, time::Instant};
use tokio::sync::{mpsc, oneshot};

/// Writes of one transaction. More would only make the first of them wait.
const MAX_GROUP: usize = 256;
/// Writes that may wait; who comes then waits for room.
const QUEUE: usize = 1_024;

/// All that the task can be asked to write.
pub(crate) enum Write {
    Accept(Arc<NewTurn>),
    Start {
        turn: TurnKey,
        number: u64,
        digest: String,
    },
    Append {
        turn: TurnKey,
        records: Arc<Vec<Record>>,
    },
    Commit(Arc<TurnCommit>),
    Fail(Arc<TurnFailure>),
    CountTokens(TokenUse),
    /// Nothing but to find out whether it can be written.
    Check,
}

/// What a write came to.
pub(crate) enum Written {
    Done,
    Accepted(Acceptance),
}

/// The way to the task. The last clone ends it when everything is written.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    requests: mpsc::Sender<Request>,
}

struct Request {
    write: Write,
    done: oneshot::Sender<Result<Written, StoreError>>,
}

impl Writer {
    pub(crate) fn start(pool: SqlitePool) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        tokio::spawn(run(pool, queue));
        Writer { requests }
    }

    /// Resolves when the write is durable. It is made even if nobody waits for it any more.
    pub(crate) async fn write(&self, write: Write) -> Result<Written, StoreError> {
        let (done, written) = oneshot::channel();
        self.requests.send(Request { write, done }).await.map_err(|_| StoreError::Closed)?;
        written.await.map_err(|_| StoreError::Closed)?
    }
}

async fn run(pool: SqlitePool, mut queue: mpsc::Receiver<Request>) {
    let mut group = Vec::with_capacity(MAX_GROUP);
    while queue.recv_many(&mut group, MAX_GROUP).await > 0 {
        match write_all(&pool, &group).await {
            Ok(results) => {
                for (request, result) in group.drain(..).zip(results) {
                    // Nobody may wait for it any more; it is written all the same.
                    let _ = request.done.send(result);
                }
            }
            // One of them fails; alone, the others do not.
            Err(_) if group.len() > 1 => {
                for request in group.drain(..) {
                    let alone = write_all(&pool, std::slice::from_ref(&request)).await;
                    let _ = request.done.send(alone.and_then(|mut results| results.remove(0)));
                }
            }
            Err(error) => {
                let _ = group.remove(0).done.send(Err(error));
            }
        }
    }
}

/// One transaction. The results of the writes in it, if it was committed.
async fn write_all(
    pool: &SqlitePool,
    group: &[Request],
) -> Result<Vec<Result<Written, StoreError>>, StoreError> {
    let failed = || StoreError::while_it("committed a group of writes");
    let began = Instant::now();
    let mut transaction = pool.begin().await.map_err(failed())?;
    let mut results = Vec::with_capacity(group.len());
    for request in group {
        match apply(&mut transaction, &request.write).await {
            Err(error) if !error.is_refusal() => return Err(error),
            result => results.push(result),
        }
    }
    transaction.commit().await.map_err(failed())?;
    metrics::histogram!(COMMIT_TIME).record(began.elapsed().as_secs_f64());
    Ok(results)
}

async fn apply(connection: &mut SqliteConnection, write: &Write) -> Result<Written, StoreError> {
    match write {
        Write::Accept(turn) => return turns::accept(connection, turn).await.map(Written::Accepted),
        Write::Start { turn, number, digest } => turns::start(connection, *turn, *number, digest).await?,
        Write::Append { turn, records } => journal::append(connection, *turn, records).await?,
        Write::Commit(commit) => sessions::commit(connection, commit).await?,
        Write::Fail(failure) => turns::fail(connection, failure).await?,
        Write::CountTokens(used) => token_use::add(connection, used).await?,
        Write::Check => standing::check(connection).await?,
    }
    Ok(Written::Done)
}
