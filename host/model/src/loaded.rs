//! A model that is ready to serve: its configuration, tokenizer, chat template and executor.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crate::chat_template::ChatTemplate;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::digest::ModelDigest;
use crate::error::ModelError;
use crate::executor::{Executor, ExecutorOptions, LoadWatch, PlacedExecutor, Restart, WeightConversion};
use crate::sampling::Sampling;
use crate::tokenizer::Tokenizer;

/// Everything that the engine needs to run a model.
pub struct LoadedModel {
    pub name: String,
    pub config: ModelConfig,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Arc<ChatTemplate>,
    pub digest: ModelDigest,
    /// The sampling parameters that the model's authors recommend.
    pub sampling: Option<Sampling>,
    pub executor: Box<dyn Executor>,
    /// The format of the most bytes of the weights, such as `Q8_0`, if it is known.
    pub weights: Option<String>,
    /// Human-readable name of the device: `cpu`, or `cuda:0 (NVIDIA H200)`.
    pub device: String,
    /// Why the model runs on the CPU although the machine may have a usable device.
    pub fallback: Option<String>,
    /// Starts another executor in the place of this one, if it runs on a device, which can fail.
    pub restart: Option<Restart>,
}

impl LoadedModel {
    /// Loads a checkpoint. A model without a chat template gets the ChatML template.
    pub fn open(name: &str, path: &Path, options: ExecutorOptions) -> Result<Self, ModelError> {
        Self::open_replicas(name, path, options, NonZeroUsize::MIN).map(|mut models| models.remove(0))
    }

    /// Loads a checkpoint once for several executors, which share its weights. `options` apply to each executor,
    /// except for the threads, which are divided: every replica gets at least one thread, and a separate KV pool and
    /// separate buffers.
    pub fn open_replicas(
        name: &str,
        path: &Path,
        options: ExecutorOptions,
        replicas: NonZeroUsize,
    ) -> Result<Vec<Self>, ModelError> {
        Self::open_replicas_watched(name, path, options, replicas, &|_, _| ())
    }

    /// Loads a checkpoint like [`LoadedModel::open_replicas`]. `watch` is called with the number of bytes of the weights that
    /// are packed, or copied to devices, and with the number of all.
    pub fn open_replicas_watched(
        name: &str,
        path: &Path,
        options: ExecutorOptions,
        replicas: NonZeroUsize,
        watch: LoadWatch<'_>,
    ) -> Result<Vec<Self>, ModelError> {
        let checkpoint = Arc::new(Checkpoint::open(path)?);
        let tokenizer = checkpoint
            .tokenizer()?
            .ok_or_else(|| ModelError::TokenizerMissing { path: path.display().to_string() })?;
        let tokenizer = Arc::new(tokenizer);
        let template = Arc::new(checkpoint.chat_template()?.unwrap_or_else(ChatTemplate::chatml_default));
        let digest = ModelDigest::new(&checkpoint, &tokenizer, &template);
        let sampling = checkpoint.sampling()?;
        let weights = match options.weights {
            WeightConversion::Keep => checkpoint.weight_format(),
            converted => Some(converted.to_string().to_uppercase()),
        };
        let placed = PlacedExecutor::replicas_watched(&checkpoint, options.clone(), replicas, watch)?;
        let restarts = PlacedExecutor::restarts(&placed, &checkpoint, &options);
        let model = |(PlacedExecutor { executor, device, fallback, .. }, restart)| LoadedModel {
            name: name.to_owned(),
            config: checkpoint.config().clone(),
            tokenizer: tokenizer.clone(),
            template: template.clone(),
            digest: digest.clone(),
            sampling: sampling.clone(),
            executor,
            weights: weights.clone(),
            device,
            fallback,
            restart,
        };
        Ok(placed.into_iter().zip(restarts).map(model).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Batch, BatchSequence, LogitsWanted, PageId};

    #[test]
    fn replicas_share_one_model_and_have_separate_executors() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixtures.join("tiny/llama-gqa").join(file), folder.path().join(file)).unwrap();
        }
        let tokenizer = fixtures.join("tokenizer/byte-level-chatml.json");
        std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
        for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 1), (1, 3)] {
            let options = ExecutorOptions {
                kv_tokens: Some(64),
                tensor_parallel,
                pipeline_parallel,
                ..Default::default()
            };
            let count = NonZeroUsize::new(3).unwrap();
            let mut models = LoadedModel::open_replicas("tiny", folder.path(), options, count).unwrap();
            assert_eq!(models.len(), 3);
            assert!(models.iter().all(|model| Arc::ptr_eq(&model.tokenizer, &models[0].tokenizer)));
            let sequence = BatchSequence {
                tokens: vec![5, 6, 7],
                start: 0,
                pages: vec![PageId(3)],
                logits: LogitsWanted::Last,
            };
            let batch = Batch { sequences: vec![sequence] };
            let logits: Vec<Vec<f32>> = models
                .iter_mut()
                .map(|model| {
                    model.executor.forward(&batch).unwrap();
                    model.executor.logits(0).unwrap().to_vec()
                })
                .collect();
            assert!(
                logits.iter().all(|row| *row == logits[0]),
                "executors with the same weights must compute the same bits"
            );
        }
    }
}
