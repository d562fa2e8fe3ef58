//! Tests of pages that another host gives: they change no output, and what is not given as it should be is computed. The other
//! host is an engine with a disk of its own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use skep_cache::{
    DiskTier, PageQuestion, PageRead, PageStream, SealingSecret, TierOptions, TransferRate, TransitSeal,
};

use super::disk_pages::{bare, cached, first_tokens, prompt, second_turn, written};
use super::fixture::{Generated, collect, executor_options, generate, greedy, ids_together, model_with};
use crate::{Engine, EngineOptions, EraseScope, GenerateRequest, PagePeers, Warmed};

/// The key that both hosts have.
const KEY: [u8; 32] = [7; 32];

/// The way in which the other host answers when it is asked for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Gives,
    /// Changes a byte of the page with this number on its way.
    Changes(usize),
    /// Hands over fewer bytes than a page has.
    Cuts(usize),
    /// Ends before the page with this number.
    Dies(usize),
    /// Gives the pages before this one, and does not end.
    Hangs(usize),
}

/// The other host, as the engine asks it.
#[derive(Debug)]
struct Other {
    tier: Arc<DiskTier>,
    manner: Manner,
    questions: AtomicUsize,
    rate: TransferRate,
}

impl Other {
    fn new(tier: &Arc<DiskTier>, manner: Manner) -> Arc<Other> {
        let (tier, rate) = (tier.clone(), TransferRate::assumed(0.001, 1e9));
        Arc::new(Other { tier, manner, questions: AtomicUsize::new(0), rate })
    }

    fn questions(&self) -> usize {
        self.questions.load(SeqCst)
    }
}

impl PagePeers for Other {
    fn are_there(&self) -> bool {
        true
    }

    fn fetch_time(&self, bytes: u64) -> Duration {
        self.rate.estimate(bytes, Instant::now())
    }

    fn fetch(&self, question: PageQuestion) -> Option<PageStream> {
        self.questions.fetch_add(1, SeqCst);
        let question = PageQuestion::decode(&question.encode()).unwrap();
        let (sender, pages) = PageStream::bounded(4);
        let (tier, manner) = (self.tier.clone(), self.manner);
        std::thread::spawn(move || give(&tier, manner, &question, &sender));
        Some(pages)
    }
}

/// Gives the pages as hosts do: sealed, checked and opened. Ends at the first one that is missing or wrong.
fn give(
    tier: &DiskTier,
    manner: Manner,
    PageQuestion { layout, payload_bytes, names }: &PageQuestion,
    pages: &SyncSender<Vec<u8>>,
) -> Option<()> {
    let seal = TransitSeal::new(&SealingSecret(KEY));
    let found = tier.find_layout(*layout, *payload_bytes)?;
    let names = &names[..tier.leading(found, names)];
    let mut read = tier.read(found, names.to_vec())?;
    for (at, name) in names.iter().enumerate() {
        if manner == Manner::Hangs(at) {
            // Longer than a request waits.
            std::thread::sleep(Duration::from_secs(30));
        }
        if [Manner::Dies(at), Manner::Hangs(at)].contains(&manner) {
            return None;
        }
        let PageRead::Page(page) = read.next_within(Duration::from_secs(30)) else { return None };
        let mut image = seal.seal(*layout, *name, &page).unwrap();
        if manner == Manner::Changes(at) {
            *image.last_mut()? ^= 1;
        }
        let mut page = seal.open(*layout, *name, *payload_bytes, image).ok()?;
        if manner == Manner::Cuts(at) {
            page.pop();
        }
        pages.send(page).ok()?;
    }
    Some(())
}

/// Opens a tier whose pages are named as those of the other host.
fn open(folder: &Path) -> Arc<DiskTier> {
    let name_key = Some(SealingSecret(KEY));
    Arc::new(DiskTier::open(TierOptions { name_key, ..TierOptions::for_tests(folder) }).unwrap())
}

fn engine(tier: &Arc<DiskTier>, other: Option<&Arc<Other>>, weights: &str) -> Engine {
    let mut model = model_with(executor_options(4096));
    model.digest.weights = weights.to_owned();
    let peers = other.cloned().map(|other| other as Arc<dyn PagePeers>);
    let options = EngineOptions { disk: Some(tier.clone()), peers, ..EngineOptions::default() };
    Engine::start(model, options).unwrap()
}

