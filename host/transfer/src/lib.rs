//! Moves images of KV pages between the memories of hosts through NIXL, without a copy through HTTP.
//!
//! The library runs in a helper process ([`serve`]), because a fault of its network stack aborts the process that it is in,
//! and because a READ that was posted cannot be taken back except by killing that process. The host and its helper share a
//! ring of memory (`ring`), and the host decides who uses which of its slots (`slots`). [`TransferAgent`] is the host's side:
//! it starts the helper, starts it again when it dies, lends slots to other hosts and reads theirs.
//!
//! Invariant: a slot that a READ was posted into is used for nothing else until the READ has ended or the helper is dead.
//! The crate knows bytes and addresses. It knows no pages, no keys and no HTTP: what arrives must be checked by the caller.

#![deny(unsafe_code)]

mod agent;
mod descriptor;
mod error;
mod frame;
mod helper;
mod library;
mod mapping;
mod message;
mod network;
mod nixl;
mod ring;
mod slots;
#[cfg(test)]
mod tests;

pub use agent::{AgentOptions, AgentStatus, Arrived, Loan, Reservation, TransferAgent};
pub use error::{HINT, TransferError};
pub use frame::FrameError;
pub use helper::serve;
pub use library::find as find_library;
pub use message::{MAX_IMAGES, MAX_METADATA_BYTES, Peer};
pub use network::{DEVICES_VARIABLE, Exposed, exposed};
pub use slots::SlotCounts;
