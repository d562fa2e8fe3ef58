//! Tests of requests that compute the first of their pages while the others are read: their tokens are those of an engine without a
//! disk, each position is computed or read, and what the disk does not give in time is computed.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use skep_cache::DiskTier;

use super::disk_pages::{bare, cached, engine, open, written};
use super::executors::Slow;
use super::fixture::{Generated, collect, generate, greedy, model};
use crate::{Engine, EngineOptions, EraseScope, GenerateRequest, Phase, Timeline, TokenStream};

/// Time in which the engine of these tests computes a token.
const TOKEN_TIME: Duration = Duration::from_millis(4);
/// Time in which its disk reads a page, which takes 64 ms to compute.
const PAGE_MS: u64 = 24;
/// Number of pages that a request finds on the disk.
const PAGES: usize = 28;
/// Number of pages of another prompt on the disk.
const OTHER_PAGES: usize = 4;

/// Number of tokens with which the engine is measured.
const MEASURED_TOKENS: usize = 100;

/// A host that knows how fast it computes and reads, and has the pages of a prompt on its disk.
struct Paced {
    engine: Engine,
    tier: Arc<DiskTier>,
    slow: Slow,
    timeline: Arc<Timeline>,
    expected: Generated,
}

fn request() -> GenerateRequest {
    let text = format!("{:.455}", "a prompt that is long enough to be read and computed. ".repeat(9));
    let mut request = greedy(&text, 8);
    request.affinity.agent = Some("agent".into());
    request.affinity.session = Some("one".into());
    request
}

/// Writes the pages of two prompts, and calls `spoil` before a host with a slow disk and a slow executor finds them.
async fn paced(folder: &Path, spoil: impl FnOnce()) -> Paced {
    let other = greedy(&"another prompt, with which the disk is measured. ".repeat(2)[..66], 1);
    {
        let tier = open(folder);
        let before = engine(&tier);
        for request in [request(), other.clone()] {
            generate(&before, request).await.unwrap();
        }
        written(&before, &tier, (PAGES + OTHER_PAGES) as u64).await;
    }
    spoil();
    for letter in 'A'..='T' {
        if let Some(paced) = measured(folder, &other, letter).await {
            return paced;
        }
    }
    panic!("no host has measured the rates of its disk and its executor");
}

/// Opens a host, which measures its executor with a prompt of this letter and its disk with the `other` prompt. A letter is used
/// once, because its pages stay on the disk. Returns `None` if the measured rates are not near those of the delays, because a
/// thread has slept for longer: they decide how many pages a head start has.
async fn measured(folder: &Path, other: &GenerateRequest, letter: char) -> Option<Paced> {
    let tier = open(folder);
    let (slow, timeline) = (Slow::default(), Arc::<Timeline>::default());
    let guarded = slow.clone();
    let mut model = model(4096, move |executor| Box::new(guarded.guard(executor, TOKEN_TIME)));
    model.digest.weights = "weights".to_owned();
    let options = EngineOptions {
        disk: Some(tier.clone()),
        timeline: Some(timeline.clone()),
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options).unwrap();
    // The first step measures the executor, and the first pages measure the disk.
    generate(&engine, greedy(&letter.to_string().repeat(MEASURED_TOKENS), 1)).await.unwrap();
    tier.faults().read_delay_ms.store(PAGE_MS, SeqCst);
    let warmed = engine.warm(&other.affinity, other.prompt.clone()).await;
    assert_eq!(warmed.read, OTHER_PAGES, "{warmed:?}");
    let step = timeline.steps()[0];
    assert_eq!(step.work.tokens, MEASURED_TOKENS);
    let computed: Duration =
        [Phase::Forward, Phase::Masks, Phase::Sample].into_iter().map(|phase| step.took(phase)).sum();
    let (_, page_bytes) = engine.page_layout(tier.keys()).unwrap();
    let read = tier.read_time((PAGES * page_bytes) as u64);
    let is_near = |measured: Duration, expected: Duration| {
        (0.75..1.35).contains(&(measured.as_secs_f64() / expected.as_secs_f64()))
    };
    let compute_time = TOKEN_TIME * MEASURED_TOKENS as u32;
    let read_time = Duration::from_millis(PAGE_MS) * PAGES as u32;
    if !is_near(computed, compute_time) || !is_near(read, read_time) {
        return None;
    }
    slow.take();
    let expected = generate(&bare(), request()).await.unwrap();
    Some(Paced { engine, tier, slow, timeline, expected })
}

impl Paced {
    /// Asserts that a request has the tokens that it would have without a disk, began with a head start, and computed each position
    /// of its prompt once that was not cached. Returns the number of pages of the head start.
    fn check(&self, found: &Generated) -> usize {
        assert_eq!(found.ids, self.expected.ids);
        let (rows, length) = (self.slow.take(), request().prompt.len());
        let (start, head) = rows[0];
        assert_eq!((start, head % 16), (0, 0), "{rows:?}");
        assert!((4..PAGES / 2).contains(&(head / 16)), "{rows:?}");
        let in_prompt =
            |(start, tokens): &(usize, usize)| (start + tokens).min(length).saturating_sub(*start);
        let computed: usize = rows.iter().map(in_prompt).sum();
        assert_eq!(computed + cached(found), length, "{rows:?}");
        assert_eq!(rows[1].0, head + cached(found), "{rows:?}");
        head / 16
    }

