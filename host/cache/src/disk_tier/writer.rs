//! The thread that changes the files: it writes pages at a bounded rate, evicts pages, and erases those that are to go (`erasing`).
//!
//! Invariant: only this thread changes files after the tier was opened, and only it lets slots be used again. It holds the lock of
//! the state only while it decides, never while it writes. The reader takes damaged pages out of use meanwhile.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::erasing::{erase_wanted, finish_erasures};
use super::eviction::Eviction;
use super::index::{Changes, LayoutId, PageKey, Slot};
use super::layout_files::LayoutFiles;
use super::leftovers::Leftovers;
use super::record::Record;
use super::space::{Pace, writable_bytes};
use super::{PageWrite, Shared, State, pins, small_file, written_days};
use crate::image::Header;
use crate::{Owner, TenantTag, metric};

pub(super) enum Command {
    Write {
        page: Box<PageWrite>,
        ticket: u64,
    },
    Mark {
        key: PageKey,
        owner: Owner,
        ticket: u64,
    },
    /// Erases pages that are out of use already.
    Remove {
        changes: Changes,
    },
    /// Wakes the writer for an erasure.
    Erase,
    Flush {
        done: Sender<()>,
    },
}

/// Interval at which a writer that waits looks whether the tier is closed.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The reason that a page was not written.
enum Refusal {
    /// The page before it is missing, or there is no space.
    Dropped,
    Failed(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Failed(error)
    }
}

pub(super) fn run(shared: &Arc<Shared>, commands: &Receiver<Command>) {
    let mut pace = Pace::new(shared.options.write_bytes_per_s);
    finish_erasures(shared);
    if let Err(Refusal::Failed(error)) = make_room(shared, 0, &Eviction::default()) {
        pause(shared, error);
    }
    show(shared);
    let mut leftovers = Leftovers::default();
    while let Some(command) = next(shared, commands, &mut leftovers) {
        erase_wanted(shared);
        match command {
            Command::Write { page, ticket } => {
                let (key, bytes) =
                    (PageKey { layout: page.layout, prefix: page.prefix }, page.bytes.len() as u64);
                let written = match shared.erasures.includes(ticket, page.owner, Some(page.tenant)) {
                    true => Ok(0),
                    false => write(shared, *page),
                };
                shared.state().queued.remove(&key);
                shared.queued_write_bytes.fetch_sub(bytes, Relaxed);
                match written {
                    Ok(0) => {}
                    Ok(written) => keep_pace(shared, pace.wait(written, Instant::now())),
                    Err(refusal) => refuse(shared, refusal),
                }
            }
            Command::Mark { key, owner, ticket } => {
                if shared.erasures.includes(ticket, owner, None) {
                    continue;
                }
                let changes = shared.state().index.mark(key, owner);
                follow(shared, changes).unwrap_or_else(|error| pause(shared, error));
            }
            Command::Remove { changes } => {
                erase(shared, changes).map(drop).unwrap_or_else(|error| pause(shared, error));
            }
            Command::Erase => {}
            Command::Flush { done } => {
                while leftovers.erase_some(shared) {
                    erase_wanted(shared);
                }
                // A caller that no longer waits does not need the answer.
                let _ = done.send(());
            }
        }
        show(shared);
    }
    save_days(shared);
}

/// Returns the next command, or `None` once all senders are gone. It empties some free slots before, and more while none waits.
fn next(shared: &Shared, commands: &Receiver<Command>, leftovers: &mut Leftovers) -> Option<Command> {
    while leftovers.erase_some(shared) {
        match commands.try_recv() {
            Ok(command) => return Some(command),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => erase_wanted(shared),
        }
    }
    commands.recv().ok()
}

/// Waits so that writes keep their rate. Erasures do not wait.
fn keep_pace(shared: &Shared, wait: Duration) {
    let until = Instant::now() + wait;
    while !shared.is_closing.load(Relaxed) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        shared.erasures.wait(left.min(LOOK_INTERVAL));
        erase_wanted(shared);
    }
}

