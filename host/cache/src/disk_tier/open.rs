//! Opens the folder of the tier: reads its key and the index that an earlier process wrote.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::index::{Changes, Index, LayoutId, Slot};
use super::layout_files::{LayoutFiles, MAX_SLOTS, slot_bytes};
use super::record::Head;
use super::unfinished::UnfinishedErasures;
use super::{
    ByteShares, Erasures, Layout, PageCipher, Pins, Shared, State, TierError, TierOptions, Totals,
    WrittenDays, sealing, small_file, written_days,
};
use crate::{Digest, PageNamer, TransferRate};

const KEY_FILE: &str = "key";
/// The file with the number of the last erasure that was made in the folder, of those that all hosts count together.
const ERASED_FILE: &str = "erased";
/// Assumed latency of a read, until it has been measured.
const READ_LATENCY_S: f64 = 0.002;
/// Assumed read rate in bytes per second, until it has been measured: that of a slow solid-state disk.
const READ_BYTES_PER_S: f64 = 200e6;

pub(super) fn open(options: TierOptions) -> Result<Shared, TierError> {
    let folder = options.folder.clone();
    let failed = |source: io::Error| TierError::Folder { path: folder.clone(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
    std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).map_err(failed)?;
    let shared = options.name_key.as_ref().map(|key| key.0);
    let secret = match read_key(&folder).map_err(failed)? {
        Some(secret) if shared.is_none_or(|shared| shared == secret) => secret,
        _ => {
            // Pages under a lost key, or another one, have names that nobody computes anymore.
            remove_pages(&folder).map_err(failed)?;
            create_key(&folder, shared.unwrap_or_else(rand::random)).map_err(failed)?
        }
    };
    let cipher = options.key.as_ref().map(PageCipher::new);
    remove_unlike(&folder, cipher.as_ref()).map_err(failed)?;
    let unfinished = UnfinishedErasures::read(&folder).map_err(failed)?;
    let state = read_state(&folder, &unfinished).map_err(failed)?;
    let totals = Totals { pages_at_start: AtomicU64::new(state.index.len() as u64), ..Totals::default() };
    let keys = PageNamer::new(secret);
    let days = WrittenDays::decode(&small_file::read(&folder, written_days::FILE).map_err(failed)?);
    Ok(Shared {
        shares: ByteShares::new(&options.shares, options.max_bytes, &keys),
        pins: Pins::read(&folder, &keys, unfinished.list()).map_err(failed)?,
        days: Mutex::new(days),
        cipher,
        options,
        keys,
        state: Mutex::new(state),
        rate: TransferRate::assumed(READ_LATENCY_S, READ_BYTES_PER_S),
        erasures: Erasures::after(unfinished),
        erasure_listener: std::sync::OnceLock::new(),
        queued_write_bytes: AtomicU64::new(0),
        queued_read_bytes: AtomicU64::new(0),
        failed: Mutex::new(None),
        is_closing: AtomicBool::new(false),
        totals,
        #[cfg(any(test, feature = "faults"))]
        faults: super::Faults::default(),
    })
}

fn read_key(folder: &Path) -> io::Result<Option<[u8; 32]>> {
    let mut secret = [0; 32];
    let mut file = match OpenOptions::new().read(true).open(folder.join(KEY_FILE)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.read_exact(&mut secret) {
        Ok(()) => Ok(Some(secret)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn create_key(folder: &Path, secret: [u8; 32]) -> io::Result<[u8; 32]> {
    let path = folder.join(KEY_FILE);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(&secret)?;
    file.sync_all()?;
    Ok(secret)
}

/// Removes pages that were sealed with another key, or that should be sealed and are not. Afterwards the folder says what
/// its pages are sealed with.
fn remove_unlike(folder: &Path, cipher: Option<&PageCipher>) -> io::Result<()> {
    let id = cipher.map(PageCipher::id).unwrap_or_default();
    if small_file::read(folder, sealing::FILE)? == id {
        return Ok(());
    }
    remove_pages(folder)?;
    small_file::replace(folder, sealing::FILE, &id)
}

fn remove_pages(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pages" || extension == "index") {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Reads the indexes of all layouts. Slots whose pages cannot be used are emptied. Pages of unfinished erasures are left out, and
/// left to the writer.
fn read_state(folder: &Path, unfinished: &UnfinishedErasures) -> io::Result<State> {
    let mut heads = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "index") {
            continue;
        }
        match LayoutFiles::head_of(&path) {
            Some(head) => heads.push(head),
            None => {
                tracing::warn!(
                    path = %path.display(),
                    "removing KV pages whose index is damaged or of another version"
                );
                // Without their index, nobody would find the pages again.
                let pages = path.with_extension("pages");
                if pages.exists() {
                    std::fs::remove_file(pages)?;
                }
                std::fs::remove_file(&path)?;
            }
        }
    }
    let (mut layouts, mut all) = (Vec::with_capacity(heads.len()), Vec::new());
    for head in heads {
        let files = Arc::new(LayoutFiles::open(folder, head)?);
        let (records, slots) = files.records()?;
        if records.is_empty() {
            // The model may never come back.
            files.remove()?;
            continue;
        }
        let at = layouts.len();
        let taken: std::collections::HashSet<u32> = records.iter().map(|(slot, _)| *slot).collect();
        let free = (0..slots).rev().filter(|slot| !taken.contains(slot)).collect();
        let layout = LayoutId(at);
        all.extend(records.into_iter().map(|(number, record)| (Slot { layout, number }, record)));
        layouts.push(Layout { files, free, slots });
    }
    let (mut index, useless) = Index::load(all, State::slot_bytes(&layouts));
    let mut unerased = Changes::default();
    for which in unfinished.list() {
        let Changes { removed, rewritten, .. } = index.forget(*which, State::slot_bytes(&layouts));
        unerased.removed.extend(removed);
        unerased.rewritten.extend(rewritten);
    }
    for Slot { layout, number } in useless {
        let Layout { files, free, .. } = &mut layouts[layout.0];
        files.clear_record(number)?;
        files.erase_page(number)?;
        free.push(number);
    }
    let used_bytes = index.bytes_by_tenant().map(|(_, bytes)| bytes).sum();
    Ok(State { index, layouts, queued: Default::default(), unerased, used_bytes })
}

impl Shared {
    pub(super) fn layout(&self, layout: Digest, payload_bytes: usize) -> Result<LayoutId, TierError> {
        let path = self.options.folder.clone();
        let failed = |source: io::Error| TierError::Folder { path, source };
        let overhead = if self.cipher.is_some() { sealing::OVERHEAD } else { 0 };
        if payload_bytes == 0 || payload_bytes > crate::MAX_PAYLOAD_BYTES - overhead {
            let problem = format!("pages of {payload_bytes} bytes are not supported");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)));
        }
        let payload_bytes = payload_bytes + overhead;
        let mut state = self.state();
        let known = |known: &Layout| known.files.head == Head { layout, payload_bytes };
        if let Some(at) = state.layouts.iter().position(known) {
            return Ok(LayoutId(at));
        }
        let files =
            LayoutFiles::open(&self.options.folder, Head { layout, payload_bytes }).map_err(failed)?;
        state.layouts.push(Layout { files: Arc::new(files), free: Vec::new(), slots: 0 });
        Ok(LayoutId(state.layouts.len() - 1))
    }
}

impl Layout {
    /// Takes a slot that has no page.
    pub(super) fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if u64::from(self.slots) >= MAX_SLOTS {
            return None;
        }
        self.slots += 1;
        Some(self.slots - 1)
    }
}

