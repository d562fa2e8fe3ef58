//! Tests of the log of requests: selections, pages, searches and the removal of old rows.

use crate::{
    AgentRow, RequestBody, RequestFilter, RequestRange, RequestRow, SessionFolder, Store, TurnCommit,
};

fn row(number: u64) -> RequestRow {
    RequestRow {
        key: 0,
        id: format!("req_{number}"),
        at_ms: 1_000 + number,
        tenant: "acme".into(),
        api_key: Some("key-1".into()),
        agent: None,
        session: None,
        asked: "smart".into(),
        model: "small".into(),
        status: "ok".into(),
        error: None,
        details: "{}".into(),
        body: RequestBody::Text(format!("said {number}")),
    }
}

fn ids(rows: &[RequestRow]) -> Vec<&str> {
    rows.iter().map(|row| row.id.as_str()).collect()
}

async fn with(rows: Vec<RequestRow>) -> Store {
    let store = Store::for_tests().await.unwrap();
    store.append_requests(rows).await.unwrap();
    store
}

async fn found(store: &Store, filter: RequestFilter) -> Vec<String> {
    let page = store.requests(&filter, RequestRange::NEWEST, 100, false).await.unwrap();
    page.rows.into_iter().map(|row| row.id).collect()
}

#[tokio::test]
async fn requests_are_selected_by_each_property() {
    let other = RequestRow {
        tenant: "globex".into(),
        api_key: None,
        agent: Some("a".into()),
        session: Some("s".into()),
        asked: "big".into(),
        model: "big".into(),
        status: "failed".into(),
        error: Some("busy".into()),
        ..row(2)
    };
    let store = with(vec![row(1), other]).await;
    let text = |text: &str| Some(text.to_owned());
    let none = RequestFilter::default;
    for (filter, expected) in [
        (none(), &["req_2", "req_1"][..]),
        (RequestFilter { tenant: text("acme"), ..none() }, &["req_1"]),
        (RequestFilter { api_key: text("key-1"), ..none() }, &["req_1"]),
        (RequestFilter { agent: text("a"), session: text("s"), ..none() }, &["req_2"]),
        (RequestFilter { agent: text("a"), session: text("t"), ..none() }, &[]),
        (RequestFilter { model: text("smart"), ..none() }, &["req_1"]),
        (RequestFilter { model: text("small"), ..none() }, &["req_1"]),
        (RequestFilter { status: text("failed"), ..none() }, &["req_2"]),
        (RequestFilter { error: text("busy"), ..none() }, &["req_2"]),
        (RequestFilter { since_ms: Some(1_002), ..none() }, &["req_2"]),
        (RequestFilter { until_ms: Some(1_002), ..none() }, &["req_1"]),
        (RequestFilter { text: text("SAID 2"), ..none() }, &["req_2"]),
        (RequestFilter { text: text("said_2"), ..none() }, &[]),
        (RequestFilter { text: text("%"), ..none() }, &[]),
    ] {
        assert_eq!(found(&store, filter.clone()).await, expected, "{filter:?}");
    }
}

#[tokio::test]
async fn pages_go_both_ways_without_gaps_and_bodies_are_read_if_asked_for() {
    let store = with((1..=5).map(row).collect()).await;
    let all = RequestFilter::default();
    let page = store.requests(&all, RequestRange::NEWEST, 2, false).await.unwrap();
    assert_eq!(ids(&page.rows), ["req_5", "req_4"]);
    assert!(page.rows.iter().all(|row| row.body == RequestBody::Unread));
    let page = store.requests(&all, page.next.unwrap(), 2, true).await.unwrap();
    assert_eq!(ids(&page.rows), ["req_3", "req_2"]);
    assert_eq!(page.rows[0].body, RequestBody::Text("said 3".into()));
    let page = store.requests(&all, page.next.unwrap(), 2, false).await.unwrap();
    assert_eq!((ids(&page.rows), page.next), (vec!["req_1"], None));
    let page = store.requests(&all, RequestRange::After(0), 3, false).await.unwrap();
    assert_eq!(ids(&page.rows), ["req_1", "req_2", "req_3"]);
    let page = store.requests(&all, page.next.unwrap(), 3, false).await.unwrap();
    assert_eq!((ids(&page.rows), page.next), (vec!["req_4", "req_5"], None));
    assert_eq!(store.newest_request().await.unwrap(), page.rows[1].key);

    let one = store.request("req_2").await.unwrap().unwrap();
    assert_eq!(one.body, RequestBody::Text("said 2".into()));
    assert_eq!(RequestRow { key: 0, ..one }, row(2));
    assert_eq!(store.request("req_9").await.unwrap(), None);
}