/// Writes a page, and returns the bytes that were written.
fn write(shared: &Shared, page: PageWrite) -> Result<u64, Refusal> {
    let PageWrite { layout, prefix, parent, tenant, owner, bytes } = page;
    let key = PageKey { layout, prefix };
    {
        let mut state = shared.state();
        if state.index.contains(&key) {
            let changes = state.index.mark(key, owner);
            drop(state);
            follow(shared, changes)?;
            return Ok(0);
        }
        let before = parent.map(|prefix| PageKey { layout, prefix });
        if before.is_some_and(|before| !state.index.contains(&before)) {
            return Err(Refusal::Dropped);
        }
    }
    let slot_bytes = shared.state().layouts.get(layout.0).map_or(0, |layout| layout.files.slot_bytes());
    let keep = parent.map(|prefix| PageKey { layout, prefix });
    make_room_of_tenant(shared, slot_bytes, keep, tenant)?;
    make_room(shared, slot_bytes, &Eviction { keep, ..Eviction::default() })?;
    let (files, slot) = take_slot(shared, layout, keep)?;
    let header = Header { layout: files.head.layout, prefix, payload_bytes: files.head.payload_bytes };
    if let Err(error) = put(shared, &files, slot, &header, &bytes) {
        // The bytes written so far have no record, and are deallocated.
        let _ = files.erase_page(slot);
        shared.state().layouts[layout.0].free.push(slot);
        return Err(Refusal::Failed(error));
    }
    let inserted = {
        let mut state = shared.state();
        let has_parent = keep.is_none_or(|before| state.index.contains(&before));
        has_parent.then(|| {
            state.used_bytes += slot_bytes;
            state.index.insert(key, slot, (parent, tenant), owner, slot_bytes)
        })
    };
    let Some(changes) = inserted else {
        // A reader has found the page before to be damaged meanwhile.
        let unused = Changes { removed: vec![Slot { layout, number: slot }], ..Changes::default() };
        erase(shared, unused)?;
        return Err(Refusal::Dropped);
    };
    follow(shared, changes)?;
    let written = slot_bytes;
    shared.totals.written_pages.fetch_add(1, Relaxed);
    shared.totals.written_bytes.fetch_add(written, Relaxed);
    metrics::counter!(metric::WRITTEN_PAGES).increment(1);
    metrics::counter!(metric::WRITTEN_BYTES).increment(written);
    let is_due = shared.days().add(written, written_days::today());
    if is_due {
        save_days(shared);
    }
    Ok(written)
}

/// Writes to the folder how much was written today.
fn save_days(shared: &Shared) {
    let text = shared.days().encode();
    if let Err(error) = small_file::replace(&shared.options.folder, written_days::FILE, &text) {
        tracing::debug!(%error, "cannot save how many bytes of KV pages were written today");
    }
}

fn put(shared: &Shared, files: &LayoutFiles, slot: u32, header: &Header, bytes: &[u8]) -> io::Result<()> {
    #[cfg(any(test, feature = "faults"))]
    shared.faults.write()?;
    let sealed = match &shared.cipher {
        Some(cipher) => Some(cipher.seal(header.layout, header.prefix, bytes)?),
        None => None,
    };
    let bytes = sealed.as_deref().unwrap_or(bytes);
    if bytes.len() != header.payload_bytes {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the page's length does not match its layout",
        ));
    }
    files.write_page(slot, &header.encode(bytes), bytes)
}

/// Evicts pages of a tenant until it has its share at most, with `bytes` more. Others make no room for it.
fn make_room_of_tenant(
    shared: &Shared,
    bytes: u64,
    keep: Option<PageKey>,
    tenant: TenantTag,
) -> Result<(), Refusal> {
    let share = shared.shares.of(tenant);
    while shared.state().index.bytes_of(tenant).saturating_add(bytes) > share {
        let of_tenant = Eviction { keep, only: Some(tenant), ..Eviction::default() };
        if !evict_page(shared, &of_tenant)? {
            return Err(Refusal::Dropped);
        }
    }
    Ok(())
}

