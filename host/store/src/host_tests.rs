//! Tests of several hosts on one PostgreSQL database: one is cut off and replaced, or two work at the same time. Without a
//! server there is only one host.

use crate::{
    postgres::{Reconnecting, Server, has_host},
    sql::query_scalar,
    *,
};
use sqlx::{AssertSqlSafe, PgConnection};
use std::{
    env,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// A schema on the server that the tests are given.
pub(crate) struct Database {
    pub(crate) server: Server,
    schema: String,
    admin: PgConnection,
}

impl Database {
    pub(crate) async fn new() -> Option<Database> {
        static SCHEMAS: AtomicU32 = AtomicU32::new(0);
        let url = env::var(TEST_SERVER).ok()?;
        let schema = format!("fencing_{}_{}", std::process::id(), SCHEMAS.fetch_add(1, Ordering::Relaxed));
        let server = Server::new(&url).unwrap().in_schema(&schema);
        let mut database = Database { admin: server.connect().await.unwrap(), server, schema };
        database.run(format!("CREATE SCHEMA {}", database.schema)).await;
        Some(database)
    }

    pub(crate) async fn run(&mut self, sql: String) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.admin).await.unwrap();
    }

    /// Waits until no host holds the lock of the schema.
    pub(crate) async fn until_free(&mut self) {
        while sqlx::query_scalar::<_, bool>(AssertSqlSafe(has_host()))
            .fetch_one(&mut self.admin)
            .await
            .unwrap()
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn host(&self) -> Store {
        Store::connect_to(self.server.clone()).await.unwrap()
    }

    /// Replaces the hosts that there are, which may have connected again meanwhile.
    async fn replacement(&self) -> Store {
        Store::on(Reconnecting::after_a_crash(self.server.clone()).await.unwrap())
    }

    /// Connects a host beside the others.
    async fn another_host(&self) -> Store {
        Store::on(Reconnecting::as_another_host(self.server.clone()).await.unwrap())
    }

    /// Ends the connection on which the host writes, as a failed network does after a while.
    async fn cut_off_the_host(&mut self) {
        let holder = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted \
                      AND objid = CAST(to_regnamespace(current_schema()) AS oid)";
        self.run(format!("SELECT pg_terminate_backend(pid, 5000) FROM ({holder}) AS holder")).await;
    }
}

/// Time for which a host hangs in a test, which is longer than another one needs to replace it.
const HANGS: Duration = Duration::from_secs(5);

