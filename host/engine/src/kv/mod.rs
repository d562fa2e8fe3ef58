//! Ownership of KV pages. Every page is free, in the prefix tree, partly filled after a page of the tree, or private to one
//! sequence, and never two of these. A freed page that a step may still write to, because it was started ahead, is held until that step has been
//! collected, and is none of these.
//!
//! A sequence first borrows the longest cached prefix of its tokens from the tree (locked, so that it cannot be
//! evicted), then allocates private pages for the rest. As soon as a private page is full and computed it moves
//! into the tree, still locked by its sequence, so that others with the same beginning can use it at once. The last page
//! of a sequence that ends is kept although it is not full, for the first one that continues the same tokens.
//!
//! ```text
//! sequence:  [ shared page | shared page | shared page ][ private page | private page ]
//! owner:       prefix tree (locked)                       this sequence
//! ```
//!
//! The module knows page numbers and token ids. It knows nothing of requests or of the contents of a page.

mod page_allocator;
mod partial_pages;
#[cfg(test)]
mod partial_tests;
mod prefix_owners;
mod prefix_tree;
mod published_prefixes;
#[cfg(test)]
mod tests;
mod windowed_pages;
#[cfg(test)]
mod windowed_tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use skep_model::{PAGE_TOKENS, PageId, WindowChange, WindowLimits};

use page_allocator::PageAllocator;
use partial_pages::PartialPages;
pub(crate) use prefix_owners::PrefixOwner;
pub(crate) use prefix_tree::UseMark;
use prefix_tree::{NodeId, PrefixTree};
pub(crate) use published_prefixes::{PublishedPrefixes, prompt_digests};
use windowed_pages::WindowedPages;

/// The pages of one sequence: the first `shared` belong to the prefix tree, the rest to the sequence.
#[derive(Debug, Default)]
pub(crate) struct SequencePages {
    pages: Vec<PageId>,
    shared: usize,
    lock: Option<NodeId>,
    /// The first page that windows of the sequence's next tokens cover. Pages before it count only for layers without windows.
    seen_from: usize,
}

impl SequencePages {
    /// Returns the pages in the order of their positions.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Returns the number of pages that belong to the sequence alone.
    pub fn own_pages(&self) -> usize {
        self.pages.len() - self.shared
    }

    /// Returns the number of tokens that the pages have room for.
    pub fn capacity_tokens(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// Returns the number of pages that windows cover, all of them if no layer has one.
    pub fn seen_pages(&self) -> usize {
        self.seen().len()
    }

    /// Adds pages that follow these, and that nobody else has.
    pub fn append(&mut self, own: SequencePages) {
        debug_assert!(own.shared == 0 && own.lock.is_none(), "cached pages are borrowed");
        self.pages.extend(own.pages);
    }

    /// Returns the pages that windows cover.
    fn seen(&self) -> &[PageId] {
        &self.pages[self.seen_from.min(self.pages.len())..]
    }
}

/// All pages of one engine.
#[derive(Debug)]
pub(crate) struct KvCache {
    allocator: PageAllocator,
    tree: PrefixTree,
    partial: PartialPages,
    /// The pages that keep what layers with a window need, if those have fewer pages than the others.
    windows: Option<WindowedPages>,
}

impl KvCache {
    /// Creates a cache of `page_count` free pages. The digests of cached pages appear in `published`.
    pub fn new(page_count: usize, published: Arc<PublishedPrefixes>) -> Self {
        let (allocator, tree) = (PageAllocator::new(page_count), PrefixTree::new(published));
        KvCache { allocator, tree, partial: PartialPages::default(), windows: None }
    }

    /// Bounds the pages that keep what layers with a window need. All pages have to be free.
    pub fn limit_windows(&mut self, limits: WindowLimits) {
        self.windows = Some(WindowedPages::new(limits, self.page_count()));
    }

    /// Returns what the executor has to know before the next step.
    pub fn window_changes(&self) -> &[WindowChange] {
        self.windows.as_ref().map(WindowedPages::changes).unwrap_or_default()
    }

    /// Forgets the changes, because the executor knows them.
    pub fn forget_window_changes(&mut self) {
        if let Some(windows) = &mut self.windows {
            windows.forget_changes();
        }
    }

    /// Returns whether `count` more pages can keep what layers with a window need.
    pub fn has_window_room(&self, count: usize) -> bool {
        self.windows.as_ref().is_none_or(|windows| count <= windows.room())
    }

