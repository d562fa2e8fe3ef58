//! Tests of queueing, refusal, cancellation, deadlines, failure and shutdown.

use std::time::{Duration, Instant};

use skep_model::{Batch, CpuExecutor, Executor, ModelError, Sampling};

use super::executors::{Gate, Slow};
use super::fixture::{collect, engine, engine_with, first_token, generate, greedy, model};
use super::intercepted::{Intercepted, Interceptor};
use crate::{Engine, EngineError, EngineOptions, EraseScope, ModelSet, Priority, TokenEvent};

fn one_at_a_time(max_queue: usize) -> EngineOptions {
    EngineOptions { max_sequences: 1, max_queue, ..EngineOptions::default() }
}

/// Starts an engine whose requests get their first token, and run on once the gate is opened.
fn held(gate: &Gate, options: EngineOptions) -> Engine {
    let model = model(4096, |executor| Box::new(gate.guard_decodes(executor)));
    Engine::start(model, options).expect("the engine starts")
}

/// Starts an engine that takes seconds for an answer of 400 tokens.
fn slow() -> Engine {
    let token_time = Duration::from_millis(10);
    let model = model(4096, |executor| Box::new(Slow::default().guard(executor, token_time)));
    Engine::start(model, EngineOptions::default()).expect("the engine starts")
}

#[tokio::test]
async fn a_full_queue_refuses_with_an_estimate() {
    let gate = Gate::default();
    let engine = held(&gate, one_at_a_time(1));
    let mut running = engine.generate(greedy("running", 400)).unwrap();
    first_token(&mut running).await;
    let waiting = engine.generate(greedy("waiting", 4)).unwrap();
    let Err(EngineError::Busy { retry_after_ms }) = engine.generate(greedy("refused", 4)) else {
        panic!("a third request must be refused");
    };
    assert!((50..=30_000).contains(&retry_after_ms));
    drop(running);
    gate.open();
    assert_eq!(collect(waiting).await.unwrap().ids.len(), 4);
    assert_eq!(generate(&engine, greedy("accepted again", 4)).await.unwrap().ids.len(), 4);
}

#[tokio::test]
async fn room_counts_sequences_that_could_start_now() {
    let gate = Gate::default();
    let engine = held(&gate, EngineOptions { max_sequences: 3, ..EngineOptions::default() });
    let free_slots = || (engine.free_slots(Priority::Interactive), engine.free_slots(Priority::Background));
    assert_eq!(free_slots(), (3, 3));
    let mut background = greedy("in the background", 400);
    background.priority = Priority::Background;
    let background = engine.generate(background).unwrap();
    assert_eq!(free_slots(), (3, 1), "background work gives up its slot");
    let interactive = engine.generate(greedy("in the foreground", 400)).unwrap();
    assert_eq!(free_slots(), (2, 0));
    drop((background, interactive));
    gate.open();
    engine.drain(Duration::from_secs(60)).await;
    assert_eq!(free_slots(), (0, 0), "an engine that drains starts no request");
}

#[tokio::test]
async fn dropping_a_stream_frees_its_pages() {
    let engine = engine();
    for _ in 0..4 {
        let mut stream = engine.generate(greedy("cancelled in the middle of a long answer", 400)).unwrap();
        first_token(&mut stream).await;
    }
    drop(engine.generate(greedy("cancelled before it starts", 400)).unwrap());
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
    assert!(stats.generated_tokens < 1000, "cancelled sequences ran on: {stats:?}");
}

