//! Chooses the experts of each token.
//!
//! Invariant: everything is computed in 32 bits and depends on the token's row alone; of equal scores, the expert with the
//! lower number is chosen. Source: DeepSeek-V3 (2024), section 2.1.2, for groups and the bias of the choice.

use std::cmp::Ordering;
use std::sync::{Mutex, PoisonError};

use super::compute::Compute;
use super::linear::Linear;
use crate::config::{Routing, Score};
use crate::error::ModelError;

/// Keeps weights finite if all scores are zero.
const SMALLEST_SUM: f32 = 1e-20;
/// Number of rows from which on a task is worth a thread.
const TASK_ROWS: usize = 16;

pub(crate) struct Router {
    /// The products of a row with all experts, in F32.
    pub(crate) scores: Linear,
    /// Added to the scores for the choice; empty without a correction.
    pub(crate) correction: Vec<f32>,
    pub(crate) routing: Routing,
    pub(crate) used: usize,
}

impl Router {
    /// Chooses the experts of each row. `products` is scratch for a row of products for each token; `experts` and
    /// `weights` receive `used` entries for each token, the best first.
    pub(crate) fn choose(
        &self,
        compute: &mut Compute,
        input: &[f32],
        tokens: usize,
        products: &mut [f32],
        experts: &mut Vec<u32>,
        weights: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.scores.forward(compute, input, tokens, products)?;
        let width = self.scores.width().max(1);
        let (rows, chosen) = (tokens.div_ceil(compute.pool.threads()).max(TASK_ROWS), self.used.max(1));
        // The memory plan counts exactly the entries in use, so no spare capacity may be reserved.
        let parts = products.chunks_mut(rows * width);
        let parts = parts
            .zip(sized(experts, tokens * self.used).chunks_mut(rows * chosen))
            .zip(sized(weights, tokens * self.used).chunks_mut(rows * chosen))
            .map(|((products, experts), weights)| Mutex::new((products, experts, weights)))
            .collect::<Vec<_>>();
        compute.pool.run(parts.len(), |part| {
            let mut part = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
            let (products, experts, weights) = &mut *part;
            let (mut choice, mut order) = (Vec::with_capacity(width), Vec::with_capacity(width));
            let rows = products.chunks_exact_mut(width).zip(experts.chunks_exact_mut(chosen));
            for ((row, experts), weights) in rows.zip(weights.chunks_exact_mut(chosen)) {
                // A row that is not finite still chooses some experts; its output stays not finite, and no other row's.
                self.choose_row(row, &mut choice, &mut order, experts, weights);
            }
        });
        Ok(())
    }

    fn choose_row(
        &self,
        row: &mut [f32],
        choice: &mut Vec<f32>,
        order: &mut Vec<u32>,
        experts: &mut [u32],
        weights: &mut [f32],
    ) {
        match self.routing.score {
            Score::Softmax => softmax(row),
            Score::Sigmoid => row.iter_mut().for_each(|value| *value = 1.0 / (1.0 + (-*value).exp())),
            Score::SoftmaxOfChosen => {}
        }
        choice.clear();
        choice.extend_from_slice(row);
        choice.iter_mut().zip(&self.correction).for_each(|(score, bias)| *score += bias);
        self.mask_groups(choice);
        best(choice, self.used, order);
        experts.copy_from_slice(order);
        weights.iter_mut().zip(&*order).for_each(|(weight, expert)| *weight = row[*expert as usize]);
        match self.routing.score {
            Score::SoftmaxOfChosen => softmax(weights),
            Score::Softmax | Score::Sigmoid if self.routing.normalized => {
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum + SMALLEST_SUM);
            }
            Score::Softmax | Score::Sigmoid => {}
        }
        weights.iter_mut().for_each(|weight| *weight *= self.routing.scale);
    }

    /// Excludes the experts of all groups but the best, which are those with the largest sum of their two best scores.
    fn mask_groups(&self, choice: &mut [f32]) {
        let Routing { groups, used_groups, .. } = self.routing;
        if used_groups >= groups {
            return;
        }
        let size = choice.len() / groups;
        let sums: Vec<f32> = choice
            .chunks_exact(size)
            .map(|group| {
                let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
                for score in group {
                    if *score > first {
                        (first, second) = (*score, first);
                    } else if *score > second {
                        second = *score;
                    }
                }
                first + second
            })
            .collect();
        let mut kept = Vec::with_capacity(groups);
        best(&sums, used_groups, &mut kept);
        for (group, scores) in choice.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&(group as u32)) {
                scores.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Gives a list this length. Its contents are unspecified.
fn sized<T: Clone + Default>(list: &mut Vec<T>, length: usize) -> &mut [T] {
    list.reserve_exact(length.saturating_sub(list.len()));
    list.resize(length, T::default());
    list
}

/// Writes the indices of the `count` largest values to `order`, the largest first and, of equal ones, the first first.
fn best(values: &[f32], count: usize, order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..values.len() as u32);
    let by_value =
        |a: &u32, b: &u32| -> Ordering { values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b)) };
    if count < order.len() {
        order.select_nth_unstable_by(count, by_value);
        order.truncate(count);
    }
    order.sort_unstable_by(by_value);
}

fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for value in values.iter_mut() {
        *value = (*value - largest).exp();
        sum += *value;
    }
    values.iter_mut().for_each(|value| *value /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGMOID: Routing = Routing {
        score: Score::Sigmoid,
        groups: 1,
        used_groups: 1,
        corrected: true,
        normalized: true,
        scale: 2.5,
    };

    fn choose(routing: Routing, used: usize, correction: &[f32], row: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let scores = Linear::new(Vec::new(), Vec::new());
        let router = Router { scores, correction: correction.to_vec(), routing, used };
        let (mut experts, mut weights) = (vec![0; used], vec![0.0; used]);
        let (choice, order) = (&mut Vec::new(), &mut Vec::new());
        router.choose_row(&mut row.to_vec(), choice, order, &mut experts, &mut weights);
        (experts, weights)
    }

    fn close(found: &[f32], expected: &[f32]) -> bool {
        found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
    }

    #[test]
    fn equal_scores_choose_the_lower_number() {
        let (experts, weights) = choose(SIGMOID, 3, &[], &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(experts, [1, 3, 5]);
        assert!(close(&weights, &[2.5 / 3.0; 3]));
        assert_eq!(choose(SIGMOID, 2, &[], &[0.0; 4]).0, [0, 1]);
        // A negative zero is below zero, whatever the platform's comparison says.
        assert_eq!(choose(Routing { score: Score::SoftmaxOfChosen, ..SIGMOID }, 1, &[], &[-0.0, 0.0]).0, [1]);
    }

    #[test]
    fn the_correction_changes_the_choice_and_not_the_weights() {
        let (experts, weights) = choose(SIGMOID, 2, &[0.0, 0.9, 0.0], &[1.0, -1.0, 0.9]);
        assert_eq!(experts, [1, 0]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let sum = sigmoid(-1.0) + sigmoid(1.0);
        assert!(close(&weights, &[2.5 * sigmoid(-1.0) / sum, 2.5 * sigmoid(1.0) / sum]));
    }

    #[test]
    fn groups_are_chosen_by_their_two_best() {
        let routing = Routing { groups: 3, used_groups: 1, ..SIGMOID };
        // The best expert is in the first group, but the second has the larger sum.
        let row = [3.0, -9.0, -9.0, 1.0, 1.5, -9.0, 0.0, 0.0, 0.0];
        assert_eq!(choose(routing, 2, &[], &row).0, [4, 3]);
        // Experts of masked groups are not chosen even if all others have negative scores.
        assert_eq!(choose(routing, 3, &[-2.0; 9], &row).0, [4, 3, 5]);
    }

    #[test]
    fn softmax_before_or_after_the_choice() {
        let softmax = Routing { score: Score::Softmax, normalized: false, scale: 1.0, ..SIGMOID };
        let row = [0.0, 2f32.ln(), 5f32.ln(), 0.0];
        let (experts, weights) = choose(softmax, 2, &[], &row);
        assert_eq!(experts, [2, 1]);
        assert!(close(&weights, &[5.0 / 9.0, 2.0 / 9.0]));
        let normalized = Routing { normalized: true, ..softmax };
        assert!(close(&choose(normalized, 2, &[], &row).1, &[5.0 / 7.0, 2.0 / 7.0]));
        let chosen = Routing { score: Score::SoftmaxOfChosen, ..softmax };
        assert!(close(&choose(chosen, 2, &[], &row).1, &[5.0 / 7.0, 2.0 / 7.0]));
    }
}
