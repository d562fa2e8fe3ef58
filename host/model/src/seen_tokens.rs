//! The distinct tokens of a sequence, to which a repetition penalty applies. A sequence keeps its set from step to step, so
//! that a step marks only the tokens that are new.
//!
//! Invariant: a set has the first tokens of its sequence, as many as are marked. A sequence that takes marked tokens back
//! begins with a new set.

use crate::token_set::TokenSet;

/// The distinct tokens at the beginning of a sequence.
#[derive(Debug)]
pub struct SeenTokens {
    set: TokenSet,
    marked: usize,
}

impl SeenTokens {
    /// Creates the set of a sequence of which no token is marked. Ids that are not below `vocabulary` are ignored.
    pub fn new(vocabulary: usize) -> Self {
        let mut set = TokenSet::default();
        set.reset(vocabulary);
        SeenTokens { set, marked: 0 }
    }

    /// Marks the tokens of the sequence after those that are marked already, and returns their number. `tokens` are all
    /// tokens of the sequence.
    pub fn mark(&mut self, tokens: &[u32]) -> usize {
        let new = tokens.get(self.marked..).unwrap_or_default();
        for token in new {
            self.set.insert(*token);
        }
        self.marked += new.len();
        new.len()
    }

    /// Returns the number of tokens at the beginning of the sequence that are marked.
    pub fn marked(&self) -> usize {
        self.marked
    }

    pub(crate) fn set(&self) -> &TokenSet {
        &self.set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_of_a_growing_sequence_is_marked_once() {
        let mut seen = SeenTokens::new(100);
        let tokens = [7, 3, 7, 100, 5, 3];
        let marked: Vec<usize> = [2, 2, 3, 6].into_iter().map(|known| seen.mark(&tokens[..known])).collect();
        assert_eq!(marked, [2, 0, 1, 3]);
        assert_eq!((seen.marked(), seen.set.insertions), (6, 6));
        assert_eq!(seen.set.iter().collect::<Vec<_>>(), [3, 5, 7]);
    }
}
