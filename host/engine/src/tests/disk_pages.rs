//! Tests of the way of KV pages to the disk and back: what the disk gives changes no output, and what it cannot give is
//! computed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use skep_cache::{DiskTier, PageWrite, TierOptions};
use skep_model::{ExecutorOptions, KvDtype};

use super::executors::Gate;
use super::fixture::{
    Generated, collect, executor_options, first_token, generate, greedy, ids_together, model, model_with,
};
use crate::{Affinity, Engine, EngineOptions, EraseScope, GenerateRequest, PublicPart};

pub(super) fn open(folder: &Path) -> Arc<DiskTier> {
    Arc::new(DiskTier::open(TierOptions::for_tests(folder)).unwrap())
}

pub(super) fn engine_of(tier: Option<&Arc<DiskTier>>, executor: ExecutorOptions, weights: &str) -> Engine {
    let mut model = model_with(executor);
    model.digest.weights = weights.to_owned();
    Engine::start(model, EngineOptions { disk: tier.cloned(), ..EngineOptions::default() }).unwrap()
}

pub(super) fn engine(tier: &Arc<DiskTier>) -> Engine {
    engine_of(Some(tier), executor_options(4096), "weights")
}

pub(super) fn bare() -> Engine {
    engine_of(None, executor_options(4096), "weights")
}

/// Returns a prompt of about 20 pages that begins with `name`.
pub(super) fn prompt(name: &str) -> String {
    format!("{name}: {}", "a long system prompt, which every request begins with. ".repeat(6))
}

pub(super) fn cached(generated: &Generated) -> usize {
    generated.finished.usage.cached_tokens as usize
}

/// Waits until the pages of everything that ran are on the disk.
pub(super) async fn written(engine: &Engine, tier: &DiskTier, pages: u64) {
    let begun = Instant::now();
    while tier.status().pages < pages {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", tier.status());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    engine.drain(Duration::from_secs(60)).await;
    tier.flush();
}

/// Runs a first turn with the tier and ends its engine.
pub(super) async fn first_turn(folder: &Path) -> Generated {
    let tier = open(folder);
    let engine = engine(&tier);
    let first = generate(&engine, greedy(&prompt("a"), 24)).await.unwrap();
    written(&engine, &tier, (first_tokens(&first) / 16) as u64).await;
    first
}

/// Returns the number of tokens that a first turn computed; the last one was not.
pub(super) fn first_tokens(first: &Generated) -> usize {
    prompt("a").len() + first.ids.len() - 1
}

pub(super) fn second_turn(first: &Generated) -> GenerateRequest {
    let mut next = greedy(&prompt("a"), 24);
    next.prompt.extend(&first.ids);
    next.prompt.extend("And then?".bytes().map(u32::from));
    next
}

#[tokio::test]
async fn a_restarted_engine_continues_from_the_disk_with_the_same_tokens() {
    for kv in [KvDtype::F32, KvDtype::F16, KvDtype::I8] {
        let folder = tempfile::tempdir().unwrap();
        let with_kv = || ExecutorOptions { kv, ..executor_options(4096) };
        let reference = engine_of(None, with_kv(), "weights");
        let tier = open(folder.path());
        let before = engine_of(Some(&tier), with_kv(), "weights");
        let first = generate(&before, greedy(&prompt("a"), 24)).await.unwrap();
        assert_eq!(first.ids, generate(&reference, greedy(&prompt("a"), 24)).await.unwrap().ids);
        written(&before, &tier, (first_tokens(&first) / 16) as u64).await;
        drop((before, tier));

        let tier = open(folder.path());
        let after = engine_of(Some(&tier), with_kv(), "weights");
        let second = generate(&after, second_turn(&first)).await.unwrap();
        assert_eq!(cached(&second), first_tokens(&first) / 16 * 16, "{kv}");
        let expected = generate(&reference, second_turn(&first)).await.unwrap();
        assert_eq!(second.ids, expected.ids, "{kv}");
        assert_eq!(tier.status().read_pages, (first_tokens(&first) / 16) as u64);
    }
}

#[tokio::test]
async fn pages_of_other_weights_formats_and_tenants_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let other_format = ExecutorOptions { kv: KvDtype::F16, ..executor_options(4096) };
    for (executor, weights, tenant) in [
        (executor_options(4096), "other weights", ""),
        (other_format, "weights", ""),
        (executor_options(4096), "weights", "somebody else"),
    ] {
        let tier = open(folder.path());
        let engine = engine_of(Some(&tier), executor, weights);
        let mut next = second_turn(&first);
        next.affinity.tenant = tenant.to_owned();
        assert_eq!(cached(&generate(&engine, next).await.unwrap()), 0, "{weights} {tenant}");
    }
}

