//! Tests that a replica whose steps fail is avoided, and recovers by itself.

use std::time::{Duration, Instant};

use super::executors::Breaker;
use super::fixture::{generate, greedy, model};
use crate::{Engine, EngineError, EngineOptions};

fn engine(replicas: usize, breaker: &Breaker) -> Engine {
    let models = (0..replicas).map(|at| match at {
        0 => model(1024, |executor| Box::new(breaker.guard(executor))),
        _ => model(1024, |executor| Box::new(executor)),
    });
    Engine::start_replicas(models.collect(), EngineOptions::default()).unwrap()
}

async fn fails(engine: &Engine) {
    assert!(matches!(generate(engine, greedy("x", 1)).await, Err(EngineError::Failed(_))));
}

/// Waits until the engine is ready. The loop detects it by itself, so there is nothing else to wait for.
async fn becomes_ready(engine: &Engine) {
    let started = Instant::now();
    while engine.problem().is_some() {
        assert!(started.elapsed() < Duration::from_secs(60), "the engine stays broken");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_engine_reports_failing_steps_until_one_succeeds() {
    let breaker = Breaker::default();
    let engine = engine(1, &breaker);
    generate(&engine, greedy("x", 1)).await.unwrap();
    breaker.set_broken(true);
    fails(&engine).await;
    fails(&engine).await;
    assert_eq!(engine.problem(), None, "a failure or two may be the requests' fault");
    fails(&engine).await;
    assert!(engine.problem().unwrap().contains("the machine is broken"));
    breaker.set_broken(false);
    becomes_ready(&engine).await;
    generate(&engine, greedy("x", 1)).await.unwrap();
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}

#[tokio::test]
async fn requests_go_to_the_working_replica() {
    let breaker = Breaker::default();
    let engine = engine(2, &breaker);
    breaker.set_broken(true);
    for _ in 0..3 {
        fails(&engine).await;
    }
    assert_eq!(engine.problem(), None, "the other replica is ready");
    let mut at_home = greedy("x", 1);
    at_home.affinity.session = Some("moves".to_string());
    for _ in 0..4 {
        generate(&engine, at_home.clone()).await.unwrap();
    }
}

#[tokio::test]
async fn a_failure_reported_while_sampling_counts_against_the_executor() {
    let breaker = Breaker::default();
    let engine = Engine::start_replicas(
        vec![model(1024, |executor| Box::new(breaker.guard_late(executor)))],
        EngineOptions::default(),
    )
    .unwrap();
    breaker.set_broken(true);
    for _ in 0..3 {
        assert!(generate(&engine, greedy("x", 1)).await.is_err());
    }
    assert!(engine.problem().unwrap().contains("the device is gone"));
    breaker.set_broken(false);
    becomes_ready(&engine).await;
    generate(&engine, greedy("x", 1)).await.unwrap();
}
