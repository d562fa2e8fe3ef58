//! Pinned sessions, whose pages are evicted last. The list survives a restart.
//!
//! Invariant: pins protect at most their share of the tier. A session's bytes count whole, those that it shares with others
//! too, and pins are counted in the order in which they were made; one that does not fit protects nothing.

use std::collections::HashSet;
use std::io;
use std::path::Path;

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

/// The pins in the order in which they were made.
#[derive(Debug, Default)]
pub(super) struct Pins {
    pins: Vec<(Pin, Owner, TenantTag)>,
}

impl Pins {
    /// Reads the list of a folder. Lines that are not pins are left out.
    pub fn read(folder: &Path, keys: &PageNamer) -> io::Result<Pins> {
        let text = small_file::read(folder, FILE)?;
        let pins = text.lines().filter_map(|line| {
            let mut words = line.split('\t').map(str::to_owned);
            let pin = Pin { tenant: words.next()?, agent: words.next()?, session: words.next()? };
            words.next().is_none().then(|| entry(pin, keys))
        });
        Ok(Pins { pins: pins.take(MAX_PINS).collect() })
    }

    /// Adds a pin. Returns whether the session was not pinned before.
    pub fn add(&mut self, pin: Pin, keys: &PageNamer, folder: &Path) -> Result<bool, PinError> {
        for name in [&pin.tenant, &pin.agent, &pin.session] {
            if name.is_empty() || name.contains(char::is_whitespace) {
                return Err(PinError::Name(name.clone()));
            }
        }
        if self.pins.iter().any(|(known, ..)| *known == pin) {
            return Ok(false);
        }
        if self.pins.len() >= MAX_PINS {
            return Err(PinError::TooMany);
        }
        self.pins.push(entry(pin, keys));
        match self.save(folder) {
            Ok(()) => Ok(true),
            Err(error) => {
                // A pin that is gone after a restart would be a surprise.
                self.pins.pop();
                Err(error.into())
            }
        }
    }

    /// Removes a pin. Returns whether the session was pinned.
    pub fn remove(&mut self, pin: &Pin, folder: &Path) -> Result<bool, PinError> {
        let Some(at) = self.pins.iter().position(|(known, ..)| known == pin) else { return Ok(false) };
        let removed = self.pins.remove(at);
        if let Err(error) = self.save(folder) {
            self.pins.insert(at, removed);
            return Err(error.into());
        }
        Ok(true)
    }

    /// Removes the pins of sessions whose pages are erased.
    pub fn forget(&mut self, which: EraseFilter, folder: &Path) {
        let before = self.pins.len();
        self.pins.retain(|(_, owner, tenant)| !which.includes(*owner, Some(*tenant)));
        if self.pins.len() < before
            && let Err(error) = self.save(folder)
        {
            tracing::warn!(%error, "cannot remove pins of erased sessions from the list on disk");
        }
    }

    /// Returns the owners of the pins.
    pub fn owners(&self) -> Vec<Owner> {
        self.pins.iter().map(|(_, owner, _)| *owner).collect()
    }

    /// Returns the pins with what they hold.
    pub fn status(
        &self,
        index: &Index,
        max_bytes: u64,
        slot_bytes: &impl Fn(LayoutId) -> u64,
    ) -> Vec<PinStatus> {
        let protected = protected(&self.owners(), index, max_bytes, slot_bytes);
        let status = self.pins.iter().map(|(pin, owner, _)| PinStatus {
            pin: pin.clone(),
            bytes: index.path_bytes(*owner, slot_bytes),
            is_protected: protected.contains(owner),
        });
        status.collect()
    }

    fn save(&self, folder: &Path) -> io::Result<()> {
        let lines = self
            .pins
            .iter()
            .map(|(Pin { tenant, agent, session }, ..)| format!("{tenant}\t{agent}\t{session}\n"));
        small_file::replace(folder, FILE, &lines.collect::<String>())
    }
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
