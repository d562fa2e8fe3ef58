//! Tests of batches: when items are started, how failures are handled, and what a restart finds.

use super::{
    durability::talker,
    fixture::{Host, Setup, tiny_engine, until},
    guest::{Guest, echo},
    store_faults::every_third_time,
    tools::{caller, echoing, granted, granting},
    waker::waker,
};
use crate::{
    BatchItem, BatchOptions, BatchOutcome, BatchPhase, BatchRequest, BatchResults, BatchTerms, Clock,
    ItemCounts, LogFilter, NewBatch, RuntimeError, RuntimeOptions, Tenant,
};
use serde_json::json;
use skep_engine::{
    Engine, GenerateRequest, LoadProgress, LocalModel, ModelSet, Priority, Sampling, TokenStream,
    chat::{ChatMessage, ChatOptions},
};
use skep_store::{Moment, Take};
use std::time::Duration;

pub(super) const PRINCIPAL: &str = "local";

fn chat(text: &str, options: ChatOptions) -> BatchItem {
    let messages = vec![ChatMessage::user(text)];
    let request = BatchRequest::Chat { messages, options: Box::new(options), choices: 1 };
    BatchItem { request, form: "plain".into(), reference: Some(text.into()), keep: None }
}

fn short(text: &str) -> BatchItem {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    chat(text, ChatOptions { max_tokens: Some(4), ignore_eos: true, sampling, ..ChatOptions::default() })
}

pub(super) fn turn(text: &str) -> BatchItem {
    let request = BatchRequest::Turn { text: text.into(), data: None };
    BatchItem { request, form: "plain".into(), reference: None, keep: None }
}

pub(super) async fn queue(host: &Host, model: &str, items: Vec<BatchItem>) -> Result<String, RuntimeError> {
    let batch = NewBatch {
        principal: PRINCIPAL.into(),
        key: None,
        model: model.into(),
        items,
        terms: BatchTerms::default(),
    };
    host.agents.queue_batch(batch).await.map(|status| status.id)
}

pub(super) async fn results(host: &Host, id: &str) -> BatchResults {
    until(async || host.agents.batch_results(PRINCIPAL, id).await.expect("the batch is known").1).await
}

pub(super) async fn counts(host: &Host, id: &str) -> ItemCounts {
    host.agents.batch(PRINCIPAL, id).await.expect("the batch is known").items
}

fn error_of(outcome: &BatchOutcome) -> (&'static str, &str) {
    match outcome {
        BatchOutcome::Failed { code, message } => (code, message),
        other => panic!("the item did not fail: {other:?}"),
    }
}

/// Starts so many interactive sequences that no room is left for background work.
async fn occupy(engine: &Engine) -> Vec<TokenStream> {
    let mut streams = Vec::new();
    while engine.free_slots(Priority::Background) > 0 {
        let mut request = GenerateRequest::new(vec![65; 8]);
        (request.max_tokens, request.ignore_eos) = (Some(500), true);
        streams.push(engine.generate(request).expect("the engine has room"));
    }
    streams
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_completes_despite_database_faults() {
    for at in [Moment::Begin, Moment::Write, Moment::Commit, Moment::Committed] {
        let host = Host::start().await;
        let items = ["one", "two", "three", "four"].map(short).to_vec();
        let id = queue(&host, "tiny", items).await.expect("room");
        host.store().faults().choose(every_third_time(at));
        let BatchResults { items, .. } = results(&host, &id).await;
        host.store().faults().end();
        assert_eq!(items.len(), 4);
        assert!(items.iter().all(|item| matches!(item.outcome, BatchOutcome::Done(_))), "{at:?}: {items:?}");
    }
}

#[tokio::test]
async fn results_keep_the_order_and_references_of_their_items() {
    let host = Host::start().await;
    let id = queue(&host, "tiny", vec![short("one"), short("two"), short("three")]).await.expect("room");
    let BatchResults { status, items } = results(&host, &id).await;
    assert!(matches!(status.phase, BatchPhase::Ended { cancelled: false, .. }));
    assert_eq!((status.items.done, status.items.total()), (3, 3));
    let names: Vec<_> = items.iter().map(|item| (item.index, item.reference.as_deref())).collect();
    assert_eq!(names, [(0, Some("one")), (1, Some("two")), (2, Some("three"))]);
    for item in &items {
        let BatchOutcome::Done(answer) = &item.outcome else { panic!("{item:?}") };
        assert_eq!((answer.form.as_str(), answer.usage.completion_tokens), ("plain", 4));
    }
}

#[tokio::test]
async fn an_agent_handles_each_item_in_a_separate_session() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("deployed");
    let id = queue(&host, "agent:echo", vec![turn("hello"), turn("bye")]).await.expect("room");
    let answers = results(&host, &id).await.items.into_iter();
    let texts = answers.map(|item| match item.outcome {
        BatchOutcome::Done(answer) => answer.text,
        other => panic!("{other:?}"),
    });
    assert_eq!(texts.collect::<Vec<_>>(), ["hello", "bye"]);
    let sessions = host.agents.sessions(&Tenant::local(), "echo", None, 10).await.expect("listed");
    assert!(sessions.iter().all(|session| session.turns == 1) && sessions.len() == 2, "{sessions:?}");
}

