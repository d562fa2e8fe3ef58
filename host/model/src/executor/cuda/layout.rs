//! Assigns each weight of a rank a range on its device, before anything is read.
//!
//! Invariant: ranges do not overlap, and start at multiples of the size that kernels load at once. The layout knows
//! names, shapes and formats; it reads no values.

use std::ops::Range;

use skep_kernels::DType;
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::matmul::Weights;
use skep_kernels::cuda::operation::ACTIVATION_BYTES;
use skep_kernels::cuda::tiles::{TILE_OUTPUTS, Tiles};

use super::workspace::LOGIT_UNIT;
use crate::checkpoint::{Checkpoint, Coding, Tensor};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::models::parts::Completions;
use crate::shard::{Shard, ShardPlan};

/// The alignment of every range in bytes.
const ALIGNMENT: usize = 256;
/// Ranks divide weights in multiples of at least this many values, because kernels load that many at once.
const RUN: usize = 8;

/// The ranges of the weights that one rank holds, for some layers of a model.
pub(super) struct Layout {
    pub(super) activation: Activation,
    pub(super) entry: Option<TokenOffsets>,
    pub(super) layers: Vec<LayerOffsets>,
    pub(super) exit: Option<ExitOffsets>,
    pub(super) completions: Completions,
    /// Rotary frequencies, f32 `[head_size / 2]`.
    pub(super) frequencies: Range<usize>,
    /// The tensors to read from the checkpoint, in this order.
    pub(super) loads: Vec<Load>,
    pub(super) bytes: usize,
}

/// The range of the vectors of some tokens.
#[derive(Clone)]
pub(super) struct TokenOffsets {
    pub(super) matrix: MatrixOffsets,
    pub(super) first: usize,
}

pub(super) struct ExitOffsets {
    pub(super) norm: Range<usize>,
    pub(super) head: TokenOffsets,
}

pub(super) struct LayerOffsets {
    pub(super) attention_norm: Range<usize>,
    /// Queries, keys and values. Neighbors with the same format are one matrix.
    pub(super) qkv: Vec<MatrixOffsets>,
    pub(super) qkv_bias: Option<Range<usize>>,
    pub(super) head_norms: Option<[Range<usize>; 2]>,
    pub(super) output: MatrixOffsets,
    pub(super) mlp_norm: Range<usize>,
    pub(super) gate_up: Vec<MatrixOffsets>,
    pub(super) down: MatrixOffsets,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) window: Option<usize>,
}

#[derive(Clone)]
pub(super) struct MatrixOffsets {
    pub(super) weights: Weights,
    pub(super) data: Range<usize>,
    pub(super) bias: Option<Range<usize>>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// A tensor, or the part of it that the rank holds, and its range.
pub(super) struct Load {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) plan: ShardPlan,
    pub(super) form: Form,
    pub(super) offsets: Range<usize>,
}

/// The format of a weight on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The format of the file, in tiles.
    Tiles(DType),
    /// The format of the activations, whatever the format of the file is.
    Activations,
}

/// One of several matrices that have the same input.
struct Part<'a> {
    name: &'a str,
    /// Number of outputs of the whole weight.
    rows: usize,
    plan: &'a ShardPlan,
}

struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    shard: Shard,
    loads: Vec<Load>,
    bytes: usize,
}

/// Returns the format of a model's activations: that of its weights if they are 16-bit floats, or else bf16.
pub(super) fn activation_of(checkpoint: &Checkpoint) -> Activation {
    match checkpoint.tensor("model.embed_tokens.weight") {
        Ok(Tensor { dtype: DType::F16, .. }) => Activation::F16,
        _ => Activation::Bf16,
    }
}

