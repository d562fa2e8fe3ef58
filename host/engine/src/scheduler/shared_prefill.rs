//! Requests with a common prefix that arrive at the same time: all but the first wait until the first has
//! computed the prefix.
//!
//! A sequence waits only for a running sequence that still has tokens to compute. Every step computes some of
//! them or ends a sequence, so the wait is bounded by one prefill. When the leader has passed the shared part,
//! has finished or was preempted, no sequence waits for it anymore.

use skep_model::PAGE_TOKENS;

use crate::Priority;
use crate::sequence::Sequence;

/// Returns whether `follower` gets its first token sooner if it starts only after `leader` has computed their
/// shared prefix.
///
/// Side by side, each would get half of every step of `step_tokens` tokens. Alone, the leader gets the whole
/// step, but the pages that it fills become available only at the end of a step. Waiting for `shared` tokens
/// therefore takes the steps that hold them (or the rest of the leader), and saves computing them at half the
/// speed.
pub(super) fn is_worth_waiting(follower: &Sequence, leader: &Sequence, step_tokens: usize) -> bool {
    let outranked =
        leader.request.priority == Priority::Background && follower.request.priority != Priority::Background;
    if outranked || leader.request.affinity.tenant != follower.request.affinity.tenant {
        return false;
    }
    let shared = shared_tokens(follower, leader).saturating_sub(leader.computed.tokens);
    let wait = shared.next_multiple_of(step_tokens.max(1)).min(leader.pending());
    wait < 2 * shared
}

/// Returns the number of tokens in the whole pages that both begin with, among the tokens that the follower may
/// reuse.
fn shared_tokens(follower: &Sequence, leader: &Sequence) -> usize {
    let reusable = follower.reusable_tokens();
    let usable = &reusable[..reusable.len().saturating_sub(1)];
    let pages = usable.chunks_exact(PAGE_TOKENS).zip(leader.tokens.chunks_exact(PAGE_TOKENS));
    pages.take_while(|(one, other)| one == other).count() * PAGE_TOKENS
}
