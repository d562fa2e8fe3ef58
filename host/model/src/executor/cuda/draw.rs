//! Packs draws for the sampling kernel and enqueues them: rows, the adjustments of tokens that follow from their
//! histories, and masks.
//!
//! Invariant: the kernel chooses the same tokens as `sampling.rs`. A row that requests more than a token is left
//! to the host. A host buffer is filled only after the device has copied what it held before.

use std::ops::Range;

use skep_kernels::cuda::device::{Device, Event, HostBuffer};
use skep_kernels::cuda::operation::Sample;
use skep_kernels::cuda::sample::{self, Adjustment, BANNED, Choice, SEEN};

use super::workspace::{DrawOffsets, logits_stride, most_adjustments};
use super::{CudaExecutor, weights};
use crate::error::ModelError;
use crate::sampling::{LogitRow, SampleRow};
use crate::token_set::TokenSet;

const ALIGNMENT: usize = 256;

/// The rows that the device draws, in groups whose adjustments fit into the buffer of a draw.
pub(super) struct DrawnRows<'a> {
    asked: &'a [LogitRow<'a>],
    vocabulary: usize,
    /// Maximum number of adjustments of a group, at least the vocabulary.
    most_adjustments: usize,
    /// Indices into the requested rows, in the order of the drawn tokens.
    pub(super) order: Vec<usize>,
    /// Number of rows in the groups that have been packed.
    packed: usize,
    /// The adjustments of the next row, if there was no space for them in the group before.
    left_over: Option<Vec<Adjustment>>,
    seen: TokenSet,
}

/// The arrays of one group.
struct Group {
    /// The positions of its tokens among all that are drawn.
    tokens: Range<usize>,
    row_bytes: Range<usize>,
    adjustments: Range<usize>,
    masks: Range<usize>,
    /// The greatest of the rows' choices.
    choice: Choice,
}

/// The host memory of draws.
pub(super) struct DrawBuffers {
    /// The buffers that groups are copied from in turn, and the ends of their copies.
    inputs: [(HostBuffer, Event); 2],
    /// Index of the buffer for the next group.
    next: usize,
    pub(super) output: HostBuffer,
    pub(super) most_adjustments: usize,
}

impl DrawBuffers {
    pub(super) fn new(
        device: &Device,
        offsets: Option<&DrawOffsets>,
        rows: usize,
        vocabulary: usize,
    ) -> Result<Self, ModelError> {
        let bytes = offsets.map_or(0, |offsets| offsets.inputs.len());
        let input = || Ok::<_, ModelError>((device.host_buffer(bytes)?, device.event()?));
        Ok(DrawBuffers {
            inputs: [input()?, input()?],
            next: 0,
            output: device.host_buffer(rows * 4)?,
            most_adjustments: most_adjustments(vocabulary),
        })
    }
}

impl CudaExecutor {
    /// Enqueues the draws of all rows on the leader, group by group, and the copy of their tokens to the host.
    pub(super) fn enqueue_draws(&mut self, drawn: &mut DrawnRows<'_>) -> Result<(), ModelError> {
        let vocabulary = self.limits.vocabulary_size;
        let (stage, draws) = (self.stages.len() - 1, &mut self.draws);
        let leader = &self.stages[stage][0];
        for other in &self.stages[stage][1..] {
            leader.device.wait(&other.done)?;
        }
        let packed = &mut self.inputs.packed;
        while let Some(group) = drawn.pack(packed) {
            let [inputs, adjusted, states, tokens, logits] =
                leader.draw_workspace(packed.len(), group.tokens.clone())?;
            let (input, copied) = &mut draws.inputs[draws.next];
            draws.next ^= 1;
            copied.synchronize()?;
            input.bytes_mut()[..packed.len()].copy_from_slice(packed);
            // The device's buffer still belongs to the group before, whose kernels are in front of this copy.
            leader.device.upload(input, 0, inputs)?;
            copied.record()?;
            let sample = Sample {
                logits,
                rows: inputs.part(group.row_bytes)?,
                adjustments: inputs.part(group.adjustments)?,
                masks: inputs.part(group.masks)?,
                // No row depends on a token that the host does not know yet.
                drawn: tokens,
                adjusted,
                states,
                tokens,
                row_count: weights::size(group.tokens.len())?,
                choice: group.choice,
                vocabulary: weights::size(vocabulary)?,
                logits_stride: weights::size(logits_stride(vocabulary))?,
            };
            leader.device.sample(&sample)?;
        }
        leader.device.download(leader.drawn_tokens(drawn.order.len())?, &mut draws.output, 0)?;
        Ok(leader.known.record()?)
    }
}

