//! Tests of the number of log lines that an agent keeps, and of how it is counted.

use crate::{
    logs::{LINES_PER_AGENT, SPARE_LINES, TurnLines, insert},
    sql::{query_scalar, raw_sql},
    *,
};

async fn put_agent(store: &Store, name: &str) {
    let agent = AgentRow {
        name: name.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
}

fn lines(count: i64) -> Vec<LogEntry> {
    let line = LogEntry { at_ms: 1, level: "info".into(), message: "line".into() };
    vec![line; count as usize]
}

async fn append(store: &Store, count: i64) {
    store.append_logs("a", "s", 1, &lines(count)).await.unwrap();
}

async fn count(store: &Store) -> i64 {
    let count = query_scalar("SELECT COUNT(*) FROM logs WHERE agent = 'a'");
    count.fetch_one(&store.readers).await.unwrap()
}

#[tokio::test]
async fn an_agent_keeps_its_lines_and_few_more_whoever_writes_them_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("skep.db");
    let mut store = Store::open_for_tests(&path).await.unwrap();
    put_agent(&store, "a").await;
    append(&store, LINES_PER_AGENT).await;
    let beside = Store::open_beside_for_tests(&path).await.unwrap();
    let kept = LINES_PER_AGENT..=LINES_PER_AGENT + SPARE_LINES;
    for number in 0..90 {
        let writer = if number % 3 == 0 { &beside } else { &store };
        append(writer, 7).await;
        assert!(kept.contains(&count(&store).await), "{} lines after {number} writes", count(&store).await);
        if number % 40 == 39 {
            store.close().await;
            store = Store::open_for_tests(&path).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_commit_counts_only_the_lines_after_the_last_count() {
    let store = Store::for_tests().await.unwrap();
    put_agent(&store, "a").await;
    append(&store, LINES_PER_AGENT).await;
    // These have smaller ids than those that were counted, as lines have that another host was just writing.
    let late = "INSERT INTO logs (id, agent, session, turn, at_ms, level, message)
                SELECT -id, agent, session, turn, at_ms, level, message FROM logs ORDER BY id LIMIT 300";
    raw_sql(late, &mut store.readers.acquire().await.unwrap()).await.unwrap();
    for written in 1..SPARE_LINES {
        append(&store, 1).await;
        assert_eq!(count(&store).await, LINES_PER_AGENT + 300 + written);
    }
    append(&store, 1).await;
    assert_eq!(count(&store).await, LINES_PER_AGENT, "the next count of all lines finds them");
}

#[tokio::test]
async fn a_count_of_lines_that_were_rolled_back_hides_no_later_lines() {
    let store = Store::in_memory().await.unwrap();
    for agent in ["a", "b"] {
        put_agent(&store, agent).await;
    }
    append(&store, LINES_PER_AGENT).await;
    append(&store, SPARE_LINES / 2).await;
    // This commit counts all lines of its agent, after many lines of another one, and is taken back.
    let mut connection = store.readers.acquire().await.unwrap();
    raw_sql("BEGIN", &mut connection).await.unwrap();
    let (of_another, own) = (lines(3 * SPARE_LINES), lines(SPARE_LINES / 2));
    let written = [("b", &of_another), ("a", &own)].map(|(agent, lines)| TurnLines {
        agent,
        session: "s",
        turn: 1,
        lines: lines.as_slice(),
    });
    insert(&mut connection, &store.line_counts, &written).await.unwrap();
    raw_sql("ROLLBACK", &mut connection).await.unwrap();
    drop(connection);
    // Later lines have the same ids.
    for _ in 0..10 {
        append(&store, SPARE_LINES / 4).await;
        assert!(count(&store).await <= LINES_PER_AGENT + SPARE_LINES, "{} lines", count(&store).await);
    }
}

#[tokio::test]
async fn the_line_count_of_a_deleted_agent_is_forgotten() {
    let store = Store::for_tests().await.unwrap();
    for agent in ["a", "b"] {
        put_agent(&store, agent).await;
        store.append_logs(agent, "s", 1, &lines(3)).await.unwrap();
    }
    let is_remembered = |agent: &str| store.line_counts.last(agent).is_some();
    assert!(is_remembered("a") && is_remembered("b"));
    assert!(store.delete_agent("a").await.unwrap());
    assert!(!is_remembered("a") && is_remembered("b"));
    // Another host has deleted it.
    store.forget_line_count("b");
    assert!(!is_remembered("b"));
}
