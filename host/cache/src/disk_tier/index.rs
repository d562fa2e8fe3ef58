//! The pages on disk, in memory: a forest of prefixes for each tenant and layout, with the owners of its leaves.
//!
//! Invariants:
//! - The page before a page is in the index, so a page is evicted only when none follows it.
//! - Each page has an owner or a page after it. An owner is recorded at the last page of each of its prefixes, so that it
//!   owns all pages before it. Pages that nobody owns anymore are erased: deleting a session erases exactly what no other
//!   session of its tenant still has.
//!
//! The module decides where pages are stored and touches no file; its callers apply the returned [`Changes`].

use std::collections::{BTreeSet, HashMap};

use super::eviction::Eviction;
use super::record::{MAX_OWNERS, Record};
use crate::{Digest, Owner, TenantTag};

/// The number of a layout in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutId(pub(super) usize);

/// The name of a page in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PageKey {
    pub layout: LayoutId,
    pub prefix: Digest,
}

/// The slot of a page in the files of its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Slot {
    pub layout: LayoutId,
    pub number: u32,
}

/// The pages to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EraseFilter {
    /// All pages, and all copies that hosts hold elsewhere under the same names.
    All,
    /// All pages. Copies elsewhere stay.
    AllHere,
    Tenant(TenantTag),
    /// The pages that only sessions of this agent have.
    Agent(u64),
    /// The pages that only this session has.
    Session(Owner),
}

impl EraseFilter {
    /// Returns whether a page that is written for an owner is among these.
    pub(super) fn includes(&self, owner: Owner, tenant: Option<TenantTag>) -> bool {
        match self {
            EraseFilter::All | EraseFilter::AllHere => true,
            EraseFilter::Tenant(of) => tenant == Some(*of),
            EraseFilter::Agent(agent) => owner.agent == *agent,
            EraseFilter::Session(session) => owner == *session,
        }
    }
}

/// The changes to make in the files.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Slots whose page was removed.
    pub removed: Vec<Slot>,
    /// The pages that these slots had, in the same order.
    pub removed_pages: Vec<PageKey>,
    /// Pages whose record has changed.
    pub rewritten: Vec<PageKey>,
}

#[derive(Debug)]
struct Entry {
    slot: u32,
    parent: Option<Digest>,
    tenant: TenantTag,
    used: u64,
    /// Number of pages from the first of the prefix to this one.
    depth: u64,
    /// The pages after it.
    children: BTreeSet<Digest>,
    owners: Vec<Owner>,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    entries: HashMap<PageKey, Entry>,
    /// The pages of each tenant.
    tenants: HashMap<TenantTag, TenantPages>,
    by_owner: HashMap<Owner, BTreeSet<PageKey>>,
    clock: u64,
    /// Pages that were looked at, for tests of how much work an operation is.
    #[cfg(test)]
    visited: usize,
}

#[derive(Debug, Default)]
struct TenantPages {
    bytes: u64,
    /// Pages that none follows, least recently used first.
    leaves: BTreeSet<(u64, PageKey)>,
}

