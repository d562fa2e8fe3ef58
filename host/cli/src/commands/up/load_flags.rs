//! The flags that say how weights are loaded and divided, and the line that says how long sequences can be then.

use skep_engine::ModelInfo;
use skep_model::{ExecutorOptions, WeightConversion};

use super::from_1_to;

/// The flags for how weights are loaded and divided, which override the settings.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct LoadFlags {
    /// Tensor-parallel ranks, which share each layer [default: 1]
    #[arg(long, value_name = "N", value_parser = from_1_to::<64>)]
    pub(super) tp: Option<usize>,
    /// Pipeline-parallel ranks, which divide the layers among them [default: 1]
    #[arg(long, value_name = "N", value_parser = from_1_to::<64>)]
    pub(super) pp: Option<usize>,
    /// Convert the weights when they are loaded on the CPU: q8_0, bf16 or keep [default: keep]
    #[arg(long, value_name = "FORMAT")]
    pub(super) weights: Option<WeightConversion>,
}

impl LoadFlags {
    /// Applies the flags that were given to `options`.
    pub(super) fn apply(&self, options: &mut ExecutorOptions) {
        options.tensor_parallel = self.tp.unwrap_or(options.tensor_parallel);
        options.pipeline_parallel = self.pp.unwrap_or(options.pipeline_parallel);
        options.weights = self.weights.unwrap_or(options.weights);
    }
}

/// Describes how long a sequence can be, and what bounds it if the model was made for longer ones.
pub(super) fn context_text(info: &ModelInfo) -> String {
    text_of(info.context_length, info.full_context_length)
}

fn text_of(tokens: usize, full: usize) -> String {
    match tokens < full {
        true => format!("context {tokens} tokens of {full} (set by `context`, `kv_tokens` or the memory)"),
        false => format!("context {tokens} tokens"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_of_the_model_is_shown_where_sequences_are_shorter() {
        assert_eq!(text_of(8192, 8192), "context 8192 tokens");
        assert!(text_of(65_536, 262_144).starts_with("context 65536 tokens of 262144 (set by "));
    }
}
