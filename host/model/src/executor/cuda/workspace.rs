//! The memory that a rank has on its device besides its weights: the buffers of a step, and KV pages. Their sizes are
//! known before any memory is allocated.

use std::ops::Range;

use skep_kernels::cuda::PageFormat;
use skep_kernels::cuda::all_reduce::SIGNAL_BYTES;
use skep_kernels::cuda::all_reduce_norm;
use skep_kernels::cuda::operation::{ACTIVATION_BYTES, MOST_UNEXPANDED_ROWS};
use skep_kernels::cuda::sample::{Adjustment, MAX_ROWS, STATE_BYTES, SampleRow};

use super::layout::Layout;
use super::step::{Attention, Cuts, bucket};
use crate::batch::PAGE_TOKENS;
use crate::config::ModelConfig;

const ALIGNMENT: usize = 256;
/// Minimum number of penalized, biased or banned tokens for which a draw has space, whatever the vocabulary is. Rows
/// that have more in all are drawn in several groups.
const LEAST_ADJUSTMENTS: usize = 64 << 10;

/// Maximum size of the weights that are converted to activations at a time. The products of more are computed in several launches,
/// each of which is large enough to keep a device busy.
const MOST_EXPANDED_BYTES: usize = 64 << 20;

/// Number of logits of which the parts of a row, and whole rows, are multiples. cuBLASLt writes no others.
pub(super) const LOGIT_UNIT: usize = 8;

/// Returns the number of values between two rows of logits.
pub(super) fn logits_stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(LOGIT_UNIT)
}

/// The maximum sizes of a step.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) sequences: usize,
    pub(super) logit_rows: usize,
    /// Number of pages of a sequence.
    pub(super) pages: usize,
    /// Number of pages on the device, including one that is never read. Set when the remaining memory is known.
    pub(super) page_count: usize,
    /// Number of KV heads of each layer.
    pub(super) kv_heads: Vec<usize>,
    pub(super) head_size: usize,
    /// The format of keys and values.
    pub(super) format: PageFormat,
    pub(super) windows: Vec<Option<usize>>,
}

/// The ranges of a layer's keys, values and FP8 scales in the pages of a device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerPages {
    pub(super) keys: Range<usize>,
    pub(super) values: Range<usize>,
    pub(super) scales: Option<Range<usize>>,
}

/// The ranges of the workspace, in bytes.
#[derive(Clone, Debug)]
pub(super) struct WorkspaceOffsets {
    pub(super) inputs: Range<usize>,
    pub(super) hidden: Range<usize>,
    /// The hidden rows between the two parts of a layer. A kernel that reads sums while it writes new ones needs both.
    pub(super) hidden_between: Range<usize>,
    pub(super) normed: Range<usize>,
    pub(super) projected: Range<usize>,
    pub(super) qkv: Range<usize>,
    pub(super) attended: Range<usize>,
    pub(super) gate_up: Range<usize>,
    pub(super) gated: Range<usize>,
    /// Quantized weights that are converted to activations.
    pub(super) expanded: Range<usize>,
    pub(super) states: StateOffsets,
    pub(super) wanted: [Range<usize>; 2],
    pub(super) meeting: MeetingOffsets,
    pub(super) draw: Option<DrawOffsets>,
    pub(super) bytes: usize,
}

/// The ranges through which ranks meet to add up their parts.
#[derive(Clone, Debug)]
pub(super) struct MeetingOffsets {
    /// The rank's parts of sums. The second has room for few rows: their sums end before all ranks have read the parts, so those of
    /// sums that follow each other are in different buffers.
    pub(super) parts: [Range<usize>; 2],
    pub(super) shares: Range<usize>,
    pub(super) signals: Range<usize>,
    pub(super) failure: Range<usize>,
}

/// The ranges of the states of splits, and of the counts of arrivals, which are zeros between launches.
#[derive(Clone, Debug)]
pub(super) struct StateOffsets {
    pub(super) values: Range<usize>,
    /// Number of states.
    pub(super) count: usize,
    pub(super) arrivals: Range<usize>,
}

