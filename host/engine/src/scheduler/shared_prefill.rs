//! Requests that begin alike and come at the same time: all but the first wait until it has computed what they share.
//!
//! A sequence is held back only for one that runs and still has tokens to compute. Every step computes some of them or
//! ends a sequence, so the wait is bounded by one prefill; when the leader has passed the shared part, has ended or was
//! preempted, nobody waits for it any more.

use skep_model::PAGE_TOKENS;

use crate::Priority;
use crate::sequence::Sequence;

/// Whether `follower` gets its first token sooner if it starts only when `leader` has computed what they share.
///
/// Next to each other both would get half of each step, of `step_tokens` in all. Alone the leader gets all of it, but
/// the pages that it fills are there only at the end of a step. So waiting for `shared` tokens takes the steps that hold
/// them (or the rest of the leader), and saves computing them at half the speed.
pub(super) fn is_worth_waiting(follower: &Sequence, leader: &Sequence, step_tokens: usize) -> bool {
    let outranked =
        leader.request.priority == Priority::Background && follower.request.priority != Priority::Background;
    if outranked || leader.request.affinity.tenant != follower.request.affinity.tenant {
        return false;
    }
    let shared = shared_tokens(follower, leader).saturating_sub(leader.computed);
    let wait = shared.next_multiple_of(step_tokens.max(1)).min(leader.pending());
    wait < 2 * shared
}

/// Tokens of the whole pages with which both begin, of those that the follower may reuse.
fn shared_tokens(follower: &Sequence, leader: &Sequence) -> usize {
    let reusable = follower.reusable_tokens();
    let usable = &reusable[..reusable.len().saturating_sub(1)];
    let pages = usable.chunks_exact(PAGE_TOKENS).zip(leader.tokens.chunks_exact(PAGE_TOKENS));
    pages.take_while(|(one, other)| one == other).count() * PAGE_TOKENS
}