/// Evicts pages until there is space for `bytes`.
fn make_room(shared: &Shared, bytes: u64, rules: &Eviction<'_>) -> Result<(), Refusal> {
    loop {
        let used = shared.state().used_bytes;
        let fits = used.saturating_add(bytes) <= shared.options.max_bytes;
        if fits && (bytes == 0 || has_free_disk(shared, bytes)) {
            return Ok(());
        }
        if !evict_page(shared, rules)? {
            return match bytes {
                0 => Ok(()),
                _ if fits => Err(Refusal::Failed(too_full(shared.options.min_free_percent))),
                _ => Err(Refusal::Dropped),
            };
        }
    }
}

/// Takes a slot of a layout. If all of them have pages, one of these is evicted.
fn take_slot(
    shared: &Shared,
    layout: LayoutId,
    keep: Option<PageKey>,
) -> Result<(Arc<LayoutFiles>, u32), Refusal> {
    loop {
        {
            let mut state = shared.state();
            let found = state.layouts.get_mut(layout.0).ok_or(Refusal::Dropped)?;
            if let Some(slot) = found.take_slot() {
                return Ok((found.files.clone(), slot));
            }
        }
        let of_layout = Eviction { keep, layout: Some(layout), ..Eviction::default() };
        if !evict_page(shared, &of_layout)? {
            return Err(Refusal::Dropped);
        }
    }
}

/// Evicts one page, those of pinned sessions last. Returns false if there is none that may go.
fn evict_page(shared: &Shared, rules: &Eviction<'_>) -> Result<bool, Refusal> {
    let owners = shared.pins.owners();
    let evicted = change(shared, |state| {
        let State { index, layouts, .. } = state;
        let slot_bytes = State::slot_bytes(layouts);
        let last = pins::protected(&owners, index, shared.shares.pinned, &slot_bytes);
        let Eviction { keep, only, layout, .. } = *rules;
        index.evict(&Eviction { keep, only, layout, last, shares: Some(&shared.shares) }, slot_bytes)
    });
    if evicted.removed.is_empty() {
        return Ok(false);
    }
    let pages = erase(shared, evicted)?;
    shared.totals.evicted_pages.fetch_add(pages, Relaxed);
    metrics::counter!(metric::REMOVED_PAGES, "reason" => "evicted").increment(pages);
    Ok(true)
}

fn too_full(min_free_percent: u8) -> io::Error {
    let problem =
        format!("less than {min_free_percent} % of the disk is free, see `disk_free_percent` in `[kv]`");
    io::Error::new(io::ErrorKind::StorageFull, problem)
}

fn has_free_disk(shared: &Shared, bytes: u64) -> bool {
    writable_bytes(&shared.options.folder, shared.options.min_free_percent) >= bytes
}

/// Changes the state, and counts the bytes of removed pages.
pub(super) fn change(shared: &Shared, how: impl FnOnce(&mut State) -> Option<Changes>) -> Changes {
    let mut state = shared.state();
    let changes = how(&mut state).unwrap_or_default();
    let slot_bytes = State::slot_bytes(&state.layouts);
    let bytes: u64 = changes.removed.iter().map(|slot| slot_bytes(slot.layout)).sum();
    drop(slot_bytes);
    state.used_bytes = state.used_bytes.saturating_sub(bytes);
    changes
}

/// The changes that the disk did not take, and its last error.
#[derive(Default)]
pub(super) struct Undone {
    pub changes: Changes,
    pub error: Option<io::Error>,
}