#[tokio::test]
async fn items_that_wait_for_people_leave_their_places_to_others() {
    let batch = BatchOptions { max_running: 2, ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..granting(&["agent:*/*"]) }).await;
    host.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    let asking = queue(&host, "agent:desk", vec![turn("agent:orders/find"); 3]).await.expect("room");
    let asked = until(async || {
        let asked = host.agents.approvals(None, 10).await.expect("listed");
        (asked.len() == 3).then_some(asked)
    });
    let asked = asked.await;
    assert_eq!(counts(&host, &asking).await.running, 3);
    let id = queue(&host, "tiny", vec![short("one")]).await.expect("room");
    assert_eq!(results(&host, &id).await.status.items.done, 1);
    for approval in asked {
        host.agents.decide(&approval.id, true, None, "tester").await.expect("open");
    }
    let BatchResults { items, .. } = results(&host, &asking).await;
    for item in &items {
        let BatchOutcome::Done(answer) = &item.outcome else { panic!("{item:?}") };
        assert_eq!(answer.text, r#"{"id":1}"#);
    }
}

#[tokio::test]
async fn an_agents_batch_generations_have_background_priority() {
    let host = Host::start().await;
    host.deploy("talk", "", talker()).await.expect("deployed");
    let engine = host.agents.models().engines().next().expect("a local model");
    let room = engine.free_slots(Priority::Interactive);
    let id = queue(&host, "agent:talk", vec![turn("hello"); 8]).await.expect("room");
    let mut ran = 0;
    let BatchResults { status, .. } = until(async || {
        assert_eq!(
            engine.free_slots(Priority::Interactive),
            room,
            "background turns take no interactive slots"
        );
        ran += usize::from(engine.free_slots(Priority::Background) < room);
        host.agents.batch_results(PRINCIPAL, &id).await.expect("the batch is known").1
    })
    .await;
    assert_eq!(status.items.done, 8);
    assert!(ran > 0, "no turn was observed while it ran");
}

#[tokio::test]
async fn no_item_starts_while_interactive_work_leaves_no_room() {
    let host = Host::start().await;
    let engine = host.agents.models().engines().next().expect("a local model").clone();
    let streams = occupy(&engine).await;
    let id = queue(&host, "tiny", vec![short("one")]).await.expect("room");
    let mut streams = streams.into_iter();
    // The puller checks the queue many times while this stream completes.
    let mut watched = streams.next().expect("at least one");
    for _ in 0..20 {
        watched.next().await.expect("the stream continues").expect("the stream has no error");
        if engine.free_slots(Priority::Background) == 0 {
            let status = host.agents.batch(PRINCIPAL, &id).await.expect("known");
            assert_eq!(status.phase, BatchPhase::Queued);
        }
    }
    drop((watched, streams));
    assert_eq!(results(&host, &id).await.status.items.done, 1);
}

#[tokio::test]
async fn an_item_waits_for_the_next_day_when_the_budget_is_used_up() {
    let batch = BatchOptions { max_attempts: 1, ..BatchOptions::default() };
    // The clock shows one millisecond before midnight until the test moves it.
    let clock = Clock::at(20_000 * 86_400_000 - 1);
    let tenant_tokens_per_day = [(PRINCIPAL.to_owned(), 4)].into();
    let options = RuntimeOptions { batch, tenant_tokens_per_day, ..RuntimeOptions::default() };
    let host = Host::with(Setup::at(&clock, options)).await;
    let first = queue(&host, "tiny", vec![short("one")]).await.expect("room");
    assert_eq!(results(&host, &first).await.status.items.done, 1);
    let second = queue(&host, "tiny", vec![short("two")]).await.expect("room");
    until(async || {
        let status = host.agents.batch(PRINCIPAL, &second).await.expect("known");
        (status.phase != BatchPhase::Queued).then_some(())
    })
    .await;
    clock.advance(1);
    assert_eq!(results(&host, &second).await.status.items.done, 1, "refused runs do not count as attempts");
}

