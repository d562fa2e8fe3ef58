//! The log is followed on one host while others write it.

use super::Cluster;
use crate::{
    LogFilter, LogLine, RuntimeOptions,
    tests::{
        fixture::{Host, until},
        guest::echo,
    },
};
use skep_store::{Fault, LogEntry, Moment};
use std::{collections::BTreeSet, time::Duration};

/// Time for which a test waits for lines.
const PATIENCE: Duration = Duration::from_secs(30);

async fn write(host: &Host, session: &str) {
    let line = LogEntry { at_ms: 1, level: "info".into(), message: "hello".into() };
    host.store().append_logs("echo", session, 1, &[line]).await.expect("writable");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_gets_each_line_of_all_hosts_once_in_whatever_order_they_are_committed() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("echo", "", echo()).await.expect("valid");
    until(async || other.agents.agent("echo").ok()).await;
    let mut follower = other.agents.follow_logs(LogFilter::of_agent("echo"), 0);

    // The first host gives a position to its line long before it commits it.
    let slow = |moment: Moment| (moment == Moment::Commit).then_some(Fault::Slow(Duration::from_millis(700)));
    one.store().faults().choose(slow);
    let before = other.store().newest_log_id().await.expect("readable");
    let mut early = 0;
    let writes = async || {
        write(&other, "early").await;
        early += 1;
        // One of the positions is not that of a line of this host.
        (other.store().newest_log_id().await.expect("readable") > before + early).then_some(())
    };
    let reads = async {
        until(writes).await;
        let mut seen: Vec<LogLine> = Vec::new();
        while !seen.iter().any(|line| line.session == "late") {
            seen.extend(follower.next().await.expect("it continues"));
        }
        seen
    };
    let (_, seen) = tokio::join!(write(&one, "late"), tokio::time::timeout(PATIENCE, reads));
    one.store().faults().end();
    let mut seen = seen.expect("the line that was committed late is read");

    // The follower is not woken on this host.
    write(&one, "last").await;
    let rest = async {
        while !seen.iter().any(|line| line.session == "last") {
            seen.extend(follower.next().await.expect("it continues"));
        }
    };
    tokio::time::timeout(PATIENCE, rest).await.expect("lines of other hosts are looked for");
    let ids: BTreeSet<i64> = seen.iter().map(|line| line.id).collect();
    assert_eq!(ids.len(), seen.len(), "no line is read twice");
    let lines = other.agents.logs(&LogFilter::of_agent("echo"), Some(0), 1_000).await.expect("readable");
    assert!(lines.iter().all(|line| ids.contains(&line.id)), "no line is missing");
}
