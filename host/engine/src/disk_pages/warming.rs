//! Pages that a caller wants in memory before a request needs them.

use skep_model::PAGE_TOKENS;
use tokio::sync::oneshot;

use crate::Affinity;
use crate::scheduler::Scheduler;

/// The pages of a conversation after they were read ahead: where they were found, and how many were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Whole pages of the conversation.
    pub pages: usize,
    /// Pages from the first on that were in memory.
    pub in_memory: usize,
    /// Pages after these that were on disk.
    pub on_disk: usize,
    /// Pages that were read into memory, from the disk or another host.
    pub read: usize,
}

impl Warmed {
    /// Returns the number of pages that a request would have to compute.
    pub fn missing(&self) -> usize {
        self.pages.saturating_sub(self.in_memory + self.read)
    }
}

/// A conversation whose pages a caller wants in memory. The caller gives up by dropping its end of `done`.
pub(crate) struct Warming {
    pub affinity: Affinity,
    pub tokens: Vec<u32>,
    pub done: oneshot::Sender<Warmed>,
}

impl Warming {
    /// Returns the tokens of the whole pages.
    pub fn whole_pages(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() / PAGE_TOKENS * PAGE_TOKENS]
    }

    /// Returns whether nobody waits for the answer anymore.
    pub fn is_given_up(&self) -> bool {
        self.done.is_closed()
    }

    /// Answers without a disk: only what is in memory counts.
    pub fn answer_from_memory(self, scheduler: &mut Scheduler) {
        let whole = self.whole_pages();
        let in_memory = scheduler.usable_prefix(&self.affinity.tenant, whole);
        let pages = whole.len() / PAGE_TOKENS;
        // A caller that no longer waits does not need the answer.
        let _ = self.done.send(Warmed { pages, in_memory, ..Warmed::default() });
    }
}
