//! Copies the pages of an ended sequence to the disk queue.

use std::sync::Arc;

use skep_cache::{Acceptance, Digest, DiskTier, LayoutId, Owner, PageNamer, PageWrite, TenantTag};
use skep_model::{Executor, PAGE_TOKENS};

use super::{EraseScope, owner_of};
use crate::Affinity;
use crate::kv::PrefixOwner;
use crate::scheduler::{EndedPrefix, Scheduler};

pub(super) struct Spill {
    affinity: Affinity,
    tokens: Vec<u32>,
    names: Vec<Digest>,
    tenant: TenantTag,
    owner: Owner,
    /// Number of pages at the beginning that all tenants share, and that stay until their agent is gone.
    public_pages: usize,
    next: usize,
}

/// The state of a spill after a page.
pub(super) enum Copied {
    Page,
    Done,
    /// The queue of the disk is full.
    Later,
}

impl Spill {
    /// Names the whole pages of an ended sequence; tokens after the last whole page are dropped.
    pub fn new(ended: EndedPrefix, keys: &PageNamer) -> Self {
        let EndedPrefix { affinity, mut tokens } = ended;
        tokens.truncate(tokens.len() / PAGE_TOKENS * PAGE_TOKENS);
        let public_pages = affinity.public_pages(PAGE_TOKENS);
        let names = affinity.page_names(keys, &tokens, PAGE_TOKENS);
        let (tenant, owner) = owner_of(keys, &affinity);
        Spill { affinity, tokens, names, tenant, owner, public_pages, next: 0 }
    }

    /// Returns the number of pages that are not copied yet.
    pub fn pages_left(&self) -> usize {
        self.names.len() - self.next
    }

    /// Returns the names of all pages, in order.
    pub fn names(&self) -> &[Digest] {
        &self.names
    }

    /// Returns whether the pages are among those that are being erased.
    pub fn belongs_to(&self, pages: &EraseScope) -> bool {
        pages.includes(&PrefixOwner::of(&self.affinity))
    }

    /// Copies the next page that is not on the disk.
    pub fn copy_next(
        &mut self,
        (tier, layout, page_bytes): (&Arc<DiskTier>, LayoutId, usize),
        scheduler: &mut Scheduler,
        executor: &mut dyn Executor,
    ) -> Copied {
        while self.names.get(self.next).is_some_and(|name| tier.has(layout, *name)) {
            self.next += 1;
        }
        let Some(name) = self.names.get(self.next).copied() else {
            if let Some(last) = self.names.last() {
                tier.mark(layout, *last, self.owner);
            }
            return Copied::Done;
        };
        match tier.accepts(page_bytes as u64) {
            Acceptance::Now => {}
            Acceptance::Later => return Copied::Later,
            Acceptance::Never => return self.give_up(tier),
        }
        let pages = scheduler.cached_prefix(&self.affinity.tenant, &self.tokens);
        let Some(page) = pages.get(self.next) else {
            // It was evicted before it could be copied.
            return self.give_up(tier);
        };
        let mut bytes = vec![0; page_bytes];
        if let Err(error) = executor.read_pages(&[*page], &mut bytes) {
            tracing::warn!(%error, "a KV page cannot be copied");
            return self.give_up(tier);
        }
        let parent = self.next.checked_sub(1).map(|before| self.names[before]);
        let (tenant, owner) = match self.next < self.public_pages {
            true => (tier.keys().public(), Owner { session: 0, ..self.owner }),
            false => (self.tenant, self.owner),
        };
        self.next += 1;
        match tier.write(PageWrite { layout, prefix: name, parent, tenant, owner, bytes }) {
            true => Copied::Page,
            // The tier has counted this page.
            false => self.give_up(tier),
        }
    }

    fn give_up(&self, tier: &DiskTier) -> Copied {
        tier.record_dropped(self.pages_left());
        Copied::Done
    }
}
