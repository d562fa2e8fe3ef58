//! Tests of hosts that write the same rows at the same time: they do not wait for each other in circles, nothing is counted
//! twice or lost, and each of them hears of what the others changed. Without a server there is only one host.

use crate::{
    cluster_tests::member,
    host_tests::{Database, agent},
    sql::Pool,
    *,
};
use std::{collections::BTreeMap, time::Duration};

/// Time for which a test waits for a notice: many polls.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns how often hosts have repeated a transaction, because one of another host was in its way.
fn retries(hosts: [&Store; 2]) -> u64 {
    hosts.iter().map(|host| host.writer.retries()).sum()
}

#[tokio::test]
async fn hosts_that_count_for_the_same_tenants_in_different_orders_do_not_block_each_other() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    one.check().await.unwrap();
    let used = |tenant: usize| {
        let tenant = format!("t{tenant:02}");
        let tokens = TokenUse { day: 7, tenant: tenant.clone(), agent: None, tokens: 1 };
        let counts = UsageCounts { requests: 1, ..UsageCounts::default() };
        let usage = UsageRow { day: 7, tenant, model: "m".into(), counts, ..UsageRow::default() };
        (tokens, usage)
    };
    let mut counting = Vec::new();
    for number in 0..400 {
        for (store, tenant) in [(&one, number % 20), (&other, 19 - number % 20)] {
            let (store, (tokens, usage)) = (store.clone(), used(tenant));
            counting.push(tokio::spawn(async move { store.count_use(Some(tokens), vec![usage]).await }));
        }
    }
    for count in counting {
        count.await.unwrap().unwrap();
    }
    let tokens: u64 = one.token_use(7).await.unwrap().iter().map(|used| used.tokens).sum();
    let all = UsageFilter { tenant: None, first_day: 0, last_day: 9 };
    let usage = one.usage(&all, UsageBy::Tenant, 99).await.unwrap();
    let requests: u64 = usage.iter().map(|sum| sum.counts.requests).sum();
    assert_eq!((tokens, requests, usage.len()), (800, 800, 20));
    assert_eq!(retries([&one, &other]), 0, "no transaction was ended by the server");
}

#[tokio::test]
async fn hosts_that_share_batches_find_the_last_item_of_each_once() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let room = BatchRoom { bytes: 1 << 20, batches: 10, share: None };
    for id in ["a", "b", "c", "d"] {
        let items = vec![NewItem { request: b"{}".to_vec(), reference: None }; 25];
        let (principal, model, terms) = ("p".into(), "m".into(), BatchTerms::default());
        let batch = NewBatch { id: id.into(), principal, model, at_ms: 1, items, terms };
        one.queue_batch(batch, room, None).await.unwrap();
    }
    other.check().await.unwrap();
    let mut working = Vec::new();
    for store in [&one, &other] {
        for _ in 0..8 {
            let store = store.clone();
            working.push(tokio::spawn(async move {
                let mut last = Vec::new();
                loop {
                    let item = match store.take_item(&["m".into()], &[], 5).await.unwrap() {
                        Take::Item(item) => item,
                        Take::Later(_) => continue,
                        Take::Nothing => return last,
                    };
                    let ended = store.end_item(item.key, &ItemEnd::Done(b"done".to_vec())).await.unwrap();
                    if ended == ItemEnded::Last {
                        last.push(item.batch);
                    }
                }
            }));
        }
    }
    let mut found = Vec::new();
    for worker in working {
        found.extend(worker.await.unwrap());
    }
    found.sort_unstable();
    assert_eq!(found, ["a", "b", "c", "d"]);
    assert_eq!(retries([&one, &other]), 0, "no transaction was ended by the server");
}

