//! A feed-forward block of experts, of which each token passes through a few.
//!
//! Invariant: a token's output does not depend on the other tokens of a step. Every rank routes alike and holds a part of
//! each expert, or of some of them; the sum over the ranks that follows each block completes the output.

use skep_kernels::grouped::{GroupedProduct, grouped_matmul};
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::mixture::{WeightedRows, add_weighted_rows, copy_rows};
use skep_kernels::swiglu::{Gate, gated};

use super::compute::{Compute, RowWidths, resized};
use super::mlp::{Mlp, MlpWorkspace};
use super::router::Router;
use crate::error::ModelError;

pub(crate) struct Mixture {
    pub(crate) router: Router,
    /// In the order of their numbers.
    pub(crate) experts: Vec<Expert>,
    /// The experts that all tokens pass through, as one block.
    pub(crate) shared: Option<Mlp>,
    pub(crate) gate: Gate,
    pub(crate) hidden_size: usize,
    /// Width of this rank's part of an expert.
    pub(crate) size: usize,
}

/// The weights of one expert. Biases are empty, or have one value per output.
pub(crate) struct Expert {
    pub(crate) gate: PackedMatrix,
    pub(crate) up: PackedMatrix,
    pub(crate) down: PackedMatrix,
    pub(crate) gate_bias: Vec<f32>,
    pub(crate) up_bias: Vec<f32>,
    pub(crate) down_bias: Vec<f32>,
}

/// Buffers of one step, reused by the next. Rows are those of tokens and their choices, in the order of experts.
#[derive(Default)]
pub(crate) struct MixtureWorkspace {
    products: Vec<f32>,
    experts: Vec<u32>,
    weights: Vec<f32>,
    rows: Rows,
    gathered: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    down: Vec<f32>,
    pub(crate) shared: MlpWorkspace,
}

/// The rows of a step in the order of their experts.
#[derive(Default)]
struct Rows {
    /// First row of each expert, and the end of the last one.
    starts: Vec<usize>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// The row of each token's choices.
    of_choices: Vec<u32>,
}

impl Rows {
    /// Sorts choices by expert; those of one expert stay in the order of tokens.
    fn sort(&mut self, choices: &[u32], used: usize, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        choices.iter().for_each(|expert| self.starts[*expert as usize + 1] += 1);
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        let mut next = self.starts.clone();
        self.tokens.clear();
        self.tokens.reserve_exact(choices.len());
        self.tokens.resize(choices.len(), 0);
        self.of_choices.clear();
        self.of_choices.reserve_exact(choices.len());
        for (index, expert) in choices.iter().enumerate() {
            let row = next[*expert as usize];
            next[*expert as usize] += 1;
            self.tokens[row] = (index / used.max(1)) as u32;
            self.of_choices.push(row as u32);
        }
    }

    /// Returns the experts that have rows, and the rows.
    fn active(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        let ranges = self.starts.windows(2).map(|pair| pair[0]..pair[1]).enumerate();
        ranges.filter(|(_, rows)| !rows.is_empty())
    }
}

impl MixtureWorkspace {
    /// Returns the experts that the last step used, each with its number of tokens.
    pub(crate) fn tokens_of_experts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.rows.active().map(|(expert, rows)| (expert, rows.len()))
    }
}

#[cfg(test)]
impl MixtureWorkspace {
    pub(crate) fn capacity(&self) -> usize {
        let floats = [&self.products, &self.weights, &self.gathered, &self.gate_up, &self.gated, &self.down];
        let rows = self.experts.capacity() + self.rows.tokens.capacity() + self.rows.of_choices.capacity();
        floats.iter().map(|buffer| buffer.capacity()).sum::<usize>() + rows + self.shared.capacity()
    }
}

impl Mixture {
    /// Returns the widths of the block that all tokens pass through.
    pub(crate) fn shared_widths(&self) -> RowWidths {
        self.shared.as_ref().map_or(RowWidths::default(), Mlp::widths)
    }

    /// Returns the widths of everything else.
    pub(crate) fn widths(&self) -> RowWidths {
        let used = self.router.used;
        // For each choice: an expert, a weight, a token and a row, its input and its output, and the gates.
        let choice = 4 + 2 * self.hidden_size + 3 * self.size;
        RowWidths {
            workspace: self.experts.len() + used * choice,
            widest_input: used * self.hidden_size.max(self.size),
        }
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let experts = self.experts.iter().flat_map(|expert| [&expert.gate, &expert.up, &expert.down]);
        experts.chain(self.shared.iter().flat_map(Mlp::matrices))
    }

    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        workspace: &mut MixtureWorkspace,
        input: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let MixtureWorkspace { products, experts, weights, rows, .. } = workspace;
        let (used, hidden, size) = (self.router.used, self.hidden_size, self.size);
        let products = resized(products, tokens * self.experts.len());
        self.router.choose(compute, input, tokens, products, experts, weights)?;
        rows.sort(experts, used, self.experts.len());
        let count = tokens * used;
        // One token is the input of all its experts, and is rounded once for them.
        let gathered = match tokens {
            1 => input,
            _ => {
                let gathered = resized(&mut workspace.gathered, count * hidden);
                copy_rows(&compute.pool, input, hidden, &rows.tokens, gathered)?;
                &*gathered
            }
        };
        let gate_up = resized(&mut workspace.gate_up, count * 2 * size);
        let mut both = Vec::new();
        let mut downs = Vec::new();
        for (expert, rows) in rows.active() {
            let Expert { gate, up, down, gate_bias, up_bias, down_bias } = &self.experts[expert];
            let out_row = rows.start;
            let inputs = if tokens == 1 { 0..1 } else { rows.clone() };
            let product =
                |matrix, rows, bias, out_column| GroupedProduct { matrix, rows, out_row, out_column, bias };
            both.push(product(gate, inputs.clone(), &gate_bias[..], 0));
            both.push(product(up, inputs, &up_bias[..], size));
            downs.push(product(down, rows, &down_bias[..], 0));
        }
        let Compute { pool, isa, activations } = &mut *compute;
        grouped_matmul(pool, *isa, &both, gathered, hidden, gate_up, 2 * size, activations)?;
        let inner = resized(&mut workspace.gated, count * size);
        gated(pool, *isa, self.gate, gate_up, size, inner)?;
        let down = resized(&mut workspace.down, count * hidden);
        grouped_matmul(pool, *isa, &downs, inner, size, down, hidden, activations)?;
        match &self.shared {
            Some(shared) => shared.forward(compute, &mut workspace.shared, input, tokens, out)?,
            None => out.fill(0.0),
        }
        let chosen = WeightedRows { rows: &rows.of_choices, weights, choices: used };
        Ok(add_weighted_rows(&compute.pool, compute.isa, down, hidden, chosen, out)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_found_again() {
        let mut rows = Rows::default();
        // Three tokens with two choices each, of four experts.
        rows.sort(&[3, 0, 0, 1, 3, 1], 2, 4);
        assert_eq!(rows.starts, [0, 2, 4, 4, 6]);
        assert_eq!(rows.tokens, [0, 1, 1, 2, 0, 2]);
        assert_eq!(rows.of_choices, [4, 0, 1, 2, 5, 3]);
        let active: Vec<_> = rows.active().collect();
        assert_eq!(active, [(0, 0..2), (1, 2..4), (3, 4..6)]);
        rows.sort(&[1], 1, 2);
        assert_eq!(
            (&rows.starts[..], &rows.tokens[..], &rows.of_choices[..]),
            (&[0, 0, 1][..], &[0][..], &[0][..])
        );
    }
}
