//! Tests of the scheduler without an executor: the steps that it plans, with simulated step times.

use std::collections::HashMap;

use futures::FutureExt as _;
use skep_model::RowOutput;

use super::*;

use crate::generation_span::GenerationSpan;
use crate::keyed_hash::KeyedHash;
use crate::kv::PublishedPrefixes;
use crate::router::{LoadShare, ReplicaLoad};
use crate::sequence::{Draw, SequenceContext};
use crate::stream::{self, SpentTokens, TokenStream};
use crate::submission::Submission;
use crate::tests::dice::Dice;
use crate::tests::fixture::{byte_tokenizer, greedy};
use crate::{Affinity, GenerateRequest, TokenEvent};

pub(super) struct Harness {
    pub(super) scheduler: Scheduler,
    context: Arc<SequenceContext>,
    view: ReplicaView,
    streams: HashMap<u64, TokenStream>,
    submitted: u64,
    /// Ids in the order in which they finished.
    pub(super) finished: Vec<u64>,
    now: Instant,
}

/// The contents of one step: sequence ids and token counts.
pub(super) type Planned = Vec<(u64, usize)>;

impl Harness {
    pub(super) fn new(pages: usize, sequences: usize, tokens: usize) -> Self {
        Self::weighted(LiveSetting::default(), pages, sequences, tokens)
    }

    pub(super) fn weighted(
        weights: LiveSetting<Weights>,
        pages: usize,
        sequences: usize,
        tokens: usize,
    ) -> Self {
        let view = ReplicaView {
            load: Arc::new(ReplicaLoad::default()),
            prefixes: Arc::new(PublishedPrefixes::new(&KeyedHash::default())),
            telemetry: Telemetry::new("test", 0, pages),
            health: Arc::default(),
            page_count: pages,
            max_sequences: sequences,
        };
        let limits = StepLimits {
            tokens,
            sequences,
            logit_rows: 64,
            page_count: pages,
            target: Some(Duration::from_millis(50)),
        };
        let context = SequenceContext {
            tokenizer: Arc::new(byte_tokenizer()),
            eos: Vec::new(),
            vocabulary_size: 320,
            telemetry: view.telemetry.clone(),
        };
        Harness {
            scheduler: Scheduler::new(limits, &weights, None, &view),
            context: Arc::new(context),
            view,
            streams: HashMap::new(),
            submitted: 0,
            finished: Vec::new(),
            now: Instant::now(),
        }
    }

    pub(super) fn submit(&mut self, request: GenerateRequest) -> u64 {
        let id = self.submitted;
        self.submitted += 1;
        let max_tokens = request.max_tokens.unwrap();
        let (events, received) = stream::channel(max_tokens);
        let stream = TokenStream::new(
            received,
            (GenerationSpan::new("test", &request), None),
            SpentTokens::default(),
            Arc::default(),
        );
        let submission = Submission {
            max_tokens,
            matcher: None,
            drafter: None,
            checks: None,
            pages: None,
            spent: SpentTokens::default(),
            events,
            submitted: self.now,
            deadline: request.deadline.unwrap_or(self.now + Duration::from_secs(3600)),
            slot: self.view.telemetry.enter_queue("t", 10_000).unwrap(),
            load: LoadShare::take(&self.view.load, request.prompt.len(), request.priority),
            request,
        };
        self.streams.insert(id, stream);
        self.scheduler.submit(Sequence::new(SequenceId(id), submission, &self.context));
        id
    }

