//! The free pages. The page freed last is allocated first, so that a warm page is reused. No page is handed out
//! twice.

use skep_model::PageId;

#[derive(Debug)]
pub(super) struct PageAllocator {
    free: Vec<PageId>,
    page_count: usize,
}

impl PageAllocator {
    /// Creates an allocator with the pages `0..page_count`, all free.
    pub fn new(page_count: usize) -> Self {
        let count = u32::try_from(page_count).expect("the executor numbers its pages with 32 bits");
        PageAllocator { free: (0..count).rev().map(PageId).collect(), page_count }
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

    /// Allocates `count` pages, or none if fewer are free.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PageId>> {
        let keep = self.free.len().checked_sub(count)?;
        Some(self.free.split_off(keep))
    }

    /// Frees pages that were allocated. A page must not be freed twice.
    pub fn release(&mut self, pages: Vec<PageId>) {
        self.free.extend(pages);
        debug_assert!(self.free.len() <= self.page_count, "more pages were freed than exist");
    }
}
