//! Tests that move rows between a file and a PostgreSQL server. Without a server they have nothing to compare.

use super::*;
use crate::{
    AgentRow, Durability, NewTurn, StateChange, TEST_SERVER, TurnCommit, WebhookRow, postgres::Server,
};
use std::env;

/// Returns two empty databases: a file, and a schema on the server that the tests are given.
async fn both(folder: &tempfile::TempDir) -> Option<(Store, Store)> {
    env::var(TEST_SERVER).ok()?;
    let file = Store::open(&folder.path().join("file.db"), Durability::Process).await.unwrap();
    Some((file, Store::for_tests().await.unwrap()))
}

fn agent(name: &str) -> AgentRow {
    AgentRow {
        name: name.into(),
        manifest: "manifest".into(),
        digest: format!("digest of {name}"),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    }
}

/// Fills a database with rows of many kinds: sizes, nulls, booleans, bytes, and numbers whose rows are gone.
async fn fill_with_work(store: &Store) {
    let blob: Vec<u8> = (0..3 << 20).map(|n| (n % 251) as u8).collect();
    for name in ["a", "b", "gone"] {
        store.put_agent(&agent(name), &blob, &[]).await.unwrap();
    }
    for session in 0..600 {
        let commit = TurnCommit {
            agent: "a".into(),
            session: format!("s{session}"),
            turn: 1,
            state: vec![StateChange { key: "ключ \u{1f41d}".into(), value: Some(vec![0, 255, 7]) }],
            ..Default::default()
        };
        store.commit_turn(commit).await.unwrap();
    }
    for (id, session) in [("t1", "s1"), ("t2", "s2")] {
        let turn = NewTurn {
            id: id.into(),
            agent: "a".into(),
            session: session.into(),
            idempotency_key: (id == "t1").then(|| "key".into()),
            digest: "d".into(),
            input: b"input".to_vec(),
            seed: b"seed".to_vec(),
            accepted_at_ms: 1,
            number: None,
        };
        store.accept_turn(turn).await.unwrap();
    }
    let webhook = WebhookRow {
        id: "w".into(),
        url: "https://example.com".into(),
        topics: "*".into(),
        sealed_secret: "s".into(),
        configured: true,
        created_at_ms: 1,
        disabled: None,
        last_try: None,
    };
    store.put_webhook(&webhook).await.unwrap();
    store.delete_agent("gone").await.unwrap();
}

fn silent() -> RowProgress {
    Arc::new(|_, _| {})
}

#[tokio::test]
async fn everything_moves_to_the_other_database_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, server)) = both(&folder).await else { return };
    fill_with_work(&file).await;
    let seen = Arc::new(std::sync::Mutex::new((0, 0)));
    let progress: RowProgress = {
        let seen = seen.clone();
        Arc::new(move |done, total| *seen.lock().unwrap() = (done, total))
    };
    let there = server.fill_from(&file, progress).await.unwrap();
    assert_eq!(there, file.table_rows().await.unwrap());
    let (done, total) = *seen.lock().unwrap();
    assert!(done == total && total > 1_200, "{done} of {total}");
    let back = Store::open(&folder.path().join("back.db"), Durability::Process).await.unwrap();
    assert_eq!(back.fill_from(&server, silent()).await.unwrap(), there);

    // Each row is the same after both moves.
    let all = async |store: &Store, table: &Table| {
        let mut snapshot = store.readers.begin().await.unwrap();
        let select = AssertSqlSafe(format!("SELECT {} FROM {}", table.column_list(), table.name));
        let mut rows: Vec<String> = Vec::new();
        let mut stream = stream(select, &mut snapshot);
        while let Some(row) = stream.next().await {
            let row = row.unwrap();
            let values = table.columns.iter().enumerate();
            let values = values.map(|(index, column)| read(&row, index, column.kind).unwrap());
            rows.push(format!("{:?}", values.collect::<Vec<_>>()));
        }
        rows.sort();
        rows
    };
    let catalog = {
        let (mut one, mut other) =
            (file.readers.begin().await.unwrap(), server.readers.begin().await.unwrap());
        Catalog::of_both(&mut one, &mut other).await.unwrap()
    };
    for table in catalog.tables() {
        let (first, second, third) =
            (all(&file, table).await, all(&server, table).await, all(&back, table).await);
        assert!(first == second && second == third, "the table {} differs", table.name);
    }

    // Sessions continue in each.
    for store in [&file, &server, &back] {
        let commit = TurnCommit { agent: "a".into(), session: "s599".into(), turn: 2, ..Default::default() };
        store.commit_turn(commit).await.unwrap();
    }
}

