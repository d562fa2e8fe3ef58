//! A model that is ready to serve: its configuration, tokenizer, chat template and executor.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crate::chat_template::ChatTemplate;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::{CpuExecutor, Executor, ExecutorOptions, ModelWeights, physical_cores};
use crate::tokenizer::Tokenizer;

/// Everything that the engine needs of a model.
pub struct LoadedModel {
    pub name: String,
    pub config: ModelConfig,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Arc<ChatTemplate>,
    pub executor: Box<dyn Executor>,
}

impl LoadedModel {
    /// Loads a checkpoint. A model without a chat template gets ChatML's.
    pub fn open(name: &str, path: &Path, options: ExecutorOptions) -> Result<Self, ModelError> {
        Self::open_replicas(name, path, options, NonZeroUsize::MIN).map(|mut models| models.remove(0))
    }

    /// Loads a checkpoint once for several executors, which share its weights. `options` are those of each but for the
    /// threads, which are divided: every replica gets at least one, and its own KV pool and buffers.
    pub fn open_replicas(
        name: &str,
        path: &Path,
        options: ExecutorOptions,
        replicas: NonZeroUsize,
    ) -> Result<Vec<Self>, ModelError> {
        let checkpoint = Checkpoint::open(path)?;
        let tokenizer = checkpoint
            .tokenizer()?
            .ok_or_else(|| ModelError::TokenizerMissing { path: path.display().to_string() })?;
        let tokenizer = Arc::new(tokenizer);
        let template = Arc::new(checkpoint.chat_template()?.unwrap_or_else(ChatTemplate::chatml_default));
        let weights = ModelWeights::load(&checkpoint, &options)?;
        let threads = options.threads.unwrap_or_else(physical_cores);
        (0..replicas.get())
            .map(|replica| {
                let threads = Some(share_of(threads, replica, replicas.get()).max(1));
                Ok(LoadedModel {
                    name: name.to_owned(),
                    config: checkpoint.config().clone(),
                    tokenizer: tokenizer.clone(),
                    template: template.clone(),
                    executor: Box::new(CpuExecutor::new(&weights, ExecutorOptions { threads, ..options })?),
                })
            })
            .collect()
    }
}

/// What part `index` of `parts` gets of `whole`: parts differ by one at most.
fn share_of(whole: usize, index: usize, parts: usize) -> usize {
    whole / parts + usize::from(index < whole % parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_differ_by_one_at_most_and_make_the_whole() {
        for (whole, parts) in [(0, 3), (2, 3), (3, 3), (7, 2), (16, 5)] {
            let shares: Vec<usize> = (0..parts).map(|index| share_of(whole, index, parts)).collect();
            assert_eq!(shares.iter().sum::<usize>(), whole);
            assert!(shares[0] - shares[parts - 1] <= 1, "{shares:?}");
        }
    }
}
