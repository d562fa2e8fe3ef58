//! The parts in which a layer may differ from the plain decoder layer: latent attention, a mixture of experts, further
//! norms, sinks, scales and gates.
//!
//! Invariant: [`LayerStyle::default`] describes the layers of Llama. A family is a value of these types, not a branch in
//! the executors.

use super::{MAX_HEAD_SIZE, MAX_HEADS, MAX_WIDTH, Rope};
use crate::error::ModelError;

/// Maximum number of experts of a layer.
pub(crate) const MAX_EXPERTS: usize = 1 << 12;
/// Maximum number of experts that a token passes through.
pub(crate) const MAX_USED: usize = 64;

/// The differences of a model's layers from those of Llama.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerStyle {
    /// Attention with latents in place of grouped keys and values.
    pub latent: Option<Latent>,
    pub experts: Option<Experts>,
    pub gate: GateKind,
    pub norms: Norms,
    /// Number of values of each head that rotate, from the first on. `None` means all.
    pub rotated: Option<usize>,
    /// Whether each head has the score of a position without a value.
    pub sinks: bool,
    /// The factor of the scores. `None` means one over the square root of the head size.
    pub attention_scale: Option<f32>,
    /// The factor of the embeddings.
    pub embedding_scale: Option<f32>,
    /// The rotation of layers with a window, if it is not that of the others.
    pub windowed_rope: Option<Rope>,
}

/// Multi-head latent attention: keys and values are expanded from one latent that all heads share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Width of the narrow query row, if queries have one.
    pub query_rank: Option<usize>,
    /// Number of values of a latent.
    pub rank: usize,
    /// Number of values of a query or key head without position, and with it.
    pub unrotated: usize,
    pub rotated: usize,
    /// Number of values of a value head.
    pub value: usize,
    /// Epsilon of the norms of the latent and of the narrow query row.
    pub norm_epsilon: f32,
    pub expansion: Expansion,
}

/// The tensors that expand a latent to keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// One tensor, with the key rows and then the value rows of each head.
    Joined,
    /// One tensor of transposed key matrices and one of value matrices, with the heads outermost.
    Split,
}

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// Number of experts that each token passes through.
    pub used: usize,
    /// Width of one expert.
    pub size: usize,
    /// Width of all shared experts together; 0 without shared experts.
    pub shared_size: usize,
    /// Whether each layer has experts.
    pub layers: Vec<bool>,
    pub routing: Routing,
    /// Whether the router and the experts have biases.
    pub biased: bool,
    pub form: ExpertForm,
}

/// How a router turns its products into choices and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub score: Score,
    /// Number of groups of experts, and of those that are considered for a token.
    pub groups: usize,
    pub used_groups: usize,
    /// Whether a bias is added to the scores for the choice alone.
    pub corrected: bool,
    /// Whether the weights of a token add up to 1 before they are scaled.
    pub normalized: bool,
    pub scale: f32,
}

/// The function that turns the products of a router into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// The softmax over all experts.
    Softmax,
    /// The logistic function of each product.
    Sigmoid,
    /// The softmax over the chosen experts.
    SoftmaxOfChosen,
}

/// The names and the layout of the experts' weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertForm {
    /// Three matrices for each expert.
    Separate,
    /// Three matrices for each expert, under Mixtral's names.
    Mixtral,
    /// Two tensors for all experts, with the inputs outermost and gates and ups interleaved.
    Interleaved,
    /// The same experts as 4-bit floats: matrices are read as those of [`ExpertForm::Separate`], biases are those of all
    /// experts in one tensor, with gates and ups interleaved.
    InterleavedRows,
}

/// The function of a gate and an up value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum GateKind {
    #[default]
    Silu,
    GeluTanh,
    /// The gate of gpt-oss, with its limit.
    Clamped(f32),
}

/// The norms of a layer. Their order among its parts is in `models/parts.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Norms {
    /// One before each part.
    #[default]
    Before,
    /// One before and one after each part.
    BeforeAndAfter,
    /// Like `BeforeAndAfter`, but files store each norm weight minus 1.
    BeforeAndAfterPlusOne,
}

impl Norms {
    /// Returns whether the output of each part goes through a norm of its own.
    pub(crate) fn follow_parts(self) -> bool {
        match self {
            Norms::Before => false,
            Norms::BeforeAndAfter | Norms::BeforeAndAfterPlusOne => true,
        }
    }

    /// Returns what is added to the stored weights.
    pub(crate) fn offset(self) -> f32 {
        match self {
            Norms::Before | Norms::BeforeAndAfter => 0.0,
            Norms::BeforeAndAfterPlusOne => 1.0,
        }
    }
}

impl Latent {
    /// Returns the number of values of a query head.
    pub fn head_size(&self) -> usize {
        self.unrotated + self.rotated
    }
}

