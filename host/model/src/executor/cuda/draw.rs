//! Packs draws for the sampling kernel: rows, the adjustments of tokens that follow from their histories, and
//! masks.
//!
//! Invariant: the kernel chooses the same tokens as `sampling.rs`. A row that requests more than a token is left
//! to the host.

use std::collections::BTreeMap;
use std::ops::Range;

use skep_kernels::cuda::sample::{self, Adjustment, BANNED, Choice, SEEN};

use super::workspace::MOST_ADJUSTMENTS;
use crate::sampling::{LogitRow, SampleRow};
use crate::token_set::TokenSet;

const ALIGNMENT: usize = 256;

/// The arrays of a draw, and the requested rows that they contain.
pub(super) struct Draw {
    /// Indices into the requested rows, in the order of the drawn tokens.
    pub(super) rows: Vec<usize>,
    pub(super) row_bytes: Range<usize>,
    pub(super) adjustments: Range<usize>,
    pub(super) masks: Range<usize>,
    /// The greatest of the rows' choices.
    pub(super) choice: Choice,
}

impl Draw {
    /// Packs the rows that the device can draw; those with the indices `first` come first. `buffer` is cleared first.
    pub(super) fn pack(
        asked: &[LogitRow<'_>],
        first: &[usize],
        vocabulary: usize,
        buffer: &mut Vec<u8>,
    ) -> Self {
        let mut rows = Vec::new();
        let (mut packed, mut adjustments, mut masks) = (Vec::new(), Vec::new(), Vec::new());
        let words = vocabulary.div_ceil(32);
        let (mut mask_count, mut seen) = (0, TokenSet::default());
        let mut comes_first = vec![false; asked.len()];
        first.iter().for_each(|index| comes_first[*index] = true);
        let others = (0..asked.len()).filter(|index| !comes_first[*index]);
        for index in first.iter().copied().chain(others) {
            let LogitRow::Sample(row) = &asked[index] else { continue };
            if row.top_logprobs.is_some() || row.sampling.validate().is_err() {
                continue;
            }
            let own = adjustments_of(row, vocabulary, &mut seen);
            if adjustments.len() + own.len() > MOST_ADJUSTMENTS {
                continue;
            }
            let first_adjustment = adjustments.len() as u32;
            adjustments.extend(own);
            let mask = row.mask.map_or(sample::NONE, |mask| {
                // Tokens beyond the end of the mask are not allowed.
                masks.extend(mask.iter().copied().chain(std::iter::repeat(0)).take(words));
                mask_count += 1;
                mask_count - 1
            });
            packed.push(device_row(row, mask, first_adjustment..adjustments.len() as u32));
            rows.push(index);
        }
        let choice = packed.iter().map(sample::SampleRow::choice).max().unwrap_or_default();
        buffer.clear();
        let row_bytes = put(buffer, packed.iter().flat_map(sample::SampleRow::words));
        let adjustments = put(buffer, adjustments.iter().flat_map(adjustment_words));
        let masks = put(buffer, masks.into_iter());
        Draw { rows, row_bytes, adjustments, masks, choice }
    }
}

fn device_row(row: &SampleRow<'_>, mask: u32, adjustments: Range<u32>) -> sample::SampleRow {
    let sampling = row.sampling;
    sample::SampleRow {
        seed: row.seed,
        step: row.step,
        logits: row.row as u32,
        mask,
        first_adjustment: adjustments.start,
        last_adjustment: adjustments.end,
        pending: sample::NONE,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        temperature: sampling.temperature,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        repetition_penalty: sampling.repetition_penalty,
    }
}

/// Returns the adjustments of a row in the order of their tokens, with one entry per token, however many settings affect
/// it. `seen` is overwritten.
fn adjustments_of(row: &SampleRow<'_>, vocabulary: usize, seen: &mut TokenSet) -> Vec<Adjustment> {
    let sampling = row.sampling;
    let mut of_tokens: BTreeMap<u32, Adjustment> = BTreeMap::new();
    let mut of = |token: u32, change: &dyn Fn(&mut Adjustment)| {
        if (token as usize) < vocabulary {
            let none = Adjustment { token, occurrences: 0, bias: 0.0, kind: 0 };
            change(of_tokens.entry(token).or_insert(none));
        }
    };
    if sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0 {
        row.output.iter().for_each(|token| of(*token, &|found| found.occurrences += 1));
    }
    for (token, bias) in &sampling.logit_bias {
        of(*token, &|found| found.bias += bias);
    }
    row.banned.iter().for_each(|token| of(*token, &|found| found.kind |= BANNED));
    if sampling.repetition_penalty == 1.0 {
        return of_tokens.into_values().collect();
    }
    row.fill_seen(vocabulary, seen);
    for (token, found) in &mut of_tokens {
        if seen.remove(*token) {
            found.kind |= SEEN;
        }
    }
    let of_seen = |token| Adjustment { token, occurrences: 0, bias: 0.0, kind: SEEN };
    let mut all: Vec<Adjustment> = seen.iter().map(of_seen).chain(of_tokens.into_values()).collect();
    all.sort_by_key(|adjustment| adjustment.token);
    all
}

fn adjustment_words(adjustment: &Adjustment) -> [u32; 4] {
    [adjustment.token, adjustment.occurrences, adjustment.bias.to_bits(), adjustment.kind]
}

fn put(buffer: &mut Vec<u8>, words: impl Iterator<Item = u32>) -> Range<usize> {
    let start = buffer.len().next_multiple_of(ALIGNMENT);
    buffer.resize(start, 0);
    words.for_each(|word| buffer.extend(word.to_le_bytes()));
    start..buffer.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{Sampling, ScoreRow};
    use crate::seen_tokens::SeenTokens;

    #[test]
    fn structs_have_the_sizes_that_the_kernel_reads() {
        assert_eq!(size_of::<sample::SampleRow>(), 64);
        assert_eq!(size_of::<Adjustment>(), 16);
    }

    #[test]
    fn packs_one_adjustment_per_token_and_leaves_other_rows_to_the_host() {
        let sampling = Sampling {
            frequency_penalty: 0.5,
            repetition_penalty: 1.5,
            logit_bias: vec![(7, 2.0), (900, 1.0)],
            ..Sampling::default()
        };
        let row = SampleRow {
            row: 3,
            sampling: &sampling,
            seed: 1 << 40,
            step: 2,
            mask: Some(&[5]),
            banned: &[9],
            prompt: &[1],
            output: &[7, 7],
            seen: None,
            occurrences: None,
            top_logprobs: None,
        };
        let with_logprobs = SampleRow { top_logprobs: Some(1), ..row.clone() };
        let asked = [
            LogitRow::Score(ScoreRow { row: 0, target: 1, top: 0 }),
            LogitRow::Sample(row.clone()),
            LogitRow::Sample(with_logprobs),
        ];
        let mut buffer = vec![1; 3];
        let draw = Draw::pack(&asked, &[], 70, &mut buffer);
        assert_eq!(draw.rows, [1]);
        assert_eq!(draw.choice, Choice::Drawn);
        let words = |range: &Range<usize>| -> Vec<u32> {
            buffer[range.clone()].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        };
        assert_eq!(words(&draw.row_bytes)[..9], [0, 256, 2, 0, 3, 0, 0, 3, sample::NONE]);
        let adjustments = words(&draw.adjustments);
        assert_eq!(adjustments, [1, 0, 0, SEEN, 7, 2, 2f32.to_bits(), SEEN, 9, 0, 0, BANNED]);
        assert_eq!(words(&draw.masks), [5, 0, 0]);
    }

    #[test]
    fn a_row_marks_only_the_tokens_that_its_sequence_has_not_marked() {
        let penalised = Sampling {
            repetition_penalty: 1.5,
            presence_penalty: 0.5,
            logit_bias: vec![(7, 1.0)],
            ..Sampling::default()
        };
        let tokens: Vec<u32> = (0..1000).map(|at| at * 7 % 300).collect();
        let mut kept = SeenTokens::new(320);
        kept.mark(&tokens[..996]);
        let mut set = TokenSet::default();
        // A draft of four tokens has rows after each of them.
        for end in 996..=1000 {
            let (prompt, output) = tokens[..end].split_at(900);
            let fresh = SampleRow { prompt, output, banned: &[9], ..SampleRow::plain(0, &penalised) };
            let row = SampleRow { seen: Some(&kept), ..fresh.clone() };
            set.insertions = 0;
            let found = adjustments_of(&row, 320, &mut set);
            assert_eq!(set.insertions, end - 996);
            assert_eq!(found, adjustments_of(&fresh, 320, &mut set));
        }
        let free = Sampling { repetition_penalty: 1.0, ..penalised };
        set.insertions = 0;
        adjustments_of(&SampleRow { prompt: &tokens, ..SampleRow::plain(0, &free) }, 320, &mut set);
        assert_eq!(set.insertions, 0, "a row without the penalty needs no set");
    }

    #[test]
    fn rows_that_the_next_step_continues_with_come_first() {
        let sampling = Sampling::default();
        let asked = [0, 1, 2, 3].map(|row| LogitRow::Sample(SampleRow::plain(row, &sampling)));
        let mut buffer = Vec::new();
        let draw = Draw::pack(&asked, &[1, 3], 70, &mut buffer);
        assert_eq!(draw.rows, [1, 3, 0, 2]);
        // The fifth word of a row is the row of its logits.
        let logits: Vec<u8> = buffer[draw.row_bytes].chunks(64).map(|row| row[16]).collect();
        assert_eq!(logits, [1, 3, 0, 2]);
    }
}
