//! Opens engines: a model's files become an executor for each replica, and these an engine.

use std::num::NonZeroUsize;

use anyhow::{Context as _, Result, anyhow};
use skep_engine::chat::Markup;
use skep_engine::{Engine, EngineOptions};
use skep_model::{ExecutorOptions, LoadedModel, ModelError};

use crate::catalog;
use crate::device_flag::{kernel_folders, report_fallback};
use crate::progress::Progress;

/// Opens the engine of a model by name or path. The executor's options apply to each replica, except for the
/// threads, which are divided among the replicas.
pub fn open_engine(
    name_or_path: &str,
    replicas: NonZeroUsize,
    executor: ExecutorOptions,
    engine: EngineOptions,
    progress: &dyn Progress,
) -> Result<Engine> {
    open_engine_as(None, name_or_path, replicas, executor, engine, progress)
}

/// Opens the engine of a model like [`open_engine`], under another name.
pub fn open_engine_as(
    name: Option<&str>,
    name_or_path: &str,
    replicas: NonZeroUsize,
    executor: ExecutorOptions,
    engine: EngineOptions,
    progress: &dyn Progress,
) -> Result<Engine> {
    let resolved = catalog::resolve(name_or_path, progress)?;
    let name = name.map_or_else(|| resolved.name.clone(), str::to_owned);
    let model = catalog::ResolvedModel { name, ..resolved };
    let step = progress.begin(&format!("loading {}", model.name), None);
    let executor = ExecutorOptions { kernels: kernel_folders()?, ..with_room_for(executor, &engine) };
    let watch = |done_bytes, total_bytes| {
        step.expect_bytes(total_bytes);
        step.advance_to(done_bytes);
    };
    let loaded = LoadedModel::open_replicas_watched(&model.name, &model.path, executor, replicas, &watch);
    let mut loaded = loaded.map_err(|error| match error {
        ModelError::Option { option, problem } => anyhow!("{}: {problem}", setting(&option)),
        error => anyhow!(error).context(format!("cannot load {}", model.path.display())),
    })?;
    for replica in &mut loaded {
        replica.sampling = catalog::default_sampling(name_or_path, replica.sampling.take());
    }
    report_fallback(&model.name, loaded.first().and_then(|model| model.fallback.as_deref()));
    let shown =
        loaded.first().map(|model| Markup::of_model(model.template.source(), Some(&model.tokenizer)).name);
    let engine = EngineOptions { markup: engine.markup.or(shown), ..engine };
    let engine =
        Engine::start_replicas(loaded, engine).with_context(|| format!("cannot start {}", model.name))?;
    step.finish("");
    Ok(engine)
}

/// Returns the options of an executor that has room for everything that the engine may plan.
pub fn with_room_for(executor: ExecutorOptions, engine: &EngineOptions) -> ExecutorOptions {
    ExecutorOptions {
        max_batch_tokens: executor.max_batch_tokens.max(engine.step_tokens.unwrap_or(0)),
        max_sequences: executor.max_sequences.max(engine.max_sequences),
        max_logit_rows: executor.max_logit_rows.max(engine.max_sequences),
        ..executor
    }
}

/// Describes where an option of the executor is set.
fn setting(option: &str) -> String {
    match option {
        "device" => "--device, or `device` in skep.toml".to_owned(),
        "threads" => "--threads, or `threads` in skep.toml".to_owned(),
        "isa" => "--isa, or `isa` under [engine] in skep.toml".to_owned(),
        "tensor_parallel" => "--tp, or `tensor_parallel` under [engine] in skep.toml".to_owned(),
        "pipeline_parallel" => "--pp, or `pipeline_parallel` under [engine] in skep.toml".to_owned(),
        "gpu_memory" => "--gpu-memory, or `gpu_memory` under [engine] or [[model]] in skep.toml".to_owned(),
        "weights" => "--weights, or `weights` under [engine] or [[model]] in skep.toml".to_owned(),
        option => format!("`{option}` under [engine] in skep.toml"),
    }
}
