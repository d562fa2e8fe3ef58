//! Tests of what a PostgreSQL server does and an SQLite file does not: it orders texts by a language, cancels statements, and ends
//! transactions that are in each other's way. Without a server they pass without a check.

use crate::{
    cluster_tests::member,
    host_tests::{Database, agent},
    postgres::LEASE,
    sql::{AssertSqlSafe, query, query_as, query_scalar, raw_sql},
    *,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

fn turn(turn: u64) -> TurnCommit {
    TurnCommit { agent: "a".into(), session: "s".into(), turn, ..Default::default() }
}

#[tokio::test]
async fn every_text_is_ordered_by_its_bytes_whatever_the_language_of_the_database() {
    let Some(database) = Database::new().await else { return };
    let host = database.host().await;
    // The collations of the columns are looked at, because that of the database may be the same one by chance.
    let texts: Vec<(String, Option<String>)> = query_as(
        "SELECT CAST(table_name AS TEXT) || '.' || CAST(column_name AS TEXT), CAST(collation_name AS TEXT)
         FROM information_schema.columns WHERE table_schema = current_schema() AND data_type = 'text'",
    )
    .fetch_all(&host.readers)
    .await
    .unwrap();
    assert!(texts.len() > 50, "{texts:?}");
    let other: Vec<_> = texts.iter().filter(|(_, collation)| collation.as_deref() != Some("C")).collect();
    assert!(other.is_empty(), "add COLLATE \"C\" to {other:?}");
}

/// The milliseconds after which the server ends a transaction whose client does nothing.
const IDLE_MS: &str =
    "SELECT CAST(setting AS BIGINT) FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'";

/// Returns this time for each connection of a host.
async fn idle_times_ms(host: &Store) -> Vec<i64> {
    let writing = host.write((), |connection, ()| {
        Box::pin(async move {
            query_scalar(IDLE_MS).fetch_one(connection).await.map_err(StoreError::while_it("read for a test"))
        })
    });
    let mut times = vec![writing.await.unwrap()];
    let mut pools = vec![&host.readers, &host.key_reader];
    if let Some(membership) = &host.membership {
        pools.push(&membership.meeting);
        times.push(sqlx::query_scalar(IDLE_MS).fetch_one(&membership.listening).await.unwrap());
    }
    for pool in pools {
        times.push(query_scalar(IDLE_MS).fetch_one(pool).await.unwrap());
    }
    times
}

#[tokio::test]
async fn a_host_that_stops_within_a_transaction_loses_it_before_its_lease_on_every_connection() {
    let Some(database) = Database::new().await else { return };
    let lease_ms = LEASE.as_millis() as i64;
    let alone = database.host().await;
    let mut times = idle_times_ms(&alone).await;
    alone.close().await;
    times.extend(idle_times_ms(&member(&database, "one").await).await);
    assert_eq!(times.len(), 8);
    assert!(times.iter().all(|time| (1..lease_ms).contains(time)), "{times:?}");
}

#[tokio::test]
async fn a_transaction_that_was_in_the_way_of_another_is_retried_and_written_once() {
    let Some(database) = Database::new().await else { return };
    let host = database.host().await;
    // It was not serializable, it was in a deadlock, or it waited for a lock for too long.
    for (id, state) in [(1_i64, "40001"), (2, "40P01"), (3, "55P03")] {
        let attempts = Arc::new(AtomicU32::new(0));
        let data = (attempts.clone(), id, state);
        let written = host.write(data, |connection, (attempts, id, state)| {
            Box::pin(async move {
                let failed = || StoreError::while_it("wrote for a test");
                let insert = "INSERT INTO checks (id, at, filler) VALUES (?, 1, decode('00', 'hex'))";
                query(insert).bind(*id).execute(&mut *connection).await.map_err(failed())?;
                if attempts.fetch_add(1, Ordering::Relaxed) < 2 {
                    let raise =
                        format!("DO $$ BEGIN RAISE EXCEPTION 'in the way' USING ERRCODE = '{state}'; END $$");
                    raw_sql(AssertSqlSafe(raise), &mut *connection).await.map_err(failed())?;
                }
                Ok(())
            })
        });
        written.await.unwrap_or_else(|error| panic!("{state}: {error}"));
        assert_eq!(attempts.load(Ordering::Relaxed), 3, "{state}");
    }
    let rows: i64 = query_scalar("SELECT COUNT(*) FROM checks").fetch_one(&host.readers).await.unwrap();
    assert_eq!(rows, 3);
}

#[tokio::test]
async fn a_statement_that_takes_too_long_is_cancelled_once_and_other_writes_are_made() {
    let Some(database) = Database::new().await else { return };
    let host = database.host().await;
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    let attempts = Arc::new(AtomicU32::new(0));
    let begun = Instant::now();
    let slow = host.write(attempts.clone(), |connection, attempts| {
        Box::pin(async move {
            let failed = || StoreError::while_it("waited for a test");
            attempts.fetch_add(1, Ordering::Relaxed);
            raw_sql("SET LOCAL statement_timeout = '100ms'", &mut *connection).await.map_err(failed())?;
            query("SELECT pg_sleep(50)").execute(connection).await.map(drop).map_err(failed())
        })
    });
    let (slow, beside) = tokio::join!(slow, host.commit_turn(turn(1)));
    let error = slow.expect_err("it was cancelled");
    assert!(matches!(error, StoreError::Query { .. }) && error.to_string().contains("timeout"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // In a group with other writes, it is made once more by itself. It is never repeated as if the server had been away.
    assert!(attempts.load(Ordering::Relaxed) <= 2);
    beside.expect("a write in the same transaction does not fail with it");
    host.commit_turn(turn(2)).await.unwrap();
    let limit: String = query_scalar("SHOW statement_timeout").fetch_one(&host.readers).await.unwrap();
    assert_eq!(limit, "1min");
}

#[tokio::test]
async fn a_host_of_the_version_before_works_and_restarts_on_newer_tables() {
    let Some(mut database) = Database::new().await else { return };
    let known = known_schema();
    let first = member(&database, "first").await;
    first.put_agent(&agent(), b"component", &[]).await.unwrap();
    first.claim_session("a", "s").await.unwrap();
    first.commit_turn(turn(1)).await.unwrap();
    // The next version adds to tables that this one writes and reads, while it uses them.
    let extend = format!(
        "CREATE TABLE later (id BIGINT PRIMARY KEY);
         ALTER TABLE hosts ADD COLUMN later BIGINT NOT NULL DEFAULT 0;
         ALTER TABLE sessions ADD COLUMN later TEXT COLLATE \"C\" NOT NULL DEFAULT '';
         ALTER TABLE turns ADD COLUMN later BIGINT;
         UPDATE skep_schema SET version = {}, oldest = {known}",
        known + 1
    );
    database.run(extend).await;
    first.commit_turn(turn(2)).await.expect("it continues to work");
    first.close().await;
    let again = member(&database, "again").await;
    assert!(matches!(again.claim_session("a", "s").await.unwrap(), Claim::Ours { .. }));
    again.commit_turn(turn(3)).await.unwrap();
    assert_eq!(again.session("a", "s").await.unwrap().unwrap().row.turns, 3);
    let version: i64 =
        query_scalar("SELECT version FROM skep_schema").fetch_one(&again.readers).await.unwrap();
    assert_eq!(version, known + 1, "an older host leaves newer tables as they are");

    // The version after that takes away what this one needs.
    again.close().await;
    database.run(format!("UPDATE skep_schema SET oldest = {}", known + 1)).await;
    let refused = Store::join(database.server.clone(), "http://late").await.expect_err("too old");
    let said = refused.to_string();
    assert!(said.contains(&format!("schema {}, this one knows {known}", known + 1)), "{said}");
    assert!(said.contains("upgrade skep"), "{said}");
}
