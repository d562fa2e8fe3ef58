//! Decides which part of each weight a rank holds when several ranks share a layer.
//!
//! Query heads are divided evenly, and the keys and values follow them. The feed-forward block and the vocabulary are
//! divided as evenly as whole blocks of quantized values allow. Invariant: no block is ever split, and the parts of
//! all ranks together are the whole. Only keys and values may be held by several ranks.

use std::ops::Range;

use skep_kernels::DType;

use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::{ExpertForm, ModelConfig};
use crate::error::ModelError;

/// The position of a rank among the ranks that share each weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

/// The part of one weight, `[outputs, inputs]`, that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ShardPlan {
    /// The whole weight, on every rank.
    Replicated,
    /// Some outputs; each rank computes different results.
    Rows(Vec<Range<usize>>),
    /// Some inputs; the results of all ranks have to be added up. The first rank adds the bias.
    Columns(Range<usize>),
}

/// The attention heads of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    pub(crate) query: Range<usize>,
    /// The KV head of each equally sized group of query heads. A head that several groups use appears several times.
    pub(crate) kv: Vec<usize>,
}

impl Shard {
    /// Returns this rank's part of `whole`, in multiples of `unit`. Parts differ by at most one unit.
    pub(crate) fn part(self, whole: usize, unit: usize) -> Range<usize> {
        let units = whole / unit;
        let bound = |rank: usize| match rank == self.ranks {
            true => whole,
            false => units * rank / self.ranks * unit,
        };
        bound(self.rank)..bound(self.rank + 1)
    }

    /// Returns this rank's heads. The rank count must divide the number of query heads.
    pub(crate) fn heads(self, config: &ModelConfig) -> Heads {
        self.heads_of(config.head_count, config.kv_head_count)
    }

    /// Returns this rank's heads of an attention with these numbers of heads.
    pub(crate) fn heads_of(self, head_count: usize, kv_head_count: usize) -> Heads {
        let count = head_count / self.ranks;
        let first = self.rank * count;
        let share = head_count / kv_head_count;
        // Groups of this size start where a KV head's queries start, or at a whole fraction of them.
        let group = greatest_common_divisor(share, count);
        let kv = (first..first + count).step_by(group).map(|head| head / share).collect();
        Heads { query: first..first + count, kv }
    }
}

impl Heads {
    /// Returns the rows of the query projection, which are the columns of the output projection.
    pub(crate) fn query_rows(&self, head_size: usize) -> Range<usize> {
        self.query.start * head_size..self.query.end * head_size
    }

    /// Returns the rows of the key and value projections.
    pub(crate) fn kv_rows(&self, head_size: usize) -> ShardPlan {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for head in &self.kv {
            let rows = head * head_size..(head + 1) * head_size;
            match ranges.last_mut() {
                Some(last) if last.end == rows.start => last.end = rows.end,
                _ => ranges.push(rows),
            }
        }
        ShardPlan::Rows(ranges)
    }
}

impl ShardPlan {
    /// Returns the rows and the columns that a rank holds of a weight of this shape.
    pub(crate) fn area(&self, [rows, columns]: [usize; 2]) -> (Vec<Range<usize>>, Range<usize>) {
        let all = 0..rows;
        match self {
            ShardPlan::Replicated => (vec![all], 0..columns),
            ShardPlan::Rows(ranges) => (ranges.clone(), 0..columns),
            ShardPlan::Columns(range) => (vec![all], range.clone()),
        }
    }

    /// Returns the number of outputs that a rank holds of a weight with `rows` outputs.
    pub(crate) fn rows(&self, rows: usize) -> usize {
        match self {
            ShardPlan::Replicated | ShardPlan::Columns(_) => rows,
            ShardPlan::Rows(ranges) => ranges.iter().map(Range::len).sum(),
        }
    }
}

/// Rejects a rank count that the model cannot be divided by. The error lists the possible counts.
pub(crate) fn check(checkpoint: &Checkpoint, ranks: usize) -> Result<(), ModelError> {
    let config = checkpoint.config();
    let Some(refusal) = refusal(checkpoint, ranks)? else { return Ok(()) };
    let mut possible = Vec::new();
    for ranks in (1..=config.head_count).filter(|ranks| config.head_count.is_multiple_of(*ranks)) {
        if self::refusal(checkpoint, ranks)?.is_none() {
            possible.push(ranks.to_string());
        }
    }
    let possible = possible.join(", ");
    Err(match refusal {
        Refusal::Heads => ModelError::Option {
            option: "tensor_parallel".to_owned(),
            problem: format!(
                "{ranks} does not divide the {} attention heads; possible values: {possible}",
                config.head_count
            ),
        },
        Refusal::Blocks { name, dtype, columns } => ModelError::Tensor {
            name,
            problem: format!(
                "tensor_parallel {ranks} would split its {dtype} blocks of {} when its {columns} columns are divided; \
                 possible values: {possible}",
                dtype.block_len()
            ),
        },
    })
}

/// Returns the layers of a pipeline stage whose stages differ by at most one layer.
pub(crate) fn stage_layers(layers: usize, stages: usize, stage: usize) -> Range<usize> {
    layers * stage / stages..layers * (stage + 1) / stages
}

enum Refusal {
    Heads,
    Blocks { name: String, dtype: DType, columns: usize },
}

fn refusal(checkpoint: &Checkpoint, ranks: usize) -> Result<Option<Refusal>, ModelError> {
    let config = checkpoint.config();
    if ranks == 0 || !config.head_count.is_multiple_of(ranks) {
        return Ok(Some(Refusal::Heads));
    }
    let value_size = config.style.latent.map_or(config.head_size, |latent| latent.value);
    let attended = config.head_count * value_size;
    for layer in 0..config.layer_count {
        let output = checkpoint.tensor(&format!("model.layers.{layer}.self_attn.o_proj.weight"))?;
        if !(attended / ranks).is_multiple_of(output.dtype.block_len()) {
            return Ok(Some(Refusal::blocks(&output)));
        }
        for (name, width) in divided_widths(config, layer) {
            let tensor = checkpoint.tensor(&name)?;
            if width / tensor.dtype.block_len() < ranks {
                return Ok(Some(Refusal::blocks(&tensor)));
            }
        }
    }
    Ok(None)
}

/// Returns the weights of a layer's feed-forward part whose inputs ranks divide, and the number of inputs. One expert
/// stands for all.
fn divided_widths(config: &ModelConfig, layer: usize) -> Vec<(String, usize)> {
    let prefix = format!("model.layers.{layer}");
    let Some(experts) = config.style.experts_of(layer) else {
        return vec![(format!("{prefix}.mlp.down_proj.weight"), config.feed_forward_size)];
    };
    let module = experts.form.module();
    let [_, _, down] = experts.form.projections();
    let name = match experts.form {
        ExpertForm::Interleaved => format!("{prefix}.{module}.experts.down_proj"),
        ExpertForm::Separate | ExpertForm::Mixtral | ExpertForm::InterleavedRows => {
            format!("{prefix}.{module}.experts.0.{down}.weight")
        }
    };
    let mut widths = vec![(name, experts.size)];
    if experts.shared_size > 0 {
        widths.push((format!("{prefix}.{module}.shared_experts.down_proj.weight"), experts.shared_size));
    }
    widths
}

impl Refusal {
    fn blocks(tensor: &Tensor<'_>) -> Self {
        let columns = tensor.shape.get(1).copied().unwrap_or_default();
        Refusal::Blocks { name: tensor.name.to_owned(), dtype: tensor.dtype, columns }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
