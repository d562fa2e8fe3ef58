//! Tests that starting the next step before its tokens are known changes no output, and that little of what is started
//! is wasted.

use std::time::Duration;

use futures::future::{join, join_all};
use serde_json::json;
use skep_model::Sampling;

use super::dice::Dice;
use super::executors::{Ahead, AheadCounts, Gate};
use super::fixture::{first_token, generate, greedy, ids_together, model};
use crate::{Constraint, Engine, EngineOptions, FinishReason, GenerateRequest, Speculation, TokenEvent};

fn engine(kv_tokens: usize, speculation: Speculation) -> (Engine, Ahead) {
    engine_after(kv_tokens, speculation, || {})
}

/// Starts an engine that calls a function ahead of each step.
fn engine_after<F>(kv_tokens: usize, speculation: Speculation, before: F) -> (Engine, Ahead)
where
    F: FnMut() + Send + 'static,
{
    let ahead = Ahead::default();
    let watched = ahead.clone();
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    let model = model(kv_tokens, move |executor| Box::new(watched.watch_after(executor, before)));
    (Engine::start(model, options).expect("the engine starts"), ahead)
}

fn requests() -> Vec<GenerateRequest> {
    let mut requests: Vec<_> =
        (0..4).map(|n| greedy(&format!("request {n} of several"), 30 + 40 * n)).collect();
    requests[1].stop = vec!["e".to_owned()];
    requests[2].top_logprobs = Some(2);
    requests
}

fn matching(pattern: &str, seed: u64) -> GenerateRequest {
    GenerateRequest {
        constraint: Some(Constraint::Regex(pattern.to_owned())),
        sampling: Sampling::default(),
        seed: Some(seed),
        ..greedy("output: ", 300)
    }
}

/// Checks that no page is lost once nothing runs.
async fn assert_all_pages_are_free(engine: &Engine) {
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!((stats.running, stats.pages_free), (0, stats.pages_total));
}

#[tokio::test]
async fn every_decode_step_of_a_single_sequence_is_started_ahead() {
    let (engine, ahead) = engine(4096, Speculation::Off);
    let run = generate(&engine, greedy("The quick brown fox", 40)).await.unwrap();
    let counts = ahead.counts();
    assert_eq!((run.ids.len(), counts.used, counts.forgotten), (40, 39, 0));
    let stats = engine.stats().ahead;
    assert_eq!((stats.steps, stats.partial_steps, stats.wasted_steps), (39, 0, 0));
    assert_eq!((stats.rows, stats.wasted_rows), (39, 0));
}

#[tokio::test]
async fn outputs_match_an_engine_without_lookahead() {
    let plain = super::fixture::engine();
    let expected = ids_together(&plain, &requests()).await;
    for (kv_tokens, speculation) in
        [(4096, Speculation::Off), (256, Speculation::Off), (4096, Speculation::prompt_lookup())]
    {
        let (engine, ahead) = engine(kv_tokens, speculation);
        assert_eq!(ids_together(&engine, &requests()).await, expected, "{kv_tokens} {speculation:?}");
        assert!(ahead.counts().used > 0, "{kv_tokens} {speculation:?}: {:?}", ahead.counts());
    }
}

/// Returns a request that ends with its token number `tokens`, which nobody knows before.
fn ending(prompt: &str, tokens: usize) -> GenerateRequest {
    let mut request = greedy(prompt, 100);
    request.sampling.logit_bias = vec![(u32::from(b'z'), 100.0)];
    request.stop = vec!["z".repeat(tokens)];
    request
}

#[tokio::test]
async fn a_step_whose_only_sequence_has_ended_is_wasted_and_holds_no_page() {
    let (engine, ahead) = engine(4096, Speculation::Off);
    let run = generate(&engine, ending("The quick brown fox", 3)).await.unwrap();
    assert_eq!(*run.reason(), FinishReason::Stop("zzz".to_owned()));
    // The answer is over before the step is.
    assert_all_pages_are_free(&engine).await;
    let stats = engine.stats().ahead;
    assert_eq!((ahead.counts().used, stats.steps, stats.wasted_steps, stats.wasted_rows), (2, 3, 1, 1));
}