pub(crate) fn agent() -> AgentRow {
    AgentRow {
        name: "a".into(),
        manifest: "manifest".into(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    }
}

fn turn(turn: u64) -> TurnCommit {
    TurnCommit { agent: "a".into(), session: "s".into(), turn, ..Default::default() }
}

async fn turns(store: &Store) -> u64 {
    store.session("a", "s").await.unwrap().map_or(0, |session| session.row.turns)
}

#[tokio::test]
async fn a_host_that_another_one_replaced_writes_nothing_more() {
    let Some(mut database) = Database::new().await else { return };
    let first = database.host().await;
    first.put_agent(&agent(), b"component", &[]).await.unwrap();
    first.commit_turn(turn(1)).await.unwrap();
    database.cut_off_the_host().await;

    // The second host ends before the first one is back, so the lock is free again.
    let second = database.replacement().await;
    second.commit_turn(turn(2)).await.unwrap();
    second.close().await;

    for _ in 0..2 {
        let refused = first.commit_turn(turn(3)).await;
        assert!(matches!(refused, Err(StoreError::Fenced { .. })), "{refused:?}");
    }
    tokio::time::timeout(Duration::from_secs(5), first.until_fenced()).await.expect("the host is told");
    assert_eq!(turns(&first).await, 2);
}

#[tokio::test]
async fn a_host_that_nobody_replaced_writes_again_after_it_was_cut_off() {
    let Some(mut database) = Database::new().await else { return };
    let host = database.host().await;
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    for number in 1..4 {
        database.cut_off_the_host().await;
        host.commit_turn(turn(number)).await.unwrap();
    }
    assert_eq!(turns(&host).await, 3);
    let fenced = tokio::time::timeout(Duration::from_millis(20), host.until_fenced()).await;
    assert!(fenced.is_err(), "nobody has taken over");
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_not_made_twice() {
    let Some(database) = Database::new().await else { return };
    let host = database.host().await;
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    let mut lost = false;
    host.faults().choose(move |moment| {
        let is_first = moment == Moment::Committed && !std::mem::replace(&mut lost, true);
        is_first.then_some(Fault::Fails(10))
    });
    host.commit_turn(turn(1)).await.expect("the server has it");
    host.commit_turn(turn(2)).await.unwrap();
    assert_eq!(turns(&host).await, 2);
}

#[tokio::test]
async fn a_host_ends_when_its_server_has_lost_what_it_confirmed() {
    let Some(mut database) = Database::new().await else { return };
    let host = database.host().await;
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    host.commit_turn(turn(1)).await.unwrap();
    // A standby that was behind becomes the primary.
    database.run("UPDATE hosts SET written = written - 1".into()).await;
    database.cut_off_the_host().await;
    let refused = host.commit_turn(turn(2)).await;
    assert!(matches!(refused, Err(StoreError::Fenced { .. })), "{refused:?}");
}

#[tokio::test]
async fn commits_wait_for_the_disk_of_the_server_except_in_measurements() {
    let Some(database) = Database::new().await else { return };
    for (durability, waits) in [(Durability::Power, "on"), (Durability::Process, "off")] {
        let host = Store::measured(database.server.clone(), None, durability).await.unwrap();
        let is: String = query_scalar("SHOW synchronous_commit").fetch_one(&host.readers).await.unwrap();
        assert_eq!(is, waits);
        host.close().await;
    }
    let host = database.host().await;
    let is: String = query_scalar("SHOW synchronous_commit").fetch_one(&host.readers).await.unwrap();
    assert_eq!(is, "on");
}

#[tokio::test]
async fn a_command_beside_a_host_writes_without_fencing_it() {
    let Some(database) = Database::new().await else { return };
    let host = database.host().await;
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    let beside = Store::connect_beside_to(database.server.clone()).await.unwrap();
    beside.commit_turn(turn(1)).await.unwrap();
    beside.close().await;
    host.commit_turn(turn(2)).await.unwrap();
}

#[tokio::test]
async fn a_host_that_hangs_is_replaced_and_does_nothing_when_it_wakes_up() {
    let Some(mut database) = Database::new().await else { return };
    let hanging = database.host().await;
    hanging.put_agent(&agent(), b"component", &[]).await.unwrap();
    hanging.commit_turn(turn(1)).await.unwrap();
    let (mut hangs, (hung, has_hung)) = (true, tokio::sync::oneshot::channel());
    let mut hung = Some(hung);
    hanging.faults().choose(move |moment| {
        let now = moment == Moment::Begin && std::mem::replace(&mut hangs, false);
        hung.take_if(|_| now).map(|hung| hung.send(()).map_or(Fault::Fails(5), |()| Fault::Slow(HANGS)))
    });
    let late = tokio::spawn({
        let hanging = hanging.clone();
        async move { hanging.commit_turn(turn(2)).await }
    });
    has_hung.await.unwrap();
    database.run("UPDATE hosts SET seen_at_ms = seen_at_ms - 60000".into()).await;
    let next = database.host().await;
    assert_eq!(turns(&next).await, 1);
    next.commit_turn(turn(2)).await.unwrap();
    let refused = late.await.unwrap();
    assert!(matches!(refused, Err(StoreError::Fenced { .. })), "{refused:?}");
    let certain = tokio::time::timeout(Duration::from_millis(20), hanging.until_certain()).await;
    assert!(certain.is_err(), "it does not know that it may act");
    next.until_certain().await;
    next.commit_turn(turn(3)).await.unwrap();
}

#[tokio::test]
async fn an_idle_host_renews_its_lease_and_notices_that_it_was_replaced() {
    let Some(mut database) = Database::new().await else { return };
    let idle = database.host().await;
    database.run("UPDATE hosts SET seen_at_ms = 0".into()).await;
    let begun = std::time::Instant::now();
    let seen = "SELECT MAX(seen_at_ms) FROM hosts";
    while query_scalar::<i64>(seen).fetch_one(&idle.readers).await.unwrap() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the lease is not renewed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    database.cut_off_the_host().await;
    let next = database.replacement().await;
    tokio::time::timeout(Duration::from_secs(20), idle.until_fenced()).await.expect("it is told");
    next.close().await;
}

const ROOM: BatchRoom = BatchRoom { bytes: 1 << 20, batches: 10, share: None };

fn batch(id: &str, items: usize) -> NewBatch {
    NewBatch {
        id: id.into(),
        principal: "p".into(),
        model: "m".into(),
        at_ms: 1,
        items: vec![NewItem { request: b"{}".to_vec(), reference: None }; items],
        terms: BatchTerms::default(),
    }
}

async fn take(store: &Store) -> Option<TakenItem> {
    match store.take_item(&["m".into()], &[], 5).await.unwrap() {
        Take::Item(item) => Some(*item),
        Take::Later(_) | Take::Nothing => None,
    }
}

#[tokio::test]
async fn two_hosts_take_every_item_of_a_batch_once() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (database.host().await, database.another_host().await);
    one.queue_batch(batch("b", 200), ROOM, None).await.unwrap();
    let take_all = async |store: &Store| {
        let mut taken = Vec::new();
        while store.queue_depth().await.unwrap().waiting > 0 {
            if let Some(item) = take(store).await {
                taken.push(item.position);
                store.end_item(item.key, &ItemEnd::Done(b"done".to_vec())).await.unwrap();
            }
        }
        taken
    };
    let (of_one, of_other) = tokio::join!(take_all(&one), take_all(&other));
    assert!(!of_one.is_empty() && !of_other.is_empty());
    let mut all = [of_one, of_other].concat();
    all.sort_unstable();
    assert_eq!(all, (0..200).collect::<Vec<_>>());
    let items = one.batch("b").await.unwrap().unwrap().items;
    assert_eq!((items.done, items.running), (200, 0));
}

#[tokio::test]
async fn items_of_a_host_that_is_gone_wait_again_and_those_of_a_live_one_do_not() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (database.host().await, database.another_host().await);
    one.queue_batch(batch("b", 4), ROOM, None).await.unwrap();
    let (of_one, of_other) = (take(&one).await.unwrap(), take(&other).await.unwrap());
    let third = database.another_host().await;
    assert_eq!(third.recover_items(3, b"lost").await.unwrap(), 0, "both live");
    let stolen = third.end_item(of_one.key, &ItemEnd::Done(b"x".to_vec())).await.unwrap();
    assert_eq!(stolen, ItemEnded::NotTaken, "only the host that took an item ends it");
    other.close().await;
    assert_eq!(third.recover_items(3, b"lost").await.unwrap(), 1);
    assert_eq!(take(&third).await.unwrap().position, of_other.position);
    third.give_back_items().await.unwrap();
    let items = one.batch("b").await.unwrap().unwrap().items;
    assert_eq!((items.running, items.waiting), (1, 3));
    let ended = one.end_item(of_one.key, &ItemEnd::Done(b"x".to_vec())).await.unwrap();
    assert_eq!(ended, ItemEnded::OthersLeft);
}

