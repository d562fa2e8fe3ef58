//! The order in which cached pages are evicted when running sequences need room: first those that no waiting request begins
//! with, the least recently used first, and then those of the requests that will be admitted last.
//!
//! Sessions that come back one after the other would otherwise find nothing: the pages that were used longest ago are
//! those of the session that has waited longest, which is the next to need them. Evicting what is needed last is the
//! rule that keeps most (Bélády, "A study of replacement algorithms for a virtual-storage computer", 1966); the queue
//! is what is known of the future.

use skep_model::PAGE_TOKENS;

use super::Scheduler;

/// Maximum number of waiting requests whose prefixes are kept before others.
const KEPT_REQUESTS: usize = 64;

impl Scheduler {
    /// Marks the cached prefixes of the waiting requests as used, the next to be admitted last. Does nothing as long as
    /// the next step cannot evict a page, or if nothing has changed.
    pub(super) fn order_evictions(&mut self) {
        let step_pages = self.limits.tokens.div_ceil(PAGE_TOKENS) + self.running.len();
        if !self.is_eviction_order_old || self.kv.free_pages() > step_pages {
            return;
        }
        self.is_eviction_order_old = false;
        let next = self.waiting.first(KEPT_REQUESTS);
        for sequence in next.into_iter().rev() {
            self.kv.touch_prefix(&sequence.request.affinity.tenant, sequence.reusable_tokens());
        }
    }
}
