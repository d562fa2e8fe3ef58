//! 128-bit hashes under keys that are drawn when an engine starts, so that nobody outside can make two values
//! collide. Each hash consists of two independent SipHashes of 64 bits.
//!
//! A hash only ever indicates where something probably is. Nothing is shared between requests because two
//! hashes are equal: the prefix tree compares tokens.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};

#[derive(Debug, Clone, Default)]
pub(crate) struct KeyedHash {
    high: RandomState,
    low: RandomState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Digest(u128);

impl KeyedHash {
    /// Returns a 128-bit digest, which is the same for equal values as long as the engine runs.
    pub fn digest(&self, value: impl Hash) -> Digest {
        let (high, low) = (self.high.hash_one(&value), self.low.hash_one(&value));
        Digest(u128::from(high) << 64 | u128::from(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_differ_by_value_and_key() {
        let (one, other) = (KeyedHash::default(), KeyedHash::default());
        assert_eq!(one.digest("a"), one.clone().digest("a"));
        assert_ne!(one.digest("a"), one.digest("b"));
        assert_ne!(one.digest("a"), other.digest("a"));
        let Digest(both) = one.digest("a");
        assert_ne!(both >> 64, both & u128::from(u64::MAX), "the halves have separate keys");
    }
}