/// The ranges of the buffers that only the drawing rank has.
#[derive(Clone, Debug)]
pub(super) struct DrawOffsets {
    /// Rows, adjustments and masks, in the layout in which they are copied.
    pub(super) inputs: Range<usize>,
    pub(super) adjusted: Range<usize>,
    /// The states of rows, parts of which are zeros between launches.
    pub(super) states: Range<usize>,
    pub(super) tokens: Range<usize>,
}

/// The widths of a rank's rows, in values, which decide the size of its buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    /// Queries, keys and values.
    pub(crate) qkv: usize,
    pub(crate) attended: usize,
    pub(crate) gated: usize,
    pub(crate) heads: usize,
    pub(crate) head_size: usize,
    pub(crate) vocabulary: usize,
    /// Size in bytes of the largest matrix that is converted to activations.
    pub(crate) expanded_bytes: usize,
}

impl Widths {
    pub(super) fn of_rank(layout: &Layout, config: &ModelConfig) -> Self {
        let (qkv, attended, gated) = layout.widths(config.head_size);
        Widths {
            hidden: config.hidden_size,
            qkv,
            attended,
            gated,
            heads: layout.layers.iter().map(|layer| layer.heads).max().unwrap_or(0),
            head_size: config.head_size,
            vocabulary: config.vocabulary_size,
            expanded_bytes: layout.expanded_bytes(),
        }
    }
}

impl Sizes {
    pub(super) fn new(
        config: &ModelConfig,
        limits: &crate::executor::ExecutorLimits,
        layout: &Layout,
        format: PageFormat,
    ) -> Self {
        // The windows of all stages, because a step is planned once for all stages.
        let kv_heads = layout.layers.iter().map(|layer| layer.kv_heads).collect();
        Self::of_limits(limits, config.windows.clone(), kv_heads, config.head_size, format)
    }

    pub(super) fn of_limits(
        limits: &crate::executor::ExecutorLimits,
        mut windows: Vec<Option<usize>>,
        kv_heads: Vec<usize>,
        head_size: usize,
        format: PageFormat,
    ) -> Self {
        windows.sort_unstable();
        windows.dedup();
        let most = bucket(limits.max_sequences);
        Sizes {
            rows: limits.max_batch_tokens.max(most),
            sequences: most,
            logit_rows: limits.max_logit_rows.max(most),
            pages: limits.context_length.div_ceil(PAGE_TOKENS),
            page_count: 0,
            kv_heads,
            head_size,
            format,
            windows,
        }
    }

    /// Returns the size of a page in bytes, over all layers.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes_of(&self.kv_heads)
    }

    /// Returns the size of a page in bytes in each layer.
    pub(super) fn layer_page_bytes(&self) -> impl Iterator<Item = usize> {
        self.kv_heads.iter().map(|heads| self.format.page_bytes(*heads, self.head_size))
    }

    /// Returns the ranges of the keys, the values and the scales, if there are any, of one page in a layer.
    pub(super) fn page_of(&self, layer: usize, page: usize) -> impl Iterator<Item = Range<usize>> {
        let LayerPages { keys, values, scales } = self.pages_of(layer);
        let page_count = self.page_count.max(1);
        [Some(keys), Some(values), scales].into_iter().flatten().map(move |range| {
            let bytes = range.len() / page_count;
            let start = range.start + page * bytes;
            start..start + bytes
        })
    }

    /// Returns the ranges of a layer.
    pub(super) fn pages_of(&self, layer: usize) -> LayerPages {
        let start = self.page_bytes_of(&self.kv_heads[..layer]) * self.page_count;
        let half = self.format.half_bytes(self.kv_heads[layer], self.head_size) * self.page_count;
        let scales = self.format.scale_bytes(self.kv_heads[layer]) * self.page_count;
        let (values, end) = (start + half, start + 2 * half);
        LayerPages {
            keys: start..values,
            values: values..end,
            scales: (scales > 0).then_some(end..end + scales),
        }
    }

    fn page_bytes_of(&self, kv_heads: &[usize]) -> usize {
        kv_heads.iter().map(|heads| self.format.page_bytes(*heads, self.head_size)).sum()
    }
}

