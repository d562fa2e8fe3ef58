//! Tests of batches on a real file: taking items, finishing once, recovery after a crash, limits and removal.

use crate::*;
use std::collections::BTreeSet;

const ROOM: BatchRoom = BatchRoom { bytes: 10_000, batches: 10, share: None };

async fn store() -> Store {
    Store::for_tests().await.unwrap()
}

fn batch(id: &str, items: usize) -> NewBatch {
    let item =
        |n: usize| NewItem { request: format!("request {n}").into(), reference: Some(format!("r{n}")) };
    NewBatch {
        id: id.into(),
        principal: "p".into(),
        model: "m".into(),
        at_ms: 100,
        items: (0..items).map(item).collect(),
        terms: BatchTerms::default(),
    }
}

async fn with_batches(batches: &[(&str, usize)]) -> Store {
    let store = store().await;
    for (id, items) in batches {
        assert_eq!(store.queue_batch(batch(id, *items), ROOM, None).await.unwrap(), Queued::New);
    }
    store
}

async fn take(store: &Store, now_ms: u64) -> Option<TakenItem> {
    match store.take_item(&["other".into(), "m".into()], &[], now_ms).await.unwrap() {
        Take::Item(item) => Some(*item),
        Take::Later(_) | Take::Nothing => None,
    }
}

async fn counts(store: &Store, id: &str) -> (u64, u64, u64, u64, u64) {
    let ItemCounts { waiting, running, done, failed, cancelled } =
        store.batch(id).await.unwrap().unwrap().items;
    (waiting, running, done, failed, cancelled)
}

fn done() -> ItemEnd {
    ItemEnd::Done(b"result".to_vec())
}

#[tokio::test]
async fn items_are_taken_in_order_from_the_batch_with_the_fewest_in_flight() {
    let store = with_batches(&[("large", 3), ("small", 1)]).await;
    let mut order = Vec::new();
    while let Some(item) = take(&store, 200).await {
        assert_eq!(item.request, format!("request {}", item.position).into_bytes());
        assert_eq!((item.queued_at_ms, item.failures), (100, 0));
        order.push((item.batch, item.position));
    }
    let expected = [("large", 0), ("small", 0), ("large", 1), ("large", 2)];
    assert_eq!(order, expected.map(|(batch, position)| (batch.to_owned(), position)));
    assert_eq!(counts(&store, "large").await, (0, 3, 0, 0, 0));
    assert_eq!(store.batch("large").await.unwrap().unwrap().started_at_ms, Some(200));
}

#[tokio::test]
async fn only_items_of_the_models_that_have_room_are_taken() {
    let store = with_batches(&[("b", 1)]).await;
    assert_eq!(store.take_item(&["other".into()], &[], 200).await.unwrap(), Take::Nothing);
    assert_eq!(store.take_item(&[], &[], 200).await.unwrap(), Take::Nothing);
    assert!(take(&store, 200).await.is_some());
}

#[tokio::test]
async fn a_result_is_written_once() {
    let store = with_batches(&[("b", 2)]).await;
    let item = take(&store, 200).await.unwrap();
    assert_eq!(store.end_item(item.key, &done()).await.unwrap(), ItemEnded::OthersLeft);
    for again in [ItemEnd::Done(b"another".to_vec()), ItemEnd::Again { wake_ms: 0 }] {
        assert_eq!(store.end_item(item.key, &again).await.unwrap(), ItemEnded::NotTaken);
    }
    let last = take(&store, 200).await.unwrap();
    assert_eq!(store.end_item(last.key, &ItemEnd::Failed(b"why".to_vec())).await.unwrap(), ItemEnded::Last);
    let items = store.batch_items("b").await.unwrap();
    let row =
        |position, reference: &str, state| ItemRow { position, reference: Some(reference.into()), state };
    let states = [ItemState::Done(b"result".to_vec()), ItemState::Failed(b"why".to_vec())];
    let [done, failed] = states;
    assert_eq!(items, [row(0, "r0", done), row(1, "r1", failed)]);
    assert!(take(&store, 300).await.is_none());
}

#[tokio::test]
async fn a_retried_item_waits_until_its_time() {
    let store = with_batches(&[("b", 1)]).await;
    let item = take(&store, 200).await.unwrap();
    store.end_item(item.key, &ItemEnd::Again { wake_ms: 500 }).await.unwrap();
    assert_eq!(store.take_item(&["m".into()], &[], 499).await.unwrap(), Take::Later(500));
    let item = take(&store, 500).await.unwrap();
    assert_eq!(item.failures, 1);
    store.end_item(item.key, &ItemEnd::GivenBack { wake_ms: 0 }).await.unwrap();
    assert_eq!(take(&store, 500).await.unwrap().failures, 1, "giving back does not count as a failure");
}