#[tokio::test]
async fn damaged_pages_are_computed_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let expected = generate(&bare(), second_turn(&first)).await.unwrap();
    let pages = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    let pages = pages.into_iter().find(|path| path.extension().is_some_and(|end| end == "pages")).unwrap();
    let mut bytes = std::fs::read(&pages).unwrap();
    let slots = first_tokens(&first) / 16;
    // A page in the middle, behind its header.
    let middle = bytes.len().next_multiple_of(4096) / slots * (slots / 2) + 200;
    bytes[middle..middle + 64].iter_mut().for_each(|byte| *byte ^= 0x55);
    std::fs::write(&pages, bytes).unwrap();
    let tier = open(folder.path());
    let engine = engine(&tier);
    let second = generate(&engine, second_turn(&first)).await.unwrap();
    assert_eq!(second.ids, expected.ids);
    assert!(cached(&second) < first_tokens(&first) / 16 * 16 && cached(&second) > 0, "{}", cached(&second));
    written(&engine, &tier, (first_tokens(&first) / 16) as u64).await;
    assert_eq!(tier.status().damaged_pages, 1);
}

#[tokio::test]
async fn a_slow_disk_and_a_full_one_change_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let expected = generate(&bare(), second_turn(&first)).await.unwrap();
    let tier = open(folder.path());
    tier.faults().read_delay_ms.store(6_000, SeqCst);
    tier.faults().disk_is_full.store(true, SeqCst);
    let engine = engine(&tier);
    let begun = Instant::now();
    let second = generate(&engine, second_turn(&first)).await.unwrap();
    // All pages would take longer than this, and a single one would be cached.
    assert!(begun.elapsed() < Duration::from_secs(20), "the request waited for the disk");
    assert_eq!((&second.ids, cached(&second)), (&expected.ids, 0));
    tier.faults().read_delay_ms.store(0, SeqCst);
    let third =
        generate(&engine, greedy("something else that is more than one page long", 24)).await.unwrap();
    assert_eq!(third.ids.len(), 24);
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}

#[tokio::test]
async fn each_page_that_a_full_queue_refuses_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let engine = engine(&tier);
    // The writer is busy with a page, and its queue is full.
    tier.faults().write_delay_ms.store(3_000, SeqCst);
    let (keys, bytes) = (tier.keys(), vec![1; 100]);
    let layout = tier.layout(keys.layout("weights", "form"), bytes.len()).unwrap();
    let names = keys.prefixes("t", &[7; 32], 16);
    let (tenant, owner) = (keys.tenant("t"), keys.owner(None, None));
    assert!(tier.write(PageWrite { layout, prefix: names[0], parent: None, tenant, owner, bytes }));
    (0..=1 << 14).for_each(|_| tier.mark(layout, names[1], owner));
    let first = generate(&engine, greedy(&prompt("a"), 8)).await.unwrap();
    engine.drain(Duration::from_secs(60)).await;
    tier.faults().write_delay_ms.store(0, SeqCst);
    tier.flush();
    let (status, pages) = (tier.status(), (first_tokens(&first) / 16) as u64);
    assert_eq!(status.written_pages + status.dropped_pages, 1 + pages, "{status:?}");
}

#[tokio::test]
async fn requests_with_the_same_prefix_read_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let tier = open(folder.path());
    let engine = engine(&tier);
    let requests: Vec<GenerateRequest> = (0..6)
        .map(|number| {
            let mut request = second_turn(&first);
            request.prompt.extend(format!(" {number}").bytes().map(u32::from));
            request
        })
        .collect();
    let expected = ids_together(&bare(), &requests).await;
    assert_eq!(ids_together(&engine, &requests).await, expected);
    assert_eq!(tier.status().read_pages, (first_tokens(&first) / 16) as u64);
}

