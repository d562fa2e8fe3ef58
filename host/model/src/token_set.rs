//! A set of token ids that takes one bit for each id of a vocabulary, which is a fraction of a map with the tokens of a long
//! prompt.

/// Token ids below a bound.
#[derive(Debug, Default)]
pub(crate) struct TokenSet {
    words: Vec<u64>,
    vocabulary: usize,
    /// Number of calls of `insert`.
    #[cfg(test)]
    pub insertions: usize,
}

impl TokenSet {
    /// Empties the set, for ids below `vocabulary`.
    pub fn reset(&mut self, vocabulary: usize) {
        self.vocabulary = vocabulary;
        self.words.clear();
        self.words.resize(vocabulary.div_ceil(64), 0);
    }

    /// Makes the set equal to another one.
    pub fn copy_from(&mut self, other: &TokenSet) {
        self.vocabulary = other.vocabulary;
        self.words.clone_from(&other.words);
    }

    /// Returns the bound of the ids.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Adds an id, and returns whether that changed the set. An id that is not below the bound is ignored.
    pub fn insert(&mut self, token: u32) -> bool {
        #[cfg(test)]
        {
            self.insertions += 1;
        }
        let is_new = (token as usize) < self.vocabulary && !self.contains(token);
        if is_new {
            self.words[token as usize / 64] |= 1 << (token % 64);
        }
        is_new
    }

    /// Returns the ids in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let bits = |(at, word): (usize, &u64)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                Some(at as u32 * 64 + bit)
            })
        };
        self.words.iter().enumerate().flat_map(bits)
    }

    fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 64).is_some_and(|word| word >> (token % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_each_id_below_its_bound_once_and_in_order() {
        let mut set = TokenSet::default();
        assert!(!set.insert(0), "an empty vocabulary has no ids");
        set.reset(130);
        let added: Vec<bool> =
            [129, 0, 64, 63, 0, 130, 191, u32::MAX].into_iter().map(|id| set.insert(id)).collect();
        assert_eq!(added, [true, true, true, true, false, false, false, false]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 129]);
        set.reset(70);
        assert_eq!(set.iter().count(), 0);
    }
}