impl Layout {
    /// Lays out the shard's part of the given layers.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        shard: Shard,
        layers: Range<usize>,
        activation: Activation,
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        if let Some(lack) = config.style.lack_on_cuda() {
            let supported = "dense models with grouped attention on CUDA devices; use `--device cpu`";
            return Err(ModelError::unsupported("model_type", format!("a model with {lack}"), supported));
        }
        let mut planner = Planner { checkpoint, shard, loads: Vec::new(), bytes: 0 };
        let frequencies = planner.take(config.head_size / 2 * 4);
        let is_last = layers.end == config.layer_count;
        let tied = config.tied_head && is_last && layers.start == 0;
        let table = "model.embed_tokens.weight";
        let entry = if layers.start == 0 { Some(planner.tokens(config, table)?) } else { None };
        let layers = layers.map(|layer| planner.layer(config, layer)).collect::<Result<_, _>>()?;
        let exit = match is_last {
            true => Some(ExitOffsets {
                norm: planner.vector("model.norm.weight", config.hidden_size, &ShardPlan::Replicated)?,
                head: match (tied, &entry) {
                    (true, Some(table)) => table.clone(),
                    _ => planner.tokens(config, if config.tied_head { table } else { "lm_head.weight" })?,
                },
            }),
            false => None,
        };
        let Planner { loads, bytes, .. } = planner;
        let completions = (&config.style).into();
        Ok(Layout { activation, entry, layers, exit, completions, frequencies, loads, bytes })
    }

    /// Returns the size of the largest matrix in tiles after it is converted to activations, or 0 if there is none.
    pub(super) fn expanded_bytes(&self) -> usize {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| layer.qkv.iter().chain(&layer.gate_up).chain([&layer.output, &layer.down]));
        let tiles = layers.filter(|matrix| matrix.weights != Weights::Plain);
        let head =
            self.exit.iter().map(|exit| &exit.head.matrix).filter(|matrix| matrix.weights != Weights::Plain);
        let bytes =
            |of: &MatrixOffsets| of.outputs.next_multiple_of(TILE_OUTPUTS) * of.inputs * ACTIVATION_BYTES;
        tiles.chain(head).map(bytes).max().unwrap_or(0)
    }

    /// Returns the number of values in this rank's widest rows: of queries, keys and values; of queries; and of
    /// gates.
    pub(super) fn widths(&self, head_size: usize) -> (usize, usize, usize) {
        let widest =
            |width: &dyn Fn(&LayerOffsets) -> usize| self.layers.iter().map(width).max().unwrap_or(0);
        (
            widest(&|layer| (layer.heads + 2 * layer.kv_heads) * head_size),
            widest(&|layer| layer.heads * head_size),
            widest(&|layer| layer.down.inputs),
        )
    }
}