impl super::DiskTier {
    /// Returns the number of a layout that has files here.
    pub fn find_layout(&self, layout: Digest, payload_bytes: usize) -> Option<LayoutId> {
        let overhead = if self.shared.cipher.is_some() { sealing::OVERHEAD } else { 0 };
        let head = Head { layout, payload_bytes: payload_bytes.checked_add(overhead)? };
        let state = self.shared.state();
        state.layouts.iter().position(|known| known.files.head == head).map(LayoutId)
    }

    /// Returns the number of the last erasure that was made here, of those that all hosts count together. `None` if none was
    /// ever recorded.
    pub fn erased_until(&self) -> io::Result<Option<u64>> {
        Ok(small_file::read(&self.shared.options.folder, ERASED_FILE)?.trim().parse().ok())
    }

    /// Records that all erasures up to this one were made. It waits for the disk.
    pub fn set_erased_until(&self, number: u64) -> io::Result<()> {
        small_file::replace(&self.shared.options.folder, ERASED_FILE, &number.to_string())
    }

    /// Returns the bytes that a page takes on disk.
    pub fn page_bytes(payload_bytes: usize) -> u64 {
        slot_bytes(payload_bytes)
    }

    /// Returns the bytes that could be written now before too little of the disk is free.
    pub fn writable_bytes(&self) -> u64 {
        let options = &self.shared.options;
        super::space::writable_bytes(&options.folder, options.min_free_percent)
            .saturating_sub(self.shared.queued_write_bytes.load(Relaxed))
    }
}