#[tokio::test]
async fn a_step_keeps_the_rows_of_others_when_a_sequence_ends() {
    let requests = [greedy("a long request", 300), ending("a request that ends", 20)];
    let expected = ids_together(&super::fixture::engine(), &requests).await;
    let gate = Gate::default();
    let held = gate.clone();
    let (engine, ahead) = engine_after(4096, Speculation::Off, move || held.pass());
    // No step passes before both requests are there.
    let (found, ()) = join(ids_together(&engine, &requests), async { gate.open() }).await;
    assert_eq!(found, expected);
    assert_eq!(ahead.counts().forgotten, 0, "the long request continues in each step");
    let stats = engine.stats().ahead;
    assert_eq!((stats.wasted_rows, stats.wasted_steps), (1, 0), "{stats:?}");
    assert!(stats.partial_steps >= 1, "{stats:?}");
    assert_all_pages_are_free(&engine).await;
}

#[tokio::test]
async fn a_cancelled_sequence_gives_its_pages_back_once_the_started_step_is_over() {
    let long = [greedy("a long request", 300)];
    let expected = ids_together(&super::fixture::engine(), &long).await;
    let (engine, _) = engine(4096, Speculation::Off);
    let mut cancelled = engine.generate(greedy("a request that is cancelled", 300)).unwrap();
    let cancel = async move {
        first_token(&mut cancelled).await;
        drop(cancelled);
    };
    let (found, ()) = join(ids_together(&engine, &long), cancel).await;
    assert_eq!(found, expected);
    assert_all_pages_are_free(&engine).await;
}

/// Runs requests beside others that are constrained, and checks that they get the tokens that they get without
/// lookahead. Returns what was started meanwhile.
async fn counts_beside(free: &[GenerateRequest], constrained: &[GenerateRequest]) -> AheadCounts {
    let requests = [free, constrained].concat();
    let expected = ids_together(&super::fixture::engine(), &requests).await;
    let (engine, ahead) = engine(8192, Speculation::Off);
    // The constraints are compiled before, so that no request is late.
    ids_together(&engine, constrained).await;
    let before = ahead.counts();
    assert_eq!(ids_together(&engine, &requests).await, expected);
    let after = ahead.counts();
    AheadCounts {
        used: after.used - before.used,
        forgotten: after.forgotten - before.forgotten,
        known: after.known - before.known,
    }
}

#[tokio::test]
async fn masks_do_not_keep_steps_from_starting() {
    let constrained = [matching("[a-z]{70}", 1), matching("[0-9]{20}", 2)];
    let counts = counts_beside(&[greedy("free", 300)], &constrained).await;
    // The step that was started when the constraints were compiled may be forgotten now.
    assert!(counts.used >= 250 && counts.forgotten <= 1, "{counts:?}");
}

#[tokio::test]
async fn forced_tokens_are_computed_in_steps_that_start_ahead() {
    let counts = counts_beside(&[greedy("free", 300)], &[matching("([xy]abcdefghijkl){8}", 1)]).await;
    assert!(counts.known >= 7 && counts.used >= 250 && counts.forgotten <= 1, "{counts:?}");
}

#[tokio::test]
async fn a_sequence_with_drafts_does_not_keep_steps_of_many_others_from_starting() {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[a-z]{4,8}$"},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city", "units"],
        "additionalProperties": false,
    });
    let free: Vec<_> = (0..16).map(|n| greedy(&format!("free request {n}"), 200)).collect();
    let call = GenerateRequest { constraint: Some(Constraint::JsonSchema(schema)), ..matching("", 3) };
    let counts = counts_beside(&free, &[call]).await;
    assert!(counts.used >= 80 && counts.forgotten <= 2, "{counts:?}");
}

/// A request of a client, and the number of tokens after which it is cancelled.
#[derive(Clone)]
struct Turn {
    request: GenerateRequest,
    cancelled_after: Option<usize>,
}