#[tokio::test]
async fn usage_of_sessions_that_two_hosts_merge_is_counted_once() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let of_session = |number: usize| UsageRow {
        day: 7,
        tenant: "acme".into(),
        agent: Some("a".into()),
        session: Some(format!("acme/s{number}")),
        model: "m".into(),
        counts: UsageCounts { requests: 1, ..UsageCounts::default() },
        ..UsageRow::default()
    };
    one.count_use(None, (0..500).map(of_session).collect()).await.unwrap();
    let (of_one, of_other) = tokio::join!(one.merge_usage_of_sessions(8), other.merge_usage_of_sessions(8));
    assert_eq!(of_one.unwrap() + of_other.unwrap(), 500);
    let all = UsageFilter { tenant: None, first_day: 0, last_day: 9 };
    let sums = one.usage(&all, UsageBy::Session, 9).await.unwrap();
    let sums: BTreeMap<_, _> = sums.into_iter().map(|sum| (sum.group, sum.counts.requests)).collect();
    assert_eq!(sums, BTreeMap::from([(None, 500)]));
}

#[tokio::test]
async fn two_hosts_that_start_the_same_schedule_start_it_once() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let schedule = |number: usize| NewSchedule {
        id: format!("id{number}"),
        name: format!("name{number}"),
        target: format!("s{number}"),
        principal: "p".into(),
        timing: String::new(),
        repeats: false,
        data: None,
        tries: 1,
        due_ms: 1,
    };
    let schedules: Vec<_> = (0..30).map(schedule).collect();
    one.put_agent(&agent(), b"component", &schedules).await.unwrap();
    for NewSchedule { id, .. } in &schedules {
        let (begun, also) =
            tokio::join!(one.begin_schedule(id, 1, 0, 1, 1), other.begin_schedule(id, 1, 0, 1, 1));
        assert_ne!(begun.unwrap(), also.unwrap(), "{id}");
    }
    let begun = [one.begun_schedules().await.unwrap(), other.begun_schedules().await.unwrap()].concat();
    assert_eq!(begun.len(), 30, "neither takes what the other one has begun");
}

#[tokio::test]
async fn an_answer_that_a_host_stores_twice_does_not_end_the_next_attempt_of_another_host() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let schedule = NewSchedule {
        id: "id".into(),
        name: "name".into(),
        target: "s".into(),
        principal: "p".into(),
        timing: String::new(),
        repeats: true,
        data: None,
        tries: 9,
        due_ms: 1,
    };
    one.put_agent(&agent(), b"component", &[schedule]).await.unwrap();
    let event = NewEvent {
        source: "shop".into(),
        id: "e".into(),
        topic: "t".into(),
        data: None,
        principal: "p".into(),
        hops: 0,
        at_ms: 1,
        deliveries: vec![NewDelivery {
            target: Target::Session { agent: "a".into(), session: "t".into() },
            undeliverable: None,
        }],
    };
    one.publish(&event, 1).await.unwrap();
    let key = one.due_deliveries(5, 1).await.unwrap()[0].key;
    assert!(
        one.begin_delivery(key, 1, 5).await.unwrap() && one.begin_schedule("id", 1, 0, 1, 1).await.unwrap()
    );
    one.retry_delivery(key, 1, 6, "busy").await.unwrap();
    one.retry_schedule("id", 1, 6, "busy").await.unwrap();
    assert!(
        other.begin_delivery(key, 2, 6).await.unwrap()
            && other.begin_schedule("id", 1, 0, 2, 6).await.unwrap()
    );

    // The host did not hear the answer of the database, and does it again.
    one.retry_delivery(key, 1, 7, "busy").await.unwrap();
    one.dead_letter_delivery(key, "refused").await.unwrap();
    one.retry_schedule("id", 1, 7, "busy").await.unwrap();
    one.advance_schedule("id", 9, 0, None).await.unwrap();
    one.fail_schedule("id", "refused").await.unwrap();
    let (deliveries, schedules) =
        (other.begun_deliveries().await.unwrap(), other.begun_schedules().await.unwrap());
    assert_eq!((deliveries.len(), deliveries[0].attempt), (1, 2));
    assert_eq!((schedules.len(), schedules[0].attempt), (1, 2));

    other.advance_schedule("id", 9, 0, None).await.unwrap();
    other.retry_delivery(key, 2, 9, "busy").await.unwrap();
    assert_eq!(
        (one.next_schedule_ms(5).await.unwrap(), one.next_delivery_ms(5).await.unwrap()),
        (Some(9), Some(9))
    );
}

