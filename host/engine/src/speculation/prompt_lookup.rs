//! Drafts that continue a sequence as it continued after the same tokens before. They work well for quotations,
//! for JSON that repeats its keys and for edited code, and need no second model. After Saxena's prompt lookup
//! decoding (2023).
//!
//! The earlier end positions of every n-gram are kept as a chain, newest first, as LZ77 compressors keep them.
//! A step therefore costs one insertion for each new token and a bounded walk, however long the sequence is.

use std::collections::HashMap;

use super::Proposer;
use crate::sequence_id::SequenceId;

/// Length of an n-gram. Fewer equal tokens are a coincidence more often than not.
const GRAM: usize = 3;
/// Number of earlier positions that are compared in one step.
const CANDIDATES: usize = 16;
/// Maximum measured length of a match; of several matches this long, the newest is taken.
const LONGEST_MATCH: usize = 64;
/// Number of tokens that are indexed in one step; a longer prompt takes several steps before the first draft.
const INDEXED_AT_ONCE: usize = 8192;

#[derive(Default)]
pub(super) struct PromptLookup {
    sequences: HashMap<SequenceId, Index>,
}

/// The earlier end positions of each n-gram of a sequence.
#[derive(Default)]
struct Index {
    /// The newest position after an n-gram.
    newest: HashMap<[u32; GRAM], usize>,
    /// The entry `i` is the previous position after the n-gram that ends at the position `GRAM + i`.
    previous: Vec<Option<usize>>,
}

impl Proposer for PromptLookup {
    fn propose(&mut self, id: SequenceId, tokens: &[u32], limit: usize) -> Vec<u32> {
        self.sequences.entry(id).or_default().propose(tokens, limit)
    }

    fn forget(&mut self, id: SequenceId) {
        self.sequences.remove(&id);
    }

    fn retain(&mut self, alive: &dyn Fn(SequenceId) -> bool) {
        self.sequences.retain(|id, _| alive(*id));
    }
}

impl Index {
    fn propose(&mut self, tokens: &[u32], limit: usize) -> Vec<u32> {
        if !self.catch_up(tokens) {
            return Vec::new();
        }
        let Some(place) = self.longest_match(tokens) else { return Vec::new() };
        let mut guess = Vec::with_capacity(limit);
        for at in place..place + limit {
            // A match that reaches the end continues with the guess itself: that is what a repetition looks
            // like.
            let token = tokens.get(at).copied().unwrap_or_else(|| guess[at - tokens.len()]);
            guess.push(token);
        }
        guess
    }

    /// Indexes the positions before the last one. Returns false if more is left for the next steps.
    fn catch_up(&mut self, tokens: &[u32]) -> bool {
        let first = GRAM + self.previous.len();
        let end = tokens.len().min(first + INDEXED_AT_ONCE);
        for place in first..end {
            let older = self.newest.insert(gram_before(tokens, place), place);
            self.previous.push(older);
        }
        end == tokens.len()
    }

    /// Returns the position after the longest earlier match of the last tokens; of several equally long ones,
    /// the newest.
    fn longest_match(&self, tokens: &[u32]) -> Option<usize> {
        if tokens.len() < GRAM {
            return None;
        }
        let newest = self.newest.get(&gram_before(tokens, tokens.len())).copied();
        let candidates = std::iter::successors(newest, |place| self.previous[place - GRAM]).take(CANDIDATES);
        let mut best: Option<(usize, usize)> = None;
        for place in candidates {
            let (earlier, last) = (tokens[..place].iter().rev(), tokens.iter().rev());
            let length = earlier.zip(last).take(LONGEST_MATCH).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|(longest, _)| length > longest) {
                best = Some((length, place));
            }
            if length == LONGEST_MATCH {
                break;
            }
        }
        best.map(|(_, place)| place)
    }
}

fn gram_before(tokens: &[u32], place: usize) -> [u32; GRAM] {
    tokens[place - GRAM..place].try_into().expect("a position has an n-gram before it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &str, limit: usize) -> String {
        let tokens: Vec<u32> = text.chars().map(u32::from).collect();
        let guess = Index::default().propose(&tokens, limit);
        guess
            .into_iter()
            .map(|token| char::from_u32(token).expect("a guess consists of earlier tokens"))
            .collect()
    }

    #[test]
    fn the_guess_follows_the_longest_match() {
        for (text, expected) in [
            ("", ""),
            ("ab", ""),
            ("no such thing", ""),
            ("the cat sat; the cat", " sat"),
            // The newest match has three tokens in common, the one before it more.
            ("one cat sat, two cats, one cat", " sat"),
            // The newest of equally long matches is used.
            ("xabc1 yabc2 zabc", "2 za"),
        ] {
            assert_eq!(guess(text, 4), expected, "{text:?}");
        }
    }

    #[test]
    fn a_repetition_continues_beyond_its_end() {
        assert_eq!(guess("na na na", 9), " na na na");
        assert_eq!(guess("....", 5), ".....");
    }

    #[test]
    fn growing_gives_the_same_guess_as_starting_over() {
        let tokens: Vec<u32> = (0..400u32).map(|n| n * n % 23 % 7).collect();
        let mut growing = Index::default();
        for end in 0..tokens.len() {
            let known = &tokens[..end];
            assert_eq!(growing.propose(known, 6), Index::default().propose(known, 6), "{end}");
        }
    }

    #[test]
    fn a_long_prompt_is_indexed_over_several_steps() {
        let mut tokens: Vec<u32> = (0..INDEXED_AT_ONCE as u32 + 100).collect();
        tokens.extend([7, 8, 9]);
        let mut index = Index::default();
        assert!(index.propose(&tokens, 2).is_empty());
        assert_eq!(index.propose(&tokens, 2), [10, 11]);
    }

    #[test]
    fn finished_sequences_are_forgotten() {
        let mut lookup = PromptLookup::default();
        for id in 0..4 {
            lookup.propose(SequenceId(id), &[1, 2, 3, 4], 4);
        }
        lookup.retain(&|id| id.0 % 2 == 0);
        assert_eq!(lookup.sequences.len(), 2);
    }
}
