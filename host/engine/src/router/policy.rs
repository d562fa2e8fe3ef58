//! The routing policy: a pure function of the replicas' published state, without clock, randomness or memory.
//!
//! All costs are counted in prompt tokens that must be computed before the request gets its first token, or
//! that another request must compute again because of it: the work that a replica already has, the part of the
//! prompt that is not cached there, and the pages that would be evicted to make room. In that unit, "the
//! longest cached prefix" and "the least load" need no order between them: a prefix wins unless waiting for it
//! costs more than it saves. The design is that of dynamo's KV router; the imbalance rule is that of
//! cache-aware routing in smg.
//!
//! A session stays at its home, even if another replica is a little cheaper now, because its next turns will
//! profit. It moves only away from a replica that is far more loaded than another *and* where waiting costs
//! more than computing its prefix elsewhere.

/// The cost of a running or waiting sequence besides its prompt: its decodes share each step with the new
/// request's prefill.
const SEQUENCE_TOKENS: usize = 128;
/// Number of tokens by which the load of a home must exceed the load of the least loaded replica before a
/// session leaves. The home's load must also exceed [`IMBALANCE_RATIO`] times that load.
const IMBALANCE_TOKENS: usize = 1024;
/// Multiple of the least load that the load of a home must exceed before a session leaves. See
/// [`IMBALANCE_TOKENS`].
const IMBALANCE_RATIO: usize = 2;

/// A replica from the perspective of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    pub is_open: bool,
    /// Prompt tokens that the replica still has to compute for other requests.
    pub prefill_tokens: usize,
    /// Sequences that run or wait there.
    pub sequences: usize,
    /// Tokens of this prompt that the replica has cached.
    pub cached_tokens: usize,
    /// Unused capacity of its KV cache, in tokens.
    pub vacant_tokens: usize,
}

/// The replica that gets a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub replica: usize,
    pub reason: Reason,
}

/// The reason why a replica gets a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The replica is the home of the session or of its parent.
    Home,
    /// The home was overloaded or closed.
    Moved,
    /// The replica has the beginning of the prompt cached.
    Prefix,
    /// The replica has the least work.
    Load,
    Turn,
}

impl Reason {
    /// Returns the value of the label `reason` in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Home => "session",
            Reason::Moved => "moved",
            Reason::Prefix => "prefix",
            Reason::Load => "load",
            Reason::Turn => "round_robin",
        }
    }
}

impl Candidate {
    fn load(&self) -> usize {
        self.prefill_tokens + SEQUENCE_TOKENS * self.sequences
    }

    fn cost(&self, prompt_tokens: usize) -> usize {
        let computed = prompt_tokens.saturating_sub(self.cached_tokens);
        let evicted = computed.saturating_sub(self.vacant_tokens);
        self.load() + computed + evicted
    }
}

/// Chooses a replica. Returns `None` only if no candidate is open.
pub fn choose(prompt_tokens: usize, home: Option<usize>, candidates: &[Candidate]) -> Option<Choice> {
    let open = || candidates.iter().enumerate().filter(|(_, candidate)| candidate.is_open);
    // The first of equal candidates is chosen, so that the choice is deterministic.
    let (best, cheapest) = open().min_by_key(|(_, candidate)| candidate.cost(prompt_tokens))?;
    let least_load = open().map(|(_, candidate)| candidate.load()).min()?;
    let reason = match home.and_then(|home| Some((home, candidates.get(home)?))) {
        Some((home, at_home)) if at_home.is_open => {
            let load = at_home.load();
            let is_overloaded = load > least_load + IMBALANCE_TOKENS && load > least_load * IMBALANCE_RATIO;
            if !is_overloaded || at_home.cost(prompt_tokens) <= cheapest.cost(prompt_tokens) {
                return Some(Choice { replica: home, reason: Reason::Home });
            }
            Reason::Moved
        }
        Some(_) => Reason::Moved,
        None if cheapest.cached_tokens > 0 => Reason::Prefix,
        None => Reason::Load,
    };
    Some(Choice { replica: best, reason })
}