    /// Runs one iteration of the loop. A step takes 5 ms plus 1 ms for each prompt token alongside decodes.
    pub(super) fn step(&mut self) -> Planned {
        self.scheduler.end_interrupted(self.now);
        self.scheduler.admit();
        let plan = self.scheduler.plan();
        assert!(!plan.is_empty() || self.scheduler.running.is_empty(), "running sequences make progress");
        let planned: Planned = plan.iter().map(|planned| (planned.id.0, planned.tokens)).collect();
        let took = took(&planned);
        for planned in plan {
            self.scheduler.computed(planned.id, planned.tokens);
            let Some(sequence) = self.scheduler.sequence_mut(planned.id) else { continue };
            if sequence.pending() > 0 {
                continue;
            }
            let drawn = RowOutput { token: u32::from(b'x'), logprob: None, top: Vec::new() };
            let drawn = Draw { row: drawn, choices: 2, accepted: false };
            if let Some(ending) = sequence.append_sampled(drawn).transpose() {
                self.scheduler.end(planned.id, ending);
                self.finished.push(planned.id.0);
            }
        }
        self.scheduler.record_step_time(took);
        self.now += took;
        self.scheduler.check_integrity(std::iter::empty());
        planned
    }

    /// Runs until all sequences have finished; returns their ids in the order in which they finished.
    pub(super) fn run(&mut self) -> &[u64] {
        for _ in 0..100_000 {
            if self.scheduler.is_idle() {
                return &self.finished;
            }
            self.step();
        }
        panic!("the sequences do not finish");
    }

    /// Lets time pass in which nothing is computed.
    pub(super) fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    fn running(&self) -> Vec<u64> {
        self.scheduler.running.iter().map(|sequence| sequence.id.0).collect()
    }

    /// Returns the number of cached prompt tokens of an admitted sequence.
    pub(super) fn cached_tokens(&mut self, id: u64) -> u32 {
        let stream = self.streams.get_mut(&id).expect("it has not been cancelled");
        match stream.next().now_or_never() {
            Some(Some(Ok(TokenEvent::Started { cached_tokens, .. }))) => cached_tokens,
            other => panic!("sequence {id} has not started: {other:?}"),
        }
    }
}

fn took(planned: &Planned) -> Duration {
    let prefill: usize = planned.iter().map(|(_, tokens)| *tokens).filter(|tokens| *tokens > 1).sum();
    Duration::from_millis(5 + prefill as u64)
}

fn of(agent: &str, session: &str) -> GenerateRequest {
    let mut request = greedy("x", 1);
    request.affinity = Affinity {
        agent: Some(agent.to_string()),
        session: Some(session.to_string()),
        ..Affinity::default()
    };
    request
}

fn background(mut request: GenerateRequest) -> GenerateRequest {
    request.priority = Priority::Background;
    request
}

/// Returns a prompt of `shared` tokens that all such prompts begin with, and 20 tokens of its own.
fn prompt(shared: usize, own: u8) -> String {
    let mut text: String = (0..shared).map(|at| char::from(b'a' + (at % 23) as u8)).collect();
    text.extend(std::iter::repeat_n(char::from(own), 20));
    text
}

#[test]
fn a_sequence_marks_each_token_once_for_its_repetition_penalty() {
    // The prompt has 16 tokens, and one is drawn in each step.
    for (repetition_penalty, expected) in [(1.3, [17, 1, 1, 1]), (1.0, [0; 4])] {
        let mut harness = Harness::new(64, 1, 64);
        let mut request = greedy("once upon a time", 8);
        request.sampling.repetition_penalty = repetition_penalty;
        let id = SequenceId(harness.submit(request));
        let mut marked = Vec::new();
        for _ in expected {
            harness.step();
            marked.push(harness.scheduler.sequence_mut(id).expect("it is running").mark_seen());
        }
        assert_eq!(marked, expected);
    }
}

#[test]
fn a_sequence_counts_each_token_of_its_output_once_for_penalties() {
    for (frequency_penalty, presence_penalty, expected) in
        [(0.5, 0.0, [1; 4]), (0.0, -0.5, [1; 4]), (0.0, 0.0, [0; 4])]
    {
        let mut harness = Harness::new(64, 1, 64);
        let mut request = greedy("once upon a time", 8);
        request.sampling.frequency_penalty = frequency_penalty;
        request.sampling.presence_penalty = presence_penalty;
        let id = SequenceId(harness.submit(request));
        let mut counted = Vec::new();
        for _ in expected {
            harness.step();
            counted.push(harness.scheduler.sequence_mut(id).expect("it is running").count_output());
        }
        assert_eq!(counted, expected);
    }
}

