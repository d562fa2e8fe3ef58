//! Orders the waiting sessions of an agent by what the prefix tree saves them, while pages are scarce.
//!
//! A session whose prompt is cached needs few pages and little computation as long as it runs before its pages are evicted,
//! and every session that runs before it may evict them. The order between agents and tenants is that of their service, and
//! `waiting` bounds how often a session is overtaken.

use skep_model::PAGE_TOKENS;

use super::Scheduler;
use crate::sequence::Sequence;

/// Maximum number of sessions whose cached prefixes are measured.
const RANKED_SESSIONS: usize = 32;
/// Cached shares that differ by less than one part of this many leave the order as it is.
const RANKS: usize = 8;

impl Scheduler {
    /// Ranks the sessions that are next by the cached share of their next prompt. Without scarcity, all ranks are equal.
    /// Does nothing if nothing has changed.
    pub(super) fn order_admissions(&mut self) {
        if !self.is_admission_order_old {
            return;
        }
        let is_scarce = self.may_evict();
        // Pages that are not scarce can become so without any other change.
        self.is_admission_order_old = !is_scarce;
        let kv = &self.kv;
        let rank = |sequence: &Sequence| {
            let tenant = sequence.request.affinity.tenant.as_str();
            let cached = kv.usable_prefix(tenant, sequence.reusable_tokens()) * PAGE_TOKENS;
            (RANKS * cached / sequence.tokens.len().max(1)) as u8
        };
        self.waiting.rank_sessions(if is_scarce { RANKED_SESSIONS } else { 0 }, rank);
    }
}
