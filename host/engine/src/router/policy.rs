//! Where a request goes, as a function of what is known of the replicas: no clock, no randomness, no state.
//!
//! Everything is counted in prompt tokens that have to be computed before the request gets its first token, or that
//! someone else will have to compute again because of it: the work that a replica has already, the part of the prompt
//! that is not cached there, and what would be evicted to make room. In that currency "the longest cached prefix" and
//! "the least load" need no order of their own: a prefix wins unless the wait in front of it costs more than it saves.
//! The shape is that of dynamo's KV router; the rule of imbalance is that of cache-aware routing in smg.
//!
//! A session stays where it is at home, even if another replica were a little cheaper now, because its next turns will
//! profit. It moves only away from a replica that is far more loaded than another *and* where waiting costs more than
//! computing its prefix elsewhere.

/// What a sequence that runs or waits costs beside its prompt: its decodes share each step with the newcomer's prefill.
const SEQUENCE_TOKENS: usize = 128;
/// A home is left only if it has more load than the least loaded replica by so many tokens …
const IMBALANCE_TOKENS: usize = 1024;
/// … and more than so many times its load.
const IMBALANCE_RATIO: usize = 2;

/// A replica as one request sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub is_open: bool,
    /// Prompt tokens that it still has to compute for others.
    pub prefill_tokens: usize,
    /// Sequences that run or wait there.
    pub sequences: usize,
    /// Tokens of this prompt that it has cached.
    pub cached_tokens: usize,
    /// Room in its KV cache that nothing occupies.
    pub vacant_tokens: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub replica: usize,
    pub reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The session, or its parent, is at home there.
    Home,
    /// The home was overloaded or closed.
    Moved,
    /// It has the beginning of the prompt cached.
    Prefix,
    /// It has least to do.
    Load,
    Turn,
}

impl Reason {
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

/// `None` only if no candidate is open.
pub(crate) fn choose(prompt_tokens: usize, home: Option<usize>, candidates: &[Candidate]) -> Option<Choice> {
    let open = || candidates.iter().enumerate().filter(|(_, candidate)| candidate.is_open);
    // Of equals the first, so that the choice is the same every time.
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

/// The open candidate whose turn it is, beginning with `turn`.
pub(crate) fn take_turns(turn: usize, candidates: &[Candidate]) -> Option<Choice> {
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
    fn a_session_goes_home_though_another_replica_is_cheaper() {
        check(Some(1), &[IDLE, busy(500, 1)], 1, Reason::Home);
        check(Some(1), &[warm(990), IDLE], 1, Reason::Home);
    }

    #[test]
    fn a_session_leaves_a_home_that_is_far_more_loaded_if_the_wait_costs_more_than_its_prefix() {
        let crowded = Candidate { cached_tokens: 600, ..busy(2000, 4) };
        check(Some(1), &[IDLE, crowded], 0, Reason::Moved);
        // The whole prompt is cached at home, and computing it costs more than waiting there.
        let long = |home: Candidate| choose(4000, Some(1), &[IDLE, home]);
        let stays = Candidate { cached_tokens: 3900, ..crowded };
        assert_eq!(long(stays), Some(Choice { replica: 1, reason: Reason::Home }));
        assert_eq!(long(crowded), Some(Choice { replica: 0, reason: Reason::Moved }));
        // Everyone is loaded: not an imbalance.
        check(Some(1), &[busy(2500, 4), crowded], 1, Reason::Home);
        check(Some(1), &[busy(1400, 4), crowded], 1, Reason::Home);
    }

    #[test]
    fn a_closed_home_is_left() {
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
    fn without_a_prefix_the_least_loaded_wins_and_equals_go_in_order() {
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
    fn turns_go_round_and_skip_who_is_closed() {
        let turns = (0..6).map(|turn| take_turns(turn, &[IDLE, CLOSED, IDLE]).map(|choice| choice.replica));
        assert_eq!(turns.collect::<Option<Vec<_>>>(), Some(vec![0, 2, 2, 0, 2, 2]));
    }
}