fn webhook() -> WebhookRow {
    WebhookRow {
        id: "w".into(),
        url: "https://example.com".into(),
        topics: "*".into(),
        sealed_secret: String::new(),
        configured: false,
        created_at_ms: 1,
        disabled: None,
        last_try: None,
    }
}

fn key() -> ApiKeyRow {
    ApiKeyRow {
        id: "k".into(),
        digest: [7; 32],
        tenant: "acme".into(),
        role: "admin".into(),
        agents: None,
        name: "k".into(),
        created_at_ms: 1,
        expires_at_ms: None,
        revoked_at_ms: None,
        last_used_day: None,
        requests_per_minute: None,
        bodies: false,
    }
}

/// Changes something of each kind in turn, and returns the kinds that the next notice names.
async fn change(store: &Store, step: usize) -> Option<Vec<NoticeKind>> {
    use NoticeKind::*;
    let secret = || SecretRow {
        agent: Some("a".into()),
        name: "A".into(),
        hosts: "[]".into(),
        sealed: b"sealed".to_vec(),
        updated_at_ms: 7,
    };
    Some(
        match step {
            0 => store.put_agent(&agent(), b"component", &[]).await.map(|_| vec![Agents]),
            1 => store.put_agent(&agent(), b"component", &[]).await.map(|_| vec![Agents]),
            2 => store.activate_version("a", 1, &[]).await.map(|_| vec![Agents]),
            3 => store.put_api_key(&key()).await.map(|()| vec![Keys]),
            4 => store.revoke_api_key("k", 5).await.map(|_| vec![Keys]),
            5 => store.remove_api_keys("acme").await.map(|_| vec![Keys, Tenants]),
            6 => store.remove_rows_of_tenant("acme").await.map(|_| vec![Tenants, Pages]),
            7 => store.put_webhook(&webhook()).await.map(|()| vec![Webhooks]),
            8 => store.delete_webhook("w").await.map(|_| vec![Webhooks]),
            9 => store.put_secret(&secret()).await.map(|()| vec![Secrets]),
            10 => store.put_resealed(vec![secret()], vec![webhook()]).await.map(|()| vec![Webhooks, Secrets]),
            11 => store.delete_secret(Some("a"), "A").await.map(|_| vec![Secrets]),
            12 => store.end_hold().await.map(|()| vec![Held]),
            13 => store.delete_session("a", "s").await.map(|_| vec![Pages]),
            14 => store.delete_agent("a").await.map(|_| vec![Agents, Pages]),
            _ => return None,
        }
        .unwrap(),
    )
}

#[tokio::test]
async fn a_host_learns_of_each_change_by_others_and_by_commands() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let command = Store::connect_beside_to(database.server.clone()).await.unwrap();
    let mut notices = other.notices().expect("it has others");
    assert_eq!(notices.next().await, NoticeKind::ALL, "the first call names everything");
    let mut step = 0;
    let by = [&one, &command];
    while let Some(expected) = change(by[step % 2], step).await {
        let heard = tokio::time::timeout(PATIENCE, notices.next()).await.expect("a notice");
        assert_eq!(heard, expected, "step {step}");
        step += 1;
    }
    // The use of a key is not a change.
    one.put_api_key(&key()).await.unwrap();
    assert_eq!(notices.next().await, [NoticeKind::Keys]);
    one.use_api_key("k", 20_000).await.unwrap();
    one.note_webhook_try("w", &WebhookTry { at_ms: 1, status: None, error: None }).await.unwrap();
    let silence = tokio::time::timeout(Duration::from_millis(1_500), notices.next()).await;
    assert!(silence.is_err(), "{silence:?}");
}

