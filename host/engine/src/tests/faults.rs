//! Tests that an executor which fails for good is replaced, and that requests continue with the other one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

use skep_cache::{DiskTier, TierOptions};
use skep_model::{Executor, LoadedModel, ModelError, Restart};

use super::disk_pages::{engine_of, prompt, written};
use super::executors::DeviceLoss;
use super::fixture::{
    collect, engine_with, executor, executor_options, first_token, generate, greedy, ids_together, model,
};
use crate::{Constraint, Engine, EngineError, EngineOptions, TokenEvent};

const KV_TOKENS: usize = 1024;

/// Returns a model that can lose its device, and whose replacements can as well. The first `failures` attempts to start one
/// fail.
fn fragile(loss: &DeviceLoss, failures: usize) -> (LoadedModel, Arc<AtomicUsize>) {
    let (attempts, of_restart) = (Arc::new(AtomicUsize::new(0)), loss.clone());
    let counted = attempts.clone();
    let restart: Restart = Arc::new(move || {
        if counted.fetch_add(1, Relaxed) < failures {
            let reason = "it is used by another program".to_string();
            return Err(ModelError::Option { option: "device".to_string(), problem: reason });
        }
        Ok(Box::new(of_restart.guard(executor(KV_TOKENS).1)) as Box<dyn Executor>)
    });
    let model = model(KV_TOKENS, |executor| Box::new(loss.guard(executor)));
    (LoadedModel { restart: Some(restart), ..model }, attempts)
}

fn start(model: LoadedModel) -> Engine {
    Engine::start(model, EngineOptions::default()).expect("the engine starts")
}