/// Returns the turns of one client: tool calls with masks, free answers that end by themselves, and a few that are
/// cancelled, each after a prompt that begins as the one before it.
fn turns(dice: &mut Dice, count: usize) -> Vec<Turn> {
    let mut prompt = format!("client {} of several, with a prompt that is long enough. ", dice.roll(1000));
    let turn = |at: usize| {
        prompt += &"result ".repeat(dice.roll(8));
        let seed = dice.roll(1 << 20) as u64;
        let free = GenerateRequest {
            sampling: Sampling { temperature: 0.8, ..Sampling::default() },
            seed: Some(seed),
            ..greedy(&prompt, 8 + dice.roll(60))
        };
        let request = match (at + dice.roll(2)) % 4 {
            0 => GenerateRequest {
                constraint: Some(Constraint::Regex("(call [a-c]{2,9}\\(now\\);){1,3}".to_owned())),
                max_tokens: Some(90),
                ..free
            },
            1 => GenerateRequest { stop: vec!["e".to_owned(), "1".to_owned()], ..free },
            2 => GenerateRequest { top_logprobs: (dice.roll(6) == 0).then_some(1), ..free },
            _ => GenerateRequest { ignore_eos: false, ..free },
        };
        Turn { request, cancelled_after: (dice.roll(8) == 0).then(|| 1 + dice.roll(9)) }
    };
    (0..count).map(turn).collect()
}

/// Runs a client's turns one after the other, and returns the tokens that it got.
async fn run(engine: &Engine, turns: &[Turn]) -> Vec<Vec<u32>> {
    let mut outputs = Vec::new();
    for Turn { request, cancelled_after } in turns {
        let mut stream = engine.generate(request.clone()).unwrap();
        let (mut ids, most) = (Vec::new(), cancelled_after.unwrap_or(usize::MAX));
        while ids.len() < most
            && let Some(event) = stream.next().await
        {
            if let TokenEvent::Token(token) = event.unwrap() {
                ids.push(token.id);
            }
        }
        outputs.push(ids);
    }
    outputs
}

#[tokio::test]
async fn clients_that_come_end_and_cancel_get_the_same_tokens_and_few_steps_are_wasted() {
    let cases = [
        (4096, Speculation::Off),
        // Sequences are preempted for want of pages.
        (768, Speculation::Off),
        (4096, Speculation::prompt_lookup()),
    ];
    for (seed, (kv_tokens, speculation)) in cases.into_iter().enumerate() {
        let mut dice = Dice(seed as u64);
        let clients: Vec<_> = (0..8).map(|_| turns(&mut dice, 6)).collect();
        let plain = super::fixture::engine();
        let mut expected = Vec::new();
        for client in &clients {
            expected.push(run(&plain, client).await);
        }
        // Steps take long enough that the clients' turns overlap.
        let before = || std::thread::sleep(Duration::from_millis(1));
        let (engine, ahead) = engine_after(kv_tokens, speculation, before);
        let found = join_all(clients.iter().map(|client| run(&engine, client))).await;
        assert_eq!(found, expected, "seed {seed}");
        assert_all_pages_are_free(&engine).await;
        let (stats, counts) = (engine.stats(), ahead.counts());
        let steps = stats.ahead;
        // A last step may be wasted that no other follows.
        assert_eq!(counts.used as u64, steps.steps - steps.wasted_steps, "{kv_tokens} {speculation:?}");
        assert!(steps.wasted_steps.abs_diff(counts.forgotten as u64) <= 1, "{steps:?} {counts:?}");
        // If a step were of use only as a whole, the partial steps would be wasted too.
        println!(
            "{kv_tokens} tokens, {speculation:?}: {} steps, {} started ahead, {} of them wasted as wholes, {} by row, {} of {} rows wasted",
            stats.steps,
            steps.steps,
            steps.partial_steps + steps.wasted_steps,
            steps.wasted_steps,
            steps.wasted_rows,
            steps.rows,
        );
        if seed == 0 {
            assert!(steps.partial_steps > 10 && steps.wasted_steps * 4 < steps.partial_steps, "{steps:?}");
        }
    }
}
