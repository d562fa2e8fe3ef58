//! KV pages in Mooncake Store: a cache in the memory of several hosts, which outlives each of them.
//!
//! A host puts the pages that are on its disk, as sealed images under the names that all hosts of the cluster compute, and
//! gets pages that it lacks. The store is used through its C library, which is loaded when a host with these settings starts
//! and never linked.
//!
//! Invariant: whatever fails here is a miss, and the page is computed. An image is used only if its seal, its layout and its
//! name are right, whatever the store returns. The crate knows bytes and digests. It knows no requests and no models.

#![deny(unsafe_code)]

mod arena;
mod cache;
mod client;
mod connection;
mod fetching;
mod figures;
mod keeping;
mod library;
mod objects;
mod settings;
mod state;
#[cfg(test)]
mod tests;
mod work;

pub use cache::ClusterCache;
pub use figures::CacheStatus;
pub use library::{Library, LibraryError};
pub use settings::Settings;