#[tokio::test]
async fn a_page_with_large_bodies_ends_early() {
    let large = |number| RequestRow { body: RequestBody::Text("x".repeat(3 << 20)), ..row(number) };
    let store = with((1..=4).map(large).collect()).await;
    let all = RequestFilter::default();
    let page = store.requests(&all, RequestRange::NEWEST, 100, true).await.unwrap();
    assert_eq!(ids(&page.rows), ["req_4", "req_3", "req_2"]);
    let page = store.requests(&all, page.next.unwrap(), 100, true).await.unwrap();
    assert_eq!((ids(&page.rows), page.next), (vec!["req_1"], None));
}

#[tokio::test]
async fn a_search_looks_at_a_bounded_number_of_rows_and_continues() {
    let mut rows: Vec<RequestRow> = (1..=12_000).map(row).collect();
    rows[0].body = RequestBody::Text("the needle".into());
    let store = with(rows).await;
    let needle = RequestFilter { text: Some("needle".into()), ..RequestFilter::default() };
    let page = store.requests(&needle, RequestRange::NEWEST, 10, false).await.unwrap();
    assert!(page.rows.is_empty() && page.next.is_some(), "10,000 rows were searched: {page:?}");
    let page = store.requests(&needle, page.next.unwrap(), 10, false).await.unwrap();
    assert_eq!((ids(&page.rows), page.next), (vec!["req_1"], None));
    let many = RequestFilter { text: Some("said".into()), ..RequestFilter::default() };
    let page = store.requests(&many, RequestRange::After(0), 2_500, false).await.unwrap();
    assert_eq!((page.rows.len(), page.rows[0].id.as_str()), (2_500, "req_2"));
    assert_eq!(page.next, Some(RequestRange::After(page.rows[2_499].key)));
}

#[tokio::test]
async fn old_requests_are_removed_by_age_and_the_oldest_of_a_tenant_by_size() {
    let mut rows: Vec<RequestRow> = (1..=400).map(row).collect();
    for row in &mut rows[300..] {
        row.tenant = "globex".into();
    }
    let each = rows[150].bytes() as u64;
    let store = with(rows).await;
    assert_eq!(store.forget_requests(1_151).await.unwrap(), 150);
    let bytes = |sizes: &[(String, u64)], tenant: &str| {
        sizes.iter().find(|(name, _)| name == tenant).map_or(0, |(_, bytes)| *bytes)
    };
    let sizes = store.request_bytes().await.unwrap();
    assert_eq!(bytes(&sizes, "acme"), 150 * each);
    let gone = store.shrink_requests("acme", 130 * each).await.unwrap();
    assert_eq!(gone, 130 * each);
    let sizes = store.request_bytes().await.unwrap();
    assert_eq!(bytes(&sizes, "acme"), 20 * each);
    assert_eq!(bytes(&sizes, "globex"), 100 * (each + 2));
    let acme = RequestFilter { tenant: Some("acme".into()), ..RequestFilter::default() };
    let left = found(&store, acme).await;
    assert_eq!((left.len(), &*left[0], &*left[19]), (20, "req_300", "req_281"), "the newest stay");
    assert_eq!(store.shrink_requests("acme", u64::MAX).await.unwrap(), 20 * each);
    let bodies: i64 = crate::sql::query_scalar("SELECT COUNT(*) FROM request_bodies")
        .fetch_one(&store.readers)
        .await
        .unwrap();
    assert_eq!(bodies, 100, "the bodies went with their requests");
}

#[tokio::test]
async fn a_deleted_session_or_agent_is_deleted_with_its_requests() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open_for_tests(&folder.path().join("skep.db")).await.unwrap();
    let agent = AgentRow {
        name: "a".into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
    for session in ["s", "t"] {
        let commit =
            TurnCommit { agent: "a".into(), session: session.into(), turn: 1, ..TurnCommit::default() };
        store.commit_turn(commit).await.unwrap();
    }
    let of = |number, session: &str| RequestRow {
        agent: Some("a".into()),
        session: Some(session.into()),
        ..row(number)
    };
    store.append_requests(vec![of(1, "s"), of(2, "t"), row(3)]).await.unwrap();
    assert!(store.delete_session("a", "s").await.unwrap());
    assert_eq!(found(&store, RequestFilter::default()).await, ["req_3", "req_2"]);
    assert_eq!(store.sessions("a", &SessionFolder::of(None), None, 10).await.unwrap().len(), 1);
    assert!(store.delete_agent("a").await.unwrap());
    assert_eq!(found(&store, RequestFilter::default()).await, ["req_3"]);
}
