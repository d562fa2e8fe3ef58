//! A model as the planner sees it: its weights by shape, format and place, and what it keeps for each token.
//!
//! Invariant: sizes saturate instead of overflowing. A description holds no values and does not depend on the file
//! that it was read from.

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::KvDtype;

use super::devices::{DeviceKind, Devices};
use super::storage::Storage;

/// A model of which only shapes and formats are known.
#[derive(Debug)]
pub struct Description {
    /// The name of the family, as `model_type` in config.json.
    pub family: String,
    pub context_length: usize,
    pub vocabulary_size: usize,
    /// How the weights are stored, for messages.
    pub format: String,
    /// Assumptions of the planner, for messages.
    pub notes: Vec<String>,
    pub(super) hidden_size: usize,
    pub(super) head_count: usize,
    pub(super) layers: Vec<LayerShape>,
    pub(super) weights: Vec<Weight>,
    /// Number of routed experts of a layer; 0 for a dense model.
    pub(super) experts: usize,
    pub(super) experts_per_token: usize,
    /// The parts that distinguish this model from a dense one with grouped attention.
    pub(super) parts: Vec<String>,
    /// The shapes that the executors plan with, or the reason why they cannot run the model.
    pub(super) runnable: Result<Checkpoint, String>,
}

/// The shape of one layer: its attention, and the widths of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerShape {
    pub(super) attention: AttentionShape,
    /// Number of positions that the layer attends to.
    pub(super) window: Option<usize>,
    /// Width of the dense feed-forward block, and of the shared experts.
    pub(super) dense_width: usize,
    /// Width of one routed expert; 0 without experts.
    pub(super) expert_width: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionShape {
    /// Heads that share keys and values in groups.
    Grouped { kv_heads: usize, head_size: usize },
    /// Keys and values as one latent vector and a rotated key, which all heads share.
    Latent { query_rank: usize, latent: usize, rotated: usize, unrotated: usize, value: usize },
}

/// The part of the model that a weight belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelPart {
    /// The vectors of the tokens. A tied table is also the output head.
    Table {
        is_tied: bool,
    },
    Layer(usize),
    /// The final norm and the output head.
    Exit,
    /// The vision tower, which belongs to the first stage.
    Vision,
    /// The layers that predict further tokens, which are not loaded.
    Draft,
}

/// How ranks divide a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// Every rank has the whole weight.
    Replicated,
    /// Equal parts of this number, which cannot be divided further.
    Parts(u64),
    /// Keys or values, which follow the query heads.
    KvHeads,
    /// Routed experts, each of them in this number of parts.
    Experts { parts: u64 },
}

/// Equal weights of one module, such as the up projections of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) model_part: ModelPart,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) copies: u64,
    /// Number of copies that a token passes through.
    pub(super) active: u64,
    pub(super) bytes: u64,
    pub(super) split: Split,
}

/// The number of parameters and bytes of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Totals {
    /// Parameters without draft layers.
    pub parameters: u64,
    /// Parameters that each token passes through, without the table of tokens, of which it reads one row.
    pub active_parameters: u64,
    /// Size of the checkpoint without draft layers.
    pub checkpoint_bytes: u64,
    /// Size of the draft layers.
    pub draft_bytes: u64,
}

impl Weight {
    /// Returns `copies` matrices of `rows` × `columns` values in one format.
    pub(super) fn matrices(
        model_part: ModelPart,
        [rows, columns]: [u64; 2],
        [copies, active]: [u64; 2],
        storage: Storage,
        split: Split,
    ) -> Self {
        let bytes = storage.bytes(rows, columns).saturating_mul(copies);
        Weight { model_part, rows, columns, copies, active, bytes, split }
    }

    pub(super) fn parameters(&self) -> u64 {
        self.rows.saturating_mul(self.columns).saturating_mul(self.copies)
    }

    fn active_part(&self, whole: u64) -> u64 {
        match self.copies {
            0 => 0,
            copies => (u128::from(whole) * u128::from(self.active) / u128::from(copies)) as u64,
        }
    }
}

impl Description {
    /// Returns the number of decoder layers, without draft layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Returns the parts that distinguish this model from a dense one with grouped attention, by name.
    pub fn parts(&self) -> &[String] {
        &self.parts
    }

    /// Returns why the executors cannot run the model, or `None` if they can.
    pub fn obstacle(&self) -> Option<&str> {
        self.runnable.as_ref().err().map(String::as_str)
    }

    /// Returns why the executors cannot run the model on these devices, or `None` if they can.
    pub fn obstacle_on(&self, devices: &Devices) -> Option<String> {
        match (&self.runnable, devices.device.kind) {
            (Err(reason), _) => Some(reason.clone()),
            (Ok(_), DeviceKind::Cpu) => None,
            (Ok(checkpoint), DeviceKind::Cuda { .. }) => {
                let lack = checkpoint.config().style.lack_on_cuda()?;
                Some(format!("the executors on CUDA devices lack {lack}; the CPU runs it"))
            }
        }
    }

