//! The numbers of times that an output contains its tokens, on which frequency and presence penalties depend. A
//! sequence keeps them from step to step, so that a step counts only the tokens that are new.
//!
//! Invariant: the first tokens of an output are counted, as many as `counted` returns. A sequence that takes tokens
//! back takes them out of its counts first.

use std::collections::BTreeMap;

/// The numbers of occurrences of the tokens at the beginning of an output.
#[derive(Debug, Default)]
pub struct Occurrences {
    /// The counts, none of which is zero.
    of_tokens: BTreeMap<u32, u32>,
    counted: usize,
}

impl Occurrences {
    /// Counts the tokens of the output after those that are counted already, and returns their number. `output` is the
    /// whole output.
    pub fn count(&mut self, output: &[u32]) -> usize {
        let new = output.get(self.counted..).unwrap_or_default();
        for token in new {
            *self.of_tokens.entry(*token).or_default() += 1;
        }
        self.counted += new.len();
        new.len()
    }

    /// Takes the tokens out that are counted after the first `length` tokens of the output.
    pub fn shorten(&mut self, output: &[u32], length: usize) {
        for token in output.get(length..self.counted).unwrap_or_default() {
            if let Some(count) = self.of_tokens.get_mut(token) {
                *count -= 1;
                if *count == 0 {
                    self.of_tokens.remove(token);
                }
            }
        }
        self.counted = self.counted.min(length);
    }

    /// Returns the number of tokens at the beginning of the output that are counted.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Calls `take` with each distinct token of an output and the number of its occurrences. `kept` are the counts of
    /// its first tokens, if there are any; the others are counted here. The tokens that are in `kept` come first, and
    /// both these and the others come in ascending order.
    pub(crate) fn each(kept: Option<&Occurrences>, output: &[u32], mut take: impl FnMut(u32, u32)) {
        // Counts of more tokens than there are belong to another output.
        let kept = kept.filter(|kept| kept.counted <= output.len());
        let mut rest = Occurrences::default();
        rest.count(&output[kept.map_or(0, Occurrences::counted)..]);
        for (token, count) in kept.iter().flat_map(|kept| &kept.of_tokens) {
            take(*token, count + rest.of_tokens.remove(token).unwrap_or(0));
        }
        rest.of_tokens.into_iter().for_each(|(token, count)| take(token, count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(kept: Option<&Occurrences>, output: &[u32]) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        Occurrences::each(kept, output, |token, count| found.push((token, count)));
        found
    }

    #[test]
    fn each_token_of_a_growing_output_is_counted_once() {
        let mut occurrences = Occurrences::default();
        let output = [7, 3, 7, 9, 3, 7];
        let counted: Vec<usize> =
            [2, 2, 3, 6].into_iter().map(|known| occurrences.count(&output[..known])).collect();
        assert_eq!(counted, [2, 0, 1, 3]);
        assert_eq!(all(Some(&occurrences), &output), [(3, 2), (7, 3), (9, 1)]);
    }

    #[test]
    fn tokens_after_the_counted_ones_are_added_for_one_call() {
        let mut occurrences = Occurrences::default();
        occurrences.count(&[7, 3, 7]);
        assert_eq!(all(Some(&occurrences), &[7, 3, 7, 1, 3, 1]), [(3, 2), (7, 2), (1, 2)]);
        assert_eq!(all(Some(&occurrences), &[7, 3, 7]), [(3, 1), (7, 2)]);
        // An output that is shorter than the counts is counted by itself.
        assert_eq!(all(Some(&occurrences), &[5, 5]), [(5, 2)]);
        assert_eq!(all(None, &[7, 3, 7]), [(3, 1), (7, 2)]);
    }

    #[test]
    fn a_shortened_output_has_the_counts_of_what_is_left() {
        let output = [7, 3, 7, 9, 3, 7];
        for counted in 0..=output.len() {
            for length in 0..=output.len() {
                let mut occurrences = Occurrences::default();
                occurrences.count(&output[..counted]);
                occurrences.shorten(&output, length);
                assert_eq!(occurrences.counted(), counted.min(length));
                let mut expected = Occurrences::default();
                expected.count(&output[..counted.min(length)]);
                assert_eq!(occurrences.of_tokens, expected.of_tokens, "{counted} to {length}");
            }
        }
    }
}