impl<'a> DrawnRows<'a> {
    /// Selects the rows that the device can draw; those with the indices `first` come first.
    pub(super) fn new(
        asked: &'a [LogitRow<'a>],
        first: &[usize],
        vocabulary: usize,
        most_adjustments: usize,
    ) -> Self {
        let mut comes_first = vec![false; asked.len()];
        first.iter().for_each(|index| comes_first[*index] = true);
        let others = (0..asked.len()).filter(|index| !comes_first[*index]);
        let is_drawn = |index: &usize| drawn_row(&asked[*index]).is_some();
        let order = first.iter().copied().chain(others).filter(is_drawn).collect();
        let (left_over, seen) = (None, TokenSet::default());
        DrawnRows { asked, vocabulary, most_adjustments, order, packed: 0, left_over, seen }
    }

    /// Packs the next group of rows, or returns `None` after the last one. `buffer` is cleared first.
    fn pack(&mut self, buffer: &mut Vec<u8>) -> Option<Group> {
        let (mut packed, mut adjustments, mut masks) = (Vec::new(), Vec::new(), Vec::new());
        let words = self.vocabulary.div_ceil(32);
        let (begin, mut mask_count) = (self.packed, 0);
        let rows = self.order[begin..].iter().filter_map(|index| drawn_row(&self.asked[*index]));
        for row in rows {
            let own = self.left_over.take();
            let own = own.unwrap_or_else(|| adjustments_of(row, self.vocabulary, &mut self.seen));
            // A group has at least one row, whose adjustments always fit.
            if !packed.is_empty() && adjustments.len() + own.len() > self.most_adjustments {
                self.left_over = Some(own);
                break;
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
        }
        self.packed += packed.len();
        let choice = packed.iter().map(sample::SampleRow::choice).max()?;
        buffer.clear();
        let row_bytes = put(buffer, packed.iter().flat_map(sample::SampleRow::words));
        let adjustments = put(buffer, adjustments.iter().flat_map(adjustment_words));
        let masks = put(buffer, masks.into_iter());
        Some(Group { tokens: begin..self.packed, row_bytes, adjustments, masks, choice })
    }
}