/// A host that has computed a first turn, and the folder of one that has not.
struct Hosts {
    there: Arc<DiskTier>,
    first: Generated,
    own: tempfile::TempDir,
    _folder: tempfile::TempDir,
}

async fn hosts() -> Hosts {
    let [folder, own] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let there = open(folder.path());
    let engine = engine(&there, None, "weights");
    let first = generate(&engine, greedy(&prompt("a"), 24)).await.unwrap();
    written(&engine, &there, (first_tokens(&first) / 16) as u64).await;
    Hosts { there, first, own, _folder: folder }
}

/// Asserts that a host computes the second turn with the tokens that it would have without the other one. Returns how many
/// tokens it did not compute.
async fn second(first: &Generated, own: &Path, other: &Arc<Other>) -> usize {
    let expected = generate(&bare(), second_turn(first)).await.unwrap();
    let engine = engine(&open(own), Some(other), "weights");
    let second = generate(&engine, second_turn(first)).await.unwrap();
    assert_eq!(second.ids, expected.ids, "{:?}", other.manner);
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total, "{:?}", other.manner);
    cached(&second)
}

#[tokio::test]
async fn pages_of_another_host_are_used_with_the_same_tokens() {
    let hosts = hosts().await;
    let other = Other::new(&hosts.there, Manner::Gives);
    assert_eq!(second(&hosts.first, hosts.own.path(), &other).await, first_tokens(&hosts.first) / 16 * 16);
    assert_eq!(other.questions(), 1);
}

#[tokio::test]
async fn pages_that_another_host_gives_wrongly_are_computed() {
    let hosts = hosts().await;
    for (manner, pages) in
        [(Manner::Changes(5), 5), (Manner::Cuts(3), 3), (Manner::Dies(7), 7), (Manner::Dies(0), 0)]
    {
        let other = Other::new(&hosts.there, manner);
        let own = tempfile::tempdir().unwrap();
        assert_eq!(second(&hosts.first, own.path(), &other).await, pages * 16, "{manner:?}");
        assert_eq!(other.questions(), 1, "{manner:?}: nobody asks again");
    }
}

#[tokio::test]
async fn a_host_that_hangs_makes_a_request_wait_for_a_bounded_time() {
    let hosts = hosts().await;
    let other = Other::new(&hosts.there, Manner::Hangs(2));
    let begun = Instant::now();
    assert_eq!(second(&hosts.first, hosts.own.path(), &other).await, 2 * 16);
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for {:?}", begun.elapsed());
}

#[tokio::test]
async fn pages_of_other_weights_and_tenants_are_not_given() {
    let hosts = hosts().await;
    for (weights, tenant) in [("other weights", ""), ("weights", "somebody else")] {
        let other = Other::new(&hosts.there, Manner::Gives);
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(&open(folder.path()), Some(&other), weights);
        let mut next = second_turn(&hosts.first);
        next.affinity.tenant = tenant.to_owned();
        assert_eq!(cached(&generate(&engine, next).await.unwrap()), 0, "{weights} {tenant}");
        assert_eq!(other.questions(), 1);
    }
}

#[tokio::test]
async fn requests_with_the_same_prefix_fetch_it_once_and_ask_once_for_missing_pages() {
    let hosts = hosts().await;
    let with_tails = |request: &GenerateRequest| -> Vec<GenerateRequest> {
        let tails = (0..6).map(|number| {
            let mut request = request.clone();
            request.prompt.extend(format!(" {number}").bytes().map(u32::from));
            request
        });
        tails.collect()
    };
    for request in [second_turn(&hosts.first), greedy(&prompt("nobody has this"), 24)] {
        let requests = with_tails(&request);
        let other = Other::new(&hosts.there, Manner::Gives);
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(&open(folder.path()), Some(&other), "weights");
        let expected = ids_together(&bare(), &requests).await;
        assert_eq!(ids_together(&engine, &requests).await, expected);
        assert_eq!(other.questions(), 1);
    }
}

