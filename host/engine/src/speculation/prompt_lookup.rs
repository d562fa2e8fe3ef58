//! Guesses that a sequence goes on as it did after the same tokens before: good at quoting, at JSON that repeats its
//! keys, at code that is edited, and free of a second model. After Saxena's prompt lookup decoding (2023).
//!
//! Every n-gram's earlier ends are kept as a chain, newest first, as LZ77 compressors keep them, so that a step costs
//! one insertion for each new token and a bounded walk, however long the sequence is.

use std::collections::HashMap;

use super::Proposer;
use crate::sequence::SequenceId;

/// Fewer equal tokens are chance more often than not.
const GRAM: usize = 3;
/// Earlier places that are compared in one step.
const CANDIDATES: usize = 16;
/// A match is not measured beyond this; the newest of several so long is taken.
const LONGEST_MATCH: usize = 64;
/// Tokens that are indexed in one step; a longer prompt takes several before the first guess.
const INDEXED_AT_ONCE: usize = 8192;

#[derive(Default)]
pub(super) struct PromptLookup {
    sequences: HashMap<SequenceId, Index>,
}

/// Where each n-gram of a sequence ended before.
#[derive(Default)]
struct Index {
    /// The newest place after an n-gram.
    newest: HashMap<[u32; GRAM], usize>,
    /// For the place `GRAM + i`, the one before it after the same n-gram.
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
            // A match that reaches the end goes on with the guess itself: that is what a repetition looks like.
            let token = tokens.get(at).copied().unwrap_or_else(|| guess[at - tokens.len()]);
            guess.push(token);
        }
        guess
    }

    /// Indexes the places before the last one. False: there is more to do in the next steps.
    fn catch_up(&mut self, tokens: &[u32]) -> bool {
        let first = GRAM + self.previous.len();
        let end = tokens.len().min(first + INDEXED_AT_ONCE);
        for place in first..end {
            let older = self.newest.insert(gram_before(tokens, place), place);
            self.previous.push(older);
        }
        end == tokens.len()
    }

    /// The place after the earlier tokens that agree longest with the last ones; of several the newest.
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
    tokens[place - GRAM..place].try_into().expect("a place has an n-gram before it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &str, limit: usize) -> String {
        let tokens: Vec<u32> = text.chars().map(u32::from).collect();
        let guess = Index::default().propose(&tokens, limit);
        guess
            .into_iter()
            .map(|token| char::from_u32(token).expect("a guess is made of what was there"))
            .collect()
    }

    #[test]
    fn the_guess_is_what_followed_the_longest_match() {
        for (text, expected) in [
            ("", ""),
            ("ab", ""),
            ("no such thing", ""),
            ("the cat sat; the cat", " sat"),
            // The newest has three tokens in common, the one before it more.
            ("one cat sat, two cats, one cat", " sat"),
            // Of matches that are as long as each other, the newest.
            ("xabc1 yabc2 zabc", "2 za"),
        ] {
            assert_eq!(guess(text, 4), expected, "{text:?}");
        }
    }

    #[test]
    fn a_repetition_goes_on_beyond_its_end() {
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
    fn ended_sequences_are_forgotten() {
        let mut lookup = PromptLookup::default();
        for id in 0..4 {
            lookup.propose(SequenceId(id), &[1, 2, 3, 4], 4);
        }
        lookup.retain(&|id| id.0 % 2 == 0);
        assert_eq!(lookup.sequences.len(), 2);
    }
}
