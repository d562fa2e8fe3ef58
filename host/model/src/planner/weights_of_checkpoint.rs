//! Describes a model whose files are on this machine, by the exact sizes of its tensors.

use std::collections::BTreeMap;

use super::description::{AttentionShape, Description, LayerShape, ModelPart, Split, Weight};
use crate::checkpoint::Checkpoint;

impl Description {
    /// Describes an open checkpoint.
    pub fn of_checkpoint(checkpoint: Checkpoint) -> Self {
        let config = checkpoint.config();
        let attention = match config.style.latent {
            Some(latent) => AttentionShape::Latent {
                query_rank: latent.query_rank.unwrap_or(0),
                latent: latent.rank,
                rotated: latent.rotated,
                unrotated: latent.unrotated,
                value: latent.value,
            },
            None => AttentionShape::Grouped { kv_heads: config.kv_head_count, head_size: config.head_size },
        };
        let experts = config.style.experts.as_ref();
        let layer = |(layer, window): (usize, &Option<usize>)| {
            let sparse = experts.filter(|experts| experts.layers.get(layer) == Some(&true));
            let (dense_width, expert_width) =
                sparse.map_or((config.feed_forward_size, 0), |experts| (experts.shared_size, experts.size));
            LayerShape { attention, window: *window, dense_width, expert_width }
        };
        // The tensors of a layer's experts are one weight with a copy for each expert.
        let mut of_experts: BTreeMap<String, usize> = BTreeMap::new();
        let mut formats: Vec<(u64, String)> = Vec::new();
        let mut weights = Vec::new();
        for tensor in checkpoint.tensors() {
            let rows = tensor.shape.first().map_or(1, |rows| *rows as u64);
            let columns =
                tensor.shape.iter().skip(1).fold(1u64, |all, size| all.saturating_mul(*size as u64));
            // A checkpoint without data has the size of its format.
            let bytes = match tensor.stored_bytes() {
                0 => {
                    tensor.dtype.row_bytes(columns as usize).map_or(0, |row| rows.saturating_mul(row as u64))
                }
                bytes => bytes,
            };
            let model_part = model_part(tensor.name, config.tied_head);
            let one =
                Weight { model_part, rows, columns, copies: 1, active: 1, bytes, split: Split::Replicated };
            match (experts, experts_part(tensor.name)) {
                (Some(experts), Some(ExpertsPart::All)) => {
                    let (copies, active) = (experts.count as u64, experts.used as u64);
                    weights.push(Weight { rows: rows / copies.max(1), copies, active, ..one });
                }
                (Some(experts), Some(ExpertsPart::One(part))) => match of_experts.get(&part) {
                    Some(index) => {
                        let all: &mut Weight = &mut weights[*index];
                        all.copies += 1;
                        all.bytes = all.bytes.saturating_add(bytes);
                    }
                    None => {
                        of_experts.insert(part, weights.len());
                        weights.push(Weight { active: experts.used as u64, ..one });
                    }
                },
                _ => weights.push(one),
            }
            let name = tensor.dtype.to_string();
            match formats.iter_mut().find(|(_, known)| *known == name) {
                Some((sum, _)) => *sum = sum.saturating_add(bytes),
                None => formats.push((bytes, name)),
            }
        }
        formats.sort_by(|a, b| b.cmp(a));
        let format: Vec<String> = formats.into_iter().map(|(_, name)| name).collect();
        Description {
            family: format!("{:?}", config.architecture).to_lowercase(),
            context_length: config.context_length,
            vocabulary_size: config.vocabulary_size,
            format: format!("{}: {}", checkpoint.format(), format.join(", ")),
            notes: Vec::new(),
            hidden_size: config.hidden_size,
            head_count: config.head_count,
            layers: config.windows.iter().enumerate().map(layer).collect(),
            weights,
            experts: 0,
            experts_per_token: 0,
            parts: Vec::new(),
            runnable: Ok(checkpoint),
        }
    }
}

/// The experts that a tensor belongs to.
enum ExpertsPart {
    /// All of a layer.
    All,
    /// One of those whose tensors have this name, apart from the number of the expert.
    One(String),
}

fn experts_part(name: &str) -> Option<ExpertsPart> {
    let (layer, rest) = name.split_once(".experts.")?;
    Some(match rest.split_once('.') {
        Some((number, part)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            ExpertsPart::One(format!("{layer}.{part}"))
        }
        _ => ExpertsPart::All,
    })
}

fn model_part(name: &str, is_tied: bool) -> ModelPart {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    match layer.and_then(|layer| layer.parse().ok()) {
        Some(layer) => ModelPart::Layer(layer),
        None if name == "model.embed_tokens.weight" => ModelPart::Table { is_tied },
        None => ModelPart::Exit,
    }
}
