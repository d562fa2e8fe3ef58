//! The measured choices for shapes of products, in bounded memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use crate::KernelError;

/// A bounded cache of plans. When it is full, it is cleared: the shapes have probably changed, and plans that are still in
/// use are soon recreated.
pub(super) struct PlanCache<K, P> {
    most: usize,
    made: HashMap<K, P>,
}

impl<K: Copy + Eq + Hash, P> PlanCache<K, P> {
    pub(super) fn of_at_most(most: usize) -> Self {
        PlanCache { most, made: HashMap::new() }
    }

    /// Returns what is known of the key, which is found out first if it is unknown. Failures are not kept.
    pub(super) fn get(
        &mut self,
        key: K,
        make: impl FnOnce() -> Result<P, KernelError>,
    ) -> Result<&mut P, KernelError> {
        if self.made.len() >= self.most && !self.made.contains_key(&key) {
            self.made.clear();
        }
        match self.made.entry(key) {
            Entry::Occupied(plan) => Ok(plan.into_mut()),
            Entry::Vacant(entry) => Ok(entry.insert(make()?)),
        }
    }

    /// Returns what is known of the key.
    pub(super) fn known(&self, key: &K) -> Option<&P> {
        self.made.get(key)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.made.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_made_once_and_bounded() {
        let mut plans = PlanCache::of_at_most(2);
        let mut made = Vec::new();
        for key in [1, 2, 1, 2, 3, 3, 1] {
            let plan = plans.get(key, || {
                made.push(key);
                Ok(key * 10)
            });
            assert_eq!(plan, Ok(&mut (key * 10)));
            assert!(plans.made.len() <= 2);
        }
        assert_eq!(made, [1, 2, 3, 1]);
        let error = KernelError::TooLarge { op: "test", what: "it" };
        assert_eq!(plans.get(4, || Err(error.clone())), Err(error));
        assert_eq!(plans.get(4, || Ok(40)), Ok(&mut 40), "failures are not cached");
    }
}
