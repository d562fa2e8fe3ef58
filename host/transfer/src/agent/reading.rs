//! Slots into which images of another host are read.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use super::state::{Outcome, Shared};
use crate::error::TransferError;
use crate::message::{Block, Command, MAX_IMAGES, Peer};
use crate::ring::{SLOT_BYTES, slots_of};
use crate::slots::Run;

/// Slots for images of another host, before they are read. They are free again when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    images: Images,
}

/// Images of another host that have arrived. Their slots are free again when it is dropped.
#[derive(Debug)]
pub struct Arrived {
    images: Images,
}

/// Slots that only this host uses.
#[derive(Debug)]
struct Images {
    shared: Arc<Shared>,
    runs: Vec<Run>,
    image_bytes: usize,
}

impl Reservation {
    pub(super) fn take(shared: &Arc<Shared>, images: usize, image_bytes: usize) -> Option<Reservation> {
        shared.state().connection()?;
        let count = slots_of(image_bytes);
        let runs: Vec<Run> = {
            let mut slots = shared.ring.slots();
            (0..images.min(MAX_IMAGES)).map_while(|_| slots.reserve(count)).collect()
        };
        let images = Images { shared: shared.clone(), runs, image_bytes };
        (!images.runs.is_empty()).then_some(Reservation { images })
    }

    /// Returns the number of images that there is room for.
    pub fn images(&self) -> usize {
        self.images.runs.len()
    }

    /// Reads the images at these addresses of a peer, and waits for them, but not longer than `within`. If they are late, their
    /// slots stay out of use until the READ has ended or the helper is dead.
    pub fn read(
        mut self,
        peer: &Peer,
        addresses: &[u64],
        within: Duration,
    ) -> Result<Arrived, TransferError> {
        let Images { shared, runs, image_bytes } = &mut self.images;
        if addresses.is_empty() || addresses.len() > runs.len() {
            return Err(TransferError::Reserved { found: addresses.len(), reserved: runs.len() });
        }
        let (shared, image_bytes) = (shared.clone(), *image_bytes);
        let mut posted = std::mem::take(runs);
        shared.free(posted.split_off(addresses.len()));
        let blocks = posted.iter().zip(addresses).map(|(run, theirs)| Block {
            own: run.bytes(SLOT_BYTES).0 as u64,
            theirs: *theirs,
            bytes: image_bytes as u64,
        });
        let blocks: Vec<Block> = blocks.collect();
        let (caller, outcome) = sync_channel(1);
        let (transfer, connection) = shared.post(posted, caller)?;
        // After a failure, the connection is closed: the READ ends with the helper, which may have got the command.
        let _ = connection.write(&Command::Read { transfer, peer: peer.clone(), blocks });
        let ended = match outcome.recv_timeout(within) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) if shared.abandon(transfer) => {
                return Err(TransferError::Late(within));
            }
            // It has ended in the moment before, so its outcome is there.
            Err(RecvTimeoutError::Timeout) => outcome.recv().map_err(|_| gone())?,
            Err(RecvTimeoutError::Disconnected) => return Err(gone()),
        };
        arrived(shared, ended, image_bytes)
    }
}

fn arrived(shared: Arc<Shared>, ended: Outcome, image_bytes: usize) -> Result<Arrived, TransferError> {
    let runs = ended.map_err(|reason| TransferError::Failed { reason })?;
    Ok(Arrived { images: Images { shared, runs, image_bytes } })
}

fn gone() -> TransferError {
    TransferError::Failed { reason: "it is not known how the READ ended".to_owned() }
}

impl Arrived {
    /// Returns the number of images.
    pub fn images(&self) -> usize {
        self.images.runs.len()
    }

    /// Copies an image. Its bytes may be anything, so the caller has to check them.
    pub fn image(&self, at: usize) -> Result<Vec<u8>, TransferError> {
        let Images { shared, runs, image_bytes } = &self.images;
        let run = runs.get(at).ok_or(TransferError::Reserved { found: at + 1, reserved: runs.len() })?;
        shared.ring.read(run, *image_bytes)
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        self.shared.free(std::mem::take(&mut self.runs));
    }
}
