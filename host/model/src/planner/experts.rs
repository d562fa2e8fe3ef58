//! Reads which layers of a model have experts and which attend to a window; families spell both differently.
//!
//! Invariant: counts are bounded before anything is multiplied.

use serde_json::Value;

use super::family::{Experts, Family};
use crate::config::{Keys, brief};
use crate::error::ModelError;

const MAX_EXPERTS: usize = 1 << 14;
const MAX_WIDTH: usize = 1 << 20;

/// The routed and shared experts of a model.
#[derive(Clone, Debug)]
pub(super) struct Moe {
    pub(super) experts: usize,
    pub(super) per_token: usize,
    /// Width of one routed expert.
    pub(super) width: usize,
    /// Width of all shared experts together.
    pub(super) shared_width: usize,
    /// Width of the block of layers without experts, if it is not `intermediate_size`.
    pub(super) dense_width: Option<usize>,
    pub(super) block: &'static str,
    pub(super) router: &'static str,
    pub(super) router_class: &'static str,
    pub(super) shared: &'static str,
    /// Names of the gate, up and down projections.
    pub(super) names: [&'static str; 3],
    pub(super) router_has_bias: bool,
    pub(super) experts_have_bias: bool,
    pub(super) shared_has_gate: bool,
    layers: Layers,
}

/// The layers that have experts.
#[derive(Clone, Debug)]
enum Layers {
    All,
    /// Every `step`-th layer from `first`, counted from layer 0.
    From {
        first: usize,
        step: usize,
    },
    /// Every `step`-th layer, the first being layer `step - 1`, without the listed ones.
    Except {
        step: usize,
        dense: Vec<usize>,
    },
    Listed(Vec<usize>),
}

impl Moe {
    pub(super) fn is_in(&self, layer: usize) -> bool {
        match &self.layers {
            Layers::All => true,
            Layers::From { first, step } => layer >= *first && layer.is_multiple_of(*step),
            Layers::Except { step, dense } => (layer + 1).is_multiple_of(*step) && !dense.contains(&layer),
            Layers::Listed(layers) => layers.contains(&layer),
        }
    }

