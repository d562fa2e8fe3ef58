//! A simulated host: sequences that run at once, a queue in front of them, one prompt after the other, and a KV cache.

use std::collections::VecDeque;

use skep_runtime::placement::{Load, Sent, WarmAgents};

use super::cache::{Cache, Entry};
use super::costs::Costs;
use super::workload::Turn;

/// A host, and what it knows.
pub(super) struct Host {
    /// The time of its death.
    pub(super) died_us: Option<u64>,
    running: Vec<Running>,
    waiting: VecDeque<Turn>,
    /// Tokens of the prompts that wait.
    waiting_tokens: usize,
    /// The time at which all prompts that were begun are computed.
    prefill_free_us: u64,
    /// Tokens of the sequences that run.
    held_tokens: u64,
    pub(super) cache: Cache,
    pub(super) warm: WarmAgents,
    pub(super) sent: Sent,
}

#[derive(Debug)]
struct Running {
    id: u64,
    turn: Turn,
}

/// The course of a turn that has begun to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Course {
    pub(super) cached_tokens: u32,
    pub(super) first_token_us: u64,
    pub(super) end_us: u64,
}

impl Host {
    pub(super) fn new(costs: &Costs) -> Self {
        Host {
            died_us: None,
            running: Vec::new(),
            waiting: VecDeque::new(),
            waiting_tokens: 0,
            prefill_free_us: 0,
            held_tokens: 0,
            cache: Cache::new(costs.kv_tokens),
            warm: WarmAgents::default(),
            sent: Sent::default(),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.died_us.is_none()
    }

    /// Returns the number of turns that run or wait.
    pub(super) fn open_turns(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Returns what the host reports about itself.
    pub(super) fn load(&self, costs: &Costs) -> Load {
        Load {
            running_turns: self.open_turns() as u32,
            waiting: self.waiting.len() as u32,
            capacity: costs.sequences,
            kv_percent: (self.held_tokens * 100 / costs.kv_tokens.max(1)).min(100) as u8,
        }
    }

    /// Returns the tokens of prompts that are still to be computed at a time, those of waiting turns as if nothing of them were
    /// cached.
    pub(super) fn prefill_tokens(&self, now_us: u64, costs: &Costs) -> usize {
        let busy_s = self.prefill_free_us.saturating_sub(now_us) as f64 / 1e6;
        (busy_s * costs.prefill_tokens_per_s) as usize + self.waiting_tokens
    }

    /// Returns how many tokens of a prompt are cached. At least one token is always computed.
    pub(super) fn cached_tokens(&self, turn: &Turn, costs: &Costs) -> u32 {
        let prefix = self.cache.tokens(Entry::Prefix(turn.agent));
        if prefix == 0 && costs.prefix_tokens > 0 {
            return 0;
        }
        let cached = prefix + self.cache.tokens(conversation(turn));
        cached.min(turn.prompt_tokens - 1)
    }

    /// Takes a turn into the queue.
    pub(super) fn push(&mut self, turn: Turn) {
        self.waiting_tokens += turn.prompt_tokens as usize;
        self.waiting.push_back(turn);
    }

    /// Begins to run the turn that has waited the longest, if a sequence is free. Adds what leaves the cache to `evicted`.
    pub(super) fn begin(
        &mut self,
        id: u64,
        now_us: u64,
        costs: &Costs,
        evicted: &mut Vec<Entry>,
    ) -> Option<(Turn, Course)> {
        if self.running.len() >= costs.sequences as usize {
            return None;
        }
        let turn = self.waiting.pop_front()?;
        self.waiting_tokens -= turn.prompt_tokens as usize;
        let cached_tokens = self.cached_tokens(&turn, costs);
        let begins_us = self.prefill_free_us.max(now_us);
        self.prefill_free_us = begins_us + costs.prefill_us(turn.prompt_tokens - cached_tokens);
        let course = Course {
            cached_tokens,
            first_token_us: self.prefill_free_us + costs.decode_us(1),
            end_us: self.prefill_free_us + costs.decode_us(turn.output_tokens),
        };
        let prefix = costs.prefix_tokens.min(turn.prompt_tokens);
        let rest = (turn.prompt_tokens - prefix).saturating_add(turn.output_tokens);
        // The prefix is used after the rest, so that it stays longer.
        self.cache.put(conversation(&turn), rest, evicted);
        self.cache.put(Entry::Prefix(turn.agent), prefix, evicted);
        self.held_tokens += held(&turn);
        self.running.push(Running { id, turn });
        Some((turn, course))
    }

    /// Ends a turn. Returns whether it ran here.
    pub(super) fn end(&mut self, id: u64) -> bool {
        let Some(place) = self.running.iter().position(|running| running.id == id) else { return false };
        let ended = self.running.swap_remove(place);
        self.held_tokens -= held(&ended.turn);
        true
    }

    /// Ends the host. Returns the turns that it had.
    pub(super) fn kill(&mut self, now_us: u64) -> Vec<Turn> {
        self.died_us = Some(now_us);
        (self.held_tokens, self.waiting_tokens) = (0, 0);
        let running = self.running.drain(..).map(|running| running.turn);
        running.chain(self.waiting.drain(..)).collect()
    }
}

fn conversation(turn: &Turn) -> Entry {
    Entry::Session { session: turn.session, cuts: turn.cuts }
}

fn held(turn: &Turn) -> u64 {
    u64::from(turn.prompt_tokens) + u64::from(turn.output_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(session: u32, prompt_tokens: u32) -> Turn {
        Turn { at_us: 0, session, agent: 1, prompt_tokens, output_tokens: 125, cuts: 0 }
    }

    #[test]
    fn the_second_turn_of_a_session_computes_only_what_is_new() {
        let costs = Costs::for_tests();
        let (mut host, mut evicted) = (Host::new(&costs), Vec::new());
        host.push(turn(1, 2_000));
        let (_, first) = host.begin(1, 0, &costs, &mut evicted).expect("it is idle");
        assert_eq!(first, Course { cached_tokens: 0, first_token_us: 1_008_000, end_us: 2_000_000 });
        host.push(turn(1, 2_225));
        let (_, second) = host.begin(2, 3_000_000, &costs, &mut evicted).expect("a sequence is free");
        assert_eq!((second.cached_tokens, second.end_us), (2_125, 3_000_000 + 50_000 + 1_000_000));
        // Another session of the agent shares the beginning.
        host.push(turn(2, 2_000));
        let (_, other) = host.begin(3, 3_000_000, &costs, &mut evicted).expect("a sequence is free");
        assert_eq!((other.cached_tokens, other.first_token_us), (1_000, 3_050_000 + 500_000 + 8_000));
        // A conversation that was cut has only the beginning in common with the one before.
        host.push(Turn { cuts: 1, ..turn(1, 1_400) });
        let (_, cut) = host.begin(4, 9_000_000, &costs, &mut evicted).expect("a sequence is free");
        assert_eq!(cut.cached_tokens, 1_000);
        assert!(evicted.is_empty());
    }

    #[test]
    fn turns_wait_for_a_sequence_and_leave_with_the_host() {
        let costs = Costs { sequences: 1, ..Costs::for_tests() };
        let (mut host, mut evicted) = (Host::new(&costs), Vec::new());
        host.push(turn(1, 1_500));
        host.push(turn(2, 1_500));
        assert!(host.begin(1, 0, &costs, &mut evicted).is_some());
        assert!(host.begin(2, 0, &costs, &mut evicted).is_none());
        let load = host.load(&costs);
        assert_eq!((load.running_turns, load.waiting, load.capacity, load.kv_percent), (2, 1, 1, 2));
        assert_eq!(host.prefill_tokens(250_000, &costs), 1_000 + 1_500);
        assert!(host.end(1) && !host.end(1));
        assert!(host.begin(2, 0, &costs, &mut evicted).is_some());
        host.push(turn(3, 1_500));
        assert_eq!(host.kill(1).len(), 2);
        assert_eq!((host.is_alive(), host.open_turns()), (false, 0));
    }
}
