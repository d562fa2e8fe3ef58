//! Describes a model whose files are on this machine, by the exact sizes of its tensors.

use super::description::{AttentionShape, Description, LayerShape, ModelPart, Split, Weight};
use crate::checkpoint::Checkpoint;

impl Description {
    /// Describes an open checkpoint.
    pub fn of_checkpoint(checkpoint: Checkpoint) -> Self {
        let config = checkpoint.config();
        let layer = |window: &Option<usize>| LayerShape {
            attention: AttentionShape::Grouped {
                kv_heads: config.kv_head_count,
                head_size: config.head_size,
            },
            window: *window,
            dense_width: config.feed_forward_size,
            expert_width: 0,
        };
        let mut formats: Vec<(u64, String)> = Vec::new();
        let mut weights = Vec::new();
        for tensor in checkpoint.tensors() {
            let rows = tensor.shape.first().map_or(1, |rows| *rows as u64);
            let columns =
                tensor.shape.iter().skip(1).fold(1u64, |all, size| all.saturating_mul(*size as u64));
            // A checkpoint without data has the size of its format.
            let bytes = match tensor.data.len() as u64 {
                0 => {
                    tensor.dtype.row_bytes(columns as usize).map_or(0, |row| rows.saturating_mul(row as u64))
                }
                bytes => bytes,
            };
            let model_part = model_part(tensor.name, config.tied_head);
            weights.push(Weight {
                model_part,
                rows,
                columns,
                copies: 1,
                active: 1,
                bytes,
                split: Split::Replicated,
            });
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
            layers: config.windows.iter().map(layer).collect(),
            weights,
            experts: 0,
            experts_per_token: 0,
            parts: Vec::new(),
            runnable: Ok(checkpoint),
        }
    }
}

fn model_part(name: &str, is_tied: bool) -> ModelPart {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    match layer.and_then(|layer| layer.parse().ok()) {
        Some(layer) => ModelPart::Layer(layer),
        None if name == "model.embed_tokens.weight" => ModelPart::Table { is_tied },
        None => ModelPart::Exit,
    }
}
