//! A mixture of experts computed with plain loops in double precision, without any code of the executors.

use super::{log_softmax, values};
use crate::checkpoint::Checkpoint;
use crate::config::{Architecture, ModelConfig};

pub(super) struct Found {
    pub(super) log_probabilities: Vec<Vec<f64>>,
    /// How often each expert was chosen, in all layers.
    pub(super) choices: Vec<usize>,
}

/// Computes the log-probabilities behind each token.
pub(super) fn run(checkpoint: &Checkpoint, ids: &[u32]) -> Found {
    let model = Model { checkpoint, config: checkpoint.config() };
    let hidden = model.config.hidden_size;
    let embedding = model.weight("model.embed_tokens.weight");
    let mut rows: Vec<Vec<f64>> =
        ids.iter().map(|id| embedding[*id as usize * hidden..][..hidden].to_vec()).collect();
    let mut choices = vec![0; model.config.style.experts.as_ref().unwrap().count];
    for layer in 0..model.config.layer_count {
        let prefix = format!("model.layers.{layer}");
        let normed = model.norm(&rows, &format!("{prefix}.input_layernorm"));
        add(&mut rows, &model.attention(&normed, &prefix));
        let normed = model.norm(&rows, &format!("{prefix}.post_attention_layernorm"));
        let out: Vec<Vec<f64>> = normed.iter().map(|row| model.mixture(row, &prefix, &mut choices)).collect();
        add(&mut rows, &out);
    }
    let head = if model.config.tied_head { embedding } else { model.weight("lm_head.weight") };
    let rows = model.norm(&rows, "model.norm");
    let log_probabilities = rows.iter().map(|row| log_softmax(product(&head, row).into_iter())).collect();
    Found { log_probabilities, choices }
}

struct Model<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a ModelConfig,
}

impl Model<'_> {
    fn weight(&self, name: &str) -> Vec<f64> {
        values(self.checkpoint, name).1.into_iter().map(f64::from).collect()
    }

    fn norm(&self, rows: &[Vec<f64>], name: &str) -> Vec<Vec<f64>> {
        let weight = self.weight(&format!("{name}.weight"));
        rows.iter().map(|row| self.normed(row, &weight)).collect()
    }

    fn normed(&self, row: &[f64], weight: &[f64]) -> Vec<f64> {
        let mean = row.iter().map(|value| value * value).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(self.config.norm_epsilon)).sqrt();
        row.iter().zip(weight).map(|(value, weight)| value * scale * weight).collect()
    }

    /// Returns the heads of a projection for each row: with its bias, its norm and its rotation, if it has them.
    fn heads(&self, rows: &[Vec<f64>], prefix: &str, name: &str, norm: Option<&str>) -> Vec<Vec<Vec<f64>>> {
        let module = format!("{prefix}.self_attn");
        let weight = self.weight(&format!("{module}.{name}.weight"));
        let bias = format!("{module}.{name}.bias");
        let bias = self.checkpoint.has(&bias).then(|| self.weight(&bias));
        let norm = norm.map(|norm| format!("{module}.{norm}.weight"));
        let head_norm = norm.as_ref().filter(|norm| self.checkpoint.has(norm)).map(|norm| self.weight(norm));
        let mut all = Vec::new();
        for (position, row) in rows.iter().enumerate() {
            let mut out = product(&weight, row);
            if let Some(bias) = &bias {
                out.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
            let heads = out.chunks_exact(self.config.head_size).map(|head| {
                let head = match &head_norm {
                    Some(weight) => self.normed(head, weight),
                    None => head.to_vec(),
                };
                if norm.is_some() { self.rotated(&head, position) } else { head }
            });
            all.push(heads.collect());
        }
        all
    }

    fn rotated(&self, head: &[f64], position: usize) -> Vec<f64> {
        let half = head.len() / 2;
        let mut out = head.to_vec();
        for pair in 0..half {
            let frequency = f64::from(self.config.rope.theta).powf(-((2 * pair) as f64) / head.len() as f64);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            out[pair] = head[pair] * cos - head[pair + half] * sin;
            out[pair + half] = head[pair + half] * cos + head[pair] * sin;
        }
        out
    }

    fn attention(&self, rows: &[Vec<f64>], prefix: &str) -> Vec<Vec<f64>> {
        let queries = self.heads(rows, prefix, "q_proj", Some("q_norm"));
        let keys = self.heads(rows, prefix, "k_proj", Some("k_norm"));
        let value_heads = self.heads(rows, prefix, "v_proj", None);
        let output = self.weight(&format!("{prefix}.self_attn.o_proj.weight"));
        let group = self.config.head_count / self.config.kv_head_count;
        let scale = 1.0 / (self.config.head_size as f64).sqrt();
        let mut all = Vec::new();
        for (position, heads) in queries.iter().enumerate() {
            let mut attended = Vec::new();
            for (head, query) in heads.iter().enumerate() {
                let scores = (0..=position).map(|at| dot(query, &keys[at][head / group]) * scale);
                let weights: Vec<f64> = log_softmax(scores).into_iter().map(f64::exp).collect();
                let mut sum = vec![0.0; self.config.head_size];
                for (at, weight) in weights.iter().enumerate() {
                    let row = &value_heads[at][head / group];
                    sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
                }
                attended.extend(sum);
            }
            all.push(product(&output, &attended));
        }
        all
    }

    fn mixture(&self, row: &[f64], prefix: &str, choices: &mut [usize]) -> Vec<f64> {
        let is_mixtral = self.config.architecture == Architecture::Mixtral;
        let (module, parts) = match is_mixtral {
            true => (format!("{prefix}.block_sparse_moe"), ["w1", "w3", "w2"]),
            false => (format!("{prefix}.mlp"), ["gate_proj", "up_proj", "down_proj"]),
        };
        let scores = product(&self.weight(&format!("{module}.gate.weight")), row);
        // GLM takes the logistic function and a factor, the others the softmax; the correction of the choice is zero.
        let (scores, factor): (Vec<f64>, f64) = match self.config.architecture {
            Architecture::Glm4Moe => {
                let factor = self.config.style.experts.as_ref().unwrap().count as f64;
                (scores.iter().map(|score| 1.0 / (1.0 + (-score).exp())).collect(), factor)
            }
            _ => (log_softmax(scores.into_iter()).into_iter().map(f64::exp).collect(), 1.0),
        };
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(self.config.style.experts.as_ref().unwrap().used);
        let sum: f64 = order.iter().map(|expert| scores[*expert]).sum();
        let mut out = vec![0.0; row.len()];
        for expert in order {
            choices[expert] += 1;
            let [gate, up, down] =
                parts.map(|part| self.weight(&format!("{module}.experts.{expert}.{part}.weight")));
            let inner: Vec<f64> = product(&gate, row)
                .into_iter()
                .zip(product(&up, row))
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            let weight = scores[expert] / sum * factor;
            out.iter_mut().zip(product(&down, &inner)).for_each(|(out, value)| *out += weight * value);
        }
        out
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Multiplies a matrix, whose rows are as long as the vector, by the vector.
fn product(matrix: &[f64], vector: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(vector.len()).map(|row| dot(row, vector)).collect()
}

fn add(rows: &mut [Vec<f64>], others: &[Vec<f64>]) {
    for (row, other) in rows.iter_mut().zip(others) {
        row.iter_mut().zip(other).for_each(|(value, other)| *value += other);
    }
}
