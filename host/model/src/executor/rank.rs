//! One rank of an executor: its part of the model, and the threads, buffers and KV pages to run it.

use std::sync::Arc;

use skep_kernels::Isa;
use skep_kernels::attention::AttentionLimits;
use skep_kernels::kv::KvFormat;
use skep_kernels::matmul::Activations;

use super::pages_ahead::PagesAhead;
use super::windows::{WindowPages, window_page_count};
use super::{CpuAffinity, ExecutorLimits, ExecutorOptions, KvDtype, option};
use crate::batch::{Batch, PageId, WindowChange, WindowLimits};
use crate::communicator::{Communicator, Links};
use crate::error::ModelError;
use crate::layers::attention::AttentionShape;
use crate::layers::cache::LayerCache;
use crate::layers::compute::{Compute, RowWidths};
use crate::memory_plan::MemoryPlan;
use crate::models::transformer::{Transformer, Workspace};

pub(super) struct Rank<C> {
    model: Arc<Transformer>,
    pub(super) workspace: Workspace,
    pub(super) compute: Compute,
    caches: Vec<LayerCache>,
    ahead: PagesAhead,
    /// The pages of layers with a window, if they have fewer than other layers.
    windows: Option<WindowPages>,
    pub(super) links: Links<C>,
}

/// The options of one rank, which may differ between ranks.
#[derive(Clone, Copy)]
pub(super) struct RankOptions {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    pub(super) affinity: CpuAffinity,
    pub(super) kv: KvDtype,
    pub(super) page_count: usize,
    pub(super) windows: Option<WindowLimits>,
}

impl<C: Communicator> Rank<C> {
    /// Allocates the rank's KV pages and starts its threads.
    pub(super) fn new(
        model: Arc<Transformer>,
        options: RankOptions,
        links: Links<C>,
    ) -> Result<Self, ModelError> {
        let RankOptions { isa, threads, affinity, page_count, windows, kv } = options;
        let windowed_count = windows.map_or(page_count, |windows| windows.pages);
        let pages = |has_window: bool| if has_window { windowed_count } else { page_count };
        let format = kv.format()?;
        let caches = model.caches().zip(model.windowed());
        let caches = caches.map(|(cache, has_window)| cache.pages(format, isa, pages(has_window)));
        let caches = caches.collect::<Result<Vec<_>, _>>()?;
        let ahead = PagesAhead::start(&caches, page_count);
        let windows = windows.map(|windows| WindowPages::new(windows, page_count));
        let compute = Compute { pool: affinity.pool(threads)?, isa, activations: Activations::default() };
        Ok(Rank { model, workspace: Workspace::default(), compute, caches, ahead, windows, links })
    }

    /// Runs the rank's part of a step. `logits` is given on the rank that receives the logits.
    pub(super) fn step(&mut self, batch: &Batch, logits: Option<&mut [f32]>) -> Result<(), ModelError> {
        let Rank { model, workspace, compute, caches, ahead, windows, links } = self;
        ahead.record(batch);
        let windowed = windows.as_mut().map(|windows| windows.of_batch(batch)).transpose()?;
        model.forward(compute, workspace, caches, links, (batch, windowed), logits)
    }

    /// Changes what pages keep for layers with a window.
    pub(super) fn change_windows(&mut self, changes: &[WindowChange]) {
        if let Some(windows) = &mut self.windows {
            windows.apply(changes);
        }
    }

    /// Returns the number of bytes of a page in each of the rank's layers.
    pub(super) fn page_bytes(&self) -> Vec<usize> {
        self.caches.iter().map(LayerCache::page_bytes).collect()
    }

    /// Copies pages, one after the other and each layer by layer.
    pub(super) fn read_pages(&self, pages: &[PageId], mut out: &mut [u8]) -> Result<(), ModelError> {
        for page in pages {
            for cache in &self.caches {
                let own = out.split_off_mut(..cache.page_bytes()).ok_or_else(truncated)?;
                cache.read_page(page.0, own)?;
            }
        }
        Ok(())
    }

    /// Returns the rank's part of some pages.
    pub(super) fn pages(&self, pages: &[PageId]) -> Result<Vec<u8>, ModelError> {
        let mut part = vec![0; pages.len() * self.page_bytes().iter().sum::<usize>()];
        self.read_pages(pages, &mut part)?;
        Ok(part)
    }

    /// Replaces pages with those that [`Rank::read_pages`] copied.
    pub(super) fn write_pages(&mut self, pages: &[PageId], mut bytes: &[u8]) -> Result<(), ModelError> {
        self.ahead.record_pages(pages);
        for page in pages {
            for cache in &mut self.caches {
                let own = bytes.split_off(..cache.page_bytes()).ok_or_else(truncated)?;
                cache.write_page(page.0, own)?;
            }
        }
        Ok(())
    }

