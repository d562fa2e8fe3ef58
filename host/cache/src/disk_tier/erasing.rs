//! The part of the writer that makes erasures.
//!
//! Invariants:
//! - Pages are out of use before anything waits for the disk, and before their pins: a session that is pinned meanwhile does not
//!   keep its pin without its pages.
//! - What the disk did not take has a note in the folder, or the error says that it has none.

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use super::index::{Changes, EraseFilter, LayoutId, Slot};
use super::writer::{Undone, change, empty, free, pause, rewrite};
use super::{Shared, State};
use crate::metric;

/// Makes all erasures that are wanted, those that were requested together with a single wait for the disk.
pub(super) fn erase_wanted(shared: &Shared) {
    while let Some(erasure) = shared.erasures.take() {
        let erased = forget(shared, &erasure.which).map_err(|error| {
            let reported = io::Error::new(error.kind(), error.to_string());
            pause(shared, error);
            reported
        });
        // A caller that no longer waits does not need the answer.
        let _ = erasure.answer.send(erased);
    }
}

/// Makes the erasures that an earlier process could not finish. What the disk does not take is left to the next erasure.
pub(super) fn finish_erasures(shared: &Shared) {
    if !shared.erasures.are_noted() {
        return;
    }
    let are_pins_saved = shared.pins.forget(&[], &shared.options.folder);
    match remove(shared, Changes::default()) {
        Ok(_) if are_pins_saved => finish(shared),
        Ok(_) => {}
        Err(error) => pause(shared, error),
    }
}

/// Erases pages and pins, and pages that earlier erasures could not remove. Returns the number of pages that are gone from the disk.
/// After an error, the folder has a note of the erasures.
fn forget(shared: &Shared, which: &[EraseFilter]) -> io::Result<u64> {
    let folder = &shared.options.folder;
    let (mut changes, mut removed_elsewhere) = (Changes::default(), Vec::new());
    for which in which {
        let forgotten = change(shared, |state| {
            let State { index, layouts, .. } = state;
            Some(index.forget(*which, State::slot_bytes(layouts)))
        });
        changes.removed.extend(forgotten.removed);
        changes.rewritten.extend(forgotten.rewritten);
        if *which != EraseFilter::AllHere {
            removed_elsewhere.extend(forgotten.removed_pages);
        }
    }
    shared.tell_erased(which, removed_elsewhere);
    let are_pins_saved = shared.pins.forget(which, folder);
    match remove(shared, changes) {
        Ok(erased) if are_pins_saved => {
            finish(shared);
            Ok(erased)
        }
        Ok(erased) => {
            if let Err(error) = shared.erasures.note(which, folder) {
                tracing::warn!(%error, "a restart would bring pins of erased sessions back");
            }
            Ok(erased)
        }
        Err(error) => {
            let problem = match shared.erasures.note(which, folder) {
                Ok(()) => {
                    let state = shared.state();
                    let left = state.unerased.removed.len() + state.unerased.rewritten.len();
                    format!("{error}; {left} pages are left to the next erasure or the next start")
                }
                Err(unnoted) => {
                    format!(
                        "{error}; a restart would bring the pages back, because this cannot be noted: {unnoted}"
                    )
                }
            };
            Err(io::Error::new(error.kind(), problem))
        }
    }
}

/// Removes the notes of erasures that are finished.
fn finish(shared: &Shared) {
    if let Err(error) = shared.erasures.finish(&shared.options.folder) {
        tracing::debug!(%error, "erasures of KV pages that are finished will be repeated at the next start");
    }
}

/// Removes pages from the files durably, with those that earlier erasures could not remove. Returns the number of pages that are
/// gone.
fn remove(shared: &Shared, mut changes: Changes) -> io::Result<u64> {
    let earlier = std::mem::take(&mut shared.state().unerased);
    changes.removed.extend(earlier.removed);
    changes.rewritten.extend(earlier.rewritten);
    let Changes { removed, rewritten, .. } = changes;
    let of_rewritten = rewritten.iter().map(|key| key.layout);
    let mut touched: Vec<LayoutId> = removed.iter().map(|slot| slot.layout).chain(of_rewritten).collect();
    touched.sort_unstable();
    touched.dedup();
    let mut undone = Undone::default();
    let emptied = empty(shared, removed, &mut undone);
    rewrite(shared, &rewritten, &mut undone);
    let mut is_synced = |layout: &LayoutId| {
        let files = shared.state().layouts[layout.0].files.clone();
        files.sync().map_err(|error| undone.error = Some(error)).is_ok()
    };
    let unsynced: Vec<LayoutId> = touched.into_iter().filter(|layout| !is_synced(layout)).collect();
    // These changes may not be on the disk, and are repeated.
    let (again, emptied): (Vec<Slot>, Vec<Slot>) =
        emptied.into_iter().partition(|slot| unsynced.contains(&slot.layout));
    undone.changes.removed.extend(again);
    undone.changes.rewritten.extend(rewritten.into_iter().filter(|key| unsynced.contains(&key.layout)));
    let erased = emptied.len() as u64;
    free(shared, emptied);
    shared.totals.erased_pages.fetch_add(erased, Relaxed);
    metrics::counter!(metric::REMOVED_PAGES, "reason" => "erased").increment(erased);
    undone.keep(shared)?;
    Ok(erased)
}
