//! Tests of when a host counts as dead although this one, or the server, was busy or away. Without a server there is only one host.

use crate::{
    cluster_tests::{Mortal, PATIENCE, meet, member},
    host_tests::Database,
};
use std::time::{Duration, Instant};

/// Time between two meetings.
const PAUSE: Duration = Duration::from_millis(100);
/// Meetings until a host that has just connected may declare others dead (see `cluster::SETTLED`).
const MEETINGS: usize = 65;

#[tokio::test]
async fn a_host_so_busy_that_its_meetings_are_seconds_apart_replaces_one_that_is_dead() {
    let Some(mut database) = Database::new().await else { return };
    let busy = member(&database, "busy").await;
    let mortal = Mortal::start(&database).await;
    let number = mortal.number();
    mortal.kill();
    database.run(format!("UPDATE hosts SET seen_at_ms = 0 WHERE number = {number}")).await;
    let (begun, mut gone) = (Instant::now(), Vec::new());
    while gone.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "nobody counts as dead");
        tokio::time::sleep(Duration::from_millis(1_300)).await;
        gone = meet(&busy).await;
    }
    assert_eq!(gone, [number]);
}

#[tokio::test]
async fn no_host_is_dead_because_the_clock_of_the_server_was_set_forward() {
    let Some(mut database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    for _ in 0..MEETINGS {
        assert!(meet(&one).await.is_empty());
        tokio::time::sleep(PAUSE).await;
    }
    let number = other.host_number().unwrap();
    for _ in 0..10 {
        // Seen from the new time, the last sign of life is old.
        database
            .run(format!("UPDATE hosts SET seen_at_ms = seen_at_ms - 60000 WHERE number = {number}"))
            .await;
        assert!(meet(&one).await.is_empty());
        tokio::time::sleep(PAUSE).await;
        assert!(meet(&one).await.is_empty());
    }
    other.check().await.expect("it belongs to the cluster");
}
