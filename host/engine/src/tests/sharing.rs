//! Tests of the operator's weights and meter in a running engine.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};

use super::executors::Gate;
use super::fixture::{collect, engine_with, generate, greedy, model};
use crate::{Engine, EngineOptions, LiveSetting, Priority, TokenMeter, Weights};

#[tokio::test]
async fn weights_decide_whose_requests_start() {
    let gate = Gate::default();
    let weight = |weight| NonZeroU32::new(weight).unwrap();
    let weights = Weights { agents: [("much".to_string(), weight(3))].into(), ..Weights::default() };
    let options =
        EngineOptions { max_sequences: 1, weights: LiveSetting::new(weights), ..EngineOptions::default() };
    let engine = Engine::start(model(4096, |executor| Box::new(gate.guard(executor))), options).unwrap();
    let started = engine.generate(greedy("runs while the others come", 2)).unwrap();
    let mut ended = FuturesUnordered::new();
    for _ in 0..12 {
        for agent in ["little", "much"] {
            let mut request = greedy("x", 2);
            request.affinity.agent = Some(agent.to_string());
            let stream = engine.generate(request).unwrap();
            ended.push(async move {
                collect(stream).await.unwrap();
                agent
            });
        }
    }
    // From now on the streams are polled in the order in which the engine wakes them, and so finish in the
    // engine's order.
    assert!(ended.next().now_or_never().is_none(), "the gate holds all of them");
    gate.open();
    collect(started).await.unwrap();
    let first: Vec<&str> = ended.take(12).collect().await;
    assert_eq!(first.iter().filter(|agent| **agent == "much").count(), 9, "{first:?}");
}

#[derive(Debug, Default)]
struct Counted(Mutex<HashMap<String, usize>>);

impl TokenMeter for Counted {
    fn count(&self, tenant: &str, tokens: usize) {
        *self.0.lock().unwrap().entry(tenant.to_string()).or_default() += tokens;
    }
}

#[tokio::test]
async fn the_meter_counts_the_uncached_tokens_of_each_tenant() {
    let counted = Arc::new(Counted::default());
    let engine =
        engine_with(4096, EngineOptions { meter: Some(counted.clone()), ..EngineOptions::default() });
    let request = |tenant: &str, max_tokens| {
        let mut request = greedy(&"a prompt of some length ".repeat(5), max_tokens);
        request.affinity.tenant = tenant.to_string();
        request
    };
    let mut expected = HashMap::new();
    for (tenant, max_tokens) in [("one", 7), ("one", 20), ("two", 1), ("two", 0)] {
        let usage = generate(&engine, request(tenant, max_tokens)).await.unwrap().finished.usage;
        let got = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens;
        *expected.entry(tenant.to_string()).or_default() += got as usize;
    }
    let mut background = request("one", 5);
    background.priority = Priority::Background;
    generate(&engine, background).await.unwrap();
    assert_eq!(*counted.0.lock().unwrap(), expected);
    assert!(expected["one"] < 2 * 120 + 27, "the second prompt was cached: {expected:?}");
}