impl Planner<'_> {
    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<LayerOffsets, ModelError> {
        let (hidden, head_size) = (config.hidden_size, config.head_size);
        let (query, kv) = (config.head_count * head_size, config.kv_head_count * head_size);
        let prefix = format!("model.layers.{layer}");
        let whole = &ShardPlan::Replicated;
        let heads = self.shard.heads(config);
        let query_plan = &ShardPlan::Rows(vec![heads.query_rows(head_size)]);
        let kv_plan = &heads.kv_rows(head_size);
        let parts = [
            Part { name: "self_attn.q_proj", rows: query, plan: query_plan },
            Part { name: "self_attn.k_proj", rows: kv, plan: kv_plan },
            Part { name: "self_attn.v_proj", rows: kv, plan: kv_plan },
        ];
        let attention_norm = self.vector(&format!("{prefix}.input_layernorm.weight"), hidden, whole)?;
        let qkv = self.matrices(&prefix, &parts, hidden)?;
        let qkv_bias = if config.qkv_bias { Some(self.biases(&prefix, &parts)?) } else { None };
        let mut norm =
            |name: &str| self.vector(&format!("{prefix}.self_attn.{name}.weight"), head_size, whole);
        let head_norms = if config.qk_norm { Some([norm("q_norm")?, norm("k_norm")?]) } else { None };
        let sum = &ShardPlan::Columns(heads.query_rows(head_size));
        let output = Part { name: "self_attn.o_proj", rows: hidden, plan: sum };
        let output = self.summed(&prefix, output, query, config.output_bias)?;
        let mlp_norm = self.vector(&format!("{prefix}.post_attention_layernorm.weight"), hidden, whole)?;
        let width = config.feed_forward_size;
        let block = self.checkpoint.tensor(&format!("{prefix}.mlp.down_proj.weight"))?.dtype.block_len();
        let own = self.shard.part(width, block.max(RUN));
        let rows = &ShardPlan::Rows(vec![own.clone()]);
        let parts = [
            Part { name: "mlp.gate_proj", rows: width, plan: rows },
            Part { name: "mlp.up_proj", rows: width, plan: rows },
        ];
        let mut gate_up = self.matrices(&prefix, &parts, hidden)?;
        if config.mlp_bias {
            let bias = self.biases(&prefix, &parts)?;
            let mut at = bias.start;
            for matrix in &mut gate_up {
                let end = at + matrix.outputs * ACTIVATION_BYTES;
                matrix.bias = Some(at..end);
                at = end;
            }
        }
        let down = Part { name: "mlp.down_proj", rows: hidden, plan: &ShardPlan::Columns(own) };
        let down = self.summed(&prefix, down, width, config.mlp_bias)?;
        Ok(LayerOffsets {
            attention_norm,
            qkv,
            qkv_bias,
            head_norms,
            output,
            mlp_norm,
            gate_up,
            down,
            heads: heads.query.len(),
            kv_heads: heads.kv.len(),
            window: config.windows.get(layer).copied().flatten(),
        })
    }

    /// Places a matrix whose products are summed over the ranks. Only the first rank adds the bias.
    fn summed(
        &mut self,
        prefix: &str,
        part: Part<'_>,
        columns: usize,
        has_bias: bool,
    ) -> Result<MatrixOffsets, ModelError> {
        let (name, rows) = (part.name, part.rows);
        let mut matrix = self.matrices(prefix, &[part], columns)?.remove(0);
        if has_bias && self.shard.rank == 0 {
            let bias = self.vector(&format!("{prefix}.{name}.bias"), rows, &ShardPlan::Replicated)?;
            matrix.bias = Some(bias);
        }
        Ok(matrix)
    }

    fn tokens(&mut self, config: &ModelConfig, name: &str) -> Result<TokenOffsets, ModelError> {
        let own = self.shard.part(config.vocabulary_size, LOGIT_UNIT);
        let plan = &ShardPlan::Rows(vec![own.clone()]);
        let (prefix, name) =
            name.strip_suffix(".weight").and_then(|name| name.rsplit_once('.')).unwrap_or(("", "lm_head"));
        let part = Part { name, rows: config.vocabulary_size, plan };
        let mut matrix = self.matrices(prefix, &[part], config.hidden_size)?.remove(0);
        // The last part may end within a unit. Rows of zeros follow it, whose products are never read.
        let padding = matrix.outputs.next_multiple_of(LOGIT_UNIT) - matrix.outputs;
        if padding > 0 {
            matrix.outputs += padding;
            let bytes = form_of(matrix.weights).bytes(matrix.outputs, matrix.inputs);
            matrix.data.end = matrix.data.start + bytes.unwrap_or(matrix.data.len());
            self.bytes = matrix.data.end;
        }
        Ok(TokenOffsets { matrix, first: own.start })
    }

    /// Places matrices that have the same input. Neighbors with the same format become one matrix if they begin at whole tiles.
    fn matrices(
        &mut self,
        prefix: &str,
        parts: &[Part<'_>],
        columns: usize,
    ) -> Result<Vec<MatrixOffsets>, ModelError> {
        let mut found = Vec::with_capacity(parts.len());
        for part in parts {
            let name = full_name(prefix, part.name, "weight");
            found.push(self.checkpoint.tensor(&name).map(|tensor| (form(&tensor), name))?);
        }
        let mut matrices: Vec<MatrixOffsets> = Vec::new();
        let rows: Vec<usize> = parts.iter().map(|part| part.plan.rows(part.rows)).collect();
        for run in runs(&found, &rows) {
            let form = found[run.start].0;
            let outputs: usize = rows[run.clone()].iter().sum();
            let inputs = match parts[run.start].plan {
                ShardPlan::Columns(range) => range.len(),
                _ => columns,
            };
            let bytes = |outputs: usize| {
                form.bytes(outputs, inputs).ok_or_else(|| {
                    let problem = format!("{inputs} columns are not a whole number of its blocks");
                    ModelError::tensor(found[run.start].1.as_str(), problem)
                })
            };
            let data = self.take(bytes(outputs)?);
            let mut at = data.start;
            for index in run.clone() {
                let (part, name) = (&parts[index], &found[index].1);
                let end = at + bytes(rows[index])?;
                self.loads.push(Load {
                    name: name.clone(),
                    shape: vec![part.rows, columns],
                    plan: part.plan.clone(),
                    form,
                    offsets: at..end,
                });
                at = end;
            }
            matrices.push(MatrixOffsets { weights: form.weights(), data, bias: None, outputs, inputs });
        }
        Ok(matrices)
    }

    /// Places the biases of matrices side by side.
    fn biases(&mut self, prefix: &str, parts: &[Part<'_>]) -> Result<Range<usize>, ModelError> {
        let outputs: usize = parts.iter().map(|part| part.plan.rows(part.rows)).sum();
        let offsets = self.take(outputs * ACTIVATION_BYTES);
        let mut at = offsets.start;
        for part in parts {
            let end = at + part.plan.rows(part.rows) * ACTIVATION_BYTES;
            self.load_vector(full_name(prefix, part.name, "bias"), part.rows, part.plan, at..end)?;
            at = end;
        }
        Ok(offsets)
    }

    fn vector(&mut self, name: &str, rows: usize, plan: &ShardPlan) -> Result<Range<usize>, ModelError> {
        let offsets = self.take(plan.rows(rows) * ACTIVATION_BYTES);
        self.load_vector(name.to_owned(), rows, plan, offsets.clone())?;
        Ok(offsets)
    }

    fn load_vector(
        &mut self,
        name: String,
        rows: usize,
        plan: &ShardPlan,
        offsets: Range<usize>,
    ) -> Result<(), ModelError> {
        self.checkpoint.tensor(&name)?;
        let plan = plan.clone();
        self.loads.push(Load { name, shape: vec![rows], plan, form: Form::Activations, offsets });
        Ok(())
    }

    fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.bytes.next_multiple_of(ALIGNMENT);
        self.bytes = start + bytes;
        start..self.bytes
    }
}

