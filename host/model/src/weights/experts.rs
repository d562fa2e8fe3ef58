//! Loads the experts of a layer, whatever the checkpoint keeps them in.
//!
//! Invariant: every rank holds the same part of each expert, in whole blocks of quantized values.

use std::borrow::Cow;
use std::ops::Range;

use skep_kernels::DType;
use skep_kernels::matmul::PackedMatrix;

use super::WeightLoader;
use crate::config::{ExpertForm, Experts};
use crate::error::ModelError;
use crate::layers::mixture::Expert;
use crate::shard::ShardPlan;

impl WeightLoader<'_> {
    /// Returns the part of each expert's width that this rank holds.
    pub(crate) fn expert_part(&self, prefix: &str, experts: &Experts) -> Result<Range<usize>, ModelError> {
        let [_, _, down] = experts.form.projections();
        let block = match experts.form {
            ExpertForm::Interleaved => 1,
            ExpertForm::Separate | ExpertForm::Mixtral | ExpertForm::InterleavedRows => {
                self.block_len(&format!("{prefix}.experts.0.{down}.weight"))?
            }
        };
        Ok(self.shard().part(experts.size, block))
    }

    /// Loads this rank's part of one expert.
    pub(crate) fn expert(
        &mut self,
        prefix: &str,
        experts: &Experts,
        expert: usize,
        hidden: usize,
        own: Range<usize>,
    ) -> Result<Expert, ModelError> {
        if experts.form == ExpertForm::Interleaved {
            return self.interleaved_expert(prefix, experts, expert, hidden, own);
        }
        let [gate, up, down] =
            experts.form.projections().map(|part| format!("{prefix}.experts.{expert}.{part}.weight"));
        let rows = ShardPlan::Rows(vec![own.clone()]);
        let columns = ShardPlan::Columns(own.clone());
        let wide = [experts.size, hidden];
        let [gate_bias, up_bias, down_bias] = match (experts.biased, experts.form) {
            (false, _) => [Vec::new(), Vec::new(), Vec::new()],
            (true, ExpertForm::InterleavedRows) => {
                self.interleaved_biases(prefix, experts, expert, hidden, own)?
            }
            (true, _) => {
                let name = |weight: &str| weight.replace(".weight", ".bias");
                [
                    self.vector(&name(&gate), experts.size, &rows)?,
                    self.vector(&name(&up), experts.size, &rows)?,
                    self.vector(&name(&down), hidden, &columns)?,
                ]
            }
        };
        Ok(Expert {
            gate: self.matrix(&gate, wide, &rows)?,
            up: self.matrix(&up, wide, &rows)?,
            down: self.matrix(&down, [hidden, experts.size], &columns)?,
            gate_bias,
            up_bias,
            down_bias,
        })
    }

    /// Loads the biases of an expert's gates, ups and outputs from the tensors of all experts.
    fn interleaved_biases(
        &mut self,
        prefix: &str,
        experts: &Experts,
        expert: usize,
        hidden: usize,
        own: Range<usize>,
    ) -> Result<[Vec<f32>; 3], ModelError> {
        let Experts { count, size, .. } = *experts;
        let wide = self.row(&format!("{prefix}.experts.gate_up_proj_bias"), [count, 2 * size], expert)?;
        let every_second = |first: usize| own.clone().map(|row| wide[2 * row + first]).collect::<Vec<f32>>();
        // The ranks' outputs are added up, so only the first rank adds the bias.
        let down = match self.shard().rank {
            0 => self.row(&format!("{prefix}.experts.down_proj_bias"), [count, hidden], expert)?,
            _ => Vec::new(),
        };
        let biases = [every_second(0), every_second(1), down];
        self.count_values(biases.iter().map(Vec::len).sum());
        Ok(biases)
    }

    /// Loads an expert from tensors of all experts, `[experts, inputs, outputs]`, in which gates and ups alternate.
    fn interleaved_expert(
        &mut self,
        prefix: &str,
        experts: &Experts,
        expert: usize,
        hidden: usize,
        own: Range<usize>,
    ) -> Result<Expert, ModelError> {
        let Experts { count, size, .. } = *experts;
        let both = format!("{prefix}.experts.gate_up_proj");
        let down = format!("{prefix}.experts.down_proj");
        let columns = |first: usize| own.clone().map(move |row| 2 * row + first);
        let gate_columns: Vec<usize> = columns(0).collect();
        let up_columns: Vec<usize> = columns(1).collect();
        let shape = [count, hidden, 2 * size];
        let gate = self.transposed(&both, shape, expert, 0..hidden, &gate_columns)?;
        let up = self.transposed(&both, shape, expert, 0..hidden, &up_columns)?;
        let outputs: Vec<usize> = (0..hidden).collect();
        let biases_of = own.clone();
        let down_matrix = self.transposed(&down, [count, size, hidden], expert, own, &outputs)?;
        let [gate_bias, up_bias, down_bias] =
            self.interleaved_biases(prefix, experts, expert, hidden, biases_of)?;
        Ok(Expert { gate, up, down: down_matrix, gate_bias, up_bias, down_bias })
    }

    /// Loads some columns of some rows of one matrix of a tensor `[matrices, rows, columns]`, transposed.
    fn transposed(
        &mut self,
        name: &str,
        [count, rows, columns]: [usize; 3],
        matrix: usize,
        inputs: Range<usize>,
        outputs: &[usize],
    ) -> Result<PackedMatrix, ModelError> {
        let tensor = self.tensor(name, &[count, rows, columns])?;
        let dtype = tensor.dtype;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            let problem = format!("has the type {dtype}; experts in one tensor must be F32, F16 or BF16");
            return Err(ModelError::tensor(name, problem));
        }
        let own = matrix..matrix + 1;
        self.begin(name, &[own]);
        let size = dtype.block_bytes();
        self.packed(name, dtype, [outputs.len(), inputs.len()], || {
            let first = matrix * rows * columns;
            let value = |output: &usize, input: usize| {
                let at = (first + input * columns + output) * size;
                &tensor.data[at..at + size]
            };
            let rows: Vec<&[u8]> = outputs
                .iter()
                .flat_map(|output| inputs.clone().map(move |input| value(output, input)))
                .collect();
            Ok(Cow::Owned(rows.concat()))
        })
    }
}
