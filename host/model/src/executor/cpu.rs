//! The executor that runs a whole model as one rank, on the calling thread and its pool.
//!
//! Invariant: a batch is fully checked before anything is computed, and memory is planned before it is
//! allocated.

use std::sync::Arc;

use skep_kernels::Isa;

use super::limits::{check, limits};
use super::model_weights::ModelWeights;
use super::page_form::{PageForm, check_pages, unsupported};
use super::rank::{Rank, RankOptions, memory_plan};
use super::threads::tier_and_threads;
use super::windows::window_limits;
use super::{Executor, ExecutorLimits, ExecutorOptions, StepLogits};
use crate::batch::{Batch, PageId, WindowChange, WindowLimits};
use crate::checkpoint::Checkpoint;
use crate::communicator::{Links, Solo};
use crate::error::ModelError;
use crate::expert_load::ExpertLoad;
use crate::memory_plan::MemoryPlan;
use crate::sampling::{LogitRow, RowOutput};

/// An executor on the processor, with the weights of one whole model.
pub struct CpuExecutor {
    rank: Rank<Solo>,
    isa: Isa,
    logits: StepLogits,
    limits: ExecutorLimits,
    plan: MemoryPlan,
    pages: PageForm,
    experts: Option<Arc<ExpertLoad>>,
    windows: Option<WindowLimits>,
}

impl CpuExecutor {
    /// Loads the weights and creates an executor with them.
    pub fn load(checkpoint: &Checkpoint, options: ExecutorOptions) -> Result<Self, ModelError> {
        Self::new(&ModelWeights::load(checkpoint, &options)?, options)
    }

    /// Creates an executor that shares weights, which must have been loaded for one rank.
    pub fn new(weights: &ModelWeights, options: ExecutorOptions) -> Result<Self, ModelError> {
        let single = ExecutorOptions { tensor_parallel: 1, pipeline_parallel: 1, ..options.clone() };
        weights.check_ranks(&single)?;
        weights.check_ranks(&options)?;
        let config = &weights.config;
        let limits = limits(config, &options)?;
        let windows = window_limits(config, &options, &limits)?;
        let (isa, threads) = tier_and_threads(&options)?;
        let model = weights.parts[0].clone();
        let mut plan = memory_plan(&model, threads, &limits, &options)?;
        plan.weight_bytes = weights.bytes;
        plan.activation_bytes = plan.activation_bytes.saturating_add(StepLogits::byte_len(&limits));
        let ExecutorOptions { kv, affinity, .. } = options;
        let rank_options = RankOptions { isa, threads, affinity, kv, page_count: limits.page_count, windows };
        let experts = ExpertLoad::new(model.experts());
        let mut rank = Rank::new(model, rank_options, Links::SOLO)?;
        rank.workspace.load = experts.as_ref().map(|experts| experts.of_stage(0));
        if let Some(turns) = &weights.turns {
            rank.compute.pool.share_cpus(turns.clone());
        }
        let logits = StepLogits::new(config.vocabulary_size);
        let pages = PageForm::new(config, &options, isa, rank.page_bytes().iter().sum());
        Ok(CpuExecutor { rank, isa, logits, limits, plan, pages, experts, windows })
    }
}

impl Executor for CpuExecutor {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.logits.clear();
        check(batch, &self.limits)?;
        let rows = batch.logit_rows();
        if batch.token_count() > 0 {
            let _turn = self.rank.compute.pool.take_turn();
            self.rank.step(batch, Some(self.logits.buffer(rows)))?;
        }
        self.logits.keep(rows);
        Ok(())
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        self.logits.row(row)
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        self.logits.sample(self.isa, rows)
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        self.experts.clone()
    }

    fn windows(&self) -> Option<WindowLimits> {
        self.windows
    }

    fn change_windows(&mut self, changes: &[WindowChange]) -> Result<(), ModelError> {
        self.rank.change_windows(changes);
        Ok(())
    }

    fn page_form(&self) -> Option<&PageForm> {
        self.windows.is_none().then_some(&self.pages)
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), ModelError> {
        self.page_form().ok_or_else(unsupported)?;
        check_pages(pages, self.limits.page_count, out.len(), self.pages.bytes)?;
        self.rank.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8]) -> Result<(), ModelError> {
        self.page_form().ok_or_else(unsupported)?;
        check_pages(pages, self.limits.page_count, bytes.len(), self.pages.bytes)?;
        self.rank.write_pages(pages, bytes)
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
