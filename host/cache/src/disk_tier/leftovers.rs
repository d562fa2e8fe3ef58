//! Pages that are in free slots when the tier is opened: a power cut can leave a page whose record is empty already, or was never
//! written.
//!
//! Invariant: a page that is to be written waits for a few slots at most, also in file systems that cannot deallocate them.

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use super::Shared;
use super::layout_files::LayoutFiles;

/// Number of bytes of slots between two looks for something else to do. One slot may be longer.
const BYTES_AT_ONCE: u64 = if cfg!(test) { 1 << 16 } else { 4 << 20 };

/// The layouts and the slots that are done.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    layouts: usize,
    /// Number of free slots of the next layout that are done, from the first of its list on.
    slots: usize,
}

impl Leftovers {
    /// Deallocates what some free slots have, unless the tier is closed. Returns whether there may be more.
    pub fn erase_some(&mut self, shared: &Shared) -> bool {
        if shared.is_closing.load(Relaxed) {
            return false;
        }
        let (files, end, mut slots) = {
            let state = shared.state();
            let Some(layout) = state.layouts.get(self.layouts) else { return false };
            let count = (BYTES_AT_ONCE / layout.files.slot_bytes()).max(1) as usize;
            // Slots are taken from the end of the list and overwritten, so the others keep their places in it.
            let left = layout.free.get(self.slots..).unwrap_or_default();
            (layout.files.clone(), layout.slots, left[..left.len().min(count)].to_vec())
        };
        // A page whose record was never written may be behind the last slot.
        let cut = if self.slots == 0 { files.cut_behind(end) } else { Ok(()) };
        self.slots += slots.len();
        let is_done = slots.is_empty();
        let erased = cut.and_then(|()| erase(&files, &mut slots));
        if let Err(error) = &erased {
            let folder = shared.options.folder.display();
            tracing::warn!(%folder, %error, "free slots of KV pages are not emptied; the next start tries it again");
        }
        if is_done || erased.is_err() {
            (self.layouts, self.slots) = (self.layouts + 1, 0);
        }
        true
    }
}

fn erase(files: &LayoutFiles, slots: &mut [u32]) -> io::Result<()> {
    slots.sort_unstable();
    let mut runs = slots.chunk_by(|slot, next| slot + 1 == *next);
    runs.try_for_each(|run| files.erase_leftovers(run[0]..run[0] + run.len() as u32))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;

    use super::super::index::PageKey;
    use super::super::record::{EMPTY, RECORD_BYTES};
    use super::super::tests::{BYTES, index_file, is_on_disk, open, tokens, write};
    use super::super::writer::{self, Command};
    use super::super::{PageWrite, TierOptions};
    use super::*;
    use crate::Owner;

    #[test]
    fn a_page_is_written_before_all_free_slots_are_empty() {
        let folder = tempfile::tempdir().unwrap();
        let (tier, form) = open(folder.path());
        let stays = write(&tier, form, "t", "stays", &tokens(1, 1));
        let left = write(&tier, form, "t", "left", &tokens(2, 100));
        drop(tier);
        let index = index_file(folder.path());
        for slot in 1..=100 {
            index.write_all_at(&EMPTY, (slot + 1) * RECORD_BYTES as u64).unwrap();
        }
        let shared = Arc::new(super::super::open::open(TierOptions::for_tests(folder.path())).unwrap());
        let layout = shared.layout(shared.keys.layout("weights", "form"), BYTES).unwrap();
        let prefix = shared.keys.prefixes("t", &tokens(3, 1), 16)[0];
        let (tenant, owner, bytes) = (shared.keys.tenant("t"), Owner::default(), vec![7; BYTES]);
        let page = Box::new(PageWrite { layout, prefix, parent: None, tenant, owner, bytes });
        let (sender, commands) = sync_channel(1);
        assert!(shared.erasures.queue(|ticket| sender.try_send(Command::Write { page, ticket }).is_ok()));
        drop(sender);
        writer::run(&shared, &commands);
        assert!(shared.state().index.contains(&PageKey { layout, prefix }));
        assert!(is_on_disk(folder.path(), left[50]), "the page waited for all free slots");
        let mut leftovers = Leftovers::default();
        while leftovers.erase_some(&shared) {}
        assert!(![0, 50, 99].iter().any(|at| is_on_disk(folder.path(), left[*at])));
        assert!([stays[0], prefix].iter().all(|prefix| is_on_disk(folder.path(), *prefix)));
    }
}