#[tokio::test]
async fn pages_of_a_forgotten_session_are_erased_and_shared_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let engine = engine(&tier);
    let of = |session: &str, text: &str| {
        let mut request = greedy(text, 8);
        request.affinity = Affinity {
            tenant: "acme".into(),
            agent: Some("agent".into()),
            session: Some(session.into()),
            ..Affinity::default()
        };
        request
    };
    let shared = prompt("shared");
    let one = format!("{shared} {}", "the first session's own words ".repeat(3));
    let other = format!("{shared} {}", "and those of another ".repeat(3));
    generate(&engine, of("one", &one)).await.unwrap();
    generate(&engine, of("other", &other)).await.unwrap();
    let of_one = (one.len() + 7) / 16;
    let of_other = (other.len() + 7) / 16;
    let in_common = shared.len() / 16;
    written(&engine, &tier, (of_one + of_other - in_common) as u64).await;
    let session = EraseScope::Session { agent: "agent".into(), session: "one".into() };
    engine.forget_pages(&session).await;
    assert_eq!(session.erase_from(&tier).unwrap(), (of_one - in_common) as u64);
    assert_eq!(tier.status().pages, of_other as u64);
    let tenant = EraseScope::Tenant("acme".into());
    engine.forget_pages(&tenant).await;
    assert_eq!(tenant.erase_from(&tier).unwrap(), of_other as u64);
    assert_eq!(EraseScope::Everyone.erase_from(&tier).unwrap(), 0);
}

#[tokio::test]
async fn tenants_share_the_pages_of_a_public_part_and_nothing_beyond() {
    for (public, shared) in
        [(PublicPart::Nothing, 0), (PublicPart::Tokens(15), 0), (PublicPart::Tokens(111), 6)]
    {
        let folder = tempfile::tempdir().unwrap();
        let tier = open(folder.path());
        let of = |tenant: &str| {
            let mut request = greedy(&prompt("a"), 8);
            request.affinity = Affinity {
                tenant: tenant.into(),
                agent: Some("agent".into()),
                session: Some(format!("{tenant}'s")),
                public,
                ..Affinity::default()
            };
            request
        };
        let expected = generate(&bare(), of("one")).await.unwrap();
        let pages = (prompt("a").len() + expected.ids.len() - 1) / 16;
        let host = engine(&tier);
        assert_eq!(generate(&host, of("one")).await.unwrap().ids, expected.ids);
        written(&host, &tier, pages as u64).await;
        // Only the disk is shared by this host and the next ones.
        let host = engine(&tier);
        let other = generate(&host, of("other")).await.unwrap();
        assert_eq!((&other.ids, cached(&other)), (&expected.ids, shared * 16), "{public:?}");
        written(&host, &tier, (2 * pages - shared) as u64).await;
        let host = engine(&tier);
        let again = generate(&host, of("one")).await.unwrap();
        assert_eq!(cached(&again), (prompt("a").len() - 1) / 16 * 16, "{public:?}");
        written(&host, &tier, (2 * pages - shared) as u64).await;
        // The pages of a tenant and of a session are erased without the public ones, which belong to the agent.
        let session = EraseScope::Session { agent: "agent".into(), session: "other's".into() };
        for scope in [EraseScope::Tenant("one".into()), session] {
            assert_eq!(scope.erase_from(&tier).unwrap(), (pages - shared) as u64, "{public:?} {scope:?}");
        }
        assert_eq!(tier.status().pages, shared as u64);
        assert_eq!(EraseScope::Agent("agent".into()).erase_from(&tier).unwrap(), shared as u64);
    }
}

/// A caller that reads ahead does not know how long the public part is.
#[tokio::test]
async fn a_public_part_of_unknown_length_is_found_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let mut request = greedy(&prompt("a"), 8);
    request.affinity.public = PublicPart::Tokens(80);
    let host = engine(&tier);
    let first = generate(&host, request.clone()).await.unwrap();
    let pages = (request.prompt.len() + first.ids.len() - 1) / 16;
    written(&host, &tier, pages as u64).await;
    let affinity = Affinity { public: PublicPart::SystemMessage, ..request.affinity };
    let warmed = engine(&tier).warm(&affinity, request.prompt).await;
    assert_eq!((warmed.on_disk, warmed.read), (warmed.pages, warmed.pages), "{warmed:?}");
}