#[tokio::test]
async fn one_host_takes_up_the_work_of_a_host_that_is_gone() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (database.host().await, database.another_host().await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    let to = |session: &str| NewDelivery {
        target: Target::Session { agent: "a".into(), session: session.into() },
        undeliverable: None,
    };
    let event = NewEvent {
        source: "shop".into(),
        id: "e".into(),
        topic: "t".into(),
        data: None,
        principal: "p".into(),
        hops: 0,
        at_ms: 1,
        deliveries: vec![to("s"), to("t")],
    };
    one.publish(&event, 1).await.unwrap();
    let due = one.due_deliveries(5, 10).await.unwrap();
    assert!(one.begin_delivery(due[0].key, 1, 5).await.unwrap());
    assert!(!other.begin_delivery(due[0].key, 1, 5).await.unwrap(), "it has begun");
    assert!(other.begin_delivery(due[1].key, 1, 5).await.unwrap());
    let begun = async |store: &Store| -> Vec<DeliveryKey> {
        store.begun_deliveries().await.unwrap().into_iter().map(|delivery| delivery.key).collect()
    };
    assert_eq!(begun(&one).await, [due[0].key]);
    assert_eq!(begun(&other).await, [due[1].key]);
    let third = database.another_host().await;
    assert!(begun(&third).await.is_empty(), "nothing is left");
    one.close().await;
    let (of_other, of_third) = tokio::join!(begun(&other), begun(&third));
    let mut all = [of_other, of_third].concat();
    all.sort_unstable();
    assert_eq!(all, [due[0].key, due[1].key], "each is in one hand");
}

#[tokio::test]
async fn a_host_that_starts_removes_only_what_no_other_host_is_writing() {
    let Some(mut database) = Database::new().await else { return };
    let (one, other) = (database.host().await, database.another_host().await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    for (name, host) in [("of_one", one.host.unwrap()), ("of_other", other.host.unwrap())] {
        database
            .run(format!(
                "INSERT INTO files (id, principal, name, purpose, bytes, at_ms, expires_at_ms, complete, maker)
                     VALUES ('{name}', 'p', 'n', 'batch', 0, 1, 9, FALSE, {host});
                 INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms, maker)
                     VALUES ('a', NULL, 1, 1, 1, {host});
                 INSERT INTO batches (id, principal, model, created_at_ms, bytes, running, cancelled, complete, maker)
                     VALUES ('{name}', 'p', 'm', 1, 0, 0, FALSE, FALSE, {host});
                 INSERT INTO erasures (agent, session, schedule, delivery, turn, log, maker)
                     VALUES ('a', '{name}', 0, 0, 0, 0, {host})"
            ))
            .await;
    }
    let left = async || -> i64 {
        let count =
            "SELECT (SELECT COUNT(*) FROM files) + (SELECT COUNT(*) FROM sessions WHERE session IS NULL)
             + (SELECT COUNT(*) FROM batches) + (SELECT COUNT(*) FROM erasures)";
        query_scalar(count).fetch_one(&one.readers).await.unwrap()
    };
    let third = database.another_host().await;
    third.tidy().await.unwrap();
    assert_eq!(left().await, 8, "both hosts live");
    other.close().await;
    third.tidy().await.unwrap();
    assert_eq!(left().await, 4, "what the live host writes stays");
}

#[tokio::test]
async fn two_hosts_that_deploy_the_same_agent_get_versions_of_their_own() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (database.host().await, database.another_host().await);
    let deploy = async |store: &Store| {
        for _ in 0..10 {
            store.put_agent(&agent(), b"component", &[]).await.unwrap();
        }
    };
    tokio::join!(deploy(&one), deploy(&other));
    let newest: i64 =
        query_scalar("SELECT MAX(version) FROM deployments").fetch_one(&one.readers).await.unwrap();
    assert_eq!(newest, 20);
}
