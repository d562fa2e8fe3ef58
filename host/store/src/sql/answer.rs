//! The time for which a statement waits for a PostgreSQL server. A connection may be lost without a sign of it, for example because a
//! firewall has forgotten it, and the operating system tries for a quarter of an hour to reach the server. The server itself ends every
//! statement sooner than the time here, so nothing that could still succeed is given up.

use std::{io, time::Duration};

/// The server ends a statement after 60 seconds (see `postgres::options`).
pub(crate) const LIMIT: Duration = Duration::from_secs(65);

/// Returns the result of a statement, or [`missing`] after the time. The connection is unusable then.
pub(super) async fn within<T>(
    limit: Option<Duration>,
    running: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, running).await.unwrap_or_else(|_elapsed| Err(missing())),
        None => running.await,
    }
}

/// Returns the error of a statement that got no answer.
pub(crate) fn missing() -> sqlx::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server did not answer; the connection may be lost").into()
}

/// Returns whether an error says that the connection carries nothing any more.
pub(super) fn is_missing(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_passing;

    #[tokio::test]
    async fn a_statement_without_an_answer_is_an_error_after_which_another_connection_is_tried() {
        let silent = std::future::pending::<Result<(), sqlx::Error>>;
        let error = within(Some(Duration::from_millis(1)), silent()).await.expect_err("nothing answers");
        assert!(is_missing(&error) && is_passing(&error), "{error}");
        assert!(within(Some(LIMIT), async { Ok(1) }).await.is_ok_and(|answer| answer == 1));
        assert!(
            within(None, async { Err::<(), _>(sqlx::Error::RowNotFound) })
                .await
                .is_err_and(|e| !is_missing(&e))
        );
    }
}