/// Waits until the engine is ready. The loop starts the executor by itself, so there is nothing else to wait for.
async fn becomes_ready(engine: &Engine) {
    let started = Instant::now();
    while engine.problem().is_some() {
        assert!(started.elapsed() < Duration::from_secs(60), "the engine stays broken");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn requests_continue_with_the_executor_that_replaces_a_lost_one() {
    let requests = || {
        let mut constrained = greedy("a constrained answer", 24);
        constrained.constraint = Some(Constraint::Regex("[a-z]{24}".to_string()));
        [greedy("the first prompt", 24), greedy("another one", 24), constrained]
    };
    let expected = ids_together(&engine_with(KV_TOKENS, EngineOptions::default()), &requests()).await;
    for steps in [0, 1, 7] {
        let loss = DeviceLoss::default();
        let (model, attempts) = fragile(&loss, 0);
        let engine = start(model);
        // Pages of an earlier request are cached, and are lost as well.
        generate(&engine, greedy("the first prompt", 2)).await.unwrap();
        loss.lose_after(steps);
        assert_eq!(ids_together(&engine, &requests()).await, expected, "lost after {steps} steps");
        assert_eq!((attempts.load(Relaxed), engine.problem()), (1, None));
        engine.drain(Duration::from_secs(60)).await;
        let stats = engine.stats();
        assert_eq!(stats.pages_free, stats.pages_total);
    }
}

#[tokio::test]
async fn an_engine_without_an_executor_is_not_ready_and_tries_again_until_it_has_one() {
    let loss = DeviceLoss::default();
    let (model, attempts) = fragile(&loss, 1);
    let engine = start(model);
    loss.lose_after(3);
    let mut running = engine.generate(greedy("a long answer", 8)).unwrap();
    first_token(&mut running).await;
    let waited = Instant::now();
    let problem = loop {
        match engine.problem() {
            Some(problem) if problem.contains("attempt 1") => break problem,
            _ => assert!(waited.elapsed() < Duration::from_secs(60), "the attempt never fails"),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    assert!(problem.contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{problem}");
    assert!(problem.contains("the next one is in 1 s: device: it is used by another program"), "{problem}");
    assert_eq!(engine.fault(), Some(problem));
    becomes_ready(&engine).await;
    assert_eq!(attempts.load(Relaxed), 2);
    let mut rest = 0;
    while let Some(event) = running.next().await {
        rest += usize::from(matches!(event.unwrap(), TokenEvent::Token(_)));
    }
    assert_eq!(rest, 7, "the first token was taken before");
}

#[tokio::test]
async fn a_request_that_meets_two_losses_in_a_row_is_ended_and_others_continue() {
    let loss = DeviceLoss::default();
    let (model, attempts) = fragile(&loss, 0);
    let (replace, of_replacement) = (model.restart.clone().unwrap(), loss.clone());
    // The loss of the first replacement is set before it computes anything, so that the request cannot end before.
    let restart: Restart = Arc::new(move || {
        let replaced = replace();
        if attempts.load(Relaxed) == 1 {
            of_replacement.lose_after(1);
        }
        replaced
    });
    let engine = start(LoadedModel { restart: Some(restart), ..model });
    loss.lose_after(1);
    let suspect = engine.generate(greedy("a long answer", 200)).unwrap();
    let error = collect(suspect).await.expect_err("it may be the cause");
    assert!(matches!(&error, EngineError::Failed(reason) if reason.contains("CUDA_ERROR_ECC")), "{error}");
    assert_eq!(generate(&engine, greedy("y", 4)).await.unwrap().ids.len(), 4);
}

#[tokio::test]
async fn requests_get_a_retry_delay_while_no_executor_replaces_a_lost_one() {
    let loss = DeviceLoss::default();
    let engine = start(model(KV_TOKENS, |executor| Box::new(loss.guard(executor))));
    loss.lose_after(0);
    for _ in 0..2 {
        let error = generate(&engine, greedy("x", 4)).await.expect_err("it has no executor");
        let EngineError::ModelLoading { retry_after_ms, progress, .. } = &error else { panic!("{error}") };
        assert!(*retry_after_ms > 0 && progress.contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{error}");
    }
    assert!(engine.problem().is_some());
    engine.drain(Duration::from_secs(60)).await;
}

/// The other executor has nothing in the pages that were read from the disk before.
#[tokio::test]
async fn pages_of_a_read_under_way_are_lost_with_the_executor() {
    let folder = tempfile::tempdir().unwrap();
    let always = TierOptions { reads_always: true, ..TierOptions::for_tests(folder.path()) };
    let tier = Arc::new(DiskTier::open(always).unwrap());
    let of = |tier| engine_of(tier, executor_options(KV_TOKENS), "weights");
    let (other, stored) = (greedy("x", 4), greedy(&prompt("b"), 24));
    let requests = [other.clone(), stored.clone()];
    let expected = ids_together(&of(None), &requests).await;
    let before = of(Some(&tier));
    generate(&before, stored.clone()).await.unwrap();
    let pages = (stored.prompt.len() / 16) as u64;
    written(&before, &tier, pages).await;
    drop(before);

    tier.faults().read_delay_ms.store(200, SeqCst);
    let loss = DeviceLoss::default();
    let (mut model, attempts) = fragile(&loss, 0);
    model.digest.weights = "weights".to_owned();
    let options = EngineOptions { disk: Some(tier.clone()), ..EngineOptions::default() };
    let engine = Engine::start(model, options).expect("the engine starts");
    let stored = engine.generate(stored).unwrap();
    let begun = Instant::now();
    // The last of these pages may still wait to be taken, and the ones before are in memory.
    while tier.status().read_pages < 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is read");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    loss.lose_after(0);
    let other = engine.generate(other).unwrap();
    while attempts.load(Relaxed) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the executor is never replaced");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(tier.status().read_pages < pages, "the read ended before the loss");
    tier.faults().read_delay_ms.store(0, SeqCst);
    let (other, stored) = tokio::join!(collect(other), collect(stored));
    assert_eq!([other.unwrap().ids, stored.unwrap().ids], expected[..]);
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}