impl ExpertForm {
    /// Returns the name of a layer's module with the experts.
    pub(crate) fn module(self) -> &'static str {
        match self {
            ExpertForm::Separate | ExpertForm::Interleaved | ExpertForm::InterleavedRows => "mlp",
            ExpertForm::Mixtral => "block_sparse_moe",
        }
    }

    /// Returns the name of the router in the module.
    pub(crate) fn router(self) -> &'static str {
        match self {
            ExpertForm::Separate | ExpertForm::Mixtral => "gate",
            ExpertForm::Interleaved | ExpertForm::InterleavedRows => "router",
        }
    }

    /// Returns the names of an expert's gate, up and down projections.
    pub(crate) fn projections(self) -> [&'static str; 3] {
        match self {
            ExpertForm::Separate | ExpertForm::Interleaved | ExpertForm::InterleavedRows => {
                ["gate_proj", "up_proj", "down_proj"]
            }
            ExpertForm::Mixtral => ["w1", "w3", "w2"],
        }
    }
}

impl LayerStyle {
    /// Returns the experts of a layer, if it has some.
    pub(crate) fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.layers.get(layer) == Some(&true))
    }

    /// Names the first part that executors on CUDA devices lack.
    pub(crate) fn lack_on_cuda(&self) -> Option<&'static str> {
        let lacks = [
            (self.latent.is_some(), "latent attention (MLA)"),
            (self.experts.is_some(), "a mixture of experts"),
            (self.sinks, "attention sinks"),
            (self.norms.follow_parts(), "norms after the parts of a layer"),
            (self.gate != GateKind::Silu, "gates other than SiLU"),
            (self.rotated.is_some(), "partial rotation"),
            (self.windowed_rope.is_some(), "a second rotation"),
            (
                self.attention_scale.is_some() || self.embedding_scale.is_some(),
                "scales of scores or embeddings",
            ),
        ];
        lacks.into_iter().find(|(present, _)| *present).map(|(_, part)| part)
    }

    pub(crate) fn check(&self, head_size: usize, layer_count: usize) -> Result<(), ModelError> {
        if let Some(latent) = &self.latent {
            latent.check()?;
        }
        if let Some(experts) = &self.experts {
            experts.check(layer_count)?;
        }
        let rotated = self.rotated.unwrap_or(head_size);
        if rotated == 0 || rotated > head_size || !rotated.is_multiple_of(2) {
            let problem = format!("{rotated} of {head_size} values rotate; an even number of them is needed");
            return Err(ModelError::config("partial_rotary_factor", problem));
        }
        if let Some(rope) = &self.windowed_rope {
            rope.check(rotated)?;
        }
        for (key, scale) in
            [("attention scale", self.attention_scale), ("embedding scale", self.embedding_scale)]
        {
            if scale.is_some_and(|scale| !(scale.is_finite() && scale > 0.0)) {
                return Err(ModelError::config(key, "is not a finite positive number"));
            }
        }
        match self.gate {
            GateKind::Clamped(limit) if !(limit.is_finite() && limit > 0.0) => {
                Err(ModelError::config("swiglu_limit", format!("{limit} is not a finite positive number")))
            }
            _ => Ok(()),
        }
    }
}

impl Latent {
    fn check(&self) -> Result<(), ModelError> {
        for (key, value, limit) in [
            ("q_lora_rank", self.query_rank.unwrap_or(1), MAX_WIDTH),
            ("kv_lora_rank", self.rank, MAX_WIDTH),
            ("qk_nope_head_dim", self.unrotated, MAX_HEAD_SIZE),
            ("qk_rope_head_dim", self.rotated, MAX_HEAD_SIZE),
            ("v_head_dim", self.value, MAX_HEAD_SIZE),
        ] {
            bounded(key, value, limit)?;
        }
        match self.rotated.is_multiple_of(2) {
            true => Ok(()),
            false => Err(ModelError::config(
                "qk_rope_head_dim",
                format!("{} is odd; rotation needs pairs of values", self.rotated),
            )),
        }
    }
}

impl Experts {
    fn check(&self, layer_count: usize) -> Result<(), ModelError> {
        let Routing { groups, used_groups, scale, .. } = self.routing;
        for (key, value, limit) in [
            ("num_experts", self.count, MAX_EXPERTS),
            ("num_experts_per_tok", self.used, self.count.min(MAX_USED)),
            ("moe_intermediate_size", self.size, MAX_WIDTH),
            ("n_shared_experts", self.shared_size.max(1), MAX_WIDTH),
            ("n_group", groups, self.count.min(MAX_HEADS)),
            ("topk_group", used_groups, groups),
        ] {
            bounded(key, value, limit)?;
        }
        if !self.count.is_multiple_of(groups) {
            let problem = format!("{groups} groups do not divide the {} experts", self.count);
            return Err(ModelError::config("n_group", problem));
        }
        if groups > 1 && self.count / groups < 2 {
            return Err(ModelError::config("n_group", "a group must have two experts"));
        }
        if self.used > self.count / groups * used_groups {
            let problem = format!("{} experts do not fit into {used_groups} groups", self.used);
            return Err(ModelError::config("num_experts_per_tok", problem));
        }
        if !(scale.is_finite() && scale > 0.0) {
            let problem = format!("{scale} is not a finite positive number");
            return Err(ModelError::config("routed_scaling_factor", problem));
        }
        match self.layers.len() == layer_count {
            true => Ok(()),
            false => Err(ModelError::config("mlp_layer_types", "must have one entry for each layer")),
        }
    }
}

fn bounded(key: &str, value: usize, limit: usize) -> Result<(), ModelError> {
    match (1..=limit).contains(&value) {
        true => Ok(()),
        false => Err(ModelError::config(key, format!("{value} is outside 1..={limit}"))),
    }
}
