//! Tests of the shares that agents and tenants get while all of them want more than there is.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use super::tests::Harness;
use crate::tests::fixture::greedy;
use crate::{GenerateRequest, LiveSetting, Weights};

/// Tenant and agent.
type Who = (&'static str, &'static str);

fn weights(tenants: &[(&str, u32)], agents: &[(&str, u32)]) -> Weights {
    let named = |weights: &[(&str, u32)]| -> BTreeMap<String, NonZeroU32> {
        weights.iter().map(|(name, weight)| (name.to_string(), NonZeroU32::new(*weight).unwrap())).collect()
    };
    Weights { tenants: named(tenants), other_tenants: None, agents: named(agents) }
}

fn request((tenant, agent): Who, prompt: &str, max_tokens: usize) -> GenerateRequest {
    let mut request = greedy(prompt, max_tokens);
    request.affinity.tenant = tenant.to_string();
    request.affinity.agent = Some(agent.to_string());
    request
}

/// The scheduler, and the sender of each request.
struct Contest {
    harness: Harness,
    weights: LiveSetting<Weights>,
    senders: HashMap<u64, Who>,
    /// The tokens of each sequence that has started.
    begun: HashMap<u64, usize>,
}

impl Contest {
    fn new(weights: Weights, sequences: usize, tokens: usize) -> Self {
        let weights = LiveSetting::new(weights);
        let harness = Harness::weighted(weights.clone(), 4_000, sequences, tokens);
        Contest { harness, weights, senders: HashMap::new(), begun: HashMap::new() }
    }

    fn send(&mut self, who: Who, count: usize, prompt: usize, max_tokens: usize) {
        for _ in 0..count {
            // Long prompts must not begin alike, or they wait for each other.
            let letter = char::from(b'a' + (self.senders.len() % 26) as u8).to_string();
            let id = self.harness.submit(request(who, &letter.repeat(prompt), max_tokens));
            self.senders.insert(id, who);
        }
    }

    /// Runs `steps` steps and returns the number of tokens that each sender computes.
    fn tokens(&mut self, steps: usize) -> HashMap<Who, usize> {
        let mut tokens = HashMap::new();
        for _ in 0..steps {
            for (id, count) in self.harness.step() {
                *tokens.entry(self.senders[&id]).or_default() += count;
                *self.begun.entry(id).or_default() += count;
            }
        }
        tokens
    }
}

fn assert_near(tokens: &HashMap<Who, usize>, shares: &[(Who, f64)]) {
    let total = tokens.values().sum::<usize>() as f64;
    for (who, share) in shares {
        let got = tokens.get(who).copied().unwrap_or(0) as f64 / total;
        assert!((got - share).abs() < 0.02, "{who:?} got {got:.3} of {share:.3}: {tokens:?}");
    }
}

const A: Who = ("t", "a");
const B: Who = ("t", "b");

#[test]
fn busy_agents_get_tokens_by_weight() {
    for (weight, share) in [(1, 0.5), (2, 2.0 / 3.0), (4, 0.8), (9, 0.9)] {
        let mut contest = Contest::new(weights(&[], &[("a", weight)]), 4, 64);
        contest.send(B, 400, 8, 20);
        contest.send(A, 400, 8, 20);
        assert_near(&contest.tokens(1_000), &[(A, share), (B, 1.0 - share)]);
    }
}

#[test]
fn replaced_weights_apply_from_then_on() {
    let mut contest = Contest::new(weights(&[], &[("a", 4)]), 4, 64);
    contest.send(B, 800, 8, 20);
    contest.send(A, 800, 8, 20);
    assert_near(&contest.tokens(1_000), &[(A, 0.8), (B, 0.2)]);
    contest.weights.replace(weights(&[], &[("b", 4)]));
    assert_near(&contest.tokens(1_000), &[(A, 0.2), (B, 0.8)]);
}

#[test]
fn agents_share_tokens_rather_than_turns() {
    let mut contest = Contest::new(Weights::default(), 4, 64);
    contest.send(A, 400, 8, 40);
    contest.send(B, 400, 8, 4);
    let tokens = contest.tokens(1_000);
    // A prompt token costs half of a drawn token.
    let cost_of_a_token = |max_tokens: f64| (8.0 + 2.0 * max_tokens) / (8.0 + max_tokens - 1.0);
    let cost = |who, max_tokens| tokens[&who] as f64 * cost_of_a_token(max_tokens);
    let ratio = cost(A, 40.0) / cost(B, 4.0);
    assert!((0.95..1.05).contains(&ratio), "{ratio}: {tokens:?}");
}

