//! The turns that clients of a fleet send: drawn from a seed, or read from a trace.

use anyhow::Result;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::costs::Costs;
use super::trace::TraceReader;

/// Share of the sessions over which the activity of the most active ones is levelled, so that no session has more turns than a
/// person could send.
const LEVELLED: f64 = 0.001;
/// Mean tokens of a message and of an answer. Both are between half and one and a half times as long.
const MESSAGE_TOKENS: u32 = 80;
const ANSWER_TOKENS: u32 = 120;
/// Tokens of a conversation from which on it is summarized, and after that.
const LONGEST_CONVERSATION: u32 = 3_000;
const SUMMARY_TOKENS: u32 = 400;
/// Share of the prompts' tokens that are assumed to be cached where the rate of turns follows from the load.
const ASSUMED_CACHED: f64 = 0.75;

/// A turn that a client begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    pub(super) at_us: u64,
    pub(super) session: u32,
    pub(super) agent: u32,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// Number of times that the session's conversation was cut before, as the simulation finds out.
    pub(super) cuts: u32,
}

/// The turns of one run, in the order of their times.
pub(super) enum Workload {
    Drawn(Box<Drawn>),
    Trace(TraceReader),
}

/// The sizes of a drawn workload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) hosts: u32,
    pub(super) sessions: u32,
    pub(super) turns: u64,
    pub(super) agents: u32,
    /// Share of the hosts' capacity that the turns use.
    pub(super) load: f64,
    pub(super) seed: u64,
}

/// Draws turns.
pub(super) struct Drawn {
    sizes: Sizes,
    prefix_tokens: u32,
    /// Mean time between two turns.
    between_us: f64,
    draws: StdRng,
    at_us: f64,
    left: u64,
    /// The tokens of each session's conversation.
    conversations: Vec<u32>,
}

impl Workload {
    /// Returns the next turn, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<Turn>> {
        match self {
            Workload::Drawn(drawn) => Ok(drawn.next()),
            Workload::Trace(trace) => trace.next(),
        }
    }
}

impl Drawn {
    pub(super) fn new(sizes: Sizes, costs: &Costs) -> Self {
        Drawn {
            sizes,
            prefix_tokens: costs.prefix_tokens,
            between_us: 1e6 / turns_per_s(&sizes, costs),
            draws: StdRng::seed_from_u64(sizes.seed),
            at_us: 0.0,
            left: sizes.turns,
            conversations: vec![0; sizes.sessions as usize],
        }
    }

    fn next(&mut self) -> Option<Turn> {
        self.left = self.left.checked_sub(1)?;
        // Turns arrive independently of each other.
        self.at_us -= (1.0 - self.draws.random::<f64>()).ln() * self.between_us;
        let session = self.session();
        let message = around(&mut self.draws, MESSAGE_TOKENS);
        let output_tokens = around(&mut self.draws, ANSWER_TOKENS);
        let conversation = &mut self.conversations[session as usize];
        if *conversation > LONGEST_CONVERSATION {
            *conversation = SUMMARY_TOKENS;
        }
        let prompt_tokens = self.prefix_tokens + *conversation + message;
        *conversation += message + output_tokens;
        let agent = agent_of(session, self.sizes);
        Some(Turn { at_us: self.at_us as u64, session, agent, prompt_tokens, output_tokens, cuts: 0 })
    }

    /// Draws a session. Its activity is inversely proportional to its rank (Zipf's law), except that the first ranks are levelled
    /// (Mandelbrot's form of the law): the inverse of the distribution of 1 / (rank + levelled).
    fn session(&mut self) -> u32 {
        let sessions = f64::from(self.sizes.sessions);
        let levelled = (sessions * LEVELLED).max(1.0);
        let rank = levelled * (((sessions + levelled) / levelled).powf(self.draws.random::<f64>()) - 1.0);
        (rank as u32).min(self.sizes.sessions - 1)
    }
}

/// Returns the agent of a session, by Zipf's law: the first agents have the most sessions.
fn agent_of(session: u32, sizes: Sizes) -> u32 {
    // Neighbors in rank have unrelated agents.
    let mixed = (u64::from(session) ^ sizes.seed).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let share = (mixed >> 11) as f64 / (1u64 << 53) as f64;
    let rank = f64::from(sizes.agents + 1).powf(share) - 1.0;
    (rank as u32).min(sizes.agents - 1)
}

fn around(draws: &mut StdRng, mean: u32) -> u32 {
    draws.random_range(mean / 2..=mean + mean / 2)
}

/// Returns the rate of turns that uses the wanted share of what is scarcer: sequences, or the tokens of prompts that are computed.
fn turns_per_s(sizes: &Sizes, costs: &Costs) -> f64 {
    let prompt = f64::from(costs.prefix_tokens + MESSAGE_TOKENS + LONGEST_CONVERSATION / 4);
    let prefill_s = prompt * (1.0 - ASSUMED_CACHED) / costs.prefill_tokens_per_s;
    let decode_s = f64::from(ANSWER_TOKENS) / costs.decode_tokens_per_s;
    sizes.load * f64::from(sizes.hosts) / prefill_s.max(decode_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { hosts: 10, sessions: 5_000, turns: 20_000, agents: 20, load: 0.5, seed: 7 };

    fn turns(sizes: Sizes) -> Vec<Turn> {
        let mut drawn = Drawn::new(sizes, &Costs::for_tests());
        std::iter::from_fn(|| drawn.next()).collect()
    }

    #[test]
    fn turns_are_those_of_the_seed_and_in_order() {
        let drawn = turns(SIZES);
        assert_eq!(drawn.len(), 20_000);
        assert!(drawn.is_sorted_by_key(|turn| turn.at_us));
        assert_eq!(drawn, turns(SIZES));
        assert_ne!(drawn, turns(Sizes { seed: 8, ..SIZES }));
    }

    #[test]
    fn the_rate_is_that_of_the_load() {
        let drawn = turns(SIZES);
        let seconds = drawn[drawn.len() - 1].at_us as f64 / 1e6;
        let expected = turns_per_s(&SIZES, &Costs::for_tests());
        let rate = 20_000.0 / seconds;
        assert!((rate / expected - 1.0).abs() < 0.05, "{rate} instead of {expected}");
    }

    #[test]
    fn activity_is_skewed_and_a_session_keeps_its_agent() {
        let drawn = turns(SIZES);
        let of = |sessions: std::ops::Range<u32>| {
            drawn.iter().filter(|turn| sessions.contains(&turn.session)).count()
        };
        let (first, last) = (of(0..500), of(4_500..5_000));
        assert!(first > 10 * last && last > 0, "{first} and {last}");
        let most = (0..100).map(|session| of(session..session + 1)).max().expect("sessions");
        assert!(most < 20_000 / 20, "{most} turns of one session");
        for turn in &drawn {
            assert_eq!(turn.agent, agent_of(turn.session, SIZES));
        }
        let agents: std::collections::BTreeSet<u32> = drawn.iter().map(|turn| turn.agent).collect();
        assert!(agents.len() > 10 && agents.iter().all(|agent| *agent < 20), "{agents:?}");
    }

    #[test]
    fn a_prompt_grows_by_what_was_said() {
        let sizes = Sizes { sessions: 1, turns: 100, ..SIZES };
        let drawn = turns(sizes);
        let costs = Costs::for_tests();
        for (before, after) in drawn.iter().zip(&drawn[1..]) {
            let said = before.prompt_tokens + before.output_tokens;
            assert!(after.prompt_tokens > said || said > costs.prefix_tokens + LONGEST_CONVERSATION);
        }
    }
}
