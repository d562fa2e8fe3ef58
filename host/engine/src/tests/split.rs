//! Tests of prompts whose pages another engine computes: they change no output, each token is counted once, and what the other one
//! does not give is computed.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use skep_cache::{PageNamer, PageQuestion, PageStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::disk_pages::{bare, cached, prompt};
use super::fixture::{Generated, collect, executor_options, generate, greedy, model_with};
use crate::{
    Engine, EngineOptions, GenerateRequest, PagePeers, PageSink, PrefillOrder, PrefillReport, PrefillView,
    PrefilledPages, Priority, TokenEvent, TokenMeter,
};

/// The key that both hosts have.
const KEY: [u8; 32] = [7; 32];
/// Room for all pages of a test's prompt.
pub(super) const ALL_PAGES: usize = 256;

/// A sink that keeps a bounded number of pages.
#[derive(Debug)]
struct Kept {
    first: usize,
    most: usize,
    pages: Mutex<Vec<(usize, Vec<u8>)>>,
}

impl Kept {
    fn new(first: usize, most: usize) -> Arc<Kept> {
        Arc::new(Kept { first, most, pages: Mutex::default() })
    }

    fn numbers(&self) -> Vec<usize> {
        self.pages.lock().unwrap().iter().map(|(number, _)| *number).collect()
    }
}

impl PageSink for Kept {
    fn first_page(&self) -> usize {
        self.first
    }

    fn put(&self, page: usize, bytes: Vec<u8>) -> bool {
        let mut pages = self.pages.lock().unwrap();
        pages.push((page, bytes));
        pages.len() < self.most
    }
}

fn engine(options: EngineOptions) -> Engine {
    let mut model = model_with(executor_options(4096));
    model.digest.weights = "weights".to_owned();
    Engine::start(model, options).unwrap()
}

/// Computes a prompt for a sink.
async fn prefill(engine: &Engine, tokens: Vec<u32>, sink: Arc<dyn PageSink>) -> Generated {
    collect(engine.prefill(GenerateRequest::new(tokens), sink).unwrap()).await.unwrap()
}

#[tokio::test]
async fn pages_are_given_as_they_are_computed_and_from_the_cache() {
    let engine = engine(EngineOptions::default());
    let mut tokens = greedy(&prompt("a"), 1).prompt;
    tokens.truncate(tokens.len() / 16 * 16);
    let pages = tokens.len() / 16;
    let all = Kept::new(0, usize::MAX);
    let first = prefill(&engine, tokens.clone(), all.clone()).await;
    assert_eq!((first.finished.usage.completion_tokens, cached(&first)), (0, 0));
    assert_eq!(all.numbers(), (0..pages).collect::<Vec<_>>());
    let (_, page_bytes) = engine.page_layout(&PageNamer::new(KEY)).unwrap();
    assert!(all.pages.lock().unwrap().iter().all(|(_, bytes)| bytes.len() == page_bytes));
    // All but the last page come from the prefix tree now, and a sink gets no page that it does not want.
    let rest = Kept::new(3, usize::MAX);
    let again = prefill(&engine, tokens.clone(), rest.clone()).await;
    assert_eq!((cached(&again), rest.numbers()), ((pages - 1) * 16, (3..pages).collect::<Vec<_>>()));
    assert_eq!(rest.pages.lock().unwrap()[..pages - 4], all.pages.lock().unwrap()[3..pages - 1]);
    let few = Kept::new(0, 2);
    prefill(&engine, tokens, few.clone()).await;
    assert_eq!(few.numbers(), [0, 1], "nothing comes after the sink refuses");
}

/// A meter that adds up.
#[derive(Debug, Default)]
pub(super) struct Sum(AtomicUsize);

impl TokenMeter for Sum {
    fn count(&self, _tenant: &str, tokens: usize) {
        self.0.fetch_add(tokens, SeqCst);
    }
}