#[test]
fn agents_and_their_sessions_take_turns() {
    let mut harness = Harness::new(8, 1, 16);
    for (agent, session) in [("a", "1"), ("a", "1"), ("a", "2"), ("a", "3"), ("b", "1")] {
        harness.submit(of(agent, session));
    }
    assert_eq!(harness.run(), [0, 4, 2, 3, 1]);
}

#[test]
fn waiting_interactive_work_preempts_background_work() {
    let mut harness = Harness::new(32, 2, 16);
    let first = harness.submit(background(greedy("background", 40)));
    let second = harness.submit(background(greedy("more of it", 40)));
    harness.step();
    assert_eq!(harness.running(), [first], "one slot is kept for interactive work");
    let chats = [harness.submit(greedy("a chat", 5)), harness.submit(greedy("another", 5))];
    harness.step();
    assert_eq!(harness.running(), chats);
    assert_eq!(harness.run()[2..], [first, second]);
    assert_eq!(harness.view.telemetry.stats().preemptions, 1);
}

#[test]
fn a_sequence_is_admitted_beside_others_only_if_all_their_windows_have_room() {
    // The running sequence will see four pages and the next one seven.
    for (pages, is_admitted) in [(10, false), (11, true)] {
        let mut harness = Harness::new(64, 4, 64);
        harness.scheduler.limit_windows(WindowLimits { window: 16, pages });
        harness.submit(greedy("0123456789", 50));
        harness.step();
        harness.submit(greedy(&"a".repeat(60), 50));
        harness.step();
        assert_eq!(harness.running().len(), 1 + usize::from(is_admitted), "{pages} pages");
        harness.run();
        assert_eq!(harness.view.telemetry.stats().preemptions, 0, "{pages} pages");
    }
}

#[test]
fn background_work_leaves_pages_for_interactive_work() {
    let mut harness = Harness::new(16, 4, 16);
    let request = |letter: &str| greedy(&letter.repeat(112), 16);
    harness.submit(background(request("a")));
    harness.submit(background(request("b")));
    harness.step();
    assert_eq!(harness.running(), [0]);
    harness.submit(request("c"));
    harness.step();
    assert_eq!(harness.running(), [0, 2]);
}

#[test]
fn a_request_waits_for_a_running_prefill_of_its_prefix() {
    let mut harness = Harness::new(200, 8, 64);
    for own in [b'1', b'2', b'3'] {
        harness.submit(greedy(&prompt(320, own), 4));
    }
    let other = harness.submit(greedy("something else", 4));
    harness.step();
    assert_eq!(harness.running(), [0, other], "only requests that share the prefix wait");
    while harness.running().len() < 3 {
        harness.step();
    }
    let cached = [0, 1, 2].map(|id| harness.cached_tokens(id));
    // The first follower starts when waiting for the last page or two would take longer than computing them.
    assert!(cached[0] == 0 && cached[1] >= 288 && cached[2] == 320, "{cached:?}");
    harness.run();
}

/// Returns a harness with 5 cached pages of a's and 5 newer ones of b's, where a running sequence needs 5 of them.
fn full_harness() -> Harness {
    let mut harness = Harness::new(16, 1, 64);
    for letter in ["a", "b"] {
        harness.submit(greedy(&letter.repeat(80), 1));
        harness.run();
    }
    harness.submit(greedy(&"c".repeat(16), 160));
    harness.step();
    harness
}

#[test]
fn pages_that_a_waiting_request_begins_with_are_evicted_last() {
    let mut harness = full_harness();
    let next = harness.submit(greedy(&"a".repeat(112), 1));
    harness.run();
    assert_eq!(harness.cached_tokens(next), 80);
}

#[test]
fn of_two_waiting_requests_the_first_keeps_its_pages() {
    let mut harness = full_harness();
    let waiting = ["a", "b"].map(|letter| harness.submit(greedy(&letter.repeat(112), 1)));
    harness.run();
    let cached = waiting.map(|id| harness.cached_tokens(id));
    assert!(cached[0] == 80 && cached[1] < 80, "{cached:?}");
}