#[test]
fn a_tenants_share_is_divided_among_its_agents() {
    let mut contest = Contest::new(weights(&[("one", 3)], &[("a", 2)]), 4, 64);
    let (a, b, other) = (("one", "a"), ("one", "b"), ("two", "a"));
    for who in [other, a, b] {
        contest.send(who, 400, 8, 20);
    }
    assert_near(&contest.tokens(1_000), &[(a, 0.5), (b, 0.25), (other, 0.25)]);
}

#[test]
fn unnamed_tenants_have_the_weight_of_other_tenants() {
    let other_tenants = NonZeroU32::new(3);
    let mut contest = Contest::new(Weights { other_tenants, ..weights(&[("one", 1)], &[]) }, 4, 64);
    let (one, two) = (("one", "a"), ("two", "a"));
    contest.send(one, 400, 8, 20);
    contest.send(two, 400, 8, 20);
    assert_near(&contest.tokens(1_000), &[(one, 0.25), (two, 0.75)]);
}

#[test]
fn concurrent_prefills_share_each_step_by_weight() {
    let mut contest = Contest::new(weights(&[], &[("a", 4)]), 8, 200);
    contest.send(A, 1, 1_000, 1);
    contest.send(B, 2, 1_000, 1);
    let planned = contest.harness.step();
    let tokens: Vec<usize> = planned.iter().map(|(_, tokens)| *tokens).collect();
    assert_eq!(tokens.iter().sum::<usize>(), 200, "{planned:?}");
    assert_eq!(planned.iter().find(|(id, _)| *id == 0), Some(&(0, 160)), "{planned:?}");
    assert!(planned.iter().filter(|(id, _)| *id != 0).all(|(_, tokens)| *tokens == 20), "{planned:?}");
}

#[test]
fn the_lightest_agent_progresses_in_every_step_and_finishes() {
    let mut contest = Contest::new(weights(&[], &[("a", 1_000)]), 4, 16);
    contest.send(A, 1_000, 12, 1);
    contest.send(B, 1, 100, 10);
    let light = 1_000;
    for _ in 0..20 {
        contest.tokens(1);
    }
    let before = contest.begun.get(&light).copied().expect("it was admitted");
    contest.tokens(10);
    assert!(
        contest.begun[&light] >= before + 10,
        "at least one token in each step: {:?}",
        contest.begun[&light]
    );
    while !contest.harness.finished.contains(&light) {
        contest.tokens(1);
        assert!(contest.harness.finished.len() < 1_000, "all other requests finished first");
    }
}

#[test]
fn a_pause_accumulates_no_share() {
    let mut contest = Contest::new(Weights::default(), 2, 64);
    contest.send(A, 1_000, 8, 20);
    contest.tokens(2_000);
    contest.send(B, 400, 8, 20);
    assert_near(&contest.tokens(400), &[(A, 0.5), (B, 0.5)]);
}

#[test]
fn sessions_of_an_agent_take_turns_whatever_its_weight() {
    let mut harness = Harness::weighted(LiveSetting::new(weights(&[], &[("a", 5)])), 400, 1, 64);
    let mut of = |session: &str| {
        let mut request = request(A, "x", 1);
        request.affinity.session = Some(session.to_string());
        harness.submit(request)
    };
    let ids = ["1", "1", "1", "2", "3"].map(&mut of);
    assert_eq!(harness.run(), [ids[0], ids[3], ids[4], ids[1], ids[2]]);
}

#[test]
fn accounts_stay_bounded_for_many_agents() {
    let mut harness = Harness::new(400, 8, 64);
    for name in 0..10_000 {
        let mut request = request(A, "x", 1);
        request.affinity.agent = Some(name.to_string());
        harness.submit(request);
        harness.step();
        assert!(harness.scheduler.waiting.accounts() <= super::accounts::MAX_ACCOUNTS);
    }
    assert_eq!(harness.run().len(), 10_000);
}
