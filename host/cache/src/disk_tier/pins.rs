//! Pinned sessions, whose pages are evicted last. The list survives a restart.
//!
//! Invariants:
//! - Pins protect at most their share of the tier. A session's bytes count whole, those that it shares with others too, and pins
//!   are counted in the order in which they were made; one that does not fit protects nothing.
//! - An erased session has no pin, also after a restart: an erasure stays unfinished until the list on disk is without it.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::index::{EraseFilter, Index, LayoutId};
use super::small_file;
use crate::{Owner, PageNamer, TenantTag};

/// The file of the list in the folder.
const FILE: &str = "pins";
/// Maximum number of pins.
pub const MAX_PINS: usize = 256;

/// A session whose pages are evicted last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    pub tenant: String,
    pub agent: String,
    pub session: String,
}

/// A pin and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinStatus {
    pub pin: Pin,
    /// Bytes of the session's pages on disk.
    pub bytes: u64,
    /// Whether the pages are evicted last. Otherwise the pins take more than their share.
    pub is_protected: bool,
}

/// The reason that a session cannot be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("{limit} sessions are pinned, which is the maximum; unpin one of them", limit = MAX_PINS)]
    TooMany,
    #[error("the names of a pinned session cannot contain white space, but {0:?} does")]
    Name(String),
    #[error("the list of pins cannot be written: {0}")]
    Disk(#[from] io::Error),
}

/// The pins. Whoever reads them does not wait for the disk.
#[derive(Debug)]
pub(super) struct Pins {
    list: Mutex<PinList>,
    /// Whether the file has the same pins. The lock is held during a change, while the file is written.
    is_saved: Mutex<bool>,
}

/// The pins in the order in which they were made.
type PinList = Vec<(Pin, Owner, TenantTag)>;

impl Pins {
    /// Reads the list of a folder in which erasures are unfinished. Their pins are left out, and lines that are not pins.
    pub fn read(folder: &Path, keys: &PageNamer, unfinished: &[EraseFilter]) -> io::Result<Pins> {
        let text = small_file::read(folder, FILE)?;
        let pins = text.lines().filter_map(|line| {
            let mut words = line.split('\t').map(str::to_owned);
            let pin = Pin { tenant: words.next()?, agent: words.next()?, session: words.next()? };
            words.next().is_none().then(|| entry(pin, keys))
        });
        let mut list: PinList = pins.take(MAX_PINS).collect();
        // An erasure of all pages may stand for many others, of sessions that had no pins.
        let erased: Vec<EraseFilter> =
            unfinished.iter().copied().filter(|which| *which != EraseFilter::AllHere).collect();
        let is_saved = !remove_erased(&mut list, &erased);
        Ok(Pins { list: Mutex::new(list), is_saved: Mutex::new(is_saved) })
    }

    /// Adds a pin. Returns whether the session was not pinned before. It waits for the disk.
    pub fn add(&self, pin: Pin, keys: &PageNamer, folder: &Path) -> Result<bool, PinError> {
        for name in [&pin.tenant, &pin.agent, &pin.session] {
            if name.is_empty() || name.contains(char::is_whitespace) {
                return Err(PinError::Name(name.clone()));
            }
        }
        let mut is_saved = self.is_saved();
        let mut list = self.list().clone();
        if list.iter().any(|(known, ..)| *known == pin) {
            return Ok(false);
        }
        if list.len() >= MAX_PINS {
            return Err(PinError::TooMany);
        }
        list.push(entry(pin, keys));
        // A pin that is gone after a restart would be a surprise.
        save(&list, folder)?;
        *is_saved = true;
        *self.list() = list;
        Ok(true)
    }

    /// Removes a pin. Returns whether the session was pinned. It waits for the disk.
    pub fn remove(&self, pin: &Pin, folder: &Path) -> Result<bool, PinError> {
        let mut is_saved = self.is_saved();
        let mut list = self.list().clone();
        let Some(at) = list.iter().position(|(known, ..)| known == pin) else { return Ok(false) };
        list.remove(at);
        save(&list, folder)?;
        *is_saved = true;
        *self.list() = list;
        Ok(true)
    }

    /// Removes the pins of sessions whose pages are erased. Returns whether the list on disk is without them, and without those that
    /// it could not be written for before. It waits for the disk.
    pub fn forget(&self, which: &[EraseFilter], folder: &Path) -> bool {
        let mut is_saved = self.is_saved();
        let mut list = self.list().clone();
        if remove_erased(&mut list, which) {
            *is_saved = false;
            *self.list() = list.clone();
        }
        if !*is_saved {
            match save(&list, folder) {
                Ok(()) => *is_saved = true,
                Err(error) => {
                    tracing::warn!(%error, "cannot remove pins of erased sessions from the list on disk")
                }
            }
        }
        *is_saved
    }

    /// Returns the owners of the pins.
    pub fn owners(&self) -> Vec<Owner> {
        self.list().iter().map(|(_, owner, _)| *owner).collect()
    }

    /// Returns the pins with what they hold.
    pub fn status(
        &self,
        index: &Index,
        max_bytes: u64,
        slot_bytes: &impl Fn(LayoutId) -> u64,
    ) -> Vec<PinStatus> {
        let protected = protected(&self.owners(), index, max_bytes, slot_bytes);
        let status = |(pin, owner, _): &(Pin, Owner, TenantTag)| PinStatus {
            pin: pin.clone(),
            bytes: index.path_bytes(*owner, slot_bytes),
            is_protected: protected.contains(owner),
        };
        self.list().iter().map(status).collect()
    }

    fn list(&self) -> MutexGuard<'_, PinList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_saved(&self) -> MutexGuard<'_, bool> {
        self.is_saved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the pins of erased sessions. Returns whether there were any.
fn remove_erased(list: &mut PinList, erased: &[EraseFilter]) -> bool {
    let before = list.len();
    list.retain(|(_, owner, tenant)| !erased.iter().any(|which| which.includes(*owner, Some(*tenant))));
    list.len() < before
}

fn save(list: &PinList, folder: &Path) -> io::Result<()> {
    let lines =
        list.iter().map(|(Pin { tenant, agent, session }, ..)| format!("{tenant}\t{agent}\t{session}\n"));
    small_file::replace(folder, FILE, &lines.collect::<String>())
}

/// Returns the pinned owners whose pages are evicted last: as many as fit into `max_bytes`, in order.
pub(super) fn protected(
    owners: &[Owner],
    index: &Index,
    max_bytes: u64,
    slot_bytes: &impl Fn(LayoutId) -> u64,
) -> HashSet<Owner> {
    let mut left = max_bytes;
    let fits = |owner: &&Owner| match left.checked_sub(index.path_bytes(**owner, slot_bytes)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    owners.iter().filter(fits).copied().collect()
}

fn entry(pin: Pin, keys: &PageNamer) -> (Pin, Owner, TenantTag) {
    let (owner, tenant) = (keys.owner(Some(&pin.agent), Some(&pin.session)), keys.tenant(&pin.tenant));
    (pin, owner, tenant)
}