#[tokio::test]
async fn an_expired_batch_abandons_its_remaining_items() {
    let clock = Clock::at(20_000 * 86_400_000);
    // No item is started.
    let batch = BatchOptions { max_running: 0, ..BatchOptions::default() };
    let host = Host::with(Setup::at(&clock, RuntimeOptions { batch, ..RuntimeOptions::default() })).await;
    let queue = async |window: u64| {
        let terms =
            BatchTerms { details: Some("{}".into()), window: Some(Duration::from_secs(window)), keep: None };
        let items = vec![short("one"), short("two")];
        let batch = NewBatch { principal: PRINCIPAL.into(), key: None, model: "tiny".into(), items, terms };
        host.agents.queue_batch(batch).await.expect("room").id
    };
    let first = queue(61).await;
    let second = queue(60).await;
    clock.advance(59_999);
    let overdue = host.store().overdue_batches(clock.now_ms()).await.expect("read");
    assert!(overdue.is_empty(), "there is a millisecond left");
    clock.advance(1);
    let BatchResults { status, items } = results(&host, &second).await;
    assert!(status.expired && status.cancelled, "{status:?}");
    assert!(items.iter().all(|item| matches!(item.outcome, BatchOutcome::Cancelled)), "{items:?}");
    let first = host.agents.batch(PRINCIPAL, &first).await.expect("known");
    assert!(!first.expired && !first.cancelled, "it has a second left");
    let listed = host.agents.detailed_batches(PRINCIPAL, None, 10).await.expect("read");
    assert_eq!(listed.iter().map(|batch| &batch.id).collect::<Vec<_>>(), [&second, &first.id]);
    host.agents.patch_batch_details(PRINCIPAL, &second, "{\"a\": {\"b\": 1}}").await.expect("written");
    host.agents.patch_batch_details(PRINCIPAL, &second, "{\"a\": {\"c\": 2}}").await.expect("written");
    let details = host.agents.batch(PRINCIPAL, &second).await.expect("known").details.expect("details");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&details).unwrap(), json!({"a": {"b": 1, "c": 2}}));
}

