//! The messages between a host and its helper.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Maximum number of images of one READ.
pub const MAX_IMAGES: usize = 64;
/// Maximum number of bytes with which a peer describes its memory and its addresses.
pub const MAX_METADATA_BYTES: usize = 64 << 10;
/// Maximum number of bytes of a peer's name.
pub(crate) const MAX_NAME_BYTES: usize = 256;

/// The helper of another host, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its host and its incarnation. A helper that was started again has another name.
    pub name: String,
    /// Its addresses and the keys of its memory, as NIXL writes them.
    pub metadata: Vec<u8>,
}

/// A part of a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Block {
    /// The offset in the ring of this host.
    pub(crate) own: u64,
    /// The address in the memory of the other helper.
    pub(crate) theirs: u64,
    pub(crate) bytes: u64,
}

/// A message of a host to its helper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Loads the library and registers the ring under this name. It is the first command, and there is no second one.
    Begin { name: String, library: PathBuf, ring_bytes: u64 },
    /// Reads blocks of a peer. Its end is an event.
    Read { transfer: u64, peer: Peer, blocks: Vec<Block> },
}

/// A message of a helper to its host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// Other hosts can read the ring, which begins at this address.
    Ready { metadata: Vec<u8>, base: u64 },
    /// The helper cannot work.
    Failed { why: String },
    /// A READ has ended, and writes no more. `fault` is why it failed.
    Ended { transfer: u64, fault: Option<String> },
}
