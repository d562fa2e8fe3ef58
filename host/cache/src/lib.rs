//! KV pages outside of memory: the format of page images, the digests that name them, the disk tier that stores them, and
//! what hosts send each other of them.
//!
//! Invariant: an image is used only if its layout digest, its prefix digest and its checksum are the expected ones.
//! Everything else (a damaged file, a torn write, a full disk) is a miss, and the page is computed. The crate knows bytes
//! and digests. It knows no tensors, no requests and no models.

#![forbid(unsafe_code)]

mod digest;
mod disk_tier;
mod fetch_ending;
mod image;
pub mod metric;
mod rate;
mod transit;

pub use digest::{Digest, Owner, PageNamer, TenantTag};
#[cfg(any(test, feature = "faults"))]
pub use disk_tier::Faults;
pub use disk_tier::{
    Acceptance, DiskTier, EraseFilter, ErasedPages, LayoutId, PageRead, PageStream, PageWrite, Pin, PinError,
    PinStatus, SealingSecret, TierError, TierOptions, TierShares, TierStatus,
};
pub use fetch_ending::FetchEnding;
pub use image::{HEADER_BYTES, Header, ImageError, MAX_PAYLOAD_BYTES};
pub use rate::TransferRate;
pub use transit::{MAX_ASKED_PAGES, PageQuestion, QuestionError, TransitSeal};