    /// Starts a request, and returns it once a step has computed some of its pages.
    async fn begun(&self) -> TokenStream {
        let running = self.engine.generate(request()).unwrap();
        let begun = Instant::now();
        while self.slow.rows().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is computed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        running
    }

    /// Asserts that nothing holds pages once everything has ended.
    async fn holds_nothing(&self) {
        self.engine.drain(Duration::from_secs(60)).await;
        let stats = self.engine.stats();
        assert_eq!(stats.pages_free, stats.pages_total);
    }
}

#[tokio::test]
async fn a_request_computes_its_first_pages_while_the_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let paced = paced(folder.path(), || {}).await;
    let before = paced.timeline.steps().len();
    let found = generate(&paced.engine, request()).await.unwrap();
    let head = paced.check(&found);
    assert!(cached(&found) >= PAGES / 2 * 16, "{} tokens after {head} pages", cached(&found));
    // Those of the other prompt were taken after the last step before.
    let read: usize = paced.timeline.steps()[before..].iter().map(|step| step.work.read_pages).sum();
    assert_eq!((read - OTHER_PAGES) * 16, cached(&found));
    // All of it is in memory now.
    let again = generate(&paced.engine, request()).await.unwrap();
    assert_eq!((&again.ids, cached(&again)), (&found.ids, PAGES * 16));
    paced.holds_nothing().await;
}

#[tokio::test]
async fn a_head_start_ends_with_the_pages_before_a_damaged_one() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = PAGES * 3 / 4;
    let spoil = || {
        let files = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
        let pages =
            files.into_iter().find(|path| path.extension().is_some_and(|end| end == "pages")).unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(pages).unwrap();
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let slot = bytes.next_multiple_of(4096) / (PAGES + OTHER_PAGES);
        // Behind the header of the page.
        file.write_all_at(&[0x55; 64], (slot * damaged + 200) as u64).unwrap();
    };
    let paced = paced(folder.path(), spoil).await;
    let found = generate(&paced.engine, request()).await.unwrap();
    let head = paced.check(&found);
    assert_eq!(head + cached(&found) / 16, damaged);
    paced.tier.flush();
    assert_eq!(paced.tier.status().damaged_pages, 1);
    paced.holds_nothing().await;
}

#[tokio::test]
async fn a_request_computes_what_the_disk_gives_too_late() {
    let folder = tempfile::tempdir().unwrap();
    let paced = paced(folder.path(), || {}).await;
    paced.tier.faults().read_delay_ms.store(6_000, SeqCst);
    let found = generate(&paced.engine, request()).await.unwrap();
    paced.check(&found);
    assert_eq!(cached(&found), 0);
    paced.tier.faults().read_delay_ms.store(0, SeqCst);
    paced.holds_nothing().await;
}

#[tokio::test]
async fn a_request_that_is_canceled_during_its_head_start_leaves_its_first_pages() {
    let folder = tempfile::tempdir().unwrap();
    let paced = paced(folder.path(), || {}).await;
    drop(paced.begun().await);
    let head = paced.slow.take()[0].1;
    paced.tier.faults().read_delay_ms.store(0, SeqCst);
    // The read of the head start ends first.
    let warmed = paced.engine.warm(&request().affinity, request().prompt).await;
    assert_eq!((warmed.in_memory, warmed.read), (head / 16, PAGES - head / 16));
    let found = generate(&paced.engine, request()).await.unwrap();
    assert_eq!((&found.ids, cached(&found)), (&paced.expected.ids, PAGES * 16));
    paced.holds_nothing().await;
}

#[tokio::test]
async fn a_request_with_the_same_beginning_waits_for_the_head_start_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let paced = paced(folder.path(), || {}).await;
    let read = paced.tier.status().read_pages;
    let mut other = request();
    other.affinity.session = Some("two".into());
    let streams = [request(), other].map(|request| paced.engine.generate(request).unwrap());
    let [first, second] = streams.map(collect);
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!([&first.ids, &second.ids], [&paced.expected.ids; 2]);
    assert_eq!(cached(&second), PAGES * 16);
    assert!(cached(&first) < PAGES * 16, "it had no head start");
    let read = (paced.tier.status().read_pages - read) as usize;
    assert_eq!(read, cached(&first) / 16, "pages are read once");
    paced.holds_nothing().await;
}

#[tokio::test]
async fn a_session_that_is_forgotten_during_a_head_start_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let paced = paced(folder.path(), || {}).await;
    let running = paced.begun().await;
    let session = EraseScope::Session { agent: "agent".into(), session: "one".into() };
    paced.engine.forget_pages(&session).await;
    assert_eq!(collect(running).await.unwrap().ids, paced.expected.ids);
    paced.holds_nothing().await;
    let owners = paced.engine.page_owners().await;
    let left = owners.iter().flatten().find(|owner| owner.session.is_some());
    assert!(left.is_none(), "{left:?}");
}
