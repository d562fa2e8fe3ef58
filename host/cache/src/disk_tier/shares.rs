//! The parts of the tier that each tenant's pages and the pages of pinned sessions may take.

use std::collections::{BTreeMap, HashMap};

use crate::{PageNamer, TenantTag};

/// Percentage of the tier that pins protect, unless the operator sets another one.
const PINNED_PERCENT: u8 = 25;

/// The operator's shares, as percentages of the tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierShares {
    /// The maximum of a tenant's pages, by the tenant's name.
    pub tenants: BTreeMap<String, u8>,
    /// The maximum of each other tenant's pages; `None` is the whole tier.
    pub other_tenants: Option<u8>,
    /// The maximum of the pages that pins protect.
    pub pinned: u8,
}

impl Default for TierShares {
    fn default() -> Self {
        TierShares { tenants: BTreeMap::new(), other_tenants: None, pinned: PINNED_PERCENT }
    }
}

/// The shares in bytes, by the tags of tenants.
#[derive(Debug)]
pub(super) struct ByteShares {
    tenants: HashMap<TenantTag, u64>,
    others: u64,
    pub pinned: u64,
}

impl ByteShares {
    /// Computes the shares of a tier of `max_bytes`.
    pub fn new(shares: &TierShares, max_bytes: u64, keys: &PageNamer) -> Self {
        let bytes = |percent: u8| {
            let percent = u64::from(percent.min(100));
            // Small tiers have exact shares, too, and large ones do not overflow.
            max_bytes / 100 * percent + max_bytes % 100 * percent / 100
        };
        let tenants = shares.tenants.iter().map(|(name, percent)| (keys.tenant(name), bytes(*percent)));
        ByteShares {
            tenants: tenants.collect(),
            others: shares.other_tenants.map_or(u64::MAX, bytes),
            pinned: bytes(shares.pinned),
        }
    }

    /// Returns the maximum of a tenant's pages.
    pub fn of(&self, tenant: TenantTag) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(self.others)
    }

    /// Returns the bytes that a tenant has beyond its share.
    pub fn excess(&self, tenant: TenantTag, bytes: u64) -> u64 {
        bytes.saturating_sub(self.of(tenant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages_of_the_tier() {
        let keys = PageNamer::random();
        let shares = TierShares {
            tenants: BTreeMap::from([("acme".to_owned(), 30), ("all".to_owned(), 100)]),
            other_tenants: Some(10),
            pinned: 25,
        };
        let bytes = ByteShares::new(&shares, 1_050, &keys);
        let of = |name: &str| bytes.of(keys.tenant(name));
        assert_eq!([of("acme"), of("all"), of("somebody")], [315, 1_050, 105]);
        assert_eq!(bytes.pinned, 262);
        assert_eq!(bytes.excess(keys.tenant("acme"), 320), 5);
        let free = ByteShares::new(&TierShares::default(), u64::MAX, &keys);
        assert_eq!(free.excess(keys.tenant("acme"), u64::MAX), 0);
    }
}
