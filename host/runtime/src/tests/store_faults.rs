//! Tests with unreadable rows in the database, and with a full disk.

use super::{
    durability::detached,
    fixture::{Host, until},
    guest::{counter, spinner},
    waker::waker,
};
use crate::{
    AgentName, Clock, NewApiKey, NewWebhook, Role, RuntimeOptions, Tenant, TopicPattern, TurnPhase, WorstCase,
};
use skep_store::{Fault, Moment, TEST_SERVER};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

/// Statements that each write something into a row that no version of the host can read.
const SPOILT: &[&str] = &[
    "UPDATE turns SET input = x'00' WHERE ended_at_ms IS NULL",
    "UPDATE turns SET seed = 7 WHERE ended_at_ms IS NULL",
    "UPDATE deployments SET manifest = 'nonsense' WHERE agent = 'spin'",
    "UPDATE deployments SET deployed_at_ms = 'soon' WHERE agent = 'spin'",
    "UPDATE webhooks SET topics = '!!'",
    "UPDATE webhooks SET created_at_ms = 'then'",
    "UPDATE schedules SET timing = 'nonsense', state = 2",
    "UPDATE schedules SET tries = 'many', state = 1",
    "UPDATE schedules SET data = x'00', state = 1",
    "UPDATE deliveries SET attempt = 'often'",
    "UPDATE api_keys SET role = 'emperor'",
    "UPDATE api_keys SET created_at_ms = 'then'",
    "INSERT INTO token_use VALUES (unixepoch() / 86400, 'local', 'count', 'many')",
    "UPDATE secrets SET updated_at_ms = 'then'",
    "UPDATE batches SET created_at_ms = 'then'",
];

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_does_not_keep_the_rest_from_starting() {
    if std::env::var_os(TEST_SERVER).is_some() {
        // PostgreSQL refuses the values that cannot be read.
        return;
    }
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    host.deploy("w", "", waker()).await.expect("valid");
    host.deploy("spin", "[limits]\ncpu_ms = 30000", spinner()).await.expect("valid");
    host.answer("w", "s", "a").await;
    let webhook = NewWebhook {
        url: "https://example.com/hook".into(),
        topics: vec![TopicPattern::new("*").expect("valid")],
        secret: None,
    };
    host.agents.add_webhook(webhook).await.expect("added");
    let key = NewApiKey {
        tenant: Tenant::local(),
        role: Role::Invoke,
        agents: Some(vec![AgentName::new("count").expect("valid")]),
        name: "ci".into(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    host.agents.keys().create(key).await.expect("created");
    let mut host = host;
    for (round, spoilt) in SPOILT.iter().enumerate() {
        // This turn is open when the host stops.
        let mut spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken");
        spins.next().await.expect("the turn starts").expect("the turn starts");
        let id = spins.turn_id().to_owned();
        let store = host.store().clone();
        let stopped = host.stop().await;
        store.spoil(spoilt).await.expect(spoilt);
        host = stopped.start(RuntimeOptions::default()).await;
        let answer = host.ask("count", &format!("s{round}"), "go").await;
        assert_eq!(answer.expect(spoilt).text, "x", "{spoilt}");
        if spoilt.contains("input") {
            let detail = host.agents.turn("spin", "s", &id).await.expect("kept");
            let TurnPhase::Failed { code, message, .. } = detail.phase else { panic!("{detail:?}") };
            assert!(code == "internal" && message.contains("is unreadable"), "{message}");
        }
        if spoilt.contains("api_keys") {
            assert!(host.agents.keys().list().await.expect("listed").is_empty(), "{spoilt}");
        }
        if spoilt.contains("deployments") {
            let known = host.agents.agents().iter().any(|agent| agent.name == "spin");
            assert!(!known, "{spoilt}: the agent cannot be called");
            store.spoil("UPDATE turns SET ended_at_ms = 1 WHERE ended_at_ms IS NULL").await.expect("ended");
            host.deploy("spin", "[limits]\ncpu_ms = 30000", spinner())
                .await
                .expect("the agent can be deployed again");
        }
        store.spoil("UPDATE turns SET ended_at_ms = 1 WHERE ended_at_ms IS NULL").await.expect("ended");
        host = host.restart().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_to_callers_and_the_host_recovers() {
    if std::env::var_os(TEST_SERVER).is_some() {
        // Only SQLite's file can be bounded here.
        return;
    }
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    host.agents.store_ready().await.expect("the disk has room");
    host.store().leave_room(Some(1)).await.expect("bounded");
    let mut refused = 0;
    for number in 0..1_000 {
        match host.ask("count", &format!("s{number}"), "go").await {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.code(), "store_full", "{error}");
                assert!(error.to_string().contains("free space on the disk"), "{error}");
                refused += 1;
            }
        }
        if refused == 5 {
            break;
        }
    }
    assert_eq!(refused, 5, "the disk is full");
    until(async || host.agents.store_ready().await.err().filter(|error| error.code() == "store_full")).await;
    host.store().leave_room(None).await.expect("the disk has room again");
    assert_eq!(host.answer("count", "after", "go").await, "x");
    until(async || host.agents.store_ready().await.ok()).await;
}

/// Waits until no transaction begins for a while.
async fn nothing_is_written(host: &Host) {
    let begun = Arc::new(AtomicU64::new(0));
    let counted = begun.clone();
    host.store().faults().choose(move |_| {
        counted.fetch_add(1, SeqCst);
        None
    });
    let mut seen = u64::MAX;
    while seen != begun.load(SeqCst) {
        seen = begun.load(SeqCst);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_whose_acceptance_is_not_confirmed_does_not_run_after_its_caller_got_the_error() {
    if std::env::var_os(TEST_SERVER).is_some() {
        // PostgreSQL says whether it was committed.
        return;
    }
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    // The fault is for this turn, and not for what a host does in the background once it has started.
    nothing_is_written(&host).await;
    host.store().faults().choose(once(Moment::Committed));
    let error = host.ask("count", "s", "go").await.expect_err("nobody knows whether it was written");
    assert_eq!(error.code(), "store_failed", "{error}");
    host.store().faults().end();
    until(async || (host.open_turns().await == 0).then_some(())).await;
    let host = host.restart().await;
    assert_eq!(host.open_turns().await, 0, "the next host has no turn to resume");
    assert_eq!(host.answer("count", "s", "go").await, "xx", "only confirmed turns have counted");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_use_of_a_request_without_an_agent_is_recorded_once_the_database_accepts_it() {
    let host = Host::start().await;
    let (model, worst) =
        (host.agents.models().get(None).expect("a default"), WorstCase::of_text(1, Some(9), 99));
    let budget = host.agents.tenant_budget("local", None).expect("no budget is set");
    let mut tokens = budget.meter(&model, worst).expect("no budget is set");
    tokens.produced(7);
    host.store().faults().choose(once(Moment::Begin));
    drop(tokens);
    let day = u32::try_from(Clock::default().now_ms() / 86_400_000).expect("this century");
    // The day may end meanwhile.
    let recorded = async || {
        let mut used = host.store().token_use(day).await.expect("read");
        used.extend(host.store().token_use(day + 1).await.expect("read"));
        used.pop()
    };
    assert_eq!(until(recorded).await.tokens, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_during_an_outage_share_one_task_and_each_of_them_counts_once() {
    let host = Host::start().await;
    let (model, worst) =
        (host.agents.models().get(None).expect("a default"), WorstCase::of_text(1, Some(9), 99));
    let budget = host.agents.tenant_budget("local", None).expect("no budget is set");
    host.store().faults().choose(|moment| (moment == Moment::Begin).then_some(Fault::Fails(10)));
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for _ in 0..300 {
        let mut tokens = budget.meter(&model, worst).expect("no budget is set");
        tokens.produced(7);
    }
    assert!(tasks() < before + 100, "{} tasks more", tasks() - before);
    host.store().faults().end();
    let day = u32::try_from(Clock::default().now_ms() / 86_400_000).expect("this century");
    // The day may end meanwhile.
    let recorded = async |host: &Host| {
        let mut used = host.store().token_use(day).await.expect("read");
        used.extend(host.store().token_use(day + 1).await.expect("read"));
        used.iter().map(|used| used.tokens).sum::<u64>()
    };
    until(async || (recorded(&host).await >= 300 * 7).then_some(())).await;
    let host = host.restart().await;
    assert_eq!(recorded(&host).await, 300 * 7);
}

/// Returns a hook that fails the first of these moments with an I/O error.
fn once(at: Moment) -> impl FnMut(Moment) -> Option<Fault> + Send {
    let mut is_done = false;
    move |moment| {
        let fails = moment == at && !is_done;
        is_done |= fails;
        fails.then_some(Fault::Fails(10))
    }
}

/// Returns a hook that fails about every third of these moments, in a pattern unrelated to what is
/// written.
pub(super) fn every_third_time(at: Moment) -> impl FnMut(Moment) -> Option<Fault> + Send {
    let mut numbers = 7_u64;
    move |moment| {
        if moment != at {
            return None;
        }
        // Knuth's MMIX generator.
        numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (numbers >> 33).is_multiple_of(3).then_some(Fault::Fails(10))
    }
}