#[tokio::test]
async fn an_item_that_always_fails_ends_with_its_error() {
    let batch =
        BatchOptions { max_attempts: 3, backoff: Duration::from_millis(1), ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let trap = Guest { on_message: "unreachable", ..Guest::default() };
    host.deploy("trap", "", trap).await.expect("deployed");
    let id = queue(&host, "agent:trap", vec![turn("go")]).await.expect("room");
    let BatchResults { status, items } = results(&host, &id).await;
    assert_eq!((status.items.failed, status.items.total()), (1, 1));
    assert_eq!(error_of(&items[0].outcome).0, "agent_trapped");
    let sessions = format!("batch-{id}-0");
    let logs = host.agents.logs(&LogFilter::of_agent("trap"), None, 100).await.expect("readable");
    let attempts = logs.iter().filter(|line| line.session == sessions).count();
    assert_eq!(attempts, 3, "{logs:?}");
}

#[tokio::test]
async fn a_panicking_item_is_retried_and_then_fails() {
    let batch =
        BatchOptions { max_attempts: 3, backoff: Duration::from_millis(1), ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let panics = |times| {
        let request = BatchRequest::Panics { times };
        BatchItem { request, form: String::new(), reference: None, keep: None }
    };
    let id = queue(&host, "tiny", vec![panics(2), panics(3), short("fine")]).await.expect("room");
    let BatchResults { status, items } = results(&host, &id).await;
    assert_eq!((status.items.done, status.items.failed, status.items.running), (2, 1, 0));
    assert!(matches!(&items[0].outcome, BatchOutcome::Done(answer) if answer.text == "at last"), "{items:?}");
    let (code, message) = error_of(&items[1].outcome);
    assert!(code == "internal" && message.contains("panicked"), "{message}");
}

#[tokio::test]
async fn an_item_with_a_permanent_error_fails_alone_without_retries() {
    let host = Host::start().await;
    let too_long = chat("x", ChatOptions { max_tokens: Some(1 << 20), ..ChatOptions::default() });
    let id = queue(&host, "tiny", vec![too_long, short("fine")]).await.expect("room");
    let BatchResults { status, items } = results(&host, &id).await;
    assert_eq!((status.items.done, status.items.failed), (1, 1));
    let (code, message) = error_of(&items[0].outcome);
    assert_eq!(code, "context_overflow");
    assert!(message.contains("max_tokens"), "{message}");
}

#[tokio::test]
async fn a_restart_resumes_taken_items_and_answers_them_once() {
    let host = Host::start().await;
    let streams = occupy(&host.agents.models().engines().next().expect("a local model")).await;
    let id = queue(&host, "tiny", vec![short("one"), short("two")]).await.expect("room");
    host.agents.drain(Duration::ZERO).await;
    // Simulates a process that was killed after taking an item.
    let taken = host.store().take_item(&["tiny".to_owned()], &[], u64::MAX >> 1).await.expect("taken");
    assert!(matches!(taken, Take::Item(_)), "{taken:?}");
    drop(streams);
    let host = host.restart().await;
    let BatchResults { status, items } = results(&host, &id).await;
    assert_eq!((status.items.done, items.len()), (2, 2));
}

#[tokio::test]
async fn an_orderly_shutdown_returns_running_items_to_the_queue() {
    let host = Host::start().await;
    let endless = ChatOptions { max_tokens: Some(400), ignore_eos: true, ..ChatOptions::default() };
    let id = queue(&host, "tiny", vec![chat("long", endless)]).await.expect("room");
    until(async || (counts(&host, &id).await.running == 1).then_some(())).await;
    let host = host.restart().await;
    let BatchResults { items, .. } = results(&host, &id).await;
    let BatchOutcome::Done(answer) = &items[0].outcome else { panic!("{items:?}") };
    assert_eq!(answer.usage.completion_tokens, 400);
}

#[tokio::test]
async fn cancelling_ends_unfinished_items_and_keeps_results() {
    let batch = BatchOptions { max_running: 1, ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let long = ChatOptions { max_tokens: Some(480), ignore_eos: true, ..ChatOptions::default() };
    let items = [vec![short("done")], vec![chat("long", long); 20]].concat();
    let id = queue(&host, "tiny", items).await.expect("room");
    until(async || (counts(&host, &id).await.done == 1).then_some(())).await;
    host.agents.cancel_batch(PRINCIPAL, &id).await.expect("known");
    let BatchResults { status, items } = results(&host, &id).await;
    assert!(matches!(status.phase, BatchPhase::Ended { cancelled: true, .. }));
    assert!(matches!(items[0].outcome, BatchOutcome::Done(_)), "{items:?}");
    // Some may have ended before the batch was cancelled.
    let ended = items.iter().take_while(|item| matches!(item.outcome, BatchOutcome::Done(_))).count();
    assert!(ended < items.len(), "{items:?}");
    assert!(items[ended..].iter().all(|item| matches!(item.outcome, BatchOutcome::Cancelled)), "{items:?}");
    let engine = host.agents.models().engines().next().expect("a local model");
    until(async || (engine.stats().running == 0).then_some(())).await;
    host.agents.cancel_batch(PRINCIPAL, &id).await.expect("cancelling again changes nothing");
}

#[tokio::test]
async fn batches_are_limited_and_private_to_their_owner() {
    let batch = BatchOptions { max_items: 2, max_batches: 1, ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    for (model, items, code) in [
        ("tiny", vec![], "invalid_batch"),
        ("tiny", vec![short("a"), short("b"), short("c")], "invalid_batch"),
        ("tiny", vec![BatchItem { reference: Some("r".repeat(257)), ..short("a") }], "invalid_batch"),
        ("huge", vec![short("a")], "model_unknown"),
        ("agent:none", vec![turn("a")], "agent_not_found"),
    ] {
        assert_eq!(queue(&host, model, items).await.expect_err(code).code(), code);
    }
    let id = queue(&host, "tiny", vec![short("a")]).await.expect("room");
    assert_eq!(queue(&host, "tiny", vec![short("b")]).await.expect_err("full").code(), "queue_full");
    let foreign = host.agents.batch("someone else", &id).await.expect_err("not theirs");
    assert_eq!(foreign.code(), "batch_not_found");
    assert_eq!(
        host.agents.cancel_batch("someone else", &id).await.expect_err("not theirs").code(),
        "batch_not_found"
    );
    assert_eq!(results(&host, &id).await.status.items.done, 1);
}

#[tokio::test]
async fn results_are_deleted_after_the_retention_and_make_room() {
    let batch = BatchOptions { max_batches: 1, retention: Duration::ZERO, ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let id = queue(&host, "tiny", vec![short("a")]).await.expect("room");
    let error = until(async || host.agents.batch(PRINCIPAL, &id).await.err()).await;
    assert_eq!(error.code(), "batch_not_found");
    queue(&host, "tiny", vec![short("b")]).await.expect("the deleted batch made room");
}

#[tokio::test]
async fn subscribers_receive_the_start_and_the_end_of_a_batch() {
    let host = Host::start().await;
    let trigger =
        "[[trigger.event]]\ntopic = \"cf.workersAi.model.batch.*\"\nsession = \"{data.payload.requestId}\"";
    host.deploy("w", trigger, waker()).await.expect("deployed");
    let good = queue(&host, "tiny", vec![short("a")]).await.expect("room");
    results(&host, &good).await;
    let too_long = chat("x", ChatOptions { max_tokens: Some(1 << 20), ..ChatOptions::default() });
    let bad = queue(&host, "tiny", vec![too_long]).await.expect("room");
    results(&host, &bad).await;
    let mut published = host.agents.events(None, 10).await.expect("listed");
    published.sort_by_key(|event| event.key);
    let names: Vec<_> =
        published.iter().map(|event| event.topic.rsplit('.').next().unwrap_or_default()).collect();
    assert_eq!(names, ["queued", "succeeded", "queued", "failed"]);
    let ended = published[1].data.as_ref().expect("the event has data").value();
    assert_eq!(
        (&ended["type"], &ended["payload"]),
        (&json!(published[1].topic), &json!({"requestId": good}))
    );
    assert_eq!(ended["source"], json!({"type": "workersAi.model", "modelName": "tiny"}));
    assert!(ended["metadata"]["eventTimestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{ended}");
    let failed = &published[3].data.as_ref().expect("the event has data").value()["payload"];
    assert_eq!((&failed["internalCode"], &failed["httpCode"]), (&json!(500), &json!(500)), "{failed}");
    // Each batch is a separate session of the agent, which received two events.
    until(async || (host.answer("w", &good, "E").await.len() == 2).then_some(())).await;
}

#[tokio::test]
async fn sessions_of_a_batch_are_deleted_with_its_results() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let id = queue(&host, "agent:echo", vec![turn("one"), turn("two")]).await.expect("room");
    results(&host, &id).await;
    host.answer("echo", "batch-of-mine", "hello").await;
    let sessions = async || {
        let sessions = host.agents.sessions(&Tenant::local(), "echo", None, 10).await.expect("known");
        sessions.into_iter().map(|session| session.id).collect::<Vec<_>>()
    };
    assert_eq!(sessions().await.len(), 3);
    let hours = |hours: u64| crate::Clock::default().now_ms() + hours * 3_600_000;
    host.agents.expire_sessions(hours(23)).await.expect("the call succeeds");
    assert_eq!(sessions().await.len(), 3);
    host.agents.expire_sessions(hours(25)).await.expect("the call succeeds");
    assert_eq!(sessions().await, ["batch-of-mine"], "only sessions created by the batch are deleted");
    let gone = host.agents.batch(PRINCIPAL, &id).await.expect_err("the batch is deleted by the expiry alone");
    assert_eq!(gone.code(), "batch_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_waits_for_the_load_of_its_model_without_an_attempt() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let slow = LocalModel::new("slow", "cpu", move |_: &LoadProgress| {
        held.lock().expect("not poisoned").recv().expect("the test releases it");
        Ok(tiny_engine("slow"))
    });
    let slow = LocalModel { load_wait: Duration::from_millis(50), ..slow };
    let batch = BatchOptions { max_attempts: 1, ..BatchOptions::default() };
    let models = ModelSet::new(tiny_engine("tiny")).with(slow);
    let host = Host::with_models(models, RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let waiting = queue(&host, "slow", vec![short("one")]).await.expect("room");
    let quick = queue(&host, "tiny", vec![short("two")]).await.expect("room");
    let BatchResults { status, .. } = results(&host, &quick).await;
    assert_eq!(status.items.done, 1, "items of other models do not wait for the load");
    // The item has been given back at least once when the model is loaded.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(counts(&host, &waiting).await.done, 0);
    release.send(()).expect("the loader waits");
    let BatchResults { status, items } = results(&host, &waiting).await;
    assert_eq!(status.items.done, 1, "{items:?}");
}