impl WorkspaceOffsets {
    pub(super) fn new(sizes: &Sizes, cuts: &Cuts, widths: &Widths, ranks: usize, draws: bool) -> Self {
        let mut end = 0usize;
        let mut take = |bytes: usize| {
            let start = end.next_multiple_of(ALIGNMENT);
            end = start.saturating_add(bytes);
            start..end
        };
        let &Widths { hidden, qkv, attended, gated, heads, head_size, vocabulary, expanded_bytes } = widths;
        let rows = sizes.rows;
        let of_rows = |width: usize| rows.saturating_mul(width).saturating_mul(ACTIVATION_BYTES);
        let wanted = sizes.logit_rows * hidden * ACTIVATION_BYTES;
        let shared = |bytes: usize| if ranks > 1 { bytes } else { 0 };
        let states = cuts.max_states(rows, sizes.sequences, sizes.pages);
        let inputs = cuts.most_bytes(rows, sizes.sequences, sizes.pages, sizes.logit_rows);
        // Rows that are added up in a fixed order are multiplied with the weights as they are, and so are few rows.
        let expands = cuts.attention == Attention::Split && rows > MOST_UNEXPANDED_ROWS as usize;
        let expanded = if expands { expanded_bytes.min(MOST_EXPANDED_BYTES) } else { 0 };
        let few_rows = rows.min(all_reduce_norm::MAX_ROWS as usize);
        let share = (rows * hidden / 8).div_ceil(ranks) * 8 * ACTIVATION_BYTES;
        WorkspaceOffsets {
            inputs: take(inputs),
            hidden: take(of_rows(hidden)),
            hidden_between: take(of_rows(hidden)),
            normed: take(of_rows(hidden).max(wanted)),
            projected: take(of_rows(hidden)),
            qkv: take(of_rows(qkv)),
            attended: take(of_rows(attended)),
            gate_up: take(of_rows(2 * gated)),
            gated: take(of_rows(gated)),
            expanded: take(expanded),
            states: StateOffsets {
                values: take(states.saturating_mul(heads * (head_size + 2) * 4)),
                count: states,
                arrivals: take(cuts.max_arrivals(rows) * 4),
            },
            wanted: [take(wanted), take(wanted)],
            meeting: MeetingOffsets {
                parts: [
                    take(shared(of_rows(hidden))),
                    take(shared(few_rows.saturating_mul(hidden).saturating_mul(ACTIVATION_BYTES))),
                ],
                shares: take(shared(share)),
                signals: take(shared(SIGNAL_BYTES)),
                failure: take(4),
            },
            draw: draws.then(|| DrawOffsets {
                inputs: take(draw_bytes(sizes.logit_rows, vocabulary)),
                adjusted: take(sizes.logit_rows * vocabulary * 4),
                states: take(state_bytes(sizes.logit_rows, vocabulary)),
                tokens: take(sizes.logit_rows * 4),
            }),
            bytes: end,
        }
    }
}

/// Returns the size of the states of a draw in bytes: as many as a launch may have, unless they take more memory than the
/// logits.
fn state_bytes(rows: usize, vocabulary: usize) -> usize {
    let most = (rows * vocabulary * 4 / STATE_BYTES).clamp(1, MAX_ROWS as usize);
    rows.min(most) * STATE_BYTES
}

/// Returns the number of adjustments for which a draw has space. One row never has more.
pub(super) fn most_adjustments(vocabulary: usize) -> usize {
    vocabulary.max(LEAST_ADJUSTMENTS)
}

/// Returns the size of the rows, adjustments and masks of a draw in bytes.
pub(super) fn draw_bytes(rows: usize, vocabulary: usize) -> usize {
    let masks = rows * vocabulary.div_ceil(32) * 4;
    let adjustments = most_adjustments(vocabulary) * size_of::<Adjustment>();
    rows * size_of::<SampleRow>() + adjustments + masks + 3 * ALIGNMENT
}
