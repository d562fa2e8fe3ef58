//! The prefixes that a replica has cached, published for other threads as one digest for each page in its
//! prefix tree.
//!
//! Invariant: between two operations of the tree, the set holds exactly the digests of its pages, so it is as
//! bounded as the pages are. A digest covers the tenant and every token up to the end of its page. Readers use
//! it to estimate what a replica would not have to compute, never to share pages.

use std::collections::HashSet;
use std::sync::{PoisonError, RwLock};

use skep_model::PAGE_TOKENS;

use crate::keyed_hash::{Digest, KeyedHash};

#[derive(Debug, Default)]
pub(crate) struct PublishedPrefixes {
    hash: KeyedHash,
    digests: RwLock<HashSet<Digest>>,
}

impl PublishedPrefixes {
    /// Creates an empty set. Replicas whose sets are compared must hash with the same keys.
    pub fn new(hash: &KeyedHash) -> Self {
        PublishedPrefixes { hash: hash.clone(), digests: RwLock::default() }
    }

    /// Returns how many of the pages with these digests, in the order of a prompt, are cached.
    pub fn matching_pages(&self, digests: &[Digest]) -> usize {
        let cached = self.digests.read().unwrap_or_else(PoisonError::into_inner);
        // A tree that has a page has all pages before it.
        digests.partition_point(|digest| cached.contains(digest))
    }

    /// Returns the number of cached pages.
    pub fn page_count(&self) -> usize {
        self.digests.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(super) fn hash(&self) -> &KeyedHash {
        &self.hash
    }

    pub(super) fn publish(&self, digests: &[Digest]) {
        self.digests.write().unwrap_or_else(PoisonError::into_inner).extend(digests);
    }

    pub(super) fn withdraw(&self, digests: &[Digest]) {
        let mut cached = self.digests.write().unwrap_or_else(PoisonError::into_inner);
        for digest in digests {
            cached.remove(digest);
        }
    }

    pub(super) fn holds(&self, digest: &Digest) -> bool {
        self.digests.read().unwrap_or_else(PoisonError::into_inner).contains(digest)
    }
}

/// Returns the digest of a tenant's empty prefix.
pub(super) fn tenant_digest(hash: &KeyedHash, tenant: &str) -> Digest {
    hash.digest(tenant)
}

/// Returns the digests of the whole pages of `tokens`, which follow a prefix with the digest `before`.
pub(super) fn digests_after(hash: &KeyedHash, before: Digest, tokens: &[u32]) -> Vec<Digest> {
    let chain = tokens.chunks_exact(PAGE_TOKENS).scan(before, |last, page| {
        *last = hash.digest((*last, page));
        Some(*last)
    });
    chain.collect()
}

/// Returns the digests of all pages of a prompt that may be reused. The page of the last token is never reused.
pub(crate) fn prompt_digests(hash: &KeyedHash, tenant: &str, prompt: &[u32]) -> Vec<Digest> {
    digests_after(hash, tenant_digest(hash, tenant), &prompt[..prompt.len().saturating_sub(1)])
}