impl Index {
    /// Builds an index from the records of all slots, and returns the slots of pages that cannot be reached.
    pub fn load(records: Vec<(Slot, Record)>, slot_bytes: impl Fn(LayoutId) -> u64) -> (Index, Vec<Slot>) {
        let mut index = Index::default();
        let mut useless = Vec::new();
        let mut waiting: HashMap<PageKey, Vec<(Slot, Record)>> = HashMap::new();
        let mut ready = Vec::new();
        for (slot, record) in records {
            index.clock = index.clock.max(record.used);
            match record.parent {
                None => ready.push((slot, record)),
                Some(parent) => {
                    let parent = PageKey { layout: slot.layout, prefix: parent };
                    waiting.entry(parent).or_default().push((slot, record));
                }
            }
        }
        while let Some((slot, record)) = ready.pop() {
            let key = PageKey { layout: slot.layout, prefix: record.prefix };
            if index.entries.contains_key(&key) {
                useless.push(slot);
                continue;
            }
            index.put(key, slot.number, &record, slot_bytes(slot.layout));
            ready.extend(waiting.remove(&key).unwrap_or_default());
        }
        useless.extend(waiting.into_values().flatten().map(|(slot, _)| slot));
        let ownerless = |(key, entry): (&PageKey, &Entry)| {
            (entry.children.is_empty() && entry.owners.is_empty()).then_some(*key)
        };
        let ownerless: Vec<PageKey> = index.entries.iter().filter_map(ownerless).collect();
        let mut changes = Changes::default();
        for key in ownerless {
            index.remove_unowned(key, &slot_bytes, &mut changes);
        }
        useless.extend(changes.removed);
        (index, useless)
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether a page is on the disk.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Returns the slot of a page, if it is on the disk.
    pub fn slot(&self, key: &PageKey) -> Option<u32> {
        self.entries.get(key).map(|entry| entry.slot)
    }

    /// Returns the slot of a page and the record that describes it.
    pub fn record(&self, key: &PageKey) -> Option<(Slot, Record)> {
        let Entry { slot, parent, tenant, used, owners, .. } = self.entries.get(key)?;
        let record = Record {
            prefix: key.prefix,
            parent: *parent,
            tenant: *tenant,
            used: *used,
            owners: owners.clone(),
        };
        Some((Slot { layout: key.layout, number: *slot }, record))
    }

    /// Returns the number of bytes of each tenant.
    pub fn bytes_by_tenant(&self) -> impl Iterator<Item = (TenantTag, u64)> {
        self.tenants.iter().map(|(tenant, pages)| (*tenant, pages.bytes))
    }

    /// Adds a page, whose parent is in the index, as the last page of an owner.
    pub fn insert(
        &mut self,
        key: PageKey,
        slot: u32,
        (parent, tenant): (Option<Digest>, TenantTag),
        owner: Owner,
        slot_bytes: u64,
    ) -> Changes {
        let used = self.next_use();
        let record = Record { prefix: key.prefix, parent, tenant, used, owners: Vec::new() };
        self.put(key, slot, &record, slot_bytes);
        self.mark(key, owner)
    }

    /// Makes a page the last one of an owner's prefix, and the most recently used.
    pub fn mark(&mut self, key: PageKey, owner: Owner) -> Changes {
        let used = self.next_use();
        let mut changes = Changes::default();
        if !self.entries.contains_key(&key) {
            return changes;
        }
        self.set_used(key, used);
        self.own(key, owner);
        changes.rewritten.push(key);
        // An owner stands at one page of a path only, so the search ends at the first page that it has, which mostly
        // is the page before. An owner that has no other page needs no search.
        let has_others = self.by_owner.get(&owner).is_some_and(|keys| keys.iter().any(|other| *other != key));
        let mut above = self.parent(key).filter(|_| has_others);
        while let Some(at) = above {
            self.visit();
            if self.disown(at, owner) {
                changes.rewritten.push(at);
                break;
            }
            above = self.parent(at);
        }
        changes
    }

    /// Returns the number of bytes of a tenant.
    pub fn bytes_of(&self, tenant: TenantTag) -> u64 {
        self.tenants.get(&tenant).map_or(0, |pages| pages.bytes)
    }

    /// Returns the number of bytes of an owner's prefixes. Pages at the beginning of several prefixes count several times.
    pub fn path_bytes(&self, owner: Owner, slot_bytes: &impl Fn(LayoutId) -> u64) -> u64 {
        let last_pages = self.by_owner.get(&owner).into_iter().flatten();
        let bytes = last_pages.filter_map(|key| Some(self.entries.get(key)?.depth * slot_bytes(key.layout)));
        bytes.sum()
    }

    /// Removes one page that none follows, by the rules. Returns `None` if there is none that may go.
    pub fn evict(&mut self, rules: &Eviction<'_>, slot_bytes: impl Fn(LayoutId) -> u64) -> Option<Changes> {
        let key = self.next_evicted(rules, true).or_else(|| self.next_evicted(rules, false))?;
        let mut changes = Changes::default();
        let owners = self.entries.get(&key).map(|entry| entry.owners.clone()).unwrap_or_default();
        let parent = self.parent(key);
        self.remove(key, &slot_bytes, &mut changes);
        self.move_up(owners, parent, &mut changes);
        Some(changes)
    }

    /// Returns the page to evict. With `spares_last`, pages of the owners that come last are left out.
    fn next_evicted(&self, rules: &Eviction<'_>, spares_last: bool) -> Option<PageKey> {
        let is_spared = |key: &PageKey| {
            let comes_last = |entry: &Entry| entry.owners.iter().any(|owner| rules.last.contains(owner));
            spares_last && self.entries.get(key).is_some_and(comes_last)
        };
        let evictable = |pages: &TenantPages| {
            let mut leaves = pages.leaves.iter().map(|(_, key)| *key);
            leaves.find(|key| rules.allows(key) && !is_spared(key))
        };
        let tenants = self.tenants.iter().filter(|(tenant, _)| rules.includes(**tenant));
        let found = tenants.filter_map(|(tenant, pages)| {
            Some((rules.excess(*tenant, pages.bytes), pages.bytes, evictable(pages)?))
        });
        // The key decides between tenants with equally many bytes, so that the choice has an order.
        found.max().map(|(.., key)| key)
    }

    /// Removes a page and all pages after it.
    pub fn remove_tree(&mut self, key: PageKey, slot_bytes: impl Fn(LayoutId) -> u64) -> Changes {
        let mut changes = Changes::default();
        let mut found = vec![key];
        let mut at = 0;
        while let Some(above) = found.get(at).copied() {
            self.visit();
            let below = self.entries.get(&above).into_iter().flat_map(|entry| &entry.children);
            found.extend(below.map(|prefix| PageKey { layout: above.layout, prefix: *prefix }));
            at += 1;
        }
        let parent = self.parent(key);
        let owners = found.iter().filter_map(|key| self.entries.get(key)).flat_map(|entry| &entry.owners);
        let owners: Vec<Owner> = owners.copied().collect();
        for key in found.into_iter().rev() {
            self.remove(key, &slot_bytes, &mut changes);
        }
        self.move_up(owners, parent, &mut changes);
        changes
    }

    /// Makes `parent` the last page of owners whose later pages were removed.
    fn move_up(&mut self, owners: Vec<Owner>, parent: Option<PageKey>, changes: &mut Changes) {
        if let Some(parent) = parent {
            owners.into_iter().for_each(|owner| self.own(parent, owner));
            changes.rewritten.push(parent);
        }
    }

    /// Removes the pages that only the given owners have.
    pub fn forget(&mut self, which: EraseFilter, slot_bytes: impl Fn(LayoutId) -> u64) -> Changes {
        let mut changes = Changes::default();
        let owners: Vec<Owner> = match which {
            EraseFilter::All | EraseFilter::AllHere | EraseFilter::Tenant(_) => {
                let goes = |entry: &Entry| match which {
                    EraseFilter::Tenant(tenant) => entry.tenant == tenant,
                    _ => true,
                };
                let gone = self.entries.iter().filter(|(_, entry)| goes(entry)).map(|(key, _)| *key);
                let gone: Vec<PageKey> = gone.collect();
                gone.into_iter().for_each(|key| self.remove(key, &slot_bytes, &mut changes));
                return changes;
            }
            EraseFilter::Session(owner) => vec![owner],
            EraseFilter::Agent(agent) => {
                self.by_owner.keys().filter(|owner| owner.agent == agent).copied().collect()
            }
        };
        for owner in owners {
            let last_pages: Vec<PageKey> = self.by_owner.get(&owner).into_iter().flatten().copied().collect();
            for key in last_pages {
                self.disown(key, owner);
                self.remove_unowned(key, &slot_bytes, &mut changes);
                if self.contains(&key) {
                    changes.rewritten.push(key);
                }
            }
        }
        changes
    }

    /// Removes a page that nobody owns and that none follows, and then those before it.
    fn remove_unowned(&mut self, key: PageKey, slot_bytes: &impl Fn(LayoutId) -> u64, changes: &mut Changes) {
        let mut next = Some(key);
        while let Some(key) = next {
            let unowned = |entry: &Entry| entry.children.is_empty() && entry.owners.is_empty();
            if !self.entries.get(&key).is_some_and(unowned) {
                return;
            }
            next = self.parent(key);
            self.remove(key, slot_bytes, changes);
        }
    }

    fn put(&mut self, key: PageKey, slot: u32, record: &Record, slot_bytes: u64) {
        let Record { parent, tenant, used, .. } = *record;
        let before = parent.map(|prefix| PageKey { layout: key.layout, prefix });
        let depth = before.and_then(|before| self.entries.get(&before)).map_or(1, |before| before.depth + 1);
        let children = BTreeSet::new();
        let entry = Entry { slot, parent, tenant, used, depth, children, owners: Vec::new() };
        self.entries.insert(key, entry);
        let pages = self.tenants.entry(tenant).or_default();
        pages.bytes += slot_bytes;
        pages.leaves.insert((used, key));
        if let Some(parent) = self.parent(key)
            && let Some(above) = self.entries.get_mut(&parent)
        {
            above.children.insert(key.prefix);
            // Public pages are followed by pages of tenants.
            self.tenants.entry(above.tenant).or_default().leaves.remove(&(above.used, parent));
        }
        record.owners.iter().for_each(|owner| self.own(key, *owner));
    }

    fn remove(&mut self, key: PageKey, slot_bytes: &impl Fn(LayoutId) -> u64, changes: &mut Changes) {
        let parent = self.parent(key);
        let Some(entry) = self.entries.remove(&key) else { return };
        changes.removed.push(Slot { layout: key.layout, number: entry.slot });
        changes.removed_pages.push(key);
        changes.rewritten.retain(|rewritten| *rewritten != key);
        for owner in &entry.owners {
            self.unlist(key, *owner);
        }
        if let Some(pages) = self.tenants.get_mut(&entry.tenant) {
            pages.leaves.remove(&(entry.used, key));
            pages.bytes = pages.bytes.saturating_sub(slot_bytes(key.layout));
            if pages.bytes == 0 {
                self.tenants.remove(&entry.tenant);
            }
        }
        if let Some(parent) = parent
            && let Some(above) = self.entries.get_mut(&parent)
        {
            above.children.remove(&key.prefix);
            if above.children.is_empty() {
                self.tenants.entry(above.tenant).or_default().leaves.insert((above.used, parent));
            }
        }
    }

    fn own(&mut self, key: PageKey, owner: Owner) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        if !entry.owners.contains(&owner) && entry.owners.len() < MAX_OWNERS {
            entry.owners.push(owner);
            self.by_owner.entry(owner).or_default().insert(key);
        }
    }