    /// Returns the number of parameters and the size of the whole model.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for weight in &self.weights {
            if weight.model_part == ModelPart::Draft {
                totals.draft_bytes = totals.draft_bytes.saturating_add(weight.bytes);
                continue;
            }
            totals.parameters = totals.parameters.saturating_add(weight.parameters());
            totals.checkpoint_bytes = totals.checkpoint_bytes.saturating_add(weight.bytes);
            if weight.is_read() {
                let active = weight.active_part(weight.parameters());
                totals.active_parameters = totals.active_parameters.saturating_add(active);
            }
        }
        totals
    }

    /// Returns the size of what all layers keep for one token, in bytes.
    pub fn kv_bytes_per_token(&self, kv: KvDtype) -> u64 {
        self.layers.iter().fold(0, |sum: u64, layer| {
            sum.saturating_add(layer.attention.kv_bytes(layer.attention.kv_heads(), kv))
        })
    }

    /// Returns the number of layers that attend to a window, and the longest window.
    pub fn windowed_layers(&self) -> Option<(usize, usize)> {
        let windows: Vec<usize> = self.layers.iter().filter_map(|layer| layer.window).collect();
        windows.iter().max().map(|longest| (windows.len(), *longest))
    }

    /// Returns the size of the keys and values that a sequence of `tokens` tokens needs if the pages behind the windows
    /// are dropped.
    pub fn kv_bytes_of_sequence(&self, tokens: usize, kv: KvDtype) -> u64 {
        self.layers.iter().fold(0, |sum: u64, layer| {
            let kept = layer.window.map_or(tokens, |window| tokens.min(window)) as u64;
            let token = layer.attention.kv_bytes(layer.attention.kv_heads(), kv);
            sum.saturating_add(token.saturating_mul(kept))
        })
    }

    /// Returns the bytes that a decode step of one sequence reads for the token after `tokens` tokens: the weights that
    /// the token passes through, and the keys and values in reach of each layer.
    pub fn decode_bytes_per_token(&self, tokens: usize, kv: KvDtype) -> u64 {
        let weights = self.weights.iter().filter(|weight| weight.is_read());
        let read = weights.fold(0u64, |sum, weight| sum.saturating_add(weight.active_part(weight.bytes)));
        read.saturating_add(self.kv_bytes_of_sequence(tokens, kv))
    }

    /// Rejects sizes that no model has.
    pub(super) fn checked(self) -> Result<Self, ModelError> {
        const MOST: u64 = 1 << 56;
        let totals = self.totals();
        if totals.parameters > MOST || totals.checkpoint_bytes > MOST {
            let problem = format!("its sizes describe more than {MOST} parameters; they cannot be right");
            return Err(ModelError::config("hidden_size", problem));
        }
        Ok(self)
    }
}

impl Weight {
    /// Returns whether every token reads the weight, or the active copies of it.
    fn is_read(&self) -> bool {
        match self.model_part {
            ModelPart::Table { is_tied } => is_tied,
            ModelPart::Layer(_) | ModelPart::Exit => true,
            ModelPart::Vision | ModelPart::Draft => false,
        }
    }
}

impl AttentionShape {
    /// Returns the number of heads whose keys and values are kept.
    pub(super) fn kv_heads(self) -> usize {
        match self {
            AttentionShape::Grouped { kv_heads, .. } => kv_heads,
            AttentionShape::Latent { .. } => 1,
        }
    }

    /// Returns the size of what the layer keeps for one token, in bytes, if it keeps `kv_heads` heads. A latent is kept
    /// whole, whatever the number of heads is.
    pub(super) fn kv_bytes(self, kv_heads: usize, kv: KvDtype) -> u64 {
        const SCALE_BYTES: u64 = 4;
        let value_bytes = |values: u64| match kv {
            KvDtype::F32 => 4 * values,
            KvDtype::F16 => 2 * values,
            KvDtype::I8 | KvDtype::Fp8 => values,
        };
        match self {
            AttentionShape::Grouped { head_size, .. } => {
                let scale = if matches!(kv, KvDtype::I8 | KvDtype::Fp8) { SCALE_BYTES } else { 0 };
                2 * kv_heads as u64 * (value_bytes(head_size as u64) + scale)
            }
            AttentionShape::Latent { latent, rotated, .. } => {
                let (latent, rotated) = (latent as u64, rotated as u64);
                match kv {
                    // The rotated key stays in 16 bits; the latent has a scale for every 128 values. Plans with FP8 are
                    // refused, because nothing stores latents so.
                    KvDtype::I8 | KvDtype::Fp8 => latent + latent.div_ceil(128) * SCALE_BYTES + 2 * rotated,
                    KvDtype::F16 | KvDtype::F32 => value_bytes(latent + rotated),
                }
            }
        }
    }
}
