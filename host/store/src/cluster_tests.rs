//! Tests of several hosts that use one PostgreSQL database at the same time: who owns a session, who is dead, and who is
//! kept out. Without a server there is only one host.

use crate::{
    host_tests::{Database, agent},
    postgres::{LEASE, Reconnecting, Upgrade, take_common},
    sql::{Pool, query_scalar},
    *,
};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::runtime::{Builder, Runtime};

/// Time for which a test waits for what happens after seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Time for which a host hangs: longer than others take until they judge it (see `cluster::SETTLED`), and less than a write is
/// tried.
const HANG: Duration = Duration::from_secs(9);
/// Time between two meetings.
const PAUSE: Duration = Duration::from_millis(100);
const CALLED: &str = "call ";

pub(crate) async fn member(database: &Database, name: &str) -> Store {
    Store::join(database.server.clone(), &format!("http://{name}")).await.unwrap()
}

/// A host whose process can be killed.
pub(crate) struct Mortal {
    store: Store,
    runtime: Runtime,
}

impl Mortal {
    pub(crate) async fn start(database: &Database) -> Mortal {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let server = database.server.clone();
        let joining = runtime.spawn(async move { Store::join(server, "http://mortal").await.unwrap() });
        Mortal { store: joining.await.unwrap(), runtime }
    }

    pub(crate) fn number(&self) -> i64 {
        self.store.host_number().unwrap()
    }

    /// Ends the task that writes, and its connection with it, as the end of the process does.
    pub(crate) fn kill(self) {
        self.runtime.shutdown_background();
    }
}

fn running(session: &str) -> NewTurn {
    NewTurn {
        id: format!("turn of {session}"),
        agent: "a".into(),
        session: session.into(),
        idempotency_key: None,
        digest: "d".into(),
        input: Vec::new(),
        seed: Vec::new(),
        accepted_at_ms: 1,
        number: Some(1),
    }
}

fn commit(session: &str, turn: u64) -> TurnCommit {
    TurnCommit { agent: "a".into(), session: session.into(), turn, ..Default::default() }
}

async fn claim(store: &Store, session: &str) -> Option<u64> {
    match store.claim_session("a", session).await.unwrap() {
        Claim::Ours { epoch } => Some(epoch),
        Claim::Elsewhere { host } => {
            assert_ne!(Some(host), store.host_number());
            None
        }
    }
}

pub(crate) async fn meet(store: &Store) -> Vec<i64> {
    store.meet_hosts("{}", false).await.unwrap()
}

/// Lets hosts meet until one of them has marked others as gone, and returns the numbers of these.
async fn until_gone(hosts: &[&Store]) -> Vec<i64> {
    let begun = Instant::now();
    loop {
        let mut gone = Vec::new();
        for host in hosts {
            gone.extend(meet(host).await);
        }
        if !gone.is_empty() {
            return gone;
        }
        assert!(begun.elapsed() < PATIENCE, "nobody counts as dead");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn take_all(store: &Store) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let some = store.take_over(CALLED, &[], 3).await.unwrap();
        assert!(some.len() <= 3);
        if some.is_empty() {
            return all;
        }
        all.extend(some.into_iter().map(|(_, session)| session));
    }
}

async fn losses(store: &Store) -> Vec<u32> {
    store.open_turns().await.unwrap().iter().map(|turn| turn.losses).collect()
}

#[tokio::test]
async fn without_a_cluster_every_session_belongs_to_the_only_host() {
    let store = Store::for_tests().await.unwrap();
    assert!(!store.is_clustered() && store.notices().is_none());
    assert_eq!(store.claim_session("a", "s").await.unwrap(), Claim::Ours { epoch: 0 });
    assert_eq!(store.owner_of("a", "s").await.unwrap(), store.host_number());
    store.release_sessions(vec![("a".into(), "s".into())]).await.unwrap();
    assert!(store.meet_hosts("{}", true).await.unwrap().is_empty());
    assert!(store.take_over(CALLED, &[], 9).await.unwrap().is_empty());
    assert_eq!(store.live_hosts().await.unwrap().len(), usize::from(store.host_number().is_some()));
}