    /// Runs the rank's part of a step that is split into micro-batches.
    pub(super) fn steps(
        &mut self,
        micro_batches: &[Batch],
        mut logits: Option<&mut [f32]>,
    ) -> Result<(), ModelError> {
        for micro_batch in micro_batches {
            let length = micro_batch.logit_rows() * self.model.vocabulary_size();
            let own = logits.as_mut().and_then(|rest| rest.split_off_mut(..length));
            self.step(micro_batch, own)?;
        }
        Ok(())
    }
}

fn truncated() -> ModelError {
    ModelError::Batch { problem: "a page has fewer bytes than its layers".to_owned() }
}

/// Returns the memory that a rank with this number of threads takes in addition to its weights and the logits of a step.
pub(super) fn memory_plan(
    model: &Transformer,
    threads: usize,
    limits: &ExecutorLimits,
    options: &ExecutorOptions,
) -> Result<MemoryPlan, ModelError> {
    let rows = activation_bytes(model.row_widths(), model.partial_logits(), limits);
    let activation_bytes = rows.saturating_add(attention_bytes(model, threads, limits));
    let kv_bytes = kv_bytes(model, limits, options)?;
    Ok(MemoryPlan { activation_bytes, kv_bytes, ..MemoryPlan::default() })
}

/// Returns the size of what attention takes beside its operands, in the layer that takes the most. Layers reuse the memory.
pub(super) fn attention_bytes(model: &Transformer, threads: usize, limits: &ExecutorLimits) -> u64 {
    let mut kinds: Vec<AttentionShape> = Vec::new();
    for shape in model.attention_shapes() {
        if !kinds.contains(&shape) {
            kinds.push(shape);
        }
    }
    let has_windows = kinds.iter().any(|shape| shape.window.is_some());
    let plans = kinds.len().max(1 + usize::from(has_windows));
    let layers = kinds.into_iter().map(|shape| attention_bytes_of(shape, plans, threads, limits));
    layers.max().unwrap_or(0)
}

/// Returns the size of what attention of this shape takes beside its operands if a step needs this number of plans, in bytes.
pub(super) fn attention_bytes_of(
    shape: AttentionShape,
    plans: usize,
    threads: usize,
    limits: &ExecutorLimits,
) -> u64 {
    let AttentionShape { heads, kv_heads, value_size, .. } = shape;
    let limits = AttentionLimits {
        threads,
        heads,
        kv_heads,
        value_size,
        tokens: limits.max_batch_tokens,
        sequences: limits.max_sequences,
        positions: limits.context_length,
        plans,
    };
    limits.workspace_bytes() as u64
}

/// Returns the size of the buffers of a rank's largest step without those of attention, in bytes.
pub(super) fn activation_bytes(widths: RowWidths, partial_logits: usize, limits: &ExecutorLimits) -> u64 {
    let rows = limits.max_batch_tokens.saturating_mul(widths.workspace);
    let values = rows.saturating_add(limits.max_logit_rows.saturating_mul(partial_logits));
    let quantized = Activations::byte_len(limits.max_batch_tokens, widths.widest_input);
    values.saturating_mul(4).saturating_add(quantized) as u64
}

/// Returns the size of the pages of a rank's layers, in bytes.
pub(super) fn kv_bytes(
    model: &Transformer,
    limits: &ExecutorLimits,
    options: &ExecutorOptions,
) -> Result<u64, ModelError> {
    let mut bytes = 0u64;
    let format = options.kv.format()?;
    let windowed_count = window_page_count(options, limits);
    for (cache, has_window) in model.caches().zip(model.windowed()) {
        let pages = if has_window { windowed_count } else { limits.page_count };
        let layer = cache
            .byte_len(format, pages)
            .ok_or_else(|| option("kv_tokens", format!("{} pages are too many", limits.page_count)))?;
        bytes = bytes.saturating_add(layer as u64);
    }
    Ok(bytes)
}

/// Returns the size of one page of a rank's layers with a window, in bytes.
pub(super) fn windowed_page_bytes(model: &Transformer, options: &ExecutorOptions) -> Result<u64, ModelError> {
    let format = options.kv.format()?;
    let windowed = model.caches().zip(model.windowed()).filter(|(_, has_window)| *has_window);
    Ok(windowed.map(|(cache, _)| cache.byte_len(format, 1).unwrap_or(0) as u64).sum())
}

impl KvDtype {
    /// Returns the format in which the CPU stores keys and values. Fails if it stores none like this.
    pub(crate) fn format(self) -> Result<KvFormat, ModelError> {
        match self {
            KvDtype::F32 => Ok(KvFormat::F32),
            KvDtype::F16 => Ok(KvFormat::F16),
            KvDtype::I8 => Ok(KvFormat::I8),
            KvDtype::Fp8 => {
                let problem = "only CUDA devices store fp8 keys and values; use i8 on the CPU, which takes \
                               as many bytes";
                Err(option("kv", problem.to_owned()))
            }
        }
    }
}

#[cfg(test)]
#[path = "rank_tests.rs"]
mod tests;