impl Form {
    /// Returns the size of a matrix, or `None` if its inputs are not whole blocks.
    fn bytes(self, outputs: usize, inputs: usize) -> Option<usize> {
        match self {
            Form::Tiles(dtype) => Tiles::of(dtype)?.matrix_bytes(outputs, inputs),
            Form::Activations => Some(outputs * inputs * ACTIVATION_BYTES),
        }
    }

    fn weights(self) -> Weights {
        match self {
            Form::Tiles(dtype) => Weights::Tiles(dtype),
            Form::Activations => Weights::Plain,
        }
    }
}

/// Returns the format of a weight on the device. Formats that kernels read stay as they are; others become
/// activations.
fn form(tensor: &Tensor<'_>) -> Form {
    match (&tensor.coding, Tiles::of(tensor.dtype)) {
        // Only the values of the zero points decide whether they are all the same.
        (Coding::Int4 { zeros: Some(_), .. }, _) => Form::Tiles(DType::Int4),
        (_, Some(_)) => Form::Tiles(tensor.dtype),
        (_, None) => Form::Activations,
    }
}

fn form_of(weights: Weights) -> Form {
    match weights {
        Weights::Tiles(dtype) => Form::Tiles(dtype),
        Weights::Plain => Form::Activations,
    }
}

fn full_name(prefix: &str, name: &str, kind: &str) -> String {
    match prefix {
        "" => format!("{name}.{kind}"),
        prefix => format!("{prefix}.{name}.{kind}"),
    }
}

/// Returns the runs of neighbors with the same format, of which each may begin where the one before it ends.
fn runs(found: &[(Form, String)], rows: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, (form, _)) in found.iter().enumerate() {
        let whole = *form == Form::Activations || index > 0 && rows[index - 1].is_multiple_of(TILE_OUTPUTS);
        match runs.last_mut() {
            Some(run) if found[run.start].0 == *form && whole => run.end = index + 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use skep_kernels::cuda::Address;
    use skep_kernels::cuda::blas::ProductLayout;
    use skep_kernels::cuda::matmul::{MatmulParams, OutputFormat};

    use super::super::workspace::logits_stride;
    use super::*;

    /// Checks that cuBLASLt writes the logits of each rank, that the parts cover the vocabulary, and that none overlaps the
    /// next one.
    fn check_parts(vocabulary: usize, ranks: usize) {
        let config = ModelConfig { vocabulary_size: vocabulary, ..ModelConfig::shape("tiny").unwrap() };
        let (layers, hidden) = (config.layer_count, config.hidden_size);
        let checkpoint = Checkpoint::synthetic(config, DType::BF16).unwrap();
        let stride = logits_stride(vocabulary);
        let mut end = 0;
        for rank in 0..ranks {
            let shard = Shard { rank, ranks };
            let layout = Layout::new(&checkpoint, shard, 0..layers, Activation::Bf16).unwrap();
            let head = layout.exit.unwrap().head;
            assert_eq!(head.first, end, "rank {rank} of {ranks}, {vocabulary} tokens");
            assert_eq!(head.matrix.data.len(), head.matrix.outputs * hidden * ACTIVATION_BYTES);
            end += head.matrix.outputs;
            let (weights, y) = (head.matrix.data.start as u64, (head.first * 4) as u64);
            let addresses = [1 << 30, (1 << 31) + weights, (1 << 20) + y].map(Address);
            let sizes = [16, hidden, head.matrix.outputs].map(|size| size as u32);
            let params = MatmulParams {
                y_stride: stride as u32,
                output_format: OutputFormat::F32,
                ..MatmulParams::dense(addresses, sizes)
            };
            let product = ProductLayout::of(&params, Activation::Bf16);
            assert!(product.is_ok(), "rank {rank} of {ranks}, {vocabulary} tokens: {product:?}");
        }
        assert_eq!(end, stride, "{ranks} ranks, {vocabulary} tokens");
    }

    #[test]
    fn the_library_for_dense_weights_writes_the_logits_of_every_vocabulary() {
        for vocabulary in [320, 1000, 1001, 1003, 1007] {
            for ranks in [1, 2, 4] {
                check_parts(vocabulary, ranks);
            }
        }
    }
}