/// A host that computes prompts for another one.
pub(super) struct Other {
    engine: Engine,
    names: PageNamer,
    runtime: Handle,
    min_tokens: usize,
    /// Number of pages after which it is gone.
    lives_for: usize,
    /// The rate that it claims.
    tokens_per_s: Option<f64>,
    orders: AtomicUsize,
    /// Number of orders that may wait.
    in_background: AtomicUsize,
}

/// The sink of an order.
#[derive(Debug)]
struct Passing {
    first: usize,
    pages: UnboundedSender<Vec<u8>>,
}

impl PageSink for Passing {
    fn first_page(&self) -> usize {
        self.first
    }

    fn put(&self, _page: usize, bytes: Vec<u8>) -> bool {
        self.pages.send(bytes).is_ok()
    }
}

impl Other {
    pub(super) fn new(engine: Engine, min_tokens: usize, lives_for: usize) -> Arc<Other> {
        Self::with_rate(engine, min_tokens, lives_for, None)
    }

    pub(super) fn with_rate(
        engine: Engine,
        min_tokens: usize,
        lives_for: usize,
        tokens_per_s: Option<f64>,
    ) -> Arc<Other> {
        let (names, runtime) = (PageNamer::new(KEY), Handle::current());
        let (orders, in_background) = Default::default();
        Arc::new(Other { engine, names, runtime, min_tokens, lives_for, tokens_per_s, orders, in_background })
    }
}

impl fmt::Debug for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Other")
    }
}

impl PagePeers for Other {
    fn are_there(&self) -> bool {
        false
    }

    fn fetch_time(&self, bytes: u64) -> Duration {
        Duration::from_nanos(1_000 + bytes)
    }

    fn fetch(&self, _question: PageQuestion) -> Option<PageStream> {
        unreachable!("no host has pages")
    }

    fn names(&self) -> Option<&PageNamer> {
        Some(&self.names)
    }

    fn prefill_view(&self, model: &str) -> Option<PrefillView> {
        assert_eq!(model, "tiny");
        let Other { min_tokens, tokens_per_s, .. } = *self;
        Some(PrefillView { min_tokens, tokens_ahead: 0, tokens_per_s })
    }

    fn prefill(&self, order: PrefillOrder) -> Option<PrefilledPages> {
        self.orders.fetch_add(1, SeqCst);
        self.in_background.fetch_add(usize::from(order.priority == Priority::Background), SeqCst);
        assert_eq!(order.names, self.names.prefixes(&order.affinity.tenant, &order.tokens, 16));
        assert_eq!(order.question.names, order.names[order.first..]);
        assert_eq!(Some((order.question.layout, order.question.payload_bytes)), {
            self.engine.page_layout(&self.names)
        });
        let (pages, mut computed) = unbounded_channel();
        let sink = Arc::new(Passing { first: order.first, pages });
        let request = GenerateRequest { affinity: order.affinity, ..GenerateRequest::new(order.tokens) };
        let mut running = self.engine.prefill(request, sink).ok()?;
        let (sender, pages) = PageStream::bounded(ALL_PAGES);
        let report = Arc::<PrefillReport>::default();
        let (reported, lives_for) = (report.clone(), self.lives_for);
        self.runtime.spawn(async move {
            let Some(Ok(TokenEvent::Started { cached_tokens, .. })) = running.next().await else { return };
            reported.set_reused(cached_tokens as usize);
            reported.set_spent(Duration::from_millis(3));
            for _ in 0..lives_for {
                let Some(page) = computed.recv().await else { return };
                if sender.try_send(page).is_err() {
                    return;
                }
            }
        });
        Some(PrefilledPages { pages, report })
    }
}

/// Returns the options of an engine that has its prompts computed by another one.
pub(super) fn asking_options(other: &Arc<Other>, meter: &Arc<Sum>) -> EngineOptions {
    let peers: Arc<dyn PagePeers> = other.clone();
    let meter: Arc<dyn TokenMeter> = meter.clone();
    EngineOptions { peers: Some(peers), meter: Some(meter), ..EngineOptions::default() }
}

fn asking(other: &Arc<Other>, meter: &Arc<Sum>) -> Engine {
    engine(asking_options(other, meter))
}

