//! The pages that ended sequences had filled in part. The next turn of a session continues in such a page, instead of computing
//! the tokens in it again.
//!
//! A partial page is found by the page before it, which is in the prefix tree. Whoever continues it gets it alone, because it
//! writes to it. The tokens that a page has beyond those that both have in common are overwritten.
//!
//! Invariant: a partial page is kept only while the page before it is in the tree. Partial pages are evicted before pages of the
//! tree, the least recently kept first: each saves less than a page of tokens. One that a step may still write to which was
//! started ahead is not evicted before that step is over.

use std::collections::{BTreeMap, HashMap};

use skep_model::PageId;

use super::prefix_owners::PrefixOwner;

/// Maximum number of partial pages after one page.
const MAX_BRANCHES: usize = 4;

#[derive(Debug)]
struct PartialPage {
    page: PageId,
    /// The computed tokens, fewer than a page has.
    tokens: Vec<u32>,
    owner: PrefixOwner,
    kept_at: u64,
}

#[derive(Debug, Default)]
pub(super) struct PartialPages {
    /// The partial pages by the page before them, the one kept last at the end.
    after: HashMap<PageId, Vec<PartialPage>>,
    /// The pages before partial pages that may be evicted, by the time at which these were kept.
    by_age: BTreeMap<u64, PageId>,
    /// The same for partial pages that a step may still write to. Those that are gone since are among them.
    written: Vec<(u64, PageId)>,
    clock: u64,
}

impl PartialPages {
    /// Returns the number of partial pages.
    pub fn count(&self) -> usize {
        self.by_age.len()
            + self.written.iter().filter(|(kept_at, previous)| self.has(*kept_at, *previous)).count()
    }

    /// Returns the number of partial pages that may be evicted.
    pub fn evictable(&self) -> usize {
        self.by_age.len()
    }

    /// Returns all partial pages.
    pub fn pages(&self) -> Vec<PageId> {
        self.after.values().flatten().map(|partial| partial.page).collect()
    }

    /// Returns the owner of each partial page.
    pub fn owners(&self) -> impl Iterator<Item = &PrefixOwner> {
        self.after.values().flatten().map(|partial| &partial.owner)
    }

    /// Keeps the page after `previous`, in which these tokens are computed. Returns the pages that it replaces. One with
    /// `is_written` is not evicted before [`PartialPages::end_writes`].
    pub fn keep(
        &mut self,
        previous: PageId,
        (page, is_written): (PageId, bool),
        (tokens, owner): (&[u32], &PrefixOwner),
    ) -> Vec<PageId> {
        let branches = self.after.entry(previous).or_default();
        if branches.iter().any(|other| other.tokens.starts_with(tokens)) {
            return vec![page];
        }
        self.clock += 1;
        let (tokens, owner) = (tokens.to_vec(), owner.clone());
        match is_written {
            true => self.written.push((self.clock, previous)),
            false => drop(self.by_age.insert(self.clock, previous)),
        }
        let mut gone: Vec<PartialPage> =
            branches.extract_if(.., |other| tokens.starts_with(&other.tokens)).collect();
        branches.push(PartialPage { page, tokens, owner, kept_at: self.clock });
        if branches.len() > MAX_BRANCHES {
            gone.push(branches.remove(0));
        }
        self.forget_ages(gone)
    }

    /// Records that no step writes to the partial pages anymore.
    pub fn end_writes(&mut self) {
        for (kept_at, previous) in std::mem::take(&mut self.written) {
            if self.has(kept_at, previous) {
                self.by_age.insert(kept_at, previous);
            }
        }
    }

    /// Takes the page after `previous` that has the most tokens in common with `next`, and at least half of its own: somebody
    /// else may continue the others. Returns it and the number of common tokens.
    pub fn take(&mut self, previous: PageId, next: &[u32]) -> Option<(PageId, usize)> {
        let common = |partial: &PartialPage| {
            let common = partial.tokens.iter().zip(next).take_while(|(one, other)| one == other).count();
            (2 * common >= partial.tokens.len()).then_some((common, partial.kept_at))
        };
        let (common, kept_at) = self.after.get(&previous)?.iter().filter_map(common).max()?;
        let page = self.remove(previous, |partial| partial.kept_at == kept_at).pop()?;
        Some((page, common))
    }

    /// Removes as many as `count` pages, the least recently kept first, and returns them.
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        let mut gone = Vec::new();
        while gone.len() < count {
            let Some((kept_at, previous)) = self.by_age.pop_first() else { break };
            gone.extend(self.remove(previous, |partial| partial.kept_at == kept_at));
        }
        gone
    }

    /// Removes the partial pages after these pages, which leave the tree, and returns them.
    pub fn remove_after(&mut self, previous: &[PageId]) -> Vec<PageId> {
        if self.after.is_empty() {
            return Vec::new();
        }
        let gone = previous.iter().filter_map(|page| self.after.remove(page)).flatten().collect();
        self.forget_ages(gone)
    }

    /// Removes the partial pages of the matching owners, and returns them.
    pub fn forget(&mut self, matches: impl Fn(&PrefixOwner) -> bool) -> Vec<PageId> {
        let previous: Vec<PageId> = self.after.keys().copied().collect();
        previous
            .into_iter()
            .flat_map(|previous| self.remove(previous, |partial| matches(&partial.owner)))
            .collect()
    }

    /// Panics unless the page before each partial page is one of `cached`, and the ages are those of the pages.
    pub fn check_integrity(&self, cached: &[PageId]) {
        let ages = self.after.iter().flat_map(|(previous, branches)| {
            assert!(cached.contains(previous), "{previous:?} has left the tree");
            assert!((1..=MAX_BRANCHES).contains(&branches.len()), "branches after {previous:?}");
            branches.iter().map(|partial| (partial.kept_at, *previous))
        });
        let written = self.written.iter().filter(|(kept_at, previous)| self.has(*kept_at, *previous));
        let listed = self.by_age.clone().into_iter().chain(written.copied());
        assert_eq!(ages.collect::<BTreeMap<_, _>>(), listed.collect());
    }

    fn has(&self, kept_at: u64, previous: PageId) -> bool {
        self.after
            .get(&previous)
            .is_some_and(|branches| branches.iter().any(|partial| partial.kept_at == kept_at))
    }

    fn remove(&mut self, previous: PageId, which: impl Fn(&PartialPage) -> bool) -> Vec<PageId> {
        let Some(branches) = self.after.get_mut(&previous) else { return Vec::new() };
        let gone = branches.extract_if(.., |partial| which(partial)).collect();
        if branches.is_empty() {
            self.after.remove(&previous);
        }
        self.forget_ages(gone)
    }

    fn forget_ages(&mut self, gone: Vec<PartialPage>) -> Vec<PageId> {
        let page = |partial: PartialPage| {
            self.by_age.remove(&partial.kept_at);
            partial.page
        };
        gone.into_iter().map(page).collect()
    }
}