#[test]
fn a_request_does_not_wait_if_computing_is_sooner() {
    let mut harness = Harness::new(200, 8, 64);
    harness.submit(greedy(&format!("{}{}", prompt(16, b'1'), "y".repeat(500)), 4));
    harness.submit(greedy(&prompt(16, b'2'), 4));
    harness.step();
    assert_eq!(harness.running(), [0, 1]);
    harness.run();
}

#[test]
fn requests_do_not_wait_for_a_background_prefill_or_another_tenant() {
    let mut harness = Harness::new(200, 8, 64);
    let mut of_other_tenant = greedy(&prompt(320, b'3'), 4);
    of_other_tenant.affinity.tenant = "other".to_string();
    harness.submit(background(greedy(&prompt(320, b'1'), 4)));
    harness.step();
    harness.submit(greedy(&prompt(320, b'2'), 4));
    harness.submit(of_other_tenant);
    harness.submit(background(greedy(&prompt(320, b'4'), 4)));
    harness.step();
    assert_eq!(harness.running(), [0, 1, 2]);
    harness.run();
}

#[test]
fn when_the_leader_is_cancelled_the_next_one_leads() {
    let mut harness = Harness::new(200, 8, 64);
    for own in [b'1', b'2', b'3'] {
        harness.submit(greedy(&prompt(320, own), 4));
    }
    harness.step();
    harness.step();
    harness.streams.remove(&0);
    harness.step();
    assert_eq!(harness.running(), [1], "it continues where the leader was");
    assert_eq!(harness.cached_tokens(1), 128);
    assert_eq!(harness.run(), [1, 2]);
    assert_eq!(harness.cached_tokens(2), 320);
}

#[test]
fn a_long_prompt_keeps_the_steps_of_decodes_short() {
    let mut harness = Harness::new(400, 8, 256);
    for own in b'1'..=b'4' {
        harness.submit(greedy(&prompt(0, own), 200));
    }
    // The first steps measure the durations of prefill and decodes.
    while harness.step().iter().any(|(_, tokens)| *tokens > 1) {}
    let long = harness.submit(greedy(&prompt(3000, b'5'), 4));
    let mut chunks = 0;
    loop {
        let planned = harness.step();
        let Some((_, chunk)) = planned.iter().find(|(id, _)| *id == long) else {
            panic!("the long prompt was passed over")
        };
        if *chunk == 1 {
            break;
        }
        chunks += 1;
        assert_eq!(planned.len(), 5, "every sequence gets a token in every step");
        assert!(took(&planned) <= Duration::from_millis(51), "{planned:?}");
    }
    assert!((60..=90).contains(&chunks), "chunks that fit the target: {chunks}");
}

#[test]
fn a_prompt_completes_in_a_step_that_would_leave_a_small_rest_of_it() {
    let mut harness = Harness::new(400, 8, 256);
    harness.scheduler.pace = StepPace::new(None);
    for own in b'1'..=b'4' {
        harness.submit(greedy(&prompt(0, own), 200));
    }
    while harness.step().iter().any(|(_, tokens)| *tokens > 1) {}
    // 24 tokens beside the decodes keep the derived target of 30 ms.
    let mut own = 'A'..;
    let mut chunks_of = |lengths: &[usize]| {
        let prompts = lengths.iter().zip(&mut own).map(|(length, own)| own.to_string().repeat(*length));
        let ids: Vec<u64> = prompts.map(|prompt| harness.submit(greedy(&prompt, 1))).collect();
        let mut chunks = Vec::new();
        while !ids.iter().all(|id| harness.finished.contains(id)) {
            let planned = harness.step();
            let own = planned.into_iter().filter(|(id, _)| ids.contains(id));
            chunks.push(own.map(|(_, tokens)| tokens).collect::<Vec<_>>());
        }
        chunks
    };
    assert_eq!(chunks_of(&[36]), [[36]]);
    assert_eq!(chunks_of(&[37]), [[24], [13]]);
    assert_eq!(
        chunks_of(&[24, 18]),
        [vec![18, 6], vec![18]],
        "the first to complete leaves the rest to the other"
    );
}

