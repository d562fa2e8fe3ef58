//! The home replica of each session. The table is bounded: the least recently used session is forgotten first.
//! A forgotten session then finds its pages by prefix, if they are still cached.

use std::collections::{BTreeMap, HashMap};

use crate::keyed_hash::Digest;

#[derive(Debug)]
pub(super) struct SessionTable {
    capacity: usize,
    /// Counts up with each use, so each value is unique.
    clock: u64,
    homes: HashMap<Digest, Home>,
    by_use: BTreeMap<u64, Digest>,
}

#[derive(Debug)]
struct Home {
    replica: usize,
    used: u64,
}

impl SessionTable {
    /// Creates a table that remembers at most `capacity` sessions.
    pub fn new(capacity: usize) -> Self {
        SessionTable { capacity, clock: 0, homes: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Returns the index of the session's replica. Looking does not count as a use.
    pub fn home(&self, session: Digest) -> Option<usize> {
        self.homes.get(&session).map(|home| home.replica)
    }

    /// Makes `replica` the home of the session from now on.
    pub fn settle(&mut self, session: Digest, replica: usize) {
        self.clock += 1;
        let home = Home { replica, used: self.clock };
        if let Some(previous) = self.homes.insert(session, home) {
            self.by_use.remove(&previous.used);
        }
        self.by_use.insert(self.clock, session);
        while self.homes.len() > self.capacity {
            let Some((_, oldest)) = self.by_use.pop_first() else { return };
            self.homes.remove(&oldest);
        }
    }

    /// Removes all homes on `replica`.
    pub fn forget_replica(&mut self, replica: usize) {
        self.homes.retain(|_, home| home.replica != replica);
        self.by_use.retain(|_, session| self.homes.contains_key(session));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed_hash::KeyedHash;

    #[test]
    fn the_least_recently_used_session_is_forgotten_first() {
        let hash = KeyedHash::default();
        let of = |session: &str| hash.digest(session);
        let mut table = SessionTable::new(2);
        table.settle(of("a"), 0);
        table.settle(of("b"), 1);
        table.settle(of("a"), 2);
        table.settle(of("c"), 3);
        assert_eq!([table.home(of("a")), table.home(of("b")), table.home(of("c"))], [Some(2), None, Some(3)]);
        assert_eq!(table.by_use.len(), 2);
    }

    #[test]
    fn sessions_of_a_removed_replica_have_no_home() {
        let hash = KeyedHash::default();
        let mut table = SessionTable::new(8);
        (0..6usize).for_each(|n| table.settle(hash.digest(n), n % 2));
        table.forget_replica(1);
        let homes: Vec<_> = (0..6usize).map(|n| table.home(hash.digest(n))).collect();
        assert_eq!(homes, [Some(0), None, Some(0), None, Some(0), None]);
        assert_eq!(table.by_use.len(), 3);
    }
}