#[tokio::test]
async fn under_pressure_no_output_is_lost_and_all_pages_are_freed() {
    let engine = engine_with(
        320,
        EngineOptions { step_tokens: Some(48), max_sequences: 6, ..EngineOptions::default() },
    );
    let mut streams = Vec::new();
    for n in 0..48usize {
        let mut request =
            greedy(&format!("shared beginning of all {}", "x".repeat(n * 37 % 90)), 1 + n * 53 % 120);
        request.affinity.session = Some((n % 5).to_string());
        request.priority = if n % 3 == 0 { Priority::Background } else { Priority::Interactive };
        let wanted = request.max_tokens.unwrap();
        streams.push((n, wanted, engine.generate(request).unwrap()));
    }
    for (n, wanted, mut stream) in streams {
        if n % 4 == 1 {
            let _ = stream.next().await;
            continue;
        }
        assert_eq!(collect(stream).await.unwrap().ids.len(), wanted);
    }
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
    assert!(stats.preemptions > 0 && stats.cached_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn a_deadline_ends_running_and_waiting_requests() {
    let engine = engine_with(4096, one_at_a_time(8));
    let mut late = greedy("late", 400);
    late.deadline = Some(Instant::now());
    assert!(matches!(generate(&engine, late.clone()).await, Err(EngineError::DeadlineExceeded)));
    let mut running = engine.generate(greedy("running", 400)).unwrap();
    first_token(&mut running).await;
    assert!(matches!(generate(&engine, late).await, Err(EngineError::DeadlineExceeded)));
}

#[tokio::test]
async fn interactive_work_is_admitted_before_background_work_and_sessions_take_turns() {
    let gate = Gate::default();
    let engine = held(&gate, one_at_a_time(16));
    let mut running = engine.generate(greedy("running", 400)).unwrap();
    first_token(&mut running).await;
    let submit = |session: &str, priority| {
        let mut request = greedy("x", 1);
        request.affinity.session = Some(session.to_string());
        request.priority = priority;
        engine.generate(request).unwrap()
    };
    let queued = [
        ("background", submit("b", Priority::Background)),
        ("a1", submit("a", Priority::Interactive)),
        ("a2", submit("a", Priority::Interactive)),
        ("c1", submit("c", Priority::Interactive)),
    ];
    let (ended, mut order) = tokio::sync::mpsc::unbounded_channel();
    for (name, stream) in queued {
        let ended = ended.clone();
        tokio::spawn(async move {
            collect(stream).await.unwrap();
            ended.send(name).unwrap();
        });
    }
    // All tasks wait for their streams before any request can finish. The requests run one after the other, and this
    // runtime has one thread, so tasks continue in the order in which streams finish.
    tokio::task::yield_now().await;
    drop((running, ended));
    gate.open();
    let mut names = Vec::new();
    while let Some(name) = order.recv().await {
        names.push(name);
    }
    assert_eq!(names, ["a1", "c1", "a2", "background"]);
}

#[tokio::test]
async fn invalid_requests_are_refused_with_their_parameter() {
    let engine = engine_with(256, EngineOptions::default());
    let refused = |change: &dyn Fn(&mut crate::GenerateRequest)| {
        let mut request = greedy("prompt", 4);
        change(&mut request);
        engine.generate(request).expect_err("the request must be refused").to_string()
    };
    assert!(refused(&|r| r.prompt.clear()).contains("prompt"));
    assert!(refused(&|r| r.prompt.push(320)).contains("320"));
    assert!(refused(&|r| r.sampling.top_p = 7.0).contains("top_p"));
    assert!(refused(&|r| r.sampling.logit_bias = vec![(9999, 1.0)]).contains("9999"));
    assert!(refused(&|r| r.stop = vec![String::new()]).contains("stop"));
    assert!(refused(&|r| r.top_logprobs = Some(1000)).contains("top_logprobs"));
    assert!(refused(&|r| r.max_tokens = Some(251)).contains("256"));
    assert!(refused(&|r| r.max_tokens = Some(usize::MAX)).contains("256"));
    assert!(matches!(
        engine.generate(greedy(&"x".repeat(256), 1)),
        Err(EngineError::ContextOverflow { limit: 256, prompt: 256, requested: 1 })
    ));
}

#[tokio::test]
async fn the_longest_request_that_fits_runs_to_the_end_of_the_context() {
    let engine = engine_with(256, EngineOptions::default());
    let mut request = greedy("to the end", 0);
    request.max_tokens = None;
    assert_eq!(generate(&engine, request).await.unwrap().ids.len(), 246);
}

#[tokio::test]
async fn dropping_the_last_handle_ends_running_requests() {
    let engine = slow();
    let mut stream = engine.generate(greedy("running", 400)).unwrap();
    first_token(&mut stream).await;
    drop(engine);
    assert!(matches!(collect(stream).await, Err(EngineError::ShuttingDown)));
}

#[tokio::test]
async fn draining_lets_running_work_finish_and_refuses_new_work() {
    let engine = engine();
    let stream = engine.generate(greedy("running", 20)).unwrap();
    engine.drain(Duration::from_secs(60)).await;
    assert!(matches!(engine.generate(greedy("new", 1)), Err(EngineError::ShuttingDown)));
    assert_eq!(collect(stream).await.unwrap().ids.len(), 20);
}

#[tokio::test]
async fn draining_past_its_deadline_ends_running_requests() {
    let engine = slow();
    let mut stream = engine.generate(greedy("running", 400)).unwrap();
    first_token(&mut stream).await;
    engine.drain(Duration::ZERO).await;
    assert!(matches!(collect(stream).await, Err(EngineError::ShuttingDown)));
    assert_eq!(engine.stats().running, 0);
}

/// Fails the steps that hold the token `!`, and panics in those that hold `?`.
struct Flaky;

impl Interceptor for Flaky {
    fn forward(&mut self, executor: &mut CpuExecutor, batch: &Batch) -> Result<(), ModelError> {
        let holds = |byte: u8| batch.sequences.iter().any(|s| s.tokens.contains(&u32::from(byte)));
        assert!(!holds(b'?'), "a step that panics");
        if holds(b'!') {
            return executor.forward(&Batch {
                sequences: vec![skep_model::BatchSequence {
                    tokens: vec![1],
                    start: usize::MAX / 2,
                    pages: Vec::new(),
                    logits: skep_model::LogitsWanted::Last,
                }],
            });
        }
        executor.forward(batch)
    }
}

#[tokio::test]
async fn a_failed_step_fails_only_its_requests() {
    let model = model(4096, |executor| Box::new(Intercepted { executor, interceptor: Flaky }));
    let engine = Engine::start(model, EngineOptions::default()).unwrap();
    let letters = || {
        let mut request = greedy("fine", 6);
        request.sampling = Sampling {
            logit_bias: vec![(u32::from(b'!'), -100.0), (u32::from(b'?'), -100.0)],
            ..request.sampling
        };
        request
    };
    let expected = generate(&engine, letters()).await.unwrap().ids;
    for bad in ["fails!", "panics?"] {
        assert!(matches!(generate(&engine, greedy(bad, 4)).await, Err(EngineError::Failed(_))), "{bad}");
        assert_eq!(generate(&engine, letters()).await.unwrap().ids, expected);
    }
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}

#[tokio::test]
async fn a_model_set_finds_engines_by_name() {
    let models = ModelSet::new(engine());
    assert_eq!(models.get(None).unwrap().name(), "tiny");
    assert_eq!(models.get(Some("tiny")).unwrap().engine().unwrap().info().vocabulary_size, 320);
    let Err(EngineError::ModelUnknown { name, known }) = models.get(Some("huge")) else {
        panic!("no such model")
    };
    assert_eq!((name.as_str(), known), ("huge", vec!["tiny".to_string()]));
}

#[tokio::test]
async fn the_start_is_reported_before_anything_is_computed() {
    let engine = engine();
    let mut stream = engine.generate(greedy("started", 1)).unwrap();
    let started = TokenEvent::Started { prompt_tokens: 7, cached_tokens: 0 };
    assert_eq!(stream.next().await.unwrap().unwrap(), started);
}

/// The loop is held in a step, and its channel fills meanwhile.
#[tokio::test]
async fn a_drain_waits_for_a_loop_whose_channel_is_full() {
    let gate = Gate::default();
    let options = EngineOptions { max_queue: 1, ..EngineOptions::default() };
    let model = model(4096, |executor| Box::new(gate.guard(executor)));
    let engine = Engine::start(model, options).expect("the engine starts");
    let running = engine.generate(greedy("x", 4)).unwrap();
    // The channel takes 65 commands.
    let everyone = EraseScope::Everyone;
    let forgets = futures::future::join_all((0..200).map(|_| engine.forget_pages(&everyone)));
    let drained = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        engine.drain(Duration::from_secs(60)).await;
        assert_eq!(engine.stats().waiting + engine.stats().running, 0, "the drain did not wait");
    };
    let opened = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        gate.open();
    };
    let (_, (), (), ended) = tokio::join!(forgets, drained, opened, collect(running));
    assert_eq!(ended.unwrap().ids.len(), 4);
}
