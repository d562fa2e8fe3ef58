//! The KV cache of a simulated host: the beginnings of prompts that agents share, and the conversations of sessions, of which the
//! least recently used ones leave first.

use std::collections::{BTreeMap, HashMap};

/// Something that is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Entry {
    /// The beginning of all prompts of an agent.
    Prefix(u32),
    /// The rest of the prompt and the answer of a session's last turn. After a conversation was cut, it is another one.
    Session { session: u32, cuts: u32 },
}

/// The entries of one host, with their numbers of tokens.
#[derive(Debug)]
pub(super) struct Cache {
    capacity: u64,
    used: u64,
    entries: HashMap<Entry, Slot>,
    /// The entries by the order of their last use.
    order: BTreeMap<u64, Entry>,
    uses: u64,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    tokens: u32,
    used: u64,
}

impl Cache {
    pub(super) fn new(capacity: u64) -> Self {
        Cache { capacity, used: 0, entries: HashMap::new(), order: BTreeMap::new(), uses: 0 }
    }

    /// Returns the tokens of an entry, or zero.
    pub(super) fn tokens(&self, entry: Entry) -> u32 {
        self.entries.get(&entry).map_or(0, |slot| slot.tokens)
    }

    /// Returns the number of tokens for which there is room without evicting anything.
    pub(super) fn vacant(&self) -> u64 {
        self.capacity - self.used
    }

    /// Makes an entry the one that was used last, with this number of tokens. Entries that have to leave are added to `evicted`; one
    /// that is larger than the cache is not kept.
    pub(super) fn put(&mut self, entry: Entry, tokens: u32, evicted: &mut Vec<Entry>) {
        let is_new = !self.entries.contains_key(&entry);
        self.remove(entry);
        if u64::from(tokens) > self.capacity {
            if !is_new {
                evicted.push(entry);
            }
            return;
        }
        while self.vacant() < u64::from(tokens) {
            let Some((_, oldest)) = self.order.first_key_value() else { break };
            let oldest = *oldest;
            self.remove(oldest);
            evicted.push(oldest);
        }
        self.uses += 1;
        self.entries.insert(entry, Slot { tokens, used: self.uses });
        self.order.insert(self.uses, entry);
        self.used += u64::from(tokens);
    }

    fn remove(&mut self, entry: Entry) {
        if let Some(slot) = self.entries.remove(&entry) {
            self.order.remove(&slot.used);
            self.used -= u64::from(slot.tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(session: u32) -> Entry {
        Entry::Session { session, cuts: 0 }
    }

    #[test]
    fn the_least_recently_used_entries_leave_first() {
        let (mut cache, mut evicted) = (Cache::new(100), Vec::new());
        let [a, b, c] = [Entry::Prefix(1), session(1), session(2)];
        cache.put(a, 40, &mut evicted);
        cache.put(b, 40, &mut evicted);
        cache.put(a, 50, &mut evicted);
        assert_eq!((cache.vacant(), evicted.len()), (10, 0), "an entry that grows is counted once");
        cache.put(c, 30, &mut evicted);
        assert_eq!((evicted.as_slice(), cache.tokens(a), cache.tokens(b)), ([b].as_slice(), 50, 0));
        cache.put(a, 101, &mut evicted);
        assert_eq!((evicted.as_slice(), cache.vacant()), ([b, a].as_slice(), 70));
    }
}