#[tokio::test]
async fn pages_of_a_forgotten_session_leave_memory_without_a_disk() {
    let engine = bare();
    let of = |session: &str| {
        let mut request = greedy(&prompt("a"), 8);
        request.affinity.agent = Some("agent".into());
        request.affinity.session = Some(session.into());
        request
    };
    generate(&engine, of("one")).await.unwrap();
    assert!(cached(&generate(&engine, of("one")).await.unwrap()) > 0);
    engine.forget_pages(&EraseScope::Session { agent: "agent".into(), session: "one".into() }).await;
    assert_eq!(cached(&generate(&engine, of("one")).await.unwrap()), 0);
    // Another session of the same agent has the same prompt, and keeps it.
    generate(&engine, of("other")).await.unwrap();
    engine.forget_pages(&EraseScope::Session { agent: "agent".into(), session: "one".into() }).await;
    assert!(cached(&generate(&engine, of("other")).await.unwrap()) > 0);
    engine.forget_pages(&EraseScope::Agent("agent".into())).await;
    assert_eq!(cached(&generate(&engine, of("other")).await.unwrap()), 0);
}

/// The session is deleted while its turn still runs, and the turn is canceled only then.
#[tokio::test]
async fn a_turn_that_ends_after_its_session_was_forgotten_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let gate = Gate::default();
    let model = model(4096, |executor| Box::new(gate.guard_decodes(executor)));
    let options = EngineOptions { disk: Some(tier.clone()), ..EngineOptions::default() };
    let engine = Engine::start(model, options).unwrap();
    let mut request = greedy(&prompt("a"), 170);
    request.affinity.agent = Some("agent".into());
    request.affinity.session = Some("one".into());
    let mut running = engine.generate(request.clone()).unwrap();
    first_token(&mut running).await;
    let session = EraseScope::Session { agent: "agent".into(), session: "one".into() };
    // The loop takes the command after the step that is held, and the turn has more steps than that.
    tokio::join!(engine.forget_pages(&session), async { gate.open() });
    assert_eq!(session.erase_from(&tier).unwrap(), 0);
    // From here on the turn has more whole pages than the one below.
    for _ in 0..40 {
        first_token(&mut running).await;
    }
    drop(running);
    request.max_tokens = Some(8);
    request.affinity.session = Some("two".into());
    assert_eq!(cached(&generate(&engine, request).await.unwrap()), 0);
    let of_two = ((prompt("a").len() + 7) / 16) as u64;
    written(&engine, &tier, of_two).await;
    assert_eq!(tier.status().written_pages, of_two, "no page of the forgotten session is written");
}

#[tokio::test]
async fn a_working_set_larger_than_memory_gives_the_same_tokens() {
    // 40 pages of memory, and eight conversations of 12 to 20 pages that take turns.
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let small = || executor_options(640);
    let (engine, reference) = (engine_of(Some(&tier), small(), "weights"), bare());
    let mut conversations: Vec<GenerateRequest> = (0..8)
        .map(|number| greedy(&format!("conversation {number}: {}", "words that stand there. ".repeat(7)), 12))
        .collect();
    for _ in 0..4 {
        for pair in conversations.chunks_mut(2) {
            let (got, expected) = tokio::join!(ids_together(&engine, pair), ids_together(&reference, pair));
            assert_eq!(got, expected);
            for (request, ids) in pair.iter_mut().zip(got) {
                request.prompt.extend(ids);
                request.prompt.extend(" Go on. ".bytes().map(u32::from));
            }
        }
    }
    engine.drain(Duration::from_secs(60)).await;
    tier.flush();
    let status = tier.status();
    assert!(status.written_pages > 40 && status.damaged_pages == 0, "{status:?}");
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}

/// Other sequences hold most pages while the request arrives; its prefix is looked up again when they have ended.
#[tokio::test]
async fn a_request_that_waits_for_room_still_reads_its_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let always = TierOptions { reads_always: true, ..TierOptions::for_tests(folder.path()) };
    let tier = Arc::new(DiskTier::open(always).unwrap());
    let prompt = prompt("waits");
    let engine_with_room = || engine_of(Some(&tier), executor_options(1024), "weights");
    let before = engine_with_room();
    let first = generate(&before, greedy(&prompt, 8)).await.unwrap();
    written(&before, &tier, (prompt.len() / 16) as u64).await;
    drop(before);
    let after = engine_with_room();
    // They take nearly all 64 pages.
    let mut large = ["x", "y"].map(|text| after.generate(greedy(&text.repeat(430), 60)).unwrap());
    for running in &mut large {
        first_token(running).await;
    }
    let waiting = after.generate(greedy(&prompt, 8)).unwrap();
    let large = large.map(async |mut stream| while stream.next().await.is_some() {});
    let (second, _) = tokio::join!(collect(waiting), futures::future::join_all(large));
    let second = second.unwrap();
    assert_eq!(second.ids, first.ids);
    assert_eq!(cached(&second), prompt.len().saturating_sub(1) / 16 * 16);
}