#[tokio::test]
async fn items_lost_in_a_crash_wait_again_until_they_are_suspected() {
    let folder = tempfile::tempdir().unwrap();
    let open = async || Store::open_for_tests(&folder.path().join("skep.db")).await.unwrap();
    let mut store = open().await;
    store.queue_batch(batch("b", 3), ROOM, None).await.unwrap();
    let first = take(&store, 200).await.unwrap();
    store.end_item(first.key, &done()).await.unwrap();
    for life in 1..=3 {
        assert!(take(&store, 200).await.is_some());
        store = open().await;
        assert_eq!(store.recover_items(3, b"suspected").await.unwrap(), 1, "life {life}");
    }
    let store = open().await;
    assert_eq!(counts(&store, "b").await, (1, 0, 1, 1, 0));
    let items = store.batch_items("b").await.unwrap();
    assert_eq!(items[1].state, ItemState::Failed(b"suspected".to_vec()));
    assert_eq!(take(&store, 200).await.unwrap().position, 2);
    store.give_back_items().await.unwrap();
    assert_eq!(store.recover_items(1, b"suspected").await.unwrap(), 0, "no item is taken");
    assert_eq!(take(&store, 200).await.unwrap().position, 2);
}

#[tokio::test]
async fn a_cancelled_batch_stops_and_accepts_no_result() {
    let store = with_batches(&[("b", 3)]).await;
    let (first, second) = (take(&store, 200).await.unwrap(), take(&store, 200).await.unwrap());
    store.end_item(first.key, &done()).await.unwrap();
    store.cancel_batch("b").await.unwrap();
    assert_eq!(store.end_item(second.key, &done()).await.unwrap(), ItemEnded::NotTaken);
    assert_eq!(counts(&store, "b").await, (0, 0, 1, 0, 2));
    assert!(take(&store, 300).await.is_none());
    assert!(store.batch("b").await.unwrap().unwrap().cancelled);
}

#[tokio::test]
async fn a_cancellation_that_an_error_interrupts_can_be_finished() {
    let store = with_batches(&[("b", 3)]).await;
    take(&store, 200).await.unwrap();
    let mut begun = 0;
    store.faults().choose(move |moment| {
        begun += u32::from(moment == Moment::Begin);
        (moment == Moment::Begin && begun > 1).then_some(Fault::Fails(10))
    });
    store.expire_batch("b").await.unwrap_err();
    store.faults().end();
    assert!(store.batch("b").await.unwrap().unwrap().cancelled, "the first write succeeded");
    assert_eq!(counts(&store, "b").await, (2, 1, 0, 0, 0));
    assert!(store.overdue_batches(u64::MAX >> 1).await.unwrap().is_empty());
    store.finish_cancellations().await.unwrap();
    assert_eq!(counts(&store, "b").await, (0, 0, 0, 0, 3));
    assert_eq!(store.finished_batches().await.unwrap()[0].id, "b");
}

