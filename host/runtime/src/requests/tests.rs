//! Tests of the log: its bounded queue, deleted sessions, settings that change, and secrets that cannot be read.

use super::*;
use crate::SealingKey;
use metrics::{Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use skep_engine::{Ending, Observation, PromptMessage, RequestObserver, SpentTokens, Timing, Usage};
use skep_store::SecretRow;
use std::sync::atomic::AtomicU64;

/// Counts increments of one counter.
#[derive(Default)]
struct Dropped(Arc<Total>);

#[derive(Default)]
struct Total(AtomicU64);

impl CounterFn for Total {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Relaxed);
    }

    fn absolute(&self, _value: u64) {}
}

impl Recorder for Dropped {
    fn describe_counter(&self, _key: KeyName, _unit: Option<Unit>, _about: SharedString) {}
    fn describe_gauge(&self, _key: KeyName, _unit: Option<Unit>, _about: SharedString) {}
    fn describe_histogram(&self, _key: KeyName, _unit: Option<Unit>, _about: SharedString) {}

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        assert_eq!(key.name(), metric::REQUESTS_DROPPED);
        Counter::from_arc(self.0.clone())
    }

    fn register_gauge(&self, _key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

async fn log(
    mode: RequestLogMode,
    sealing_key: SealingKey,
) -> (RequestLog, impl Future<Output = ()> + Send + 'static) {
    let (store, clock) = (Store::for_tests().await.expect("a database in memory"), Clock::default());
    let options = RequestLogOptions { mode, body_bytes: 1 << 20, ..RequestLogOptions::default() };
    let vault = Arc::new(Vault::new(store.clone(), clock.clone(), sealing_key));
    RequestLog::new(options, (store, clock, Shutdown::default()), PriceList::default(), vault)
}

/// Begins a request of a session, with this text.
fn begin(log: &RequestLog, session: &str, text: &str) -> Box<dyn RequestObserver> {
    let mut origin = RequestOrigin::of_client("acme", None, Surface::Agent);
    (origin.source.agent, origin.source.session) = (Some("a".to_owned()), Some(session.to_owned()));
    let said = PromptMessage {
        role: "user",
        text: text.into(),
        reasoning: None,
        name: None,
        call_id: None,
        calls: Vec::new(),
    };
    log.observer(origin).expect("it is logged").request_started("m", &mut [said].into_iter())
}

fn end(mut request: Box<dyn RequestObserver>) {
    request.observe(Observation::Started { prompt_tokens: 3, cached_tokens: 1, cache_write_tokens: 0 });
    request.observe(Observation::Text("hello"));
    let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2, ..Usage::default() };
    let spent = SpentTokens { output: 2, unreported: Vec::new() };
    let timing = Timing { queue_us: 1_000, first_token_us: 2_000, total_us: 3_000 };
    request.request_ended(
        Ending::Finished { reason: "stop", usage: &usage, timing: &timing },
        spent,
        Vec::new(),
    );
}

async fn stored(log: &RequestLog) -> Vec<LoggedRequest> {
    log.flush().await;
    let page = log.page(&RequestFilter::default(), RequestRange::After(0), 1_000, true).await;
    page.expect("it can be read").requests
}

#[tokio::test]
async fn a_full_queue_drops_records_and_counts_them() {
    let recorder = Dropped::default();
    // Nobody reads these queues.
    let (many, _writer) = log(RequestLogMode::Metadata, SealingKey::InMemory).await;
    let (large, _writer) = log(RequestLogMode::Full, SealingKey::InMemory).await;
    metrics::with_local_recorder(&recorder, || {
        for _ in 0..QUEUE + 7 {
            end(begin(&many, "s", "hi"));
        }
        assert_eq!(recorder.0.0.swap(0, Relaxed), 7);
        let text = "x".repeat(1 << 20);
        for _ in 0..40 {
            end(begin(&large, "s", &text));
        }
        let dropped = recorder.0.0.load(Relaxed);
        assert_eq!(dropped, 40 - (QUEUE_BYTES >> 20) as u64 + 1, "and a message has a size of its own");
    });
}

#[tokio::test]
async fn requests_of_a_deleted_session_are_not_stored_afterwards() {
    let (log, writer) = log(RequestLogMode::Full, SealingKey::InMemory).await;
    tokio::spawn(writer);
    let (of_deleted, of_other) = (begin(&log, "s", "one"), begin(&log, "t", "two"));
    log.forget(Askers::Session { agent: "a".into(), session: "s".into() }).await;
    end(of_deleted);
    end(of_other);
    end(begin(&log, "s", "three"));
    let stored = stored(&log).await;
    let texts: Vec<_> =
        stored.iter().map(|request| &*request.body.as_ref().expect("a body").messages[0].text).collect();
    assert_eq!(texts, ["two", "three"]);
    let details = &stored[0].details;
    assert_eq!((details.queue_ms, details.first_token_ms, details.total_ms), (Some(1), Some(2), 3));
    let usage =
        LoggedUsage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2, ..LoggedUsage::default() };
    assert_eq!((details.usage, &details.cost), (Some(usage), &None));
}

#[tokio::test]
async fn settings_can_be_replaced_while_requests_run() {
    let (log, writer) = log(RequestLogMode::Full, SealingKey::InMemory).await;
    tokio::spawn(writer);
    let before = begin(&log, "s", "text");
    let metadata = RequestLogOptions { mode: RequestLogMode::Metadata, ..RequestLogOptions::default() };
    log.configure(metadata, PriceList::default());
    let after = begin(&log, "s", "text");
    end(before);
    end(after);
    let has_body: Vec<_> = stored(&log).await.iter().map(|request| request.has_body).collect();
    assert_eq!(has_body, [true, false]);
    log.configure(RequestLogOptions::default(), PriceList::default());
    assert!(log.observer(RequestOrigin::of_client("acme", None, Surface::Batch)).is_none(), "it is off");
}

#[tokio::test]
async fn no_text_is_stored_while_the_secrets_cannot_be_read() {
    let folder = tempfile::tempdir().expect("a folder");
    // A folder is not a key.
    let (log, writer) = log(RequestLogMode::Full, SealingKey::File(folder.path().to_owned())).await;
    tokio::spawn(writer);
    end(begin(&log, "s", "before there is a secret"));
    assert!(stored(&log).await[0].has_body);
    let secret = SecretRow {
        agent: None,
        name: "KEY".into(),
        hosts: "[\"*\"]".into(),
        sealed: vec![0; 64],
        updated_at_ms: 1,
    };
    log.inner.store.put_secret(&secret).await.expect("stored");
    end(begin(&log, "s", "a text that may hold the secret"));
    let stored = stored(&log).await;
    assert_eq!((stored.len(), stored[1].has_body, &*stored[1].status), (2, false, "ok"));
}