/// Returns the next open candidate in turn, starting with `turn`.
pub fn take_turns(turn: usize, candidates: &[Candidate]) -> Option<Choice> {
    let mut in_turn = (0..candidates.len()).map(|n| (turn + n) % candidates.len());
    let replica = in_turn.find(|replica| candidates[*replica].is_open)?;
    Some(Choice { replica, reason: Reason::Turn })
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Candidate = Candidate {
        is_open: true,
        prefill_tokens: 0,
        sequences: 0,
        cached_tokens: 0,
        vacant_tokens: 100_000,
    };
    const CLOSED: Candidate = Candidate { is_open: false, ..IDLE };

    fn busy(prefill_tokens: usize, sequences: usize) -> Candidate {
        Candidate { prefill_tokens, sequences, ..IDLE }
    }

    fn warm(cached_tokens: usize) -> Candidate {
        Candidate { cached_tokens, ..IDLE }
    }

    #[track_caller]
    fn check(home: Option<usize>, candidates: &[Candidate], replica: usize, reason: Reason) {
        assert_eq!(choose(1000, home, candidates), Some(Choice { replica, reason }));
    }

    #[test]
    fn a_session_stays_home_though_another_replica_is_cheaper() {
        check(Some(1), &[IDLE, busy(500, 1)], 1, Reason::Home);
        check(Some(1), &[warm(990), IDLE], 1, Reason::Home);
    }

    #[test]
    fn a_session_leaves_an_overloaded_replica_if_waiting_costs_more_than_the_prefix() {
        let crowded = Candidate { cached_tokens: 600, ..busy(2000, 4) };
        check(Some(1), &[IDLE, crowded], 0, Reason::Moved);
        // The whole prompt is cached at home, and computing it costs more than waiting there.
        let long = |home: Candidate| choose(4000, Some(1), &[IDLE, home]);
        let stays = Candidate { cached_tokens: 3900, ..crowded };
        assert_eq!(long(stays), Some(Choice { replica: 1, reason: Reason::Home }));
        assert_eq!(long(crowded), Some(Choice { replica: 0, reason: Reason::Moved }));
        // All replicas are loaded, so there is no imbalance.
        check(Some(1), &[busy(2500, 4), crowded], 1, Reason::Home);
        check(Some(1), &[busy(1400, 4), crowded], 1, Reason::Home);
    }

    #[test]
    fn a_session_leaves_a_replica_that_has_closed() {
        check(Some(0), &[CLOSED, IDLE], 1, Reason::Moved);
        check(Some(7), &[IDLE, IDLE], 0, Reason::Load);
    }

    #[test]
    fn the_longest_prefix_wins_unless_the_wait_for_it_costs_more() {
        check(None, &[IDLE, warm(160), warm(480)], 2, Reason::Prefix);
        check(None, &[IDLE, Candidate { cached_tokens: 480, ..busy(0, 3) }], 1, Reason::Prefix);
        check(None, &[IDLE, Candidate { cached_tokens: 480, ..busy(0, 4) }], 0, Reason::Load);
        check(None, &[IDLE, Candidate { cached_tokens: 16, ..busy(100, 1) }], 0, Reason::Load);
    }

    #[test]
    fn without_a_prefix_the_least_loaded_wins_and_ties_go_in_order() {
        check(None, &[busy(300, 1), busy(0, 2), busy(200, 1)], 1, Reason::Load);
        check(None, &[IDLE, IDLE], 0, Reason::Load);
    }

    #[test]
    fn room_in_the_cache_counts_against_a_short_prefix() {
        let full = Candidate { cached_tokens: 400, vacant_tokens: 0, ..IDLE };
        check(None, &[full, IDLE], 1, Reason::Load);
        check(None, &[Candidate { cached_tokens: 600, ..full }, IDLE], 0, Reason::Prefix);
    }

    #[test]
    fn a_closed_replica_is_never_chosen() {
        check(None, &[CLOSED, busy(9000, 9)], 1, Reason::Load);
        assert_eq!(choose(1, Some(0), &[CLOSED, CLOSED]), None);
        assert_eq!(take_turns(3, &[CLOSED, CLOSED]), None);
    }

    #[test]
    fn round_robin_skips_closed_replicas() {
        let turns = (0..6).map(|turn| take_turns(turn, &[IDLE, CLOSED, IDLE]).map(|choice| choice.replica));
        assert_eq!(turns.collect::<Option<Vec<_>>>(), Some(vec![0, 2, 2, 0, 2, 2]));
    }
}
