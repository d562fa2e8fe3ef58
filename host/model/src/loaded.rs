//! A model that is ready to serve: its configuration, tokenizer, chat template and executor.

use std::path::Path;
use std::sync::Arc;

use crate::chat_template::ChatTemplate;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::{CpuExecutor, Executor, ExecutorOptions};
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
        let checkpoint = Checkpoint::open(path)?;
        let tokenizer = checkpoint
            .tokenizer()?
            .ok_or_else(|| ModelError::TokenizerMissing { path: path.display().to_string() })?;
        let template = checkpoint.chat_template()?.unwrap_or_else(ChatTemplate::chatml_default);
        let executor = CpuExecutor::load(&checkpoint, options)?;
        Ok(LoadedModel {
            name: name.to_owned(),
            config: checkpoint.config().clone(),
            tokenizer: Arc::new(tokenizer),
            template: Arc::new(template),
            executor: Box::new(executor),
        })
    }
}
