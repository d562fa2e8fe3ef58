//! Tests of routing, seen from outside: by the requests that each replica has admitted.

use std::time::Duration;

use futures::future::join_all;

use super::executors::Gate;
use super::fixture::{collect, engine, generate, greedy, model, replicas};
use crate::{Engine, EngineError, EngineOptions, GenerateRequest, Routing, TokenEvent, TokenStream};

/// Seven pages of prompt.
const PROMPT: &str = "You are a careful assistant. You look things up before you answer, you answer in one short \
                      sentence, and you say so if you do not know.";

fn of_session(session: &str, prompt: &str) -> GenerateRequest {
    let mut request = greedy(prompt, 2);
    request.affinity.session = Some(session.to_string());
    request
}

/// Returns the number of prompt tokens that each replica has admitted.
fn admitted(engine: &Engine) -> Vec<u64> {
    engine.replica_stats().iter().map(|stats| stats.prompt_tokens).collect()
}

/// Returns the index of the replica that `request` goes to.
async fn replica_of(engine: &Engine, request: GenerateRequest) -> usize {
    let before = admitted(engine);
    generate(engine, request).await.expect("the request runs");
    let after = admitted(engine);
    (0..before.len()).find(|at| before[*at] != after[*at]).expect("some replica has admitted the request")
}

/// Starts replicas of which the first is blocked by a request until the gate opens.
async fn first_occupied(count: usize) -> (Engine, Gate, TokenStream) {
    let gate = Gate::default();
    let models = (0..count).map(|at| match at {
        0 => model(4096, |executor| Box::new(gate.guard(executor))),
        _ => model(4096, |executor| Box::new(executor)),
    });
    let engine = Engine::start_replicas(models.collect(), EngineOptions::default()).unwrap();
    let mut occupied = engine.generate(greedy("occupied", 2)).unwrap();
    started(&mut occupied).await;
    assert!(admitted(&engine)[0] > 0);
    (engine, gate, occupied)
}

/// Reads until the sequence is admitted.
async fn started(stream: &mut TokenStream) {
    assert!(matches!(stream.next().await, Some(Ok(TokenEvent::Started { .. }))));
}

#[tokio::test]
async fn a_session_stays_where_its_pages_are() {
    let (engine, gate, occupied) = first_occupied(2).await;
    assert_eq!(replica_of(&engine, of_session("a", "first turn")).await, 1);
    gate.open();
    collect(occupied).await.unwrap();
    assert_eq!(replica_of(&engine, of_session("b", "first turn of another")).await, 0);
    for turn in ["second turn", "a turn that has nothing in common with the others"] {
        assert_eq!(replica_of(&engine, of_session("a", turn)).await, 1);
    }
}

#[tokio::test]
async fn a_sub_agent_starts_on_the_home_of_its_parent() {
    let (engine, gate, occupied) = first_occupied(2).await;
    assert_eq!(replica_of(&engine, of_session("parent", PROMPT)).await, 1);
    gate.open();
    collect(occupied).await.unwrap();
    let mut child = of_session("child", "short");
    child.affinity.parent = Some("parent".to_string());
    assert_eq!(replica_of(&engine, child).await, 1);
    assert_eq!(replica_of(&engine, of_session("child", "short")).await, 1, "the child has its own home");
}

#[tokio::test]
async fn a_new_session_goes_where_its_prefix_is_cached() {
    let (engine, gate, occupied) = first_occupied(3).await;
    assert_eq!(replica_of(&engine, of_session("a", PROMPT)).await, 1);
    gate.open();
    collect(occupied).await.unwrap();
    let other = of_session("b", &format!("{PROMPT} Another question."));
    let usage = generate(&engine, other).await.unwrap().finished.usage;
    assert_eq!(usage.cached_tokens as usize, PROMPT.len());
}

#[tokio::test]
async fn a_burst_is_spread_before_any_of_it_has_run() {
    let gate = Gate::default();
    let models = (0..4).map(|_| model(4096, |executor| Box::new(gate.guard(executor)))).collect();
    let engine = Engine::start_replicas(models, EngineOptions::default()).unwrap();
    let prompts: Vec<String> = (0..8).map(|n| format!("{n} {PROMPT}")).collect();
    let streams: Vec<_> = prompts.iter().map(|prompt| engine.generate(greedy(prompt, 3)).unwrap()).collect();
    gate.open();
    join_all(streams.into_iter().map(collect)).await;
    let even = 2 * prompts[0].len() as u64;
    assert_eq!(admitted(&engine), [even; 4]);
}

#[tokio::test]
async fn round_robin_ignores_sessions() {
    let engine = replicas(3, EngineOptions { routing: Routing::RoundRobin, ..EngineOptions::default() });
    let mut order = Vec::new();
    for _ in 0..6 {
        order.push(replica_of(&engine, of_session("a", PROMPT)).await);
    }
    assert_eq!(order, [0, 1, 2, 0, 1, 2]);
}

#[tokio::test]
async fn all_replicas_give_the_same_output() {
    let expected = generate(&engine(), greedy(PROMPT, 30)).await.unwrap().ids;
    let engine = replicas(2, EngineOptions { routing: Routing::RoundRobin, ..EngineOptions::default() });
    for _ in 0..2 {
        assert_eq!(generate(&engine, greedy(PROMPT, 30)).await.unwrap().ids, expected);
    }
}

#[tokio::test]
async fn a_full_queue_moves_a_session_and_only_full_queues_refuse() {
    let gate = Gate::default();
    let models = (0..2).map(|_| model(4096, |executor| Box::new(gate.guard(executor)))).collect();
    let options = EngineOptions { max_sequences: 1, max_queue: 1, ..EngineOptions::default() };
    let engine = Engine::start_replicas(models, options).unwrap();
    let submit = || engine.generate(of_session("a", "a turn"));
    let mut running = submit().unwrap();
    started(&mut running).await;
    let waiting = submit().unwrap();
    let mut elsewhere = submit().unwrap();
    started(&mut elsewhere).await;
    assert!(admitted(&engine).iter().all(|tokens| *tokens > 0), "both replicas run requests of the session");
    let also_waiting = submit().unwrap();
    assert!(matches!(submit(), Err(EngineError::Busy { .. })));
    gate.open();
    for stream in [waiting, also_waiting] {
        assert_eq!(collect(stream).await.unwrap().ids.len(), 2);
    }
    drop((running, elsewhere));
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
}

#[tokio::test]
async fn replicas_must_be_of_one_model() {
    let models = vec![model(1024, |executor| Box::new(executor)), model(2048, |executor| Box::new(executor))];
    let error = Engine::start_replicas(models, EngineOptions::default()).unwrap_err();
    assert!(error.to_string().contains("not a replica"), "{error}");
    assert!(Engine::start_replicas(Vec::new(), EngineOptions::default()).is_err());
}

#[tokio::test]
async fn each_device_of_the_replicas_is_listed_once() {
    let mut models: Vec<_> = (0..3).map(|_| model(1024, |executor| Box::new(executor))).collect();
    models[0].device = "cuda:0".to_owned();
    let engine = Engine::start_replicas(models, EngineOptions::default()).unwrap();
    assert_eq!(engine.info().device, "cuda:0, cpu");
}