    /// Returns the maximum number of pages that windows cover while a sequence computes this many tokens.
    pub fn pages_in_windows(&self, step_tokens: usize) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.most_seen(step_tokens))
    }

    /// Returns the number of pages, free or not.
    pub fn page_count(&self) -> usize {
        self.allocator.page_count()
    }

    /// Returns the number of pages that an allocation could get: free pages, partial ones, and evictable pages of the tree.
    pub fn available_pages(&self) -> usize {
        self.allocator.free_count() + self.evictable_pages()
    }

    fn evictable_pages(&self) -> usize {
        self.partial.evictable() + self.tree.evictable_pages()
    }

    /// Returns the number of pages that running sequences could get now, windows included.
    pub fn growable_pages(&self) -> usize {
        let in_windows = self.windows.as_ref().map_or(usize::MAX, WindowedPages::room);
        self.available_pages().min(in_windows)
    }

    /// Returns the number of available pages, but no larger part of all pages than of those for windows.
    pub fn free_in_proportion(&self) -> usize {
        let all = self.page_count();
        let in_windows = self.windows.as_ref().map_or(all, |windows| windows.share_of_room(all));
        self.available_pages().min(in_windows)
    }

    /// Returns the number of pages that a sequence can get without taking anything from a cached prefix.
    pub fn free_pages(&self) -> usize {
        let in_windows = self.windows.as_ref().map_or(usize::MAX, WindowedPages::vacant);
        self.allocator.free_count().min(in_windows)
    }

    /// Returns the number of cached pages, those that sequences use included.
    pub fn cached_pages(&self) -> usize {
        self.tree.page_count() + self.partial.count()
    }

    /// Returns the number of cached pages of each session, and of each agent and tenant for pages that several have.
    pub fn cached_pages_by_owner(&self) -> BTreeMap<PrefixOwner, usize> {
        let mut counted = self.tree.pages_by_owner();
        for owner in self.partial.owners() {
            *counted.entry(owner.clone()).or_default() += 1;
        }
        counted
    }

    /// Borrows the longest cached prefix of whole pages, but never the page that holds the last token. That
    /// token is always computed, because its logits are needed.
    pub fn borrow_prefix(&mut self, tenant: &str, tokens: &[u32]) -> SequencePages {
        let usable = tokens.len().saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS;
        self.borrow_pages(tenant, tokens, usable / PAGE_TOKENS)
    }

    /// Returns the pages of the longest cached prefix of whole pages.
    pub fn cached_prefix(&mut self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
        self.tree.longest_prefix(tenant, &tokens[..whole]).map_or_else(Vec::new, |(_, pages)| pages)
    }

    /// Marks the longest cached prefix of these tokens as used last.
    pub fn touch_prefix(&mut self, tenant: &str, tokens: &[u32]) {
        let pages = self.cached_prefix(tenant, tokens);
        self.touch_windows(&pages);
    }

    /// Returns the pages of the longest cached prefix of whole pages, without marking it as used.
    pub fn peek_prefix(&self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        self.tree.peek(tenant, whole_pages(tokens))
    }

    /// Returns how many pages of the longest cached prefix a sequence can continue from, without marking it as used.
    pub fn usable_prefix(&self, tenant: &str, tokens: &[u32]) -> usize {
        let pages = self.peek_prefix(tenant, tokens);
        self.windows.as_ref().map_or(pages.len(), |windows| windows.usable(&pages))
    }

    /// Marks the longest cached prefix of these tokens as used last, until [`KvCache::unmark_prefix`]. Returns `None` if
    /// nothing of it is cached.
    pub fn mark_prefix(&mut self, tenant: &str, tokens: &[u32]) -> Option<UseMark> {
        let mark = self.tree.mark(tenant, whole_pages(tokens))?;
        let pages = self.peek_prefix(tenant, tokens);
        self.touch_windows(&pages);
        Some(mark)
    }

    /// Moves what windows need to continue from a cached prefix to the end of the order of eviction.
    fn touch_windows(&mut self, prefix: &[PageId]) {
        if let Some(windows) = &mut self.windows {
            let end = windows.usable(prefix);
            windows.touch(&prefix[windows.first_seen(end * PAGE_TOKENS)..end]);
        }
    }

    /// Gives a marked prefix back the place in the order of eviction that it had before, unless it was used since. The
    /// order of what pages keep for windows stays as it is.
    pub fn unmark_prefix(&mut self, tenant: &str, tokens: &[u32], mark: UseMark) {
        self.tree.unmark(tenant, whole_pages(tokens), mark);
    }

    /// Borrows as many of the first `pages` pages of a prefix as are cached.
    pub fn borrow_pages(&mut self, tenant: &str, tokens: &[u32], pages: usize) -> SequencePages {
        let mut found = self.tree.longest_prefix(tenant, &tokens[..pages * PAGE_TOKENS]);
        if let (Some(windows), Some((_, pages))) = (&self.windows, &found) {
            let usable = windows.usable(pages);
            if usable < pages.len() {
                found = self.tree.longest_prefix(tenant, &tokens[..usable * PAGE_TOKENS]);
            }
        }
        let Some((node, pages)) = found else { return SequencePages::default() };
        self.tree.lock(node);
        let mut sequence = SequencePages { shared: pages.len(), pages, lock: Some(node), seen_from: 0 };
        if let Some(windows) = &mut self.windows {
            sequence.seen_from = windows.first_seen(sequence.capacity_tokens());
            windows.see(sequence.seen());
        }
        sequence
    }

    /// Extends a sequence to `page_count` pages and evicts cached pages where needed. Allocates all pages or
    /// none.
    pub fn grow(&mut self, sequence: &mut SequencePages, page_count: usize) -> bool {
        let wanted = page_count.saturating_sub(sequence.pages.len());
        let missing = wanted.saturating_sub(self.allocator.free_count());
        if missing > self.evictable_pages() || !self.has_window_room(wanted) {
            return false;
        }
        self.evict(missing);
        let pages = self.allocator.allocate(wanted).expect("the pages were just freed");
        if let Some(windows) = &mut self.windows {
            windows.keep(&pages);
        }
        sequence.pages.extend(pages);
        true
    }

    /// Sets the pages that a step writes to which was started ahead. Until the next call, none of them gets another
    /// owner, even if it is freed. The step of the last call must have been collected or discarded.
    pub fn set_written(&mut self, pages: Vec<PageId>) {
        self.partial.end_writes();
        self.allocator.set_written(pages);
    }

    /// Frees the sequence's own pages beyond the first `page_count`.
    pub fn shrink(&mut self, sequence: &mut SequencePages, page_count: usize) {
        let keep = page_count.max(sequence.shared).min(sequence.pages.len());
        let pages = sequence.pages.split_off(keep);
        self.free(pages);
    }

    /// Moves the full pages of the `settled` tokens, which are computed, into the tree. If the tree already has the same
    /// tokens, the sequence continues with the tree's pages, and its own copies are freed. Windows leave the pages that a
    /// sequence which has computed `next` tokens sees no more, settled or not.
    pub fn share(&mut self, tenant: &str, sequence: &mut SequencePages, settled: &[u32], next: usize) {
        self.share_full(tenant, sequence, settled);
        if let Some(windows) = &mut self.windows {
            let first = windows.first_seen(next).min(sequence.pages.len());
            if first > sequence.seen_from {
                windows.leave(&sequence.pages[sequence.seen_from..first]);
                sequence.seen_from = first;
            }
        }
    }

    /// Returns whether windows have left a page that the sequence needs to continue after `next` tokens, because later ones
    /// were rolled back.
    pub fn has_left(&self, sequence: &SequencePages, next: usize) -> bool {
        self.windows.as_ref().is_some_and(|windows| windows.first_needed(next) < sequence.seen_from)
    }

    fn share_full(&mut self, tenant: &str, sequence: &mut SequencePages, computed: &[u32]) {
        let full = computed.len() / PAGE_TOKENS;
        if full <= sequence.shared {
            return;
        }
        let (tokens, pages) = (&computed[..full * PAGE_TOKENS], &sequence.pages[..full]);
        let inserted = self.tree.insert(tenant, tokens, pages, sequence.lock);
        self.tree.lock(inserted.node);
        if let Some(previous) = sequence.lock.replace(inserted.node) {
            self.tree.unlock(previous);
        }
        let mut duplicates = Vec::new();
        for at in sequence.shared..full {
            let (own, cached) = (sequence.pages[at], inserted.pages[at]);
            if own != cached {
                if let Some(windows) = &mut self.windows {
                    windows.replace(own, cached, at >= sequence.seen_from);
                }
                duplicates.push(own);
            }
        }
        self.free(duplicates);
        sequence.pages[..full].copy_from_slice(&inserted.pages);
        sequence.shared = full;
    }

    /// Makes a sequence that has borrowed a cached prefix continue in a page that another one has filled in part, if there is
    /// one. Returns how many of these tokens the sequence has then. The last one is always computed.
    pub fn continue_partial(&mut self, sequence: &mut SequencePages, tokens: &[u32]) -> usize {
        let whole = sequence.capacity_tokens();
        let next = tokens.get(whole..tokens.len().saturating_sub(1)).unwrap_or_default();
        let taken = sequence.pages.last().and_then(|previous| self.partial.take(*previous, next));
        let Some((page, found)) = taken else { return whole };
        sequence.pages.push(page);
        whole + found
    }

    /// Keeps the page in which the `computed` tokens of a sequence end, for the first sequence that continues them. Layers
    /// with windows do not: their pages would have to be kept as well.
    pub fn keep_partial(&mut self, owner: &PrefixOwner, sequence: &mut SequencePages, computed: &[u32]) {
        self.share_full(&owner.tenant, sequence, computed);
        let tokens = &computed[whole_pages(computed).len()..];
        let full = computed.len() / PAGE_TOKENS;
        if tokens.is_empty() || full == 0 || sequence.shared != full || self.windows.is_some() {
            return;
        }
        let page = sequence.pages.remove(full);
        let is_written = self.allocator.is_written(page);
        let replaced = self.partial.keep(sequence.pages[full - 1], (page, is_written), (tokens, owner));
        self.free(replaced);
    }

    /// Ends a sequence's ownership: full computed pages stay in the tree for the next turn, the rest become free.
    pub fn release(&mut self, tenant: &str, mut sequence: SequencePages, computed: &[u32]) {
        self.share(tenant, &mut sequence, computed, computed.len());
        let own = sequence.pages.split_off(sequence.shared);
        self.free(own);
        if let Some(windows) = &mut self.windows {
            windows.leave(sequence.seen());
        }
        if let Some(node) = sequence.lock {
            self.tree.unlock(node);
        }
    }

    /// Records for whom the whole pages of these tokens were computed.
    pub fn own(&mut self, owner: &PrefixOwner, tokens: &[u32]) {
        self.tree.own(owner, &tokens[..tokens.len() / PAGE_TOKENS * PAGE_TOKENS]);
    }

    /// Frees the cached pages that only the matching owners have, except for those that sequences use. Returns their
    /// number.
    pub fn forget(&mut self, matches: impl Fn(&PrefixOwner) -> bool) -> usize {
        let mut pages = self.partial.forget(&matches);
        pages.extend(self.tree.forget(matches));
        let count = pages.len();
        self.free(pages);
        count
    }

    /// Frees all cached pages. No sequence may hold any.
    pub fn clear(&mut self) {
        self.evict(self.evictable_pages());
    }

    /// Frees the cached pages of these tokens that nobody owns or uses.
    pub fn drop_unowned(&mut self, tenant: &str, tokens: &[u32]) {
        let pages = self.tree.drop_unowned(tenant, &tokens[..tokens.len() / PAGE_TOKENS * PAGE_TOKENS]);
        self.free(pages);
    }

    /// Frees cached pages, of which there have to be as many. Partial ones go first.
    fn evict(&mut self, count: usize) {
        let mut pages = self.partial.evict(count);
        pages.extend(self.tree.evict(count - pages.len()));
        self.free(pages);
    }

    /// Frees pages, and the partial ones after them.
    fn free(&mut self, mut pages: Vec<PageId>) {
        pages.extend(self.partial.remove_after(&pages));
        if let Some(windows) = &mut self.windows {
            windows.free(&pages);
        }
        self.allocator.release(pages);
    }

    /// Panics unless every page is owned exactly once and the tree's counters are correct. `live` contains
    /// every sequence that holds pages.
    pub fn check_integrity<'a>(&self, live: impl Iterator<Item = &'a SequencePages>) {
        let mut owners = vec![0u32; self.page_count()];
        let mut locks = Vec::new();
        let mut own = |pages: &[PageId]| pages.iter().for_each(|page| owners[page.0 as usize] += 1);
        own(self.allocator.free_pages());
        own(self.allocator.held_pages());
        let live: Vec<&SequencePages> = live.collect();
        if let Some(windows) = &self.windows {
            windows.check_integrity(live.iter().map(|sequence| sequence.seen()));
        }
        for sequence in live {
            own(&sequence.pages[sequence.shared..]);
            locks.extend(sequence.lock);
        }
        let cached = self.tree.check_integrity(&locks);
        own(&cached);
        own(&self.partial.pages());
        self.partial.check_integrity(&cached);
        let wrong = owners.iter().enumerate().find(|(_, count)| **count != 1);
        assert!(wrong.is_none(), "page {:?} (number, owners) must have exactly one owner", wrong);
    }
}

/// Returns the tokens that fill whole pages.
fn whole_pages(tokens: &[u32]) -> &[u32] {
    &tokens[..tokens.len() / PAGE_TOKENS * PAGE_TOKENS]
}

/// Returns the number of pages that `tokens` tokens take.
pub(crate) fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}
