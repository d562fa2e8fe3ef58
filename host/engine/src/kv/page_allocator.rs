//! The free pages. The page freed last is allocated first, so that a warm page is reused.
//!
//! Invariant: no page is handed out twice, nor while a step that was started ahead may still write to it. Such a page
//! that is freed is held until the step has been collected.

use skep_model::PageId;

#[derive(Debug)]
pub(super) struct PageAllocator {
    free: Vec<PageId>,
    /// Pages that a step writes to which was started ahead.
    written: Vec<PageId>,
    /// The pages among them that were freed since.
    held: Vec<PageId>,
    page_count: usize,
}

impl PageAllocator {
    /// Creates an allocator with the pages `0..page_count`, all free.
    pub fn new(page_count: usize) -> Self {
        let count = u32::try_from(page_count).expect("the executor numbers its pages with 32 bits");
        let free = (0..count).rev().map(PageId).collect();
        PageAllocator { free, written: Vec::new(), held: Vec::new(), page_count }
    }

    /// Returns the number of pages, free or not.
    pub fn page_count(&self) -> usize {
        self.page_count
    }

    /// Returns the number of free pages.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Returns the free pages, the next one to be allocated last. Only the check of integrity needs them.
    pub fn free_pages(&self) -> &[PageId] {
        &self.free
    }

    /// Returns the freed pages that are held. Only the check of integrity needs them.
    pub fn held_pages(&self) -> &[PageId] {
        &self.held
    }

    /// Replaces the pages that a step writes to which was started ahead. The step before it has been collected, so its
    /// pages are no longer held.
    pub fn set_written(&mut self, pages: Vec<PageId>) {
        self.free.append(&mut self.held);
        debug_assert!(pages.iter().all(|page| !self.free.contains(page)), "a free page is written to");
        self.written = pages;
    }

    /// Returns whether a step that was started ahead may still write to a page.
    pub fn is_written(&self, page: PageId) -> bool {
        self.written.contains(&page)
    }

    /// Allocates `count` pages, or none if fewer are free.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PageId>> {
        let keep = self.free.len().checked_sub(count)?;
        let pages = self.free.split_off(keep);
        debug_assert!(pages.iter().all(|page| !self.written.contains(page)), "a page is written to");
        Some(pages)
    }

    /// Frees pages that were allocated. A page must not be freed twice.
    pub fn release(&mut self, pages: Vec<PageId>) {
        for page in pages {
            let freed = if self.written.contains(&page) { &mut self.held } else { &mut self.free };
            freed.push(page);
        }
        let freed = self.free.len() + self.held.len();
        debug_assert!(freed <= self.page_count, "more pages were freed than exist");
    }
}
