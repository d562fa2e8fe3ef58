//! The cost of each part of a model on this machine, measured by running it.
//!
//! The model of a part's time is `fixed + rows * per_row`: reading its weights, then computing with them. Parts with
//! the same formats and shapes are measured once, so their costs are exactly equal.

use std::time::Instant;

use skep_kernels::DType;
use skep_kernels::kv::KvFormat;
use skep_kernels::matmul::PackedMatrix;

use super::parts::layer_parts;
use super::transformer::{Block, FeedForward, LayerAttention, Transformer, Workspace};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::communicator::Solo;
use crate::error::ModelError;
use crate::layers::compute::{Compute, resized};

/// Rows of the larger of the two measured steps.
const ROWS: usize = 2 * PAGE_TOKENS;
const RUNS: usize = 3;

/// The time that a part of a model takes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    pub(crate) fixed_s: f64,
    pub(crate) per_row_s: f64,
}

/// The cost of a model, from the tokens to the logits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelCost {
    pub(crate) entry: Cost,
    pub(crate) layers: Vec<Cost>,
    /// Cost of the head; its rows are rows of logits.
    pub(crate) exit: Cost,
}

/// The properties that decide how long a layer takes.
#[derive(PartialEq)]
struct Kind {
    dtypes: Vec<DType>,
    window: Option<usize>,
}

impl Transformer {
    /// Measures a model with all its layers, or one rank's part of each layer.
    pub(crate) fn measure(&self, compute: &mut Compute) -> Result<ModelCost, ModelError> {
        let mut workspace = Workspace::default();
        let vocabulary = self.exit.as_ref().map_or(0, |exit| exit.head.vocabulary_size);
        let mut logits = vec![0.0; ROWS * vocabulary];
        let tokens: Vec<u32> = (0..ROWS).map(|token| (token % vocabulary.max(1)) as u32).collect();
        let entry = Cost::measure(|rows| {
            let hidden = resized(&mut workspace.hidden, rows * self.hidden_size);
            let Some(entry) = &self.entry else { return Ok(()) };
            entry.embed(compute, &tokens[..rows], hidden)
        })?;
        let mut kinds: Vec<(Kind, Cost)> = Vec::new();
        let mut layers = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let kind = Kind::of(block);
            let known = kinds.iter().find(|(other, _)| *other == kind).map(|(_, cost)| *cost);
            let cost = match known {
                Some(cost) => cost,
                None => {
                    let cost = self.measure_block(block, compute, &mut workspace)?;
                    kinds.push((kind, cost));
                    cost
                }
            };
            layers.push(cost);
        }
        let all: Vec<usize> = (0..ROWS).collect();
        let exit = Cost::measure(|rows| {
            let Some(exit) = &self.exit else { return Ok(()) };
            let out = exit.head.is_whole().then_some(&mut logits[..rows * vocabulary]);
            exit.forward(compute, &mut workspace, &mut Solo, &all[..rows], out)
        })?;
        Ok(ModelCost { entry, layers, exit })
    }

    fn measure_block(
        &self,
        block: &Block,
        compute: &mut Compute,
        workspace: &mut Workspace,
    ) -> Result<Cost, ModelError> {
        let pages = ROWS / PAGE_TOKENS;
        let mut cache = block.attention.cache().pages(KvFormat::F16, compute.isa, pages)?;
        Cost::measure(|rows| {
            let sequence = BatchSequence {
                tokens: vec![0; rows],
                start: 0,
                pages: (0..pages as u32).map(PageId).collect(),
                logits: LogitsWanted::None,
            };
            let step = self.layout(&Batch { sequences: vec![sequence] }, None);
            layer_parts(0, true)
                .into_iter()
                .try_for_each(|part| block.compute(part, compute, workspace, &mut cache, &step))
        })
    }
}

impl Cost {
    /// Returns the cost of several parts that run one after the other.
    pub(crate) fn sum<'a>(costs: impl IntoIterator<Item = &'a Cost>) -> Cost {
        costs.into_iter().fold(Cost::default(), |sum, cost| Cost {
            fixed_s: sum.fixed_s + cost.fixed_s,
            per_row_s: sum.per_row_s + cost.per_row_s,
        })
    }

    pub(crate) fn of_rows(self, rows: f64) -> f64 {
        self.fixed_s + rows * self.per_row_s
    }

    /// Runs a part with one row and with several rows. Takes the fastest of a few runs, which is the least disturbed
    /// one.
    fn measure(mut run: impl FnMut(usize) -> Result<(), ModelError>) -> Result<Cost, ModelError> {
        let mut seconds = |rows: usize| {
            run(rows)?;
            let mut best = f64::INFINITY;
            for _ in 0..RUNS {
                let started = Instant::now();
                run(rows)?;
                best = best.min(started.elapsed().as_secs_f64());
            }
            Ok::<_, ModelError>(best)
        };
        let (one, several) = (seconds(1)?, seconds(ROWS)?);
        let per_row_s = ((several - one) / (ROWS - 1) as f64).max(0.0);
        Ok(Cost { fixed_s: (one - per_row_s).max(0.0), per_row_s })
    }
}

impl Kind {
    fn of(block: &Block) -> Self {
        let matrices: Box<dyn Iterator<Item = &PackedMatrix>> = match &block.attention {
            LayerAttention::Grouped(attention) => Box::new(attention.matrices()),
            LayerAttention::Latent(attention) => Box::new(attention.matrices()),
        };
        let dtypes = |matrix: &PackedMatrix| matrix.dtype();
        let feed_forward: Vec<DType> = match &block.feed_forward {
            FeedForward::Dense(mlp) => mlp.matrices().map(dtypes).collect(),
            FeedForward::Experts(mixture) => mixture.matrices().map(dtypes).collect(),
        };
        let window = match &block.attention {
            LayerAttention::Grouped(attention) => attention.window,
            LayerAttention::Latent(_) => None,
        };
        Kind { dtypes: matrices.map(dtypes).chain(feed_forward).collect(), window }
    }
}