impl Undone {
    /// Leaves the changes to the next erasure, and returns the error.
    pub fn keep(self, shared: &Shared) -> io::Result<()> {
        let mut state = shared.state();
        state.unerased.removed.extend(self.changes.removed);
        state.unerased.rewritten.extend(self.changes.rewritten);
        self.error.map_or(Ok(()), Err)
    }
}

/// Removes pages from the files, frees their slots, and returns the number of pages.
fn erase(shared: &Shared, changes: Changes) -> io::Result<u64> {
    let pages = changes.removed.len() as u64;
    let mut undone = Undone::default();
    let emptied = empty(shared, changes.removed, &mut undone);
    free(shared, emptied);
    rewrite(shared, &changes.rewritten, &mut undone);
    undone.keep(shared).map(|()| pages)
}

/// Empties slots, and returns those that are empty now. The others are not free, so that no page is written to them.
pub(super) fn empty(shared: &Shared, slots: Vec<Slot>, undone: &mut Undone) -> Vec<Slot> {
    let mut emptied = Vec::with_capacity(slots.len());
    for slot in slots {
        match empty_slot(shared, slot) {
            Ok(()) => emptied.push(slot),
            Err(error) => {
                undone.changes.removed.push(slot);
                undone.error = Some(error);
            }
        }
    }
    emptied
}

fn empty_slot(shared: &Shared, Slot { layout, number }: Slot) -> io::Result<()> {
    #[cfg(any(test, feature = "faults"))]
    shared.faults.erase()?;
    let files = shared.state().layouts[layout.0].files.clone();
    files.clear_record(number)?;
    files.erase_page(number)
}

/// Lets pages be written to empty slots.
pub(super) fn free(shared: &Shared, slots: Vec<Slot>) {
    let mut state = shared.state();
    slots.into_iter().for_each(|Slot { layout, number }| state.layouts[layout.0].free.push(number));
}

/// Writes the records that have changed.
fn follow(shared: &Shared, changes: Changes) -> io::Result<()> {
    let mut undone = Undone::default();
    rewrite(shared, &changes.rewritten, &mut undone);
    undone.error.map_or(Ok(()), Err)
}

/// Writes the records of pages as they are now.
pub(super) fn rewrite(shared: &Shared, keys: &[PageKey], undone: &mut Undone) {
    for key in keys {
        let record: Option<(Arc<LayoutFiles>, Slot, Record)> = {
            let state = shared.state();
            let record = state.index.record(key);
            record.and_then(|(slot, record)| {
                Some((state.layouts.get(key.layout.0)?.files.clone(), slot, record))
            })
        };
        if let Some((files, slot, record)) = record
            && let Err(error) = files.write_record(slot.number, &record)
        {
            undone.changes.rewritten.push(*key);
            undone.error = Some(error);
        }
    }
}

/// Counts a page that is not written.
fn refuse(shared: &Shared, refusal: Refusal) {
    shared.drop_page();
    if let Refusal::Failed(error) = refusal {
        pause(shared, error);
    }
}

/// Writes nothing for a while, because the disk has failed.
pub(super) fn pause(shared: &Shared, error: io::Error) {
    let mut failed = shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
    if failed.is_none_or(|at| at.elapsed() >= super::AFTER_FAILURE) {
        tracing::warn!(
            folder = %shared.options.folder.display(),
            "cannot write KV pages: {error}; pausing writes for {} s",
            super::AFTER_FAILURE.as_secs()
        );
    }
    *failed = Some(Instant::now());
}

/// Shows what is on disk.
fn show(shared: &Shared) {
    let (bytes, pages) = {
        let state = shared.state();
        (state.used_bytes, state.index.len())
    };
    metrics::gauge!(metric::DISK_BYTES).set(bytes as f64);
    metrics::gauge!(metric::DISK_PAGES).set(pages as f64);
    let [today, _] = shared.days().on(written_days::today());
    metrics::gauge!(metric::WRITTEN_TODAY_BYTES).set(today as f64);
}
