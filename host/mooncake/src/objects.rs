//! The store of objects that the cache needs, and the names of objects in it.

use std::ffi::{CStr, CString};

use skep_cache::Digest;

use crate::arena::Lane;

/// The reason that a call of the store did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// The master does not answer, or refuses.
    #[error("{call} failed with the code {code}")]
    Master { call: &'static str, code: i64 },
    /// The master does not accept a connection.
    #[error("nothing listens at {master}; start mooncake_master there, or correct master under [kv.cluster]")]
    Unreached { master: String },
    /// The bytes could not be moved: the host that has them is gone, or the store is full.
    #[error("the bytes were not moved (code {code})")]
    Transfer { code: i64 },
    /// A call took so long that the next requests would wait for nothing.
    #[error("a call took {seconds} s")]
    Slow { seconds: u64 },
}

/// A store of objects that hosts share. Its calls wait for other hosts, for as long as those take.
pub(crate) trait Objects: Send + Sync {
    /// Returns which of the objects exist.
    fn exist(&self, names: &[CString]) -> Result<Vec<bool>, Failure>;

    /// Puts objects, as many as the lane has room for. Returns how many are in the store now, or an error if none is.
    fn put(&self, lane: &mut Lane, names: &[CString], objects: &[Vec<u8>]) -> Result<usize, Failure>;

    /// Gets objects of `bytes` bytes each, as many as the lane has room for. One that is gone is `None`; an error means that
    /// none came.
    fn get(&self, lane: &mut Lane, names: &[CString], bytes: usize) -> Result<Vec<Option<Vec<u8>>>, Failure>;

    /// Removes an object. Returns false if somebody uses it at this moment, so that it can be removed later only. One that does
    /// not exist is removed already.
    fn remove(&self, name: &CStr) -> Result<bool, Failure>;

    /// Removes all objects whose names begin with `prefix`, and returns their number.
    fn remove_beginning(&self, prefix: &str) -> Result<u64, Failure>;
}

/// The names of the objects of the hosts that share a key.
#[derive(Clone, Debug)]
pub(crate) struct ObjectNames {
    prefix: String,
}

impl ObjectNames {
    /// Creates the names for hosts whose key gives this number.
    pub fn new(namespace: u64) -> Self {
        ObjectNames { prefix: format!("skep-{namespace:016x}-") }
    }

    /// Returns what all names begin with, which has no character that a regular expression treats specially.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the name of a page.
    pub fn of(&self, layout: Digest, page: Digest) -> CString {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let name = format!("{}{}-{}", self.prefix, hex(&layout.0[..8]), hex(&page.0));
        CString::new(name).expect("the name has only letters, digits and hyphens")
    }

    /// Returns the names of pages, in order.
    pub fn all(&self, layout: Digest, pages: &[Digest]) -> Vec<CString> {
        pages.iter().map(|page| self.of(layout, *page)).collect()
    }
}