#[tokio::test]
async fn hosts_that_start_together_on_an_empty_database_list_each_other() {
    let Some(database) = Database::new().await else { return };
    let (one, two, three) =
        tokio::join!(member(&database, "one"), member(&database, "two"), member(&database, "three"));
    two.meet_hosts(r#"{"models":[]}"#, true).await.unwrap();
    let mut hosts = three.live_hosts().await.unwrap();
    assert_eq!(hosts.len(), 3, "{hosts:?}");
    hosts.retain(|host| Some(host.number) == two.host_number());
    let [host] = &hosts[..] else { panic!("{hosts:?}") };
    assert_eq!((host.url.as_str(), &host.state), ("http://two", &HostState::Draining));
    assert_eq!((host.facts.as_str(), host.sessions), (r#"{"models":[]}"#, 0));
    assert!(host.seen_ms_ago < 10_000 && host.started_at_ms > 0, "{host:?}");
    assert!(one.is_clustered());
    two.close().await;
    assert_eq!(three.live_hosts().await.unwrap().len(), 2);
}

#[tokio::test]
async fn one_of_many_hosts_that_claim_a_session_gets_it() {
    let Some(database) = Database::new().await else { return };
    let hosts =
        [member(&database, "one").await, member(&database, "two").await, member(&database, "x").await];
    let names: Vec<String> = (0..60).map(|number| format!("s{number}")).collect();
    let mut claiming = Vec::new();
    for (index, host) in hosts.iter().enumerate() {
        let mut names = names.clone();
        names.rotate_left(index * 20);
        if index == 1 {
            names.reverse();
        }
        for name in names {
            let host = host.clone();
            claiming.push(tokio::spawn(async move {
                claim(&host, &name).await.map(|_epoch| (name, host.host_number()))
            }));
        }
    }
    let mut owners = BTreeMap::new();
    for claim in claiming {
        if let Some((name, host)) = claim.await.unwrap() {
            assert_eq!(owners.insert(name.clone(), host), None, "{name} has two owners");
        }
    }
    assert_eq!(owners.len(), names.len());
    for (name, host) in owners {
        assert_eq!(hosts[0].owner_of("a", &name).await.unwrap(), host);
    }
}

#[tokio::test]
async fn a_released_session_gets_its_next_owner_under_a_later_epoch() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    let session = || vec![("a".to_owned(), "s".to_owned())];
    let (mut owner, mut next, mut last) = (&one, &other, 0);
    for _ in 0..4 {
        let epoch = claim(owner, "s").await.expect("it is free");
        assert!(epoch > last, "{epoch} after {last}");
        assert_eq!(claim(owner, "s").await, Some(epoch), "a claim that is repeated changes nothing");
        assert_eq!(claim(next, "s").await, None);
        next.release_sessions(session()).await.unwrap();
        assert_eq!(next.owner_of("a", "s").await.unwrap(), owner.host_number(), "only an owner releases");
        // A deletion leaves the owner, who may act without asking again.
        owner.delete_session("a", "s").await.unwrap();
        assert_eq!(claim(next, "s").await, None);
        owner.release_sessions(session()).await.unwrap();
        assert_eq!(next.owner_of("a", "s").await.unwrap(), None);
        last = epoch;
        std::mem::swap(&mut owner, &mut next);
    }
}

#[tokio::test]
async fn turns_of_sessions_that_were_released_or_whose_host_ended_in_order_are_not_lost() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    for session in ["released", "left"] {
        claim(&one, session).await.unwrap();
        one.accept_turn(running(session)).await.unwrap();
    }
    assert!(take_all(&other).await.is_empty(), "their owner lives");
    assert!(other.open_turns().await.unwrap().is_empty());
    one.release_sessions(vec![("a".into(), "released".into())]).await.unwrap();
    assert_eq!(take_all(&other).await, ["released"]);
    assert_eq!(losses(&one).await, [0], "it still owns the other one");
    one.end_in_order(1).await.unwrap();
    assert_eq!(take_all(&other).await, ["left"]);
    assert_eq!((losses(&other).await, losses(&one).await), (vec![0, 0], vec![]));
}

#[tokio::test]
async fn open_turns_of_a_killed_host_are_taken_over_once_and_count_as_lost() {
    let Some(mut database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    for host in [&one, &other] {
        host.count_losses(CALLED, &[]).await.unwrap();
    }
    let mortal = Mortal::start(&database).await;
    let sessions: Vec<String> = (10..30).map(|number| format!("s{number}")).collect();
    let mut epochs = BTreeMap::new();
    for session in &sessions {
        epochs.insert(session, claim(&mortal.store, session).await.unwrap());
        mortal.store.accept_turn(running(session)).await.unwrap();
    }
    claim(&mortal.store, "idle").await.unwrap();
    assert_eq!(mortal.store.live_hosts().await.unwrap()[2].sessions, 21);
    let number = mortal.number();
    assert_eq!(one.claim_session("a", "s10").await.unwrap(), Claim::Elsewhere { host: number });
    mortal.kill();

    // A host that has just connected may have been cut off together with the others.
    database.run(format!("UPDATE hosts SET seen_at_ms = 0 WHERE number = {number}")).await;
    let fresh = member(&database, "fresh").await;
    assert!(meet(&fresh).await.is_empty() && meet(&fresh).await.is_empty());
    assert_eq!(until_gone(&[&one, &other]).await, [number]);
    assert!(meet(&one).await.is_empty() && meet(&other).await.is_empty(), "it is gone only once");

    // A caller comes before the search.
    let early = claim(&one, "s15").await.expect("its owner is gone");
    assert!(early > epochs[&sessions[5]]);
    let (of_one, of_other) = tokio::join!(take_all(&one), take_all(&other));
    let mut taken = [vec!["s15".to_owned()], of_one.clone(), of_other.clone()].concat();
    taken.sort_unstable();
    assert_eq!(taken, sessions);
    assert_eq!(losses(&one).await, vec![1; of_one.len() + 1]);
    assert_eq!(losses(&other).await, vec![1; of_other.len()]);
    assert!(claim(&other, "idle").await.is_some(), "a session without open turns waits for its next use");
}

/// Lets a host hang at a moment of a transaction with two turns, until it was replaced.
async fn hang(moment: Moment) {
    let Some(mut database) = Database::new().await else { return };
    let (hanging, other) = (member(&database, "hanging").await, member(&database, "other").await);
    other.put_agent(&agent(), b"component", &[]).await.unwrap();
    let epoch = claim(&hanging, "s").await.unwrap();
    for session in ["s", "t"] {
        hanging.commit_turn(commit(session, 1)).await.unwrap();
    }
    let (hung, has_hung) = tokio::sync::oneshot::channel();
    let mut hung = Some(hung);
    hanging.faults().choose(move |now| {
        let hung = hung.take_if(|_| now == moment)?;
        hung.send(()).ok().map(|()| Fault::Slow(HANG))
    });
    let late = tokio::spawn({
        let hanging = hanging.clone();
        async move { tokio::join!(hanging.commit_turn(commit("s", 2)), hanging.commit_turn(commit("t", 2))) }
    });
    has_hung.await.unwrap();
    let number = hanging.host_number().unwrap();
    database.run(format!("UPDATE hosts SET seen_at_ms = seen_at_ms - 60000 WHERE number = {number}")).await;
    assert_eq!(until_gone(&[&other]).await, [number], "although it holds its lock");
    assert!(claim(&other, "s").await.unwrap() > epoch);
    for session in ["s", "t"] {
        other.commit_turn(commit(session, 2)).await.expect("the host that hangs has written nothing");
    }
    let (one, two) = late.await.unwrap();
    for refused in [one, two] {
        // A host that hung at the end of its transaction is not sure of the outcome.
        let is_refused = matches!(refused, Err(StoreError::Fenced { .. } | StoreError::Unconfirmed { .. }));
        assert!(is_refused, "{refused:?}");
    }
    let refused = hanging.claim_session("a", "new").await;
    assert!(matches!(refused, Err(StoreError::Fenced { .. })), "{refused:?}");
    tokio::time::timeout(PATIENCE, hanging.until_fenced()).await.expect("it finds out");
    for session in ["s", "t"] {
        assert_eq!(other.session("a", session).await.unwrap().unwrap().row.turns, 2);
    }
}

#[tokio::test]
async fn a_host_that_hangs_loses_its_sessions_and_writes_nothing_when_it_wakes_up() {
    hang(Moment::Begin).await;
}

#[tokio::test]
async fn a_host_that_hangs_before_a_group_is_committed_writes_nothing_of_it_when_it_wakes_up() {
    hang(Moment::Commit).await;
}

#[tokio::test]
async fn a_host_that_was_cut_off_connects_again_before_it_counts_as_dead() {
    let Some(mut database) = Database::new().await else { return };
    let (cut_off, other) = (member(&database, "cut-off").await, member(&database, "other").await);
    cut_off.put_agent(&agent(), b"component", &[]).await.unwrap();
    let number = cut_off.host_number().unwrap();
    claim(&cut_off, "s").await.unwrap();
    for meeting in 0..60 {
        assert!(meet(&other).await.is_empty(), "meeting {meeting}");
        if meeting == 30 {
            let end = "SELECT pg_terminate_backend(CAST(backend AS int)) FROM hosts WHERE number =";
            database.run(format!("{end} {number}")).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
    assert_eq!(other.owner_of("a", "s").await.unwrap(), Some(number));
    cut_off.commit_turn(commit("s", 1)).await.unwrap();
}

#[tokio::test]
async fn the_first_host_after_a_crash_of_all_hosts_adopts_their_work() {
    let Some(mut database) = Database::new().await else { return };
    let mortal = Mortal::start(&database).await;
    mortal.store.put_agent(&agent(), b"component", &[]).await.unwrap();
    claim(&mortal.store, "s").await.unwrap();
    mortal.store.accept_turn(running("s")).await.unwrap();
    let number = mortal.number();
    mortal.kill();
    database.until_free().await;
    let next = member(&database, "next").await;
    assert!(take_all(&next).await.is_empty(), "the others may only have lost their connections");
    assert_eq!(until_gone(&[&next]).await, [number]);
    assert_eq!(next.owner_of("a", "s").await.unwrap(), None);
    assert_eq!((take_all(&next).await, losses(&next).await), (vec!["s".to_owned()], vec![1]));
}

#[tokio::test]
async fn a_starting_host_does_not_mark_a_disconnected_one_as_gone() {
    let Some(mut database) = Database::new().await else { return };
    let cut_off = member(&database, "cut-off").await;
    cut_off.put_agent(&agent(), b"component", &[]).await.unwrap();
    let epoch = claim(&cut_off, "s").await.unwrap();
    let (hung, has_hung) = tokio::sync::oneshot::channel();
    let mut hung = Some(hung);
    cut_off.faults().choose(move |moment| {
        let hung = hung.take_if(|_| moment == Moment::Begin)?;
        hung.send(()).ok().map(|()| Fault::Slow(Duration::from_secs(4)))
    });
    let late = tokio::spawn({
        let cut_off = cut_off.clone();
        async move { cut_off.commit_turn(commit("s", 1)).await }
    });
    has_hung.await.unwrap();
    database.run("SELECT pg_terminate_backend(CAST(backend AS int), 5000) FROM hosts".into()).await;
    database.until_free().await;
    // It has been away for a while, as after a restart of the server.
    database.run("UPDATE hosts SET seen_at_ms = seen_at_ms - 3000".into()).await;
    let new = member(&database, "new").await;
    assert_eq!(claim(&new, "s").await, None, "its owner may live");
    late.await.unwrap().expect("it connects again");
    assert_eq!(claim(&cut_off, "s").await, Some(epoch));
}

#[tokio::test]
async fn a_host_without_others_waits_until_the_members_of_a_cluster_cannot_live_any_more() {
    let Some(mut database) = Database::new().await else { return };
    let mortal = Mortal::start(&database).await;
    mortal.kill();
    database.until_free().await;
    let refused = Store::connect_to(database.server.clone()).await;
    assert!(matches!(refused, Err(StoreError::InUse { .. })), "{refused:?}");
    database.run("UPDATE hosts SET seen_at_ms = seen_at_ms - 60000".into()).await;
    assert_eq!(database.host().await.live_hosts().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_host_that_waits_for_a_lock_is_not_dead() {
    let Some(mut database) = Database::new().await else { return };
    let (waiting, other) = (member(&database, "waiting").await, member(&database, "other").await);
    let lock = take_common().replace("pg_advisory_xact_lock", "pg_advisory_lock");
    database.run(lock).await;
    let claiming = tokio::spawn({
        let waiting = waiting.clone();
        async move { waiting.claim_session("a", "s").await }
    });
    let begun = Instant::now();
    while begun.elapsed() < LEASE + Duration::from_secs(3) {
        assert!(meet(&other).await.is_empty(), "after {:?}", begun.elapsed());
        tokio::time::sleep(PAUSE).await;
    }
    let refused = claiming.await.unwrap();
    assert!(matches!(refused, Err(StoreError::Away { .. })), "{refused:?}");
    database.run("SELECT pg_advisory_unlock_all()".into()).await;
    assert!(claim(&waiting, "s").await.is_some());
}

#[tokio::test]
async fn a_host_that_finds_no_batch_item_waits_for_nobody() {
    let Some(mut database) = Database::new().await else { return };
    let one = member(&database, "one").await;
    database.run(take_common().replace("pg_advisory_xact_lock", "pg_advisory_lock")).await;
    let models = ["m".to_owned()];
    let taken = tokio::time::timeout(Duration::from_secs(2), one.take_item(&models, &[], 5)).await;
    assert_eq!(taken.expect("it takes no lock").unwrap(), Take::Nothing);
}

#[tokio::test]
async fn a_meeting_does_not_wait_for_the_reads_of_its_host() {
    let Some(database) = Database::new().await else { return };
    let (one, _other) = (member(&database, "one").await, member(&database, "other").await);
    let Pool::Postgres(readers) = &one.readers else { panic!("it is a server") };
    let mut reading = Vec::new();
    for _ in 0..readers.options().get_max_connections() {
        reading.push(readers.acquire().await.unwrap());
    }
    let listing = tokio::time::timeout(Duration::from_millis(300), one.live_hosts()).await;
    assert!(listing.is_err(), "other reads wait");
    tokio::time::timeout(PATIENCE, meet(&one)).await.expect("it has a connection of its own");
    let members = tokio::time::timeout(PATIENCE, one.members()).await.expect("it has one, too").unwrap();
    assert_eq!(members.len(), 2);
    drop(reading);
    assert_eq!(one.live_hosts().await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_cluster_continues_what_a_host_without_others_has_left() {
    for (ends_in_order, expected) in [(true, 0), (false, 1)] {
        let Some(database) = Database::new().await else { return };
        let alone = database.host().await;
        alone.put_agent(&agent(), b"component", &[]).await.unwrap();
        alone.accept_turn(running("s")).await.unwrap();
        if ends_in_order {
            alone.end_in_order(1).await.unwrap();
        }
        alone.close().await;
        let member = member(&database, "one").await;
        assert_eq!(take_all(&member).await, ["s"]);
        assert_eq!(losses(&member).await, [expected], "in order: {ends_in_order}");
        member.close().await;
        // The next host without others counts by itself.
        let alone = database.host().await;
        assert_eq!(losses(&alone).await, [expected]);
        let owners: i64 =
            query_scalar("SELECT COUNT(*) FROM session_owners").fetch_one(&alone.readers).await.unwrap();
        assert_eq!(owners, 0);
    }
}

#[tokio::test]
async fn owners_that_are_gone_are_forgotten_and_live_ones_are_not() {
    let Some(mut database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    for (host, session) in [(&one, "live"), (&other, "idle"), (&other, "open")] {
        claim(host, session).await.unwrap();
    }
    other.accept_turn(running("open")).await.unwrap();
    other.close().await;
    one.tidy().await.unwrap();
    let mut left: Vec<String> =
        query_scalar("SELECT session FROM session_owners").fetch_all(&one.readers).await.unwrap();
    left.sort_unstable();
    assert_eq!(left, ["live", "open"]);
    database.run("UPDATE turns SET held = TRUE".into()).await;
    assert!(take_all(&one).await.is_empty(), "held turns wait for the operator");
}

#[tokio::test]
async fn a_host_without_others_a_migration_and_a_cluster_exclude_each_other() {
    let Some(database) = Database::new().await else { return };
    let one = member(&database, "one").await;
    let (host, migration) = tokio::join!(
        Store::connect_to(database.server.clone()),
        Reconnecting::as_host(database.server.clone(), Upgrade::Any)
    );
    assert!(matches!(host, Err(StoreError::InUse { .. })), "{host:?}");
    assert!(matches!(migration.map(|_| ()), Err(StoreError::InUse { .. })));
    let other = member(&database, "other").await;
    one.close().await;
    assert!(meet(&other).await.is_empty(), "the cluster is not in the way of itself");
    other.close().await;

    let alone = database.host().await;
    let refused = Store::join(database.server.clone(), "http://late").await;
    let said = refused.expect_err("one host has the database for itself").to_string();
    assert!(said.contains("another host uses the database") && said.contains("--cluster"), "{said}");
    alone.check().await.expect("it was not disturbed");
}
