//! The rules by which the next page to evict is chosen.

use std::collections::HashSet;

use super::index::{LayoutId, PageKey};
use super::shares::ByteShares;
use crate::{Owner, TenantTag};

/// The page to evict is the least recently used one that none follows, of the tenant that is furthest beyond its share, or
/// else of the one that has the most bytes.
#[derive(Debug, Default)]
pub(super) struct Eviction<'a> {
    /// A page that stays.
    pub keep: Option<PageKey>,
    /// The only tenant whose pages are evicted.
    pub only: Option<TenantTag>,
    /// The only layout whose pages are evicted.
    pub layout: Option<LayoutId>,
    /// Owners whose pages are evicted after all others.
    pub last: HashSet<Owner>,
    pub shares: Option<&'a ByteShares>,
}

impl Eviction<'_> {
    /// Returns whether pages of a tenant may be chosen.
    pub fn includes(&self, tenant: TenantTag) -> bool {
        self.only.is_none_or(|only| only == tenant)
    }

    /// Returns whether a page of these tenants may be chosen.
    pub fn allows(&self, key: &PageKey) -> bool {
        Some(*key) != self.keep && self.layout.is_none_or(|layout| layout == key.layout)
    }

    /// Returns the bytes that a tenant has beyond its share.
    pub fn excess(&self, tenant: TenantTag, bytes: u64) -> u64 {
        self.shares.map_or(0, |shares| shares.excess(tenant, bytes))
    }
}
