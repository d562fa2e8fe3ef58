//! Orders the cached pages for eviction: first those that nobody is known to need, the least recently used first, then
//! those of sequences that will be continued, and then those of the waiting requests that will be admitted last.
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
    /// Returns whether the next step may evict cached pages, or take from them what windows need.
    pub(super) fn may_evict(&self) -> bool {
        self.kv.free_pages() <= self.limits.tokens.div_ceil(PAGE_TOKENS) + self.running.len()
    }

    /// Marks the cached prefixes of sequences that will be continued as used, and then those of the waiting requests, the
    /// next to be admitted last. Does nothing as long as the next step cannot evict a page, or if nothing has changed.
    pub(super) fn order_evictions(&mut self) {
        if !self.is_eviction_order_old || !self.may_evict() {
            return;
        }
        self.is_eviction_order_old = false;
        self.keep_continuations();
        let next = self.waiting.first(KEPT_REQUESTS);
        for sequence in next.into_iter().rev() {
            self.kv.touch_prefix(&sequence.request.affinity.tenant, sequence.reusable_tokens());
        }
    }
}