    /// Reads the experts of a configuration, if its family and its keys have some.
    pub(super) fn read(keys: &Keys<'_>, family: &Family) -> Result<Option<Self>, ModelError> {
        if family.experts == Experts::Never {
            return Ok(None);
        }
        let mut experts = None;
        for key in ["n_routed_experts", "num_local_experts", "num_experts"] {
            experts = experts.or(keys.size(key)?);
        }
        // Small models of a family with experts may have none.
        let experts = match (experts, family.experts) {
            (Some(0), _) | (None, Experts::DeepSeek | Experts::Qwen) => return Ok(None),
            (None, _) => return Err(ModelError::config("num_local_experts", "is missing")),
            (Some(experts), _) => bounded("num_experts", experts, MAX_EXPERTS)?,
        };
        let per_token = bounded("num_experts_per_tok", keys.required("num_experts_per_tok")?, experts)?;
        let width_key = match family.experts {
            Experts::DeepSeek | Experts::Qwen => "moe_intermediate_size",
            _ => "intermediate_size",
        };
        let width = bounded(width_key, keys.required(width_key)?, MAX_WIDTH)?;
        let base = Moe {
            experts,
            per_token,
            width,
            shared_width: 0,
            dense_width: None,
            block: "mlp",
            router: "gate",
            router_class: "Linear",
            shared: "shared_experts",
            names: ["gate_proj", "up_proj", "down_proj"],
            router_has_bias: false,
            experts_have_bias: false,
            shared_has_gate: false,
            layers: Layers::All,
        };
        let step = |key: &str| match keys.size(key)? {
            Some(0) => Err(ModelError::config(key, "is 0")),
            step => Ok(step.unwrap_or(1)),
        };
        Ok(Some(match family.experts {
            Experts::Never | Experts::Mixtral => {
                Moe { block: "block_sparse_moe", names: ["w1", "w3", "w2"], ..base }
            }
            Experts::GptOss => {
                let router_class = "Router";
                Moe { router: "router", router_class, router_has_bias: true, experts_have_bias: true, ..base }
            }
            Experts::DeepSeek => {
                let shared = keys.size("n_shared_experts")?.unwrap_or(0);
                let shared = shared.saturating_mul(width).min(MAX_WIDTH);
                let first = keys.size("first_k_dense_replace")?.unwrap_or(0);
                let layers = Layers::From { first, step: step("moe_layer_freq")? };
                let has_bias = keys.string("topk_method")?.is_none_or(|method| method == "noaux_tc");
                let router_class = "Router";
                Moe { shared_width: shared, router_class, router_has_bias: has_bias, layers, ..base }
            }
            Experts::Qwen => {
                let shared = keys.size("shared_expert_intermediate_size")?.unwrap_or(0);
                let shared = shared.min(MAX_WIDTH);
                let dense = numbers(keys, "mlp_only_layers")?.unwrap_or_default();
                let layers = Layers::Except { step: step("decoder_sparse_step")?, dense };
                let shared_has_gate = shared > 0;
                Moe { shared_width: shared, shared: "shared_expert", shared_has_gate, layers, ..base }
            }
            Experts::Llama4 => {
                let layers = match numbers(keys, "moe_layers")? {
                    Some(layers) => Layers::Listed(layers),
                    None => Layers::Except { step: step("interleave_moe_layer_step")?, dense: Vec::new() },
                };
                let dense = keys.size("intermediate_size_mlp")?.map(|width| width.min(MAX_WIDTH));
                Moe {
                    shared_width: width,
                    dense_width: dense,
                    block: "feed_forward",
                    router: "router",
                    router_class: "Router",
                    shared: "shared_expert",
                    layers,
                    ..base
                }
            }
        }))
    }
}

/// Returns the window of a layer, if it has one.
pub(super) fn is_windowed(
    keys: &Keys<'_>,
    family: &Family,
    layer: usize,
    layers: usize,
) -> Result<Option<usize>, ModelError> {
    let length_key = if family.name == "llama4_text" { "attention_chunk_size" } else { "sliding_window" };
    let Some(window) = keys.size(length_key)?.filter(|window| *window > 0) else { return Ok(None) };
    if family.window_is_optional && !keys.boolean("use_sliding_window")?.unwrap_or(false) {
        return Ok(None);
    }
    if let Some(types) = keys.get("layer_types").and_then(Value::as_array) {
        if types.len() != layers {
            let problem = format!("has {} entries for {layers} layers", types.len());
            return Err(ModelError::config("layer_types", problem));
        }
        // A layer that predicts further tokens attends to everything.
        let kind = types.get(layer).and_then(Value::as_str).unwrap_or("full_attention");
        return match kind {
            "full_attention" => Ok(None),
            "sliding_attention" | "chunked_attention" => Ok(Some(window)),
            other => {
                let supported = "full_attention, sliding_attention, chunked_attention";
                Err(ModelError::unsupported("layer_types", format!("\"{other}\""), supported))
            }
        };
    }
    let is_local = match family.name {
        "llama4_text" => match numbers(keys, "no_rope_layers")?.filter(|list| !list.is_empty()) {
            // Layers with rotation attend in chunks.
            Some(rotated) => rotated.get(layer).is_some_and(|rotated| *rotated != 0),
            None => !(layer + 1).is_multiple_of(4),
        },
        "gemma3_text" => {
            let pattern = keys.size("sliding_window_pattern")?.unwrap_or(6).max(1);
            !(layer + 1).is_multiple_of(pattern)
        }
        "gpt_oss" => layer.is_multiple_of(2),
        "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => {
            layer >= keys.size("max_window_layers")?.unwrap_or(28)
        }
        "mistral" | "mixtral" => true,
        _ => false,
    };
    Ok(is_local.then_some(window))
}

fn bounded(key: &str, value: usize, most: usize) -> Result<usize, ModelError> {
    match value {
        0 => Err(ModelError::config(key, "is 0")),
        value if value > most => Err(ModelError::config(key, format!("{value} is above {most}"))),
        value => Ok(value),
    }
}

/// Reads a list of numbers, such as those of layers.
fn numbers(keys: &Keys<'_>, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
    const MOST: usize = 1024;
    let Some(value) = keys.get(key) else { return Ok(None) };
    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let list = value.as_array().filter(|list| list.len() <= MOST);
    let list: Option<Vec<usize>> = list.and_then(|list| list.iter().map(number).collect());
    let wrong =
        || ModelError::config(key, format!("{} is not a list of at most {MOST} numbers", brief(value)));
    list.map(Some).ok_or_else(wrong)
}
