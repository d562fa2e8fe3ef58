//! The number of parameters of a vision tower and its projector, from `vision_config`.
//!
//! Invariant: sizes saturate instead of overflowing. A tower that is not known by name is counted as a plain vision
//! transformer, and the caller says that this is an estimate.

use crate::config::Keys;
use crate::error::ModelError;

const MAX_SIZE: usize = 1 << 18;

/// The parameters of a vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tower {
    pub(super) parameters: u64,
    /// Whether the tower is one whose weights are known by name.
    pub(super) is_known: bool,
}

/// The shape of a vision transformer whose linear layers and norms have biases.
struct Encoder {
    width: u64,
    layers: u64,
    feed_forward: u64,
    patch: u64,
}

impl Encoder {
    fn layers(&self) -> u64 {
        let (width, wide) = (self.width, self.feed_forward);
        let attention = linear(width, width).saturating_mul(4);
        let mlp = linear(width, wide).saturating_add(linear(wide, width));
        attention.saturating_add(mlp).saturating_add(4 * width).saturating_mul(self.layers)
    }

    /// Returns the parameters of the convolution that makes vectors of patches of three colors.
    fn patches(&self) -> u64 {
        product(&[3, self.patch, self.patch, self.width])
    }
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product: u64, factor| product.saturating_mul(*factor))
}

/// Returns the parameters of a linear layer with a bias.
fn linear(inputs: u64, outputs: u64) -> u64 {
    inputs.saturating_mul(outputs).saturating_add(outputs)
}

/// Counts the tower that `vision_config` describes, with its projector into rows of `hidden` values.
pub(super) fn tower(keys: &Keys<'_>, hidden: u64) -> Result<Tower, ModelError> {
    let bounded = |key: &str, size: usize| match size {
        1..=MAX_SIZE => Ok(size as u64),
        _ => Err(ModelError::config(
            format!("vision_config.{key}"),
            format!("{size} is outside 1..={MAX_SIZE}"),
        )),
    };
    let size = |key: &str, default: usize| bounded(key, keys.size(key)?.unwrap_or(default));
    if keys.get("vt_hidden_size").is_some() {
        let encoder = Encoder {
            width: size("vt_hidden_size", 1152)?,
            layers: size("vt_num_hidden_layers", 27)?,
            feed_forward: size("vt_intermediate_size", 4304)?,
            patch: size("patch_size", 14)?,
        };
        let grid = [size("init_pos_emb_height", 64)?, size("init_pos_emb_width", 64)?, encoder.width];
        // Four neighboring patches are joined.
        let joined = encoder.width.saturating_mul(4);
        let projector = linear(joined, joined).saturating_add(linear(joined, hidden));
        let rest = encoder.patches() + product(&grid) + encoder.width + 4 * encoder.width;
        return Ok(Tower { parameters: sum(&[encoder.layers(), projector, rest]), is_known: true });
    }
    let width = keys.size("hidden_size")?.or(keys.size("embed_dim")?);
    let layers = keys.size("num_hidden_layers")?.or(keys.size("depth")?);
    let (Some(width), Some(layers)) = (width, layers) else {
        return Err(ModelError::config("vision_config", "has neither hidden_size nor num_hidden_layers"));
    };
    let width = bounded("hidden_size", width)?;
    let encoder = Encoder {
        width,
        layers: bounded("num_hidden_layers", layers)?,
        feed_forward: size("intermediate_size", 4 * width as usize)?,
        patch: size("patch_size", 14)?,
    };
    let side = size("image_size", 336)? / encoder.patch.max(1);
    let positions = product(&[side, side, width]);
    let (rest, is_known) = match keys.string("model_type")? {
        Some("llama4_vision_model") => {
            let (inner, outer) = (size("projector_input_dim", 4096)?, size("projector_output_dim", 4096)?);
            // A class vector with its position, and norms before and after the layers.
            let vectors = 2 * width + 4 * width;
            let adapter = encoder.feed_forward * inner + inner * outer;
            let projector = size("vision_output_dim", 4096)?.saturating_mul(hidden);
            (sum(&[encoder.patches(), positions, vectors, adapter, projector]), true)
        }
        Some("siglip_vision_model") => {
            let projector = width.saturating_mul(hidden).saturating_add(width);
            (sum(&[encoder.patches() + width, positions, 2 * width, projector]), true)
        }
        _ => (sum(&[encoder.patches(), positions, width.saturating_mul(hidden)]), false),
    };
    Ok(Tower { parameters: encoder.layers().saturating_add(rest), is_known })
}

fn sum(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |sum: u64, part| sum.saturating_add(*part))
}