#[tokio::test]
async fn only_what_the_own_disk_lacks_is_fetched() {
    let hosts = hosts().await;
    let folder = tempfile::tempdir().unwrap();
    let beginning = "this is the beginning, which both hosts have. ".repeat(4);
    let long = beginning.clone() + &"the rest was computed by the other one only. ".repeat(5);
    let there = engine(&hosts.there, None, "weights");
    let before = hosts.there.status().pages;
    let expected = generate(&there, greedy(&long, 8)).await.unwrap();
    written(&there, &hosts.there, before + ((long.len() + 7) / 16) as u64).await;
    {
        let tier = open(folder.path());
        let here = engine(&tier, None, "weights");
        generate(&here, greedy(&beginning, 1)).await.unwrap();
        written(&here, &tier, (beginning.len() / 16) as u64).await;
    }
    let tier = open(folder.path());
    let other = Other::new(&hosts.there, Manner::Gives);
    let here = engine(&tier, Some(&other), "weights");
    let found = generate(&here, greedy(&long, 8)).await.unwrap();
    assert_eq!((found.ids.clone(), cached(&found)), (expected.ids, (long.len() - 1) / 16 * 16));
    assert_eq!((tier.status().read_pages, other.questions()), ((beginning.len() / 16) as u64, 1));
}

#[tokio::test]
async fn pages_of_another_host_are_read_ahead_of_a_turn() {
    let hosts = hosts().await;
    let other = Other::new(&hosts.there, Manner::Gives);
    let engine = engine(&open(hosts.own.path()), Some(&other), "weights");
    let next = second_turn(&hosts.first);
    let pages = first_tokens(&hosts.first) / 16;
    let warmed = engine.warm(&next.affinity, next.prompt[..pages * 16].to_vec()).await;
    assert_eq!(warmed, Warmed { pages, in_memory: 0, on_disk: 0, read: pages });
    assert_eq!(cached(&generate(&engine, next).await.unwrap()), pages * 16);
    assert_eq!(other.questions(), 1);
}

/// The other host may be gone when the turn comes, and the pages may be evicted before.
#[tokio::test]
async fn pages_that_were_fetched_ahead_of_a_turn_are_written_without_one() {
    let hosts = hosts().await;
    let tier = open(hosts.own.path());
    let engine = engine(&tier, Some(&Other::new(&hosts.there, Manner::Gives)), "weights");
    let next = second_turn(&hosts.first);
    let pages = first_tokens(&hosts.first) / 16;
    engine.warm(&next.affinity, next.prompt[..pages * 16].to_vec()).await;
    written(&engine, &tier, pages as u64).await;
}

/// Pages from another host are written to the own disk when their request ends, and belong to its session.
#[tokio::test]
async fn fetched_pages_belong_to_the_session_that_uses_them() {
    let hosts = hosts().await;
    let tier = open(hosts.own.path());
    let other = Other::new(&hosts.there, Manner::Gives);
    let engine = engine(&tier, Some(&other), "weights");
    let mut request = second_turn(&hosts.first);
    request.affinity.agent = Some("agent".into());
    request.affinity.session = Some("one".into());
    let answer = generate(&engine, request.clone()).await.unwrap();
    assert_eq!(cached(&answer), first_tokens(&hosts.first) / 16 * 16);
    let pages = ((request.prompt.len() + answer.ids.len() - 1) / 16) as u64;
    written(&engine, &tier, pages).await;
    let other_session = EraseScope::Session { agent: "agent".into(), session: "two".into() };
    assert_eq!(other_session.erase_from(&tier).unwrap(), 0);
    let of_agent = ["one", "of which nobody knows"].map(str::to_owned).into();
    let session = EraseScope::Sessions(Arc::new([("agent".to_owned(), of_agent)].into()));
    engine.forget_pages(&session).await;
    assert_eq!(session.erase_from(&tier).unwrap(), pages);
    assert!(engine.page_owners().await.iter().all(Vec::is_empty), "nothing stays in memory");
}

/// The session is deleted while its pages arrive.
#[tokio::test]
async fn pages_that_arrive_for_a_deleted_session_do_not_stay() {
    let hosts = hosts().await;
    let tier = open(hosts.own.path());
    let other = Other::new(&hosts.there, Manner::Hangs(5));
    let engine = engine(&tier, Some(&other), "weights");
    let mut request = second_turn(&hosts.first);
    request.affinity.agent = Some("agent".into());
    request.affinity.session = Some("one".into());
    let running = engine.generate(request).unwrap();
    while other.questions() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Pages that arrived before the deletion are dropped with it, and later ones when their request ends.
    let session = EraseScope::Session { agent: "agent".into(), session: "one".into() };
    engine.forget_pages(&session).await;
    collect(running).await.unwrap();
    engine.drain(Duration::from_secs(60)).await;
    tier.flush();
    assert_eq!(tier.status().written_pages, 0);
    assert!(engine.page_owners().await.iter().all(Vec::is_empty), "nothing stays in memory");
}
