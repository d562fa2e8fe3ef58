//! Slots with images that another host may read.

use std::sync::Arc;

use super::state::Shared;
use crate::error::TransferError;
use crate::message::{MAX_IMAGES, Peer};
use crate::ring::{SLOT_BYTES, slots_of};
use crate::slots::Run;

/// Slots that are lent to another host. They are free again when it is dropped; what the other host reads afterwards is
/// another image, which it notices.
#[derive(Debug)]
pub struct Loan {
    shared: Arc<Shared>,
    /// The helper from which they are read.
    peer: Peer,
    base: u64,
    runs: Vec<Run>,
}

impl Loan {
    pub(super) fn take(shared: &Arc<Shared>, images: usize, image_bytes: usize) -> Option<Loan> {
        let (peer, base) = {
            let state = shared.state();
            let connection = state.connection()?;
            (connection.peer.clone(), connection.base)
        };
        let count = slots_of(image_bytes);
        let runs: Vec<Run> = {
            let mut slots = shared.ring.slots();
            (0..images.min(MAX_IMAGES)).map_while(|_| slots.lend(count)).collect()
        };
        (!runs.is_empty()).then(|| Loan { shared: shared.clone(), peer, base, runs })
    }

    /// Returns the number of images that there is room for.
    pub fn images(&self) -> usize {
        self.runs.len()
    }

    /// Writes an image into its slots. Nobody may know its address yet.
    pub fn write(&self, at: usize, image: &[u8]) -> Result<(), TransferError> {
        let run = self.runs.get(at);
        let run = run.ok_or(TransferError::Reserved { found: at + 1, reserved: self.runs.len() })?;
        self.shared.ring.write(run, image)
    }

    /// Gives back the slots of all images but the first ones.
    pub fn truncate(&mut self, images: usize) {
        if images < self.runs.len() {
            self.shared.free(self.runs.split_off(images));
        }
    }

    /// Returns the helper that has the images.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the address of each image in the helper.
    pub fn addresses(&self) -> Vec<u64> {
        self.runs.iter().map(|run| self.base + run.bytes(SLOT_BYTES).0 as u64).collect()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.shared.free(std::mem::take(&mut self.runs));
    }
}