#[test]
fn background_work_beside_interactive_work_gets_few_tokens_in_turns() {
    let mut harness = Harness::new(400, 8, 256);
    let backgrounds: Vec<u64> =
        (b'1'..=b'3').map(|own| harness.submit(background(greedy(&prompt(0, own), 40)))).collect();
    while harness.step().iter().any(|(_, tokens)| *tokens > 1) {}
    assert_eq!(harness.step().len(), 3, "all of them decode when alone");
    let chat = harness.submit(greedy("a chat", 100));
    harness.submit(background(greedy(&prompt(200, b'4'), 4)));
    let mut tokens_of = HashMap::new();
    while !harness.finished.contains(&chat) {
        let planned = harness.step();
        assert!(planned.iter().any(|(id, _)| *id == chat), "the chat is in every step");
        let others = planned.iter().filter(|(id, _)| *id != chat);
        // A quarter of a step of 5 ms, in which a token takes 1 ms.
        assert_eq!(others.clone().map(|(_, tokens)| tokens).sum::<usize>(), 1, "{planned:?}");
        others.for_each(|(id, tokens)| *tokens_of.entry(*id).or_insert(0) += tokens);
    }
    let shares: Vec<usize> = backgrounds.iter().map(|id| tokens_of[id]).collect();
    assert!(shares.iter().all(|share| (30..=37).contains(share)), "they take turns: {tokens_of:?}");
    assert_eq!(harness.run().len(), 5, "all sequences finish");
}

#[test]
fn random_work_always_finishes_and_frees_all_pages() {
    for seed in 0..80 {
        let mut dice = Dice(seed);
        let pages = 6 + dice.roll(40);
        let sequences = 1 + dice.roll(6);
        let mut harness = Harness::new(pages, sequences, sequences.max(8) + dice.roll(60));
        let mut to_come = 40;
        for _ in 0..50_000 {
            if to_come > 0 && dice.roll(3) == 0 {
                to_come -= 1;
                let request = random_request(&mut dice, pages * skep_model::PAGE_TOKENS, harness.now);
                harness.submit(request);
            }
            if dice.roll(25) == 0 && harness.submitted > 0 {
                let cancelled = dice.roll(harness.submitted as usize) as u64;
                harness.streams.remove(&cancelled);
            }
            if to_come == 0 && harness.scheduler.is_idle() {
                break;
            }
            harness.step();
        }
        assert!(harness.scheduler.is_idle(), "seed {seed} does not finish");
        assert_eq!(harness.scheduler.kv.available_pages(), pages, "seed {seed}");
        assert_eq!(
            (harness.view.load.prefill_tokens(), harness.view.load.sequences()),
            (0, 0),
            "seed {seed}"
        );
        for (id, mut stream) in harness.streams {
            let events = std::iter::from_fn(|| stream.next().now_or_never().expect("the stream has ended"));
            let last = events.last();
            assert!(
                matches!(last, Some(Ok(TokenEvent::Finished(_)) | Err(EngineError::DeadlineExceeded))),
                "seed {seed}, sequence {id}: {last:?}"
            );
        }
    }
}

fn random_request(dice: &mut Dice, limit: usize, now: Instant) -> GenerateRequest {
    let max_tokens = 1 + dice.roll(limit / 2);
    let length = 1 + dice.roll(limit - max_tokens);
    let mut text = prompt(length * dice.roll(3) / 2, b'0' + dice.roll(10) as u8);
    text.truncate(length);
    let mut request = greedy(&text, max_tokens);
    request.affinity.tenant = ["one", "two"][dice.roll(8) / 7].to_string();
    request.affinity.agent = Some(dice.roll(3).to_string());
    request.affinity.session = Some(dice.roll(4).to_string());
    if dice.roll(3) == 0 {
        request.priority = Priority::Background;
    }
    if dice.roll(6) == 0 {
        request.deadline = Some(now + Duration::from_millis(dice.roll(3000) as u64));
    }
    request
}