#[tokio::test]
async fn batches_that_were_cancelled_have_ended_or_are_gone_do_not_run() {
    let store = with_batches(&[("open", 1), ("cancelled", 1), ("ended", 0)]).await;
    store.cancel_batch("cancelled").await.unwrap();
    store.end_batch("ended", 200, None).await.unwrap();
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<String>>();
    let stopped = store.stopped_batches(ids(&["open", "cancelled", "ended", "gone"])).await.unwrap();
    assert_eq!(stopped, ids(&["cancelled", "ended", "gone"]));
    assert!(store.stopped_batches(ids(&[])).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_batch_with_a_time_of_its_own_outlives_the_others() {
    let store = Store::for_tests().await.unwrap();
    for (id, keep_ms) in [("own", Some(50)), ("other", None)] {
        let terms = BatchTerms { details: Some("{}".into()), keep_ms, ..BatchTerms::default() };
        let batch = NewBatch {
            id: id.into(),
            principal: "p".into(),
            model: "m".into(),
            at_ms: 100,
            items: Vec::new(),
            terms,
        };
        let room = BatchRoom { bytes: 1_000, batches: 10, share: None };
        assert_eq!(store.queue_batch(batch, room, None).await.unwrap(), Queued::New);
        assert!(store.end_batch(id, 300, None).await.unwrap());
    }
    assert_eq!(store.forget_batches(301, 350).await.unwrap(), 1);
    assert!(store.batch("own").await.unwrap().is_some());
    assert_eq!(store.forget_batches(301, 351).await.unwrap(), 1);
    assert_eq!(store.batch("own").await.unwrap(), None);
}

#[tokio::test]
async fn a_batch_finishes_once_and_is_removed_later() {
    let store = with_batches(&[("b", 1), ("open", 1)]).await;
    let item = take(&store, 200).await.unwrap();
    assert_eq!(store.finished_batches().await.unwrap(), []);
    store.end_item(item.key, &done()).await.unwrap();
    let finished = store.finished_batches().await.unwrap();
    assert_eq!(finished.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["b"]);
    assert!(store.end_batch("b", 300, None).await.unwrap());
    assert!(!store.end_batch("b", 301, None).await.unwrap(), "the batch had finished");
    assert_eq!(store.finished_batches().await.unwrap(), []);
    assert_eq!(store.forget_batches(300, 301).await.unwrap(), 0);
    assert_eq!(store.forget_batches(301, 301).await.unwrap(), 1);
    assert_eq!(store.batch("b").await.unwrap(), None);
    assert_eq!(store.batch_items("b").await.unwrap(), []);
    assert!(store.batch("open").await.unwrap().is_some(), "open batches are never removed");
}

#[tokio::test]
async fn storage_is_limited_in_bytes_and_in_batches() {
    let store = store().await;
    let room = BatchRoom { bytes: 50, batches: 2, share: None };
    // Each item has nine bytes of request and two of reference.
    assert_eq!(store.queue_batch(batch("large", 5), room, None).await.unwrap(), Queued::Full);
    assert_eq!(store.queue_batch(batch("a", 4), room, None).await.unwrap(), Queued::New);
    assert_eq!(store.queue_batch(batch("b", 1), room, None).await.unwrap(), Queued::Full);
    let item = take(&store, 200).await.unwrap();
    store.end_item(item.key, &done()).await.unwrap();
    assert_eq!(
        store.queue_batch(batch("b", 1), BatchRoom { bytes: 60, ..room }, None).await.unwrap(),
        Queued::Full
    );
    assert_eq!(
        store.queue_batch(batch("b", 1), BatchRoom { bytes: 61, ..room }, None).await.unwrap(),
        Queued::New
    );
    let more = BatchRoom { bytes: 1000, ..room };
    assert_eq!(
        store.queue_batch(batch("c", 1), more, None).await.unwrap(),
        Queued::Full,
        "the maximum is two batches"
    );
}

#[tokio::test]
async fn a_tenant_leaves_room_for_the_batches_of_others() {
    let store = store().await;
    let room = BatchRoom { bytes: 100, batches: 100, share: Some(3) };
    let of = |principal: &str, id: &str, items| NewBatch { principal: principal.into(), ..batch(id, items) };
    // An item has eleven bytes. Six items leave 34 bytes free; three times that amount is more than 66.
    assert_eq!(store.queue_batch(of("greedy", "a", 6), room, None).await.unwrap(), Queued::New);
    assert_eq!(store.queue_batch(of("greedy", "b", 1), room, None).await.unwrap(), Queued::Full);
    assert_eq!(store.queue_batch(of("small", "c", 2), room, None).await.unwrap(), Queued::New);
    assert_eq!(
        store.queue_batch(of("greedy", "b", 1), BatchRoom { share: None, ..room }, None).await.unwrap(),
        Queued::New
    );
}

#[tokio::test]
async fn the_tenant_with_the_fewest_items_in_flight_comes_first() {
    let store = store().await;
    for (principal, id) in [("greedy", "a"), ("greedy", "b"), ("small", "c")] {
        let batch = NewBatch { principal: principal.into(), ..batch(id, 2) };
        store.queue_batch(batch, ROOM, None).await.unwrap();
    }
    let take =
        async |tenants: &[BusyTenant]| match store.take_item(&["m".into()], tenants, 200).await.unwrap() {
            Take::Item(item) => item.batch,
            other => format!("{other:?}"),
        };
    let greedy = |running, has_its_share| BusyTenant { principal: "greedy".into(), running, has_its_share };
    assert_eq!(take(&[]).await, "a");
    assert_eq!(take(&[greedy(1, false)]).await, "c");
    assert_eq!(take(&[greedy(1, true)]).await, "c");
    assert_eq!(take(&[greedy(1, true)]).await, "Nothing", "the other tenant has no waiting items");
    assert_eq!(take(&[greedy(1, false)]).await, "b");
}

#[tokio::test]
async fn the_queue_depth_counts_waiting_items() {
    let store = with_batches(&[("b", 2)]).await;
    let waiting = QueueDepth { waiting: 2, oldest_ms: Some(100) };
    assert_eq!(store.queue_depth().await.unwrap(), waiting);
    while take(&store, 200).await.is_some() {}
    assert_eq!(store.queue_depth().await.unwrap(), QueueDepth::default());
}

#[tokio::test]
async fn batch_events_are_written_together_with_their_change_or_not_at_all() {
    let store = store().await;
    let event = |id: &str| NewEvent {
        source: "skep".into(),
        id: id.into(),
        topic: "batch".into(),
        data: None,
        principal: "p".into(),
        hops: 1,
        at_ms: 100,
        deliveries: Vec::new(),
    };
    let ids = async || -> Vec<String> {
        store.events(None, 10).await.unwrap().into_iter().map(|row| row.id).collect()
    };
    let full = BatchRoom { bytes: 0, batches: 0, share: None };
    assert_eq!(store.queue_batch(batch("b", 1), full, Some(event("refused"))).await.unwrap(), Queued::Full);
    store.queue_batch(batch("b", 1), ROOM, Some(event("queued"))).await.unwrap();
    assert!(store.end_batch("b", 300, Some(&event("ended"))).await.unwrap());
    assert!(!store.end_batch("b", 301, Some(&event("ended again"))).await.unwrap());
    assert_eq!(ids().await, ["ended", "queued"]);
}