#[tokio::test]
async fn nothing_is_written_to_a_database_that_has_rows() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, server)) = both(&folder).await else { return };
    fill_with_work(&file).await;
    server.put_agent(&agent("here"), b"component", &[]).await.unwrap();
    let before = server.table_rows().await.unwrap();
    let refused = server.fill_from(&file, silent()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::NotEmpty { table, .. } if table == "components"), "{refused}");
    assert_eq!(server.table_rows().await.unwrap(), before);
}

#[tokio::test]
async fn a_text_that_postgresql_cannot_store_is_named_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, server)) = both(&folder).await else { return };
    fill_with_work(&file).await;
    file.put_agent(&AgentRow { manifest: "a\0b".into(), ..agent("nul") }, b"component", &[]).await.unwrap();
    let refused = server.fill_from(&file, silent()).await.unwrap_err().to_string();
    assert!(refused.contains("\"nul\" of the table deployments") && refused.contains("U+0000"), "{refused}");
    assert!(server.table_rows().await.unwrap().iter().all(|table| table.rows <= 1));
}

#[tokio::test]
async fn numbers_continue_after_deleted_rows() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, server)) = both(&folder).await else { return };
    let last = async |store: &Store| -> i64 {
        let mut snapshot = store.readers.begin().await.unwrap();
        let added = "SELECT COALESCE(MAX(id), 0) FROM logs";
        query_scalar(added).fetch_one(&mut snapshot).await.unwrap()
    };
    let log = async |store: &Store, session: &str| {
        let entry =
            |message: &str| crate::LogEntry { level: "info".into(), message: message.into(), at_ms: 1 };
        let commit = TurnCommit {
            agent: "a".into(),
            session: session.into(),
            turn: 1,
            logs: vec![entry("one"), entry("two")],
            ..Default::default()
        };
        store.commit_turn(commit).await.unwrap();
    };
    file.put_agent(&agent("a"), b"component", &[]).await.unwrap();
    log(&file, "first").await;
    let given = last(&file).await;
    file.delete_session("a", "first").await.unwrap();
    assert!(given >= 2 && last(&file).await == 0);
    server.fill_from(&file, silent()).await.unwrap();
    log(&server, "second").await;
    assert_eq!(last(&server).await, given + 2);
    let back = Store::open(&folder.path().join("back.db"), Durability::Process).await.unwrap();
    back.fill_from(&server, silent()).await.unwrap();
    log(&back, "third").await;
    assert_eq!(last(&back).await, given + 4);
}

#[tokio::test]
async fn a_host_uses_a_schema_that_is_newer_but_still_has_what_it_needs() {
    let Ok(url) = env::var(TEST_SERVER) else { return };
    let known = crate::known_schema();
    let schema = format!("window_{}", std::process::id());
    let server = || Server::new(&url).unwrap().in_schema(&schema);
    let set = async |sql: String| {
        let mut connection = server().connect().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    };
    set(format!("CREATE SCHEMA {schema}")).await;
    Store::connect_to(server()).await.unwrap().close().await;
    set(format!("UPDATE skep_schema SET version = {}, oldest = {known}", known + 1)).await;
    Store::connect_to(server()).await.unwrap().close().await;
    Store::connect_beside_to(server()).await.unwrap().close().await;
    set(format!("UPDATE skep_schema SET oldest = {}", known + 1)).await;
    for refused in [Store::connect_to(server()).await, Store::connect_beside_to(server()).await] {
        assert!(matches!(refused.unwrap_err(), StoreError::NewerSchema { .. }));
    }
}
