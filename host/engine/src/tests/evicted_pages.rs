//! Tests that pages are on their way to the disk before memory is short of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use skep_cache::{DiskTier, TierOptions};
use skep_model::Executor;

use super::disk_pages::{cached, open, written};
use super::executors::Gate;
use super::fixture::{collect, generate, greedy, ids_together, model};
use super::intercepted::{Intercepted, Interceptor};
use crate::{Engine, EngineOptions, GenerateRequest};

/// Takes longer to copy a page than copying may take between two steps.
struct SlowCopies;

impl Interceptor for SlowCopies {
    fn before_copies(&self) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn pages_are_copied_for_the_disk_before_steps_evict_them() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    // Forty pages of memory, and six prompts of 20 pages without a pause between them.
    let options = EngineOptions { disk: Some(tier.clone()), ..EngineOptions::default() };
    let slow =
        |executor| -> Box<dyn Executor> { Box::new(Intercepted { executor, interceptor: SlowCopies }) };
    let engine = Engine::start(model(640, slow), options).unwrap();
    let requests: Vec<GenerateRequest> = (0..6)
        .map(|number| greedy(&format!("conversation {number}: {}", "words that stand there. ".repeat(13)), 4))
        .collect();
    ids_together(&engine, &requests).await;
    let dropped = tier.status().dropped_pages;
    assert_eq!(dropped, 0, "{:?}", tier.status());
    let pages: usize = requests.iter().map(|request| (request.prompt.len() + 3) / 16).sum();
    written(&engine, &tier, pages as u64).await;
}

/// Its request is given up while it waits, so it never ends as one that runs.
#[tokio::test]
async fn the_pages_of_a_preempted_sequence_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let always = TierOptions { reads_always: true, ..TierOptions::for_tests(folder.path()) };
    let tier = Arc::new(DiskTier::open(always).unwrap());
    // Sixteen pages, of which both would need more together.
    let gate = Gate::default();
    let start = |pool| {
        let options = EngineOptions { disk: Some(tier.clone()), ..EngineOptions::default() };
        Engine::start(model(pool, |executor| Box::new(gate.guard(executor))), options).unwrap()
    };
    let engine = start(256);
    let older = "the older one ".repeat(3);
    let old = engine.generate(greedy(&older, 180)).unwrap();
    let prompt = "the younger one ".repeat(4);
    let young = engine.generate(greedy(&prompt, 180)).unwrap();
    let begun = Instant::now();
    while engine.stats().preemptions == 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "the pool is too large for the test to mean anything"
        );
        gate.let_one_pass();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The older one still runs, so the younger one waits.
    drop(young);
    gate.open();
    let old = collect(old).await.unwrap();
    let pages_of_old = (older.len() + old.ids.len() - 1) / 16;
    written(&engine, &tier, pages_of_old as u64 + 2).await;
    drop(engine);
    let after = start(4096);
    let again = generate(&after, greedy(&prompt, 4)).await.unwrap();
    assert!(cached(&again) >= 32, "{} tokens were cached: {:?}", cached(&again), tier.status());
}
