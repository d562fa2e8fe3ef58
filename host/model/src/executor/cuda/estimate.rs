//! The memory that a rank takes on a device, computed without opening one.
//!
//! Invariant: an executor allocates what these functions return. They read shapes and formats, and no values.

use skep_kernels::cuda::PageFormat;
use skep_kernels::cuda::attention_decode::{
    Blocks, blocks_per_split, max_blocks_per_multiprocessor, rows_per_shared_split, rows_per_split,
};

use super::layout::{LayerOffsets, Layout, activation_of};
use super::step::{Attention, Cuts};
use super::workspace::{Sizes, Widths, WorkspaceOffsets, logits_stride};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::limits::limits;
use crate::executor::{ExecutorLimits, ExecutorOptions, KvDtype, option};
use crate::memory_plan::{MemoryPlan, RankPlan};
use crate::shard::{self, Shard};

/// Number of rows with which the products of a step keep a device busy.
pub(super) const STEP_TOKENS: usize = 2048;

/// Returns the part of a device's memory that is reserved for each rank on it, for recordings and for what the driver
/// allocates while it runs.
pub(crate) fn spare(total: u64) -> u64 {
    (total / 100).max((256 << 20).min(total / 32))
}

/// Returns the options with steps that are large enough for a device.
pub(crate) fn device_options(options: ExecutorOptions) -> ExecutorOptions {
    let max_batch_tokens = options.max_batch_tokens.max(STEP_TOKENS);
    ExecutorOptions { max_batch_tokens, ..options }
}

/// Returns the format of pages in which devices store keys and values. Fails if they store none like this.
pub(crate) fn page_format(kv: KvDtype) -> Result<PageFormat, ModelError> {
    match kv {
        KvDtype::F16 => Ok(PageFormat::Activations),
        KvDtype::Fp8 => Ok(PageFormat::Fp8),
        KvDtype::F32 | KvDtype::I8 => {
            let problem = format!(
                "{kv} keys and values are supported only on the CPU; a CUDA device stores 16 bits or FP8: use \
                 f16 or fp8"
            );
            Err(option("kv", problem))
        }
    }
}

/// Lays out the weights of a rank.
pub(super) fn layout_of_rank(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    stage: usize,
    rank: usize,
) -> Result<Layout, ModelError> {
    let shard = Shard { rank, ranks: options.tensor_parallel };
    let activation = options.activations.unwrap_or_else(|| activation_of(checkpoint));
    let layers = shard::stage_layers(checkpoint.config().layer_count, options.pipeline_parallel, stage);
    Layout::new(checkpoint, shard, layers, activation)
}

/// Returns the sizes of a rank's steps and the ranges of its buffers.
pub(super) fn workspace_of_rank(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    layout: &Layout,
    draws: bool,
    multiprocessors: u32,
) -> Result<(Sizes, WorkspaceOffsets), ModelError> {
    let config = checkpoint.config();
    let sizes = Sizes::new(config, &limits(config, options)?, layout, page_format(options.kv)?);
    let blocks = multiprocessors * max_blocks_per_multiprocessor(sizes.head_size as u32, sizes.format);
    let cuts = cuts(blocks, &sizes, &[layout], 0, attention(options, config));
    let widths = Widths::of_rank(layout, config);
    let offsets = WorkspaceOffsets::new(&sizes, &cuts, &widths, options.tensor_parallel, draws);
    Ok((sizes, offsets))
}

/// Returns the size of a rank's buffers in bytes, with the logits of the rank that draws.
pub(super) fn workspace_bytes(sizes: &Sizes, offsets: &WorkspaceOffsets, config: &ModelConfig) -> usize {
    let logits = logits_bytes(sizes, config.vocabulary_size);
    offsets.bytes.saturating_add(if offsets.draw.is_some() { logits } else { 0 })
}

/// Returns the size of the logits of a step in bytes.
pub(super) fn logits_bytes(sizes: &Sizes, vocabulary: usize) -> usize {
    sizes.logit_rows.saturating_mul(logits_stride(vocabulary)).saturating_mul(4)
}

pub(super) fn attention(options: &ExecutorOptions, config: &ModelConfig) -> Attention {
    match options.deterministic {
        true => Attention::in_fixed_order(config.context_length),
        false => Attention::Split,
    }
}

/// Returns what all steps share on devices that run this many blocks of attention at once and hold these layers.
pub(super) fn cuts(
    blocks: u32,
    sizes: &Sizes,
    layouts: &[&Layout],
    spare_page: u32,
    attention: Attention,
) -> Cuts {
    let heads = || {
        let layers = layouts.iter().flat_map(|layout| &layout.layers);
        layers.map(|layer: &LayerOffsets| (layer.heads as u32, layer.kv_heads as u32))
    };
    let shared_rows =
        heads().map(|(heads, kv_heads)| rows_per_shared_split(heads, kv_heads, sizes.head_size as u32));
    Cuts {
        windows: sizes.windows.clone(),
        blocks: Blocks {
            at_once: blocks,
            per_split: heads().map(|(heads, kv_heads)| blocks_per_split(heads, kv_heads)).max().unwrap_or(1),
            rows: heads().map(|(heads, kv_heads)| rows_per_split(heads, kv_heads)).min().unwrap_or(1),
            shared_rows: shared_rows.min().unwrap_or(0),
        },
        most_shape_rows: sizes.sequences,
        spare_page,
        attention,
    }
}

/// Returns the memory of a rank on a device with this much memory and this many multiprocessors.
pub(crate) fn rank_plan(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    [stage, rank]: [usize; 2],
    memory_bytes: u64,
    multiprocessors: u32,
) -> Result<RankPlan, ModelError> {
    let layout = layout_of_rank(checkpoint, options, stage, rank)?;
    let draws = stage + 1 == options.pipeline_parallel && rank == 0;
    let (sizes, offsets) = workspace_of_rank(checkpoint, options, &layout, draws, multiprocessors)?;
    let memory = MemoryPlan {
        weight_bytes: layout.bytes as u64,
        activation_bytes: workspace_bytes(&sizes, &offsets, checkpoint.config()) as u64,
        graph_bytes: spare(memory_bytes),
        kv_bytes: 0,
    };
    Ok(RankPlan { memory, page_bytes: sizes.page_bytes() as u64, windowed: None, spare_pages: 1 })
}

/// Returns the size of a rank's buffers for rows of these widths, in bytes. It is for models that have no layout yet,
/// whose attention runs in as many blocks as a grouped one with as many heads.
pub(crate) fn workspace_of_widths(
    widths: &Widths,
    limits: &ExecutorLimits,
    windows: Vec<Option<usize>>,
    ranks: usize,
    draws: bool,
    format: PageFormat,
    multiprocessors: u32,
) -> u64 {
    let sizes = Sizes::of_limits(limits, windows, Vec::new(), widths.head_size, format);
    let cuts = Cuts {
        windows: sizes.windows.clone(),
        blocks: Blocks {
            at_once: multiprocessors * max_blocks_per_multiprocessor(widths.head_size as u32, format),
            per_split: 1,
            rows: 1,
            shared_rows: 0,
        },
        most_shape_rows: sizes.sequences,
        spare_page: 0,
        attention: Attention::Split,
    };
    let offsets = WorkspaceOffsets::new(&sizes, &cuts, widths, ranks, draws);
    let logits = if draws { logits_bytes(&sizes, widths.vocabulary) } else { 0 };
    offsets.bytes.saturating_add(logits) as u64
}
