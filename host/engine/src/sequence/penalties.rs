//! The tokens of a sequence that penalties apply to. A sequence keeps them from draw to draw, so that a draw looks only
//! at the tokens that are new.
//!
//! Invariant: only tokens of the sequence are marked or counted. A rollback (`append`) takes the others back.

use skep_model::{Occurrences, SeenTokens};

use super::Sequence;

impl Sequence {
    /// Marks the tokens that are not marked yet for the repetition penalty, if there is one, and returns their number.
    pub fn mark_seen(&mut self) -> usize {
        if self.request.sampling.repetition_penalty == 1.0 {
            return 0;
        }
        let vocabulary = self.context.vocabulary_size;
        self.seen.get_or_insert_with(|| SeenTokens::new(vocabulary)).mark(&self.tokens)
    }

    /// Counts the tokens of the output that are not counted yet for a frequency or presence penalty, if there is one,
    /// and returns their number.
    pub fn count_output(&mut self) -> usize {
        if !self.request.sampling.counts_occurrences() {
            return 0;
        }
        self.occurrences.get_or_insert_default().count(&self.tokens[self.prompt_len..])
    }

    /// Returns the tokens that are marked.
    pub fn seen(&self) -> Option<&SeenTokens> {
        self.seen.as_ref()
    }

    /// Returns the counts of the output's tokens.
    pub fn occurrences(&self) -> Option<&Occurrences> {
        self.occurrences.as_ref()
    }
}
