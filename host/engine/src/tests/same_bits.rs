//! Tests that the tokens and log-probabilities of a request are bit-identical to those of the request alone,
//! whatever else the engine does.

use futures::future::{BoxFuture, join_all};
use skep_model::{ExecutorOptions, Sampling};

use super::dice::Dice;
use super::fixture::{
    Generated, collect, engine, executor_options, first_token, generate, greedy, model_with,
};
use crate::{DraftLimits, Engine, EngineOptions, EngineStats, GenerateRequest, Speculation};

const PROMPT: &str = "one two three, one two four, ";
/// Number of engines, each with another schedule.
const ROUNDS: u64 = 30;

/// Returns the requests to compare: greedy and drawn, and long enough for several blocks of attention. A model
/// with random weights repeats itself when it is restricted to a few letters, which gives drafts a chance.
fn observed() -> Vec<GenerateRequest> {
    let mut greedy = greedy(&PROMPT.repeat(7), 70);
    greedy.sampling.logit_bias = "abcd".bytes().map(|letter| (u32::from(letter), 4.0)).collect();
    greedy.top_logprobs = Some(3);
    let drawn = |seed: u64, sampling: Sampling| {
        let mut request = GenerateRequest { seed: Some(seed), sampling, ..greedy.clone() };
        request.prompt.truncate(100 + 20 * seed as usize);
        request
    };
    let base = greedy.sampling.clone();
    let warm = drawn(1, Sampling { temperature: 1.0, top_k: 3, ..base.clone() });
    let hot = drawn(2, Sampling { temperature: 1.5, top_p: 0.9, repetition_penalty: 1.05, ..base });
    vec![greedy, warm, hot]
}

/// All numbers that a caller receives.
type Bits = Vec<(u32, u32, Vec<(u32, u32)>)>;

fn bits(run: &Generated) -> Bits {
    let logprobs = run.logprobs.iter().zip(&run.ids);
    logprobs
        .map(|(logprob, id)| {
            let logprob = logprob.as_ref().expect("the request asked for it");
            let top = logprob.top.iter().map(|(id, logprob)| (*id, logprob.to_bits())).collect();
            (*id, logprob.logprob.to_bits(), top)
        })
        .collect()
}

/// Starts an engine whose threads, stages, replicas, pages, budget and drafts are random.
fn random_engine(dice: &mut Dice) -> (Engine, String) {
    let executor = ExecutorOptions {
        threads: Some(1 + dice.roll(3)),
        pipeline_parallel: 1 + dice.roll(2),
        ..executor_options([448, 4096][dice.roll(2)])
    };
    let speculation = match dice.roll(2) {
        0 => Speculation::Off,
        _ => Speculation::PromptLookup(DraftLimits { adaptive: false, ..DraftLimits::default() }),
    };
    let step_tokens = [None, Some(8), Some(17), Some(64)][dice.roll(4)];
    let options = EngineOptions { speculation, step_tokens, ..EngineOptions::default() };
    let replicas = 1 + dice.roll(2);
    let described = format!(
        "{replicas} replicas of {:?} threads, {} stages and {:?} KV tokens, steps of {step_tokens:?}, {speculation:?}",
        executor.threads, executor.pipeline_parallel, executor.kv_tokens
    );
    let models = (0..replicas).map(|_| model_with(executor.clone())).collect();
    (Engine::start_replicas(models, options).expect("the engine starts"), described)
}

/// Returns a request whose prompt may share a prefix with the compared requests.
fn neighbor(dice: &mut Dice) -> GenerateRequest {
    let mut request = greedy(&PROMPT.repeat(7), 1 + dice.roll(80));
    request.prompt.truncate(dice.roll(180));
    request.prompt.extend((0..1 + dice.roll(60)).map(|_| dice.roll(256) as u32));
    request.sampling = Sampling { temperature: dice.roll(2) as f32, ..Sampling::default() };
    request.seed = Some(dice.roll(1000) as u64);
    request
}

/// Runs the requests together with random neighbors, some of which are cancelled.
async fn among_others(engine: &Engine, dice: &mut Dice, requests: &[GenerateRequest]) -> Vec<Generated> {
    let mut all: Vec<BoxFuture<'_, Option<(usize, Generated)>>> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        for _ in 0..dice.roll(4) {
            let request = neighbor(dice);
            let stream = engine.generate(request).expect("there is room");
            let withdrawn = dice.roll(4);
            all.push(Box::pin(async move {
                let mut stream = stream;
                match withdrawn {
                    0 => drop(stream),
                    1 => first_token(&mut stream).await,
                    _ => drop(collect(stream).await.expect("the neighbor finishes")),
                }
                None
            }));
        }
        let stream = engine.generate(request.clone()).expect("there is room");
        all.push(Box::pin(
            async move { Some((index, collect(stream).await.expect("the request finishes"))) },
        ));
    }
    let mut runs: Vec<(usize, Generated)> = join_all(all).await.into_iter().flatten().collect();
    runs.sort_by_key(|(index, _)| *index);
    runs.into_iter().map(|(_, run)| run).collect()
}

#[tokio::test]
async fn tokens_and_log_probabilities_match_a_request_alone() {
    let requests = observed();
    let mut alone = Vec::new();
    for request in &requests {
        // Each request gets a fresh engine, so that nothing is cached.
        alone.push(bits(&generate(&engine(), request.clone()).await.unwrap()));
    }
    let seed = u64::from(std::process::id());
    let mut total = EngineStats::default();
    for round in 0..ROUNDS {
        let mut dice = Dice(seed << 8 | round);
        let (engine, described) = random_engine(&mut dice);
        for time in ["computed", "cached"] {
            let runs = among_others(&engine, &mut dice, &requests).await;
            for (index, (run, alone)) in runs.iter().zip(&alone).enumerate() {
                let same = bits(run) == *alone;
                assert!(same, "seed {seed}, round {round}, request {index}, {time}: {described}");
            }
        }
        let stats = engine.stats();
        total.preemptions += stats.preemptions;
        total.accepted_tokens += stats.accepted_tokens;
        total.rejected_tokens += stats.rejected_tokens;
        total.cached_tokens += stats.cached_tokens;
    }
    let met = [total.preemptions, total.accepted_tokens, total.rejected_tokens, total.cached_tokens];
    assert!(met.iter().all(|count| *count > 0), "one of the counts is zero: {total:?}");
}

#[tokio::test]
async fn prompt_scores_are_bit_identical_among_other_requests() {
    let mut request = greedy(&PROMPT.repeat(7), 1);
    request.prompt_logprobs = Some(2);
    let scores = |run: &Generated| -> Vec<Option<u32>> {
        let scores = run.prompt_logprobs.as_ref().expect("the request asked for them");
        scores.iter().map(|score| score.as_ref().map(|score| score.logprob.to_bits())).collect()
    };
    let alone = scores(&generate(&engine(), request.clone()).await.unwrap());
    assert_eq!(alone.len(), request.prompt.len());
    for round in 0..6 {
        let mut dice = Dice(u64::from(std::process::id()) << 8 | round);
        let (engine, described) = random_engine(&mut dice);
        let runs = among_others(&engine, &mut dice, std::slice::from_ref(&request)).await;
        assert_eq!(scores(&runs[0]), alone, "{described}");
    }
}