#[tokio::test]
async fn a_host_learns_which_pages_others_have_erased_or_that_it_does_not_know_all_of_them() {
    let Some(mut database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let after = async |store: &Store, since| {
        let PageErasures { until, erased } = store.page_erasures(since).await.unwrap();
        (until, erased)
    };
    assert_eq!(after(&other, Some(0)).await, (0, Some(Vec::new())));
    assert_eq!(after(&other, None).await, (0, None));
    one.put_agent(&agent(), b"component", &[]).await.unwrap();
    one.delete_session("a", "s").await.unwrap();
    one.delete_agent("a").await.unwrap();
    one.remove_rows_of_tenant("acme").await.unwrap();
    let session = PageErasure::Session { agent: "a".into(), session: "s".into() };
    let (agent, tenant) =
        (PageErasure::Agent { agent: "a".into() }, PageErasure::Tenant { tenant: "acme".into() });
    let rest = Some(vec![agent.clone(), tenant.clone()]);
    assert_eq!(after(&other, Some(0)).await, (3, Some(vec![session, agent, tenant])));
    assert_eq!(after(&other, Some(1)).await, (3, rest.clone()));
    assert_eq!(after(&one, Some(0)).await, (3, Some(Vec::new())), "it has made its own");
    assert_eq!(after(&other, Some(3)).await, (3, Some(Vec::new())));
    assert_eq!(after(&other, Some(4)).await, (3, None), "the number is from another database");
    assert_eq!(after(&other, None).await, (3, None));
    // A week later, a host that was away does not learn of the first one.
    database.run("UPDATE page_erasures SET at_ms = 0 WHERE number = 1".into()).await;
    assert_eq!(other.forget_page_erasures().await.unwrap(), 1);
    assert_eq!(after(&other, Some(0)).await, (3, None));
    assert_eq!(after(&other, Some(1)).await, (3, rest));
}

#[tokio::test]
async fn the_pullers_of_other_hosts_learn_of_a_new_batch() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let mut notices = other.notices().expect("it has others");
    notices.next().await;
    let batch = NewBatch {
        id: "b".into(),
        principal: "p".into(),
        model: "m".into(),
        at_ms: 1,
        items: vec![NewItem { request: b"request".to_vec(), reference: None }],
        terms: BatchTerms::default(),
    };
    let room = BatchRoom { bytes: 1_000, batches: 1, share: None };
    assert_eq!(one.queue_batch(batch, room, None).await.unwrap(), Queued::New);
    let heard = tokio::time::timeout(PATIENCE, notices.next()).await.expect("a notice");
    assert_eq!(heard, [NoticeKind::Batches]);
}

#[tokio::test]
async fn a_notice_does_not_wait_for_the_reads_of_its_host() {
    let Some(database) = Database::new().await else { return };
    let (one, other) = (member(&database, "one").await, member(&database, "other").await);
    let mut notices = other.notices().expect("it has others");
    notices.next().await;
    let Pool::Postgres(readers) = &other.readers else { panic!("it is a server") };
    let mut reading = Vec::new();
    for _ in 0..readers.options().get_max_connections() {
        reading.push(readers.acquire().await.unwrap());
    }
    one.put_api_key(&key()).await.unwrap();
    let heard = tokio::time::timeout(PATIENCE, notices.next()).await.expect("a notice");
    assert_eq!(heard, [NoticeKind::Keys]);
    drop(reading);
}

#[tokio::test]
async fn a_change_is_noticed_without_a_notification() {
    let Some(mut database) = Database::new().await else { return };
    let host = member(&database, "one").await;
    host.put_webhook(&webhook()).await.unwrap();
    let mut notices = host.notices().unwrap();
    notices.next().await;
    for _ in 0..2 {
        database.run("UPDATE notices SET version = version + 1 WHERE kind = 'webhooks'".into()).await;
        let heard = tokio::time::timeout(PATIENCE, notices.next()).await.expect("a poll");
        assert_eq!(heard, [NoticeKind::Webhooks]);
        // The connection that listens is lost, and the next change is still found.
        database.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"skep_%' AND pid != pg_backend_pid()"
                .into(),
        )
        .await;
    }
    host.put_webhook(&webhook()).await.unwrap();
    let heard = tokio::time::timeout(PATIENCE, notices.next()).await.expect("a notice");
    assert_eq!(heard, [NoticeKind::Webhooks]);
}