    fn disown(&mut self, key: PageKey, owner: Owner) -> bool {
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        let before = entry.owners.len();
        entry.owners.retain(|other| *other != owner);
        let changed = entry.owners.len() < before;
        if changed {
            self.unlist(key, owner);
        }
        changed
    }

    fn unlist(&mut self, key: PageKey, owner: Owner) {
        if let Some(keys) = self.by_owner.get_mut(&owner) {
            keys.remove(&key);
            if keys.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
    }

    fn set_used(&mut self, key: PageKey, used: u64) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let before = std::mem::replace(&mut entry.used, used);
        let leaves = &mut self.tenants.entry(entry.tenant).or_default().leaves;
        if leaves.remove(&(before, key)) {
            leaves.insert((used, key));
        }
    }

    fn parent(&self, key: PageKey) -> Option<PageKey> {
        let parent = self.entries.get(&key)?.parent?;
        Some(PageKey { layout: key.layout, prefix: parent })
    }

    fn visit(&mut self) {
        #[cfg(test)]
        {
            self.visited += 1;
        }
    }

    /// Returns the number of pages that were looked at since the last call.
    #[cfg(test)]
    pub fn take_visited(&mut self) -> usize {
        std::mem::take(&mut self.visited)
    }

    fn next_use(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Panics unless the invariants hold.
    #[cfg(test)]
    pub fn check(&self) {
        for (key, entry) in &self.entries {
            if let Some(parent) = self.parent(*key) {
                assert!(self.entries.contains_key(&parent), "{key:?} has no parent");
            }
            let after = |other: &&Entry| other.parent == Some(key.prefix);
            assert_eq!(entry.children.len(), self.entries.values().filter(after).count());
            assert!(!entry.children.is_empty() || !entry.owners.is_empty(), "{key:?} is owned by nobody");
            let is_listed = self.tenants[&entry.tenant].leaves.contains(&(entry.used, *key));
            assert_eq!(is_listed, entry.children.is_empty());
            for owner in &entry.owners {
                assert!(self.by_owner[owner].contains(key));
            }
        }
        let owned: usize = self.by_owner.values().map(BTreeSet::len).sum();
        assert_eq!(owned, self.entries.values().map(|entry| entry.owners.len()).sum::<usize>());
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
