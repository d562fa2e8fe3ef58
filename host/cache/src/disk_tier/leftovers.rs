//! Pages that are in free slots when the tier is opened: a power cut can leave a page whose record is empty already, or was never
//! written.

use std::iter::once;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Shared;
use super::layout_files::{LayoutFiles, MAX_SLOTS};

/// Maximum number of slots between two looks at whether the tier is closed.
const SLOTS_AT_ONCE: usize = 1024;

/// Deallocates what free slots have, and calls `between` now and then. No slot may be taken meanwhile.
pub(super) fn erase(shared: &Shared, between: impl Fn()) {
    let layouts: Vec<(Arc<LayoutFiles>, Vec<u32>, u32)> = {
        let state = shared.state();
        let layouts = state.layouts.iter();
        layouts.map(|layout| (layout.files.clone(), layout.free.clone(), layout.slots)).collect()
    };
    for (files, mut free, slots) in layouts {
        free.sort_unstable();
        let runs = free.chunk_by(|slot, next| slot + 1 == *next).flat_map(|run| run.chunks(SLOTS_AT_ONCE));
        let free = runs.map(|run| run[0]..run[0] + run.len() as u32);
        // A page whose record was never written may be behind the last slot.
        for range in free.chain(once(slots..MAX_SLOTS as u32)) {
            if shared.is_closing.load(Relaxed) {
                return;
            }
            if let Err(error) = files.erase_leftovers(range) {
                let folder = shared.options.folder.display();
                tracing::warn!(%folder, %error, "free slots of KV pages are not emptied; the next start tries it again");
                break;
            }
            between();
        }
    }
}