#[tokio::test]
async fn a_prompt_that_another_engine_computes_gives_the_same_tokens_without_a_disk() {
    let (own, there) = (Arc::<Sum>::default(), Arc::<Sum>::default());
    let meter: Arc<dyn TokenMeter> = there.clone();
    let other =
        Other::new(engine(EngineOptions { meter: Some(meter), ..EngineOptions::default() }), 64, ALL_PAGES);
    let (here, reference) = (asking(&other, &own), bare());
    let request = greedy(&prompt("a"), 12);
    let expected = generate(&reference, request.clone()).await.unwrap();
    let found = generate(&here, request.clone()).await.unwrap();
    assert_eq!(found.ids, expected.ids);
    let whole = (request.prompt.len() - 1) / 16 * 16;
    let usage = found.finished.usage;
    assert_eq!((usage.cached_tokens, usage.prefilled_tokens as usize, usage.prefill_ms), (0, whole, 3));
    assert_eq!((other.orders.load(SeqCst), there.0.load(SeqCst)), (1, 0), "the other host counts nothing");
    assert_eq!(own.0.load(SeqCst), request.prompt.len() + 12, "each token counts here, and once");
    // The second answer finds the pages in memory, and the prompt after them is too short.
    let again = generate(&here, request).await.unwrap();
    assert_eq!((cached(&again), again.ids), (whole, expected.ids));
    assert_eq!((again.finished.usage.prefilled_tokens, other.orders.load(SeqCst)), (0, 1));
    here.drain(Duration::from_secs(60)).await;
    assert_eq!(here.stats().pages_free, here.stats().pages_total);
}

#[tokio::test]
async fn what_the_other_engine_had_cached_counts_as_cached() {
    let other = Other::new(engine(EngineOptions::default()), 64, ALL_PAGES);
    let request = greedy(&prompt("a"), 4);
    generate(&other.engine, request.clone()).await.unwrap();
    let whole = (request.prompt.len() - 1) / 16 * 16;
    let found = generate(&asking(&other, &Arc::default()), request).await.unwrap();
    // The token at the end of the last page that it gives is always computed.
    let usage = found.finished.usage;
    assert_eq!((usage.cached_tokens as usize, usage.prefilled_tokens), (whole - 16, 16));
}

#[tokio::test]
async fn what_the_other_engine_does_not_give_is_computed() {
    let reference = bare();
    let request = greedy(&prompt("a"), 12);
    let expected = generate(&reference, request.clone()).await.unwrap();
    for lives_for in [0, 1, 5] {
        let other = Other::new(engine(EngineOptions::default()), 64, lives_for);
        let found = generate(&asking(&other, &Arc::default()), request.clone()).await.unwrap();
        assert_eq!(found.ids, expected.ids, "it gave {lives_for} pages");
        let usage = found.finished.usage;
        assert_eq!((usage.prefilled_tokens as usize, usage.cached_tokens), (lives_for * 16, 0));
        assert_eq!(other.orders.load(SeqCst), 1, "nobody asks again");
    }
}

#[tokio::test]
async fn short_prompts_are_computed_here() {
    let request = greedy(&prompt("a"), 4);
    let other = Other::new(engine(EngineOptions::default()), request.prompt.len(), ALL_PAGES);
    let found = generate(&asking(&other, &Arc::default()), request).await.unwrap();
    assert_eq!((found.finished.usage.prefilled_tokens, other.orders.load(SeqCst)), (0, 0));
}

#[tokio::test]
async fn the_other_engine_learns_which_prompts_may_wait() {
    let other = Other::new(engine(EngineOptions::default()), 64, ALL_PAGES);
    let here = asking(&other, &Arc::default());
    for (name, priority, expected) in [("a", Priority::Background, 1), ("b", Priority::Interactive, 1)] {
        let request = GenerateRequest { priority, ..greedy(&prompt(name), 4) };
        generate(&here, request).await.unwrap();
        assert_eq!(other.in_background.load(SeqCst), expected, "{name}");
    }
    assert_eq!(other.orders.load(SeqCst), 2);
}
