//! The errors of transfers. Each of them means that pages travel another way, and nothing worse.

use std::io;
use std::time::Duration;

use crate::frame::FrameError;

/// Says how to get the library. It needs neither CUDA nor an installation.
pub const HINT: &str = "`pip download --no-deps nixl-cu12==1.5.1` (69 MB), `python3 -m zipfile -e nixl_cu12-*.whl nixl`, and SKEP_NIXL=nixl \
                        or nixl_dir under [kv]; it needs no CUDA";

/// The reason that a transfer, or the process that makes transfers, does not work.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error("there is no NIXL library (libnixl_capi.so) in {folder}\n  hint: {hint}", hint = HINT)]
    NoLibrary { folder: String },
    #[error("{library} cannot be loaded: {reason}\n  hint: {hint}", hint = HINT)]
    Load { library: String, reason: String },
    #[error("{library} has no function {symbol}, so it is another version\n  hint: {hint}", hint = HINT)]
    Function { library: String, symbol: &'static str },
    #[error("NIXL's {call} failed with status {status}")]
    Nixl { call: &'static str, status: i32 },
    #[error("the peer {name:?} cannot be used: {reason}")]
    Peer { name: String, reason: &'static str },
    #[error("a block of {bytes} bytes at {offset} is outside of the ring, which has {ring} bytes")]
    Block { offset: u64, bytes: u64, ring: u64 },
    #[error("the ring of {bytes} bytes cannot be created: {reason}")]
    Ring { bytes: u64, reason: io::Error },
    #[error("this process was not started by a host: its standard input is not a socket with a ring ({0})")]
    NotStarted(io::Error),
    #[error("the connection between the host and its helper is broken: {0}")]
    Frame(#[from] FrameError),
    #[error("the transfer helper is not running: {why}")]
    Down { why: String },
    #[error("the pages did not arrive within {0:?}")]
    Late(Duration),
    #[error("the READ failed: {reason}")]
    Failed { reason: String },
    #[error("{found} images were requested, and there is room for {reserved}")]
    Reserved { found: usize, reserved: usize },
    #[error("an image has {found} bytes, and its slots have {room}")]
    Image { found: usize, room: usize },
    #[error("the ring cannot be used: {0}")]
    Memory(io::Error),
}
