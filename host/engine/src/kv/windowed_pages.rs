//! The pages that keep what layers with a window need, where those layers have fewer pages than the others.
//!
//! A page keeps it from its allocation on. Once no sequence sees the page through a window anymore, it keeps it until another
//! page needs the room; the page that was seen longest ago gives way first. Invariant: a prefix is only continued if the pages
//! that a window covers at its end keep what they need.

use std::collections::BTreeSet;

use skep_model::{PAGE_TOKENS, PageId, WindowChange, WindowLimits};

#[derive(Debug)]
pub(super) struct WindowedPages {
    limits: WindowLimits,
    states: Vec<State>,
    /// Number of pages that keep what windows need.
    kept: usize,
    /// The pages among them that no sequence sees, each with the time from which on.
    unseen: BTreeSet<(u64, PageId)>,
    clock: u64,
    /// The changes that the executor does not know yet.
    changes: Vec<WindowChange>,
}

/// The state of a page.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    is_kept: bool,
    /// Number of sequences whose windows cover the page.
    seen_by: u32,
    /// The time since when no sequence sees it.
    since: u64,
}

impl State {
    fn is_unseen(self) -> bool {
        self.is_kept && self.seen_by == 0
    }
}

impl WindowedPages {
    /// Describes a cache of `page_count` free pages.
    pub fn new(limits: WindowLimits, page_count: usize) -> Self {
        WindowedPages {
            limits,
            states: vec![State::default(); page_count],
            kept: 0,
            unseen: BTreeSet::new(),
            clock: 0,
            changes: Vec::new(),
        }
    }

    /// Returns the first page of a sequence that windows cover after this many tokens. One more page counts as covered, because
    /// the last token may be computed again.
    pub fn first_seen(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.limits.window + PAGE_TOKENS) / PAGE_TOKENS
    }

    /// Returns the first page that a step sees which continues after this many tokens.
    pub fn first_needed(&self, tokens: usize) -> usize {
        (tokens + 1).saturating_sub(self.limits.window) / PAGE_TOKENS
    }

    /// Returns the maximum number of pages that windows cover while a sequence computes this many tokens.
    pub fn most_seen(&self, step_tokens: usize) -> usize {
        (self.limits.window + step_tokens).div_ceil(PAGE_TOKENS) + 2
    }

    /// Returns how many of the pages of a prefix can be continued: as many as end in a whole window.
    pub fn usable(&self, pages: &[PageId]) -> usize {
        let mut end = pages.len();
        loop {
            let seen = self.first_seen(end * PAGE_TOKENS)..end;
            match seen.rev().find(|at| !self.state(pages[*at]).is_kept) {
                Some(missing) => end = missing,
                None => return end,
            }
        }
    }

    /// Returns how many more pages can keep what windows need.
    pub fn room(&self) -> usize {
        self.limits.pages - (self.kept - self.unseen.len())
    }

    /// Returns how many more pages can keep what windows need before one has to give way.
    pub fn vacant(&self) -> usize {
        self.limits.pages - self.kept
    }

    /// Returns the part of `page_count` pages for which there is room.
    pub fn share_of_room(&self, page_count: usize) -> usize {
        page_count * self.room() / self.limits.pages.max(1)
    }

    /// Lets pages that were just allocated for a sequence keep what windows need. There has to be room.
    pub fn keep(&mut self, pages: &[PageId]) {
        while self.kept + pages.len() > self.limits.pages {
            let Some((_, page)) = self.unseen.pop_first() else { break };
            self.changes.push(WindowChange::Release(page));
            self.states[page.0 as usize].is_kept = false;
            self.kept -= 1;
        }
        for page in pages {
            self.change(*page, |state| (state.is_kept, state.seen_by) = (true, 1));
        }
    }

    /// Counts a sequence whose windows cover these pages.
    pub fn see(&mut self, pages: &[PageId]) {
        pages.iter().for_each(|page| self.change(*page, |state| state.seen_by += 1));
    }

    /// Undoes [`WindowedPages::see`] or [`WindowedPages::keep`] for a sequence.
    pub fn leave(&mut self, pages: &[PageId]) {
        pages
            .iter()
            .for_each(|page| self.change(*page, |state| state.seen_by = state.seen_by.saturating_sub(1)));
    }

    /// Moves pages that no sequence sees to the end of the order of eviction.
    pub fn touch(&mut self, pages: &[PageId]) {
        self.see(pages);
        self.leave(pages);
    }

    /// Describes pages that are free again.
    pub fn free(&mut self, pages: &[PageId]) {
        for page in pages {
            if self.state(*page).is_kept {
                self.changes.push(WindowChange::Release(*page));
            }
            self.change(*page, |state| (state.is_kept, state.seen_by) = (false, 0));
        }
    }

    /// Replaces a sequence's page by a cached one with the same tokens, which gets what the other one kept if it lacks it.
    pub fn replace(&mut self, own: PageId, cached: PageId, is_seen: bool) {
        if self.state(own).is_kept && !self.state(cached).is_kept {
            self.changes.push(WindowChange::Move { from: own, to: cached });
            self.change(own, |state| state.is_kept = false);
            self.change(cached, |state| state.is_kept = true);
        }
        if is_seen {
            self.see(&[cached]);
        }
    }

    /// Returns what the executor has to know before the next step.
    pub fn changes(&self) -> &[WindowChange] {
        &self.changes
    }

    /// Forgets the changes, because the executor knows them.
    pub fn forget_changes(&mut self) {
        self.changes.clear();
    }

    /// Panics unless the counters are those of the pages. `seen` has the pages that the windows of each sequence cover.
    pub fn check_integrity<'a>(&self, seen: impl Iterator<Item = &'a [PageId]>) {
        let mut seen_by = vec![0u32; self.states.len()];
        seen.flatten().for_each(|page| seen_by[page.0 as usize] += 1);
        let counted: Vec<u32> = self.states.iter().map(|state| state.seen_by).collect();
        assert_eq!(counted, seen_by, "sequences that see each page");
        let kept = self.states.iter().filter(|state| state.is_kept).count();
        assert_eq!(kept, self.kept, "pages that keep what windows need");
        assert!(kept <= self.limits.pages, "{kept} pages of {}", self.limits.pages);
        let unseen: BTreeSet<(u64, PageId)> = (0..)
            .map(PageId)
            .zip(&self.states)
            .filter(|(_, state)| state.is_unseen())
            .map(|(page, state)| (state.since, page))
            .collect();
        assert_eq!(unseen, self.unseen, "pages that no sequence sees");
    }

    fn state(&self, page: PageId) -> State {
        self.states[page.0 as usize]
    }

    fn change(&mut self, page: PageId, change: impl FnOnce(&mut State)) {
        let state = &mut self.states[page.0 as usize];
        let before = *state;
        change(state);
        self.kept = self.kept + usize::from(state.is_kept) - usize::from(before.is_kept);
        match (before.is_unseen(), state.is_unseen()) {
            (false, true) => {
                self.clock += 1;
                state.since = self.clock;
                self.unseen.insert((self.clock, page));
            }
            (true, false) => {
                self.unseen.remove(&(before.since, page));
            }
            _ => {}
        }
    }
}