/// Returns the row if the device can draw it.
fn drawn_row<'a>(asked: &'a LogitRow<'a>) -> Option<&'a SampleRow<'a>> {
    let LogitRow::Sample(row) = asked else { return None };
    (row.top_logprobs.is_none() && row.sampling.validate().is_ok()).then_some(row)
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
    let of =
        |token: u32, occurrences: u32, bias: f32, kind: u32| Adjustment { token, occurrences, bias, kind };
    let mut all = Vec::new();
    if sampling.counts_occurrences() {
        row.each_occurrence(|token, occurrences| all.push(of(token, occurrences, 0.0, 0)));
    }
    all.extend(sampling.logit_bias.iter().map(|(token, bias)| of(*token, 0, *bias, 0)));
    all.extend(row.banned.iter().map(|token| of(*token, 0, 0.0, BANNED)));
    if sampling.repetition_penalty != 1.0 {
        row.fill_seen(vocabulary, seen);
        all.extend(seen.iter().map(|token| of(token, 0, 0.0, SEEN)));
    }
    all.retain(|adjustment| (adjustment.token as usize) < vocabulary);
    // The long parts are in order, so a stable sort only merges them. It also keeps the order of a token's biases.
    all.sort_by_key(|adjustment| adjustment.token);
    all.dedup_by(|next, kept| {
        let is_same = next.token == kept.token;
        if is_same {
            kept.occurrences += next.occurrences;
            kept.bias += next.bias;
            kept.kind |= next.kind;
        }
        is_same
    });
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
    use super::super::workspace::draw_bytes;
    use super::*;
    use crate::occurrences::Occurrences;
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
        let mut drawn = DrawnRows::new(&asked, &[], 70, 70);
        assert_eq!(drawn.order, [1]);
        let group = drawn.pack(&mut buffer).unwrap();
        assert_eq!((group.tokens, group.choice), (0..1, Choice::Drawn));
        let words = |range: &Range<usize>| -> Vec<u32> {
            buffer[range.clone()].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        };
        assert_eq!(words(&group.row_bytes)[..9], [0, 256, 2, 0, 3, 0, 0, 3, sample::NONE]);
        let adjustments = words(&group.adjustments);
        assert_eq!(adjustments, [1, 0, 0, SEEN, 7, 2, 2f32.to_bits(), SEEN, 9, 0, 0, BANNED]);
        assert_eq!(words(&group.masks), [5, 0, 0]);
        assert!(drawn.pack(&mut buffer).is_none(), "all rows are packed");
    }

    #[test]
    fn rows_are_packed_in_groups_whose_adjustments_fit() {
        let penalised = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
        let free = Sampling::default();
        let tokens: Vec<u32> = (0..60).collect();
        let mask = [7; 3];
        // The numbers of adjustments of the rows.
        let asked = [20, 30, 0, 25, 60, 1, 60, 0, 60].map(|count| {
            let sampling = if count == 0 { &free } else { &penalised };
            LogitRow::Sample(SampleRow {
                prompt: &tokens[60 - count..],
                mask: Some(&mask),
                ..SampleRow::plain(count, sampling)
            })
        });
        let mut drawn = DrawnRows::new(&asked, &[], 70, 70);
        let (mut buffer, mut groups) = (Vec::new(), Vec::new());
        while let Some(group) = drawn.pack(&mut buffer) {
            let words = |range: &Range<usize>| -> Vec<u32> {
                buffer[range.clone()]
                    .chunks(4)
                    .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
                    .collect()
            };
            let adjustments = words(&group.adjustments);
            assert_eq!(words(&group.masks), [7].repeat(3 * group.tokens.len()));
            for (at, (row, position)) in
                words(&group.row_bytes).chunks(16).zip(group.tokens.clone()).enumerate()
            {
                let count = asked[position].row();
                assert_eq!((row[4] as usize, row[5] as usize), (count, at));
                let own =
                    adjustments[4 * row[6] as usize..4 * row[7] as usize].chunks(4).map(|words| words[0]);
                assert_eq!(own.collect::<Vec<_>>(), tokens[60 - count..], "row {position}");
            }
            groups.push(group.tokens);
        }
        assert_eq!(groups, [0..3, 3..4, 4..6, 6..8, 8..9]);
        assert_eq!(drawn.seen.insertions, 20 + 30 + 25 + 60 + 1 + 60 + 60, "each row is looked at once");
    }

    #[test]
    fn a_row_with_every_token_of_a_large_vocabulary_fits_into_the_buffer() {
        const VOCABULARY: usize = 70_000;
        let penalised = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
        let tokens: Vec<u32> = (0..VOCABULARY as u32).collect();
        let asked = [LogitRow::Sample(SampleRow { prompt: &tokens, ..SampleRow::plain(0, &penalised) })];
        let mut drawn = DrawnRows::new(&asked, &[], VOCABULARY, most_adjustments(VOCABULARY));
        let mut buffer = Vec::new();
        let group = drawn.pack(&mut buffer).unwrap();
        assert_eq!(group.adjustments.len(), VOCABULARY * size_of::<Adjustment>());
        assert!(buffer.len() <= draw_bytes(1, VOCABULARY), "{} bytes", buffer.len());
    }

    #[test]
    fn a_row_counts_only_the_tokens_that_its_sequence_has_not_counted() {
        let penalised = Sampling {
            frequency_penalty: 0.5,
            repetition_penalty: 1.5,
            logit_bias: vec![(7, 1.0)],
            ..Sampling::default()
        };
        let tokens: Vec<u32> = (0..1000).map(|at| at * 7 % 300).collect();
        let (mut kept, mut seen) = (Occurrences::default(), SeenTokens::new(280));
        kept.count(&tokens[..996]);
        seen.mark(&tokens[..996]);
        // The counted tokens are not read again, so they may be others.
        let others: Vec<u32> = [vec![0; 996], tokens[996..].to_vec()].concat();
        let mut set = TokenSet::default();
        // A draft of four tokens has rows after each of them. Some tokens are outside the vocabulary.
        for end in 996..=1000 {
            let fresh =
                SampleRow { output: &tokens[..end], banned: &[9, 9], ..SampleRow::plain(0, &penalised) };
            let row = SampleRow {
                output: &others[..end],
                seen: Some(&seen),
                occurrences: Some(&kept),
                ..fresh.clone()
            };
            let found = adjustments_of(&row, 280, &mut set);
            assert_eq!(found, adjustments_of(&fresh, 280, &mut set));
            let counted = found.iter().map(|adjustment| adjustment.occurrences as usize).sum::<usize>();
            assert_eq!(counted, tokens[..end].iter().filter(|token| **token < 280).count());
        }
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
        let mut drawn = DrawnRows::new(&asked, &[1, 3], 70, 70);
        assert_eq!(drawn.order, [1, 3, 0, 2]);
        let group = drawn.pack(&mut buffer).unwrap();
        // The fifth word of a row is the row of its logits.
        let logits: Vec<u8> = buffer[group.row_bytes].chunks(64).map(|row| row[16]).collect();
        assert_eq!(logits, [1, 3, 0, 2]);
    }
}
