//! The subject of a measurement: a model from a file, or random weights in a known shape.

use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use skep_model::{Checkpoint, DType, DeviceChoice, Executor, ExecutorOptions, ModelConfig, PlacedExecutor};

use crate::catalog;
use crate::device_flag::report_fallback;
use crate::progress::Terminal;

/// A model that can be loaded.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Subject {
    /// A name, hf:OWNER/REPO[:FILE], or a path.
    File(String),
    /// One of [`ModelConfig::SHAPES`].
    Shape { name: String, weights: DType },
}

/// A loaded model that computes; it needs no tokenizer.
pub(super) struct Loaded {
    pub name: String,
    /// The device that it runs on: never `Auto`.
    pub devices: DeviceChoice,
    /// The same device, as text for people.
    pub device: String,
    pub config: ModelConfig,
    /// Type of most of its weights.
    pub dtype: DType,
    /// Size of the rows that tokens are looked up in; 0 if the head multiplies with them as well.
    pub looked_up_bytes: u64,
    /// Size of the weights of all experts.
    pub expert_bytes: u64,
    pub load_s: f64,
    pub executor: Box<dyn Executor>,
}

impl Subject {
    /// Loads the model, and measures how long that takes.
    pub(super) fn load(&self, options: ExecutorOptions) -> Result<Loaded> {
        let started;
        let (name, checkpoint) = match self {
            Subject::File(name) => {
                let model = catalog::resolve(name, &Terminal)?;
                started = Instant::now();
                let opened = Checkpoint::open(&model.path);
                (model.name, opened.with_context(|| format!("cannot load {}", model.path.display()))?)
            }
            Subject::Shape { name, weights } => {
                let config = ModelConfig::shape(name).with_context(|| {
                    format!("there is no shape {name}; the known ones are {}", ModelConfig::SHAPES.join(", "))
                })?;
                let made = Checkpoint::synthetic(config, *weights).with_context(|| self.to_string())?;
                started = Instant::now();
                (self.to_string(), made)
            }
        };
        let placed = PlacedExecutor::replicas(&checkpoint, options, NonZeroUsize::MIN)
            .with_context(|| format!("cannot load {name}"))?;
        let Some(PlacedExecutor { executor, devices, device, fallback }) = placed.into_iter().next() else {
            bail!("cannot run {name}");
        };
        report_fallback(&name, fallback.as_deref());
        let load_s = started.elapsed().as_secs_f64();
        let config = checkpoint.config().clone();
        let embedding = checkpoint.tensor("model.embed_tokens.weight")?.data.len() as u64;
        let of_experts = checkpoint.tensors().filter(|tensor| tensor.name.contains(".experts."));
        let expert_bytes: u64 = of_experts.map(|tensor| tensor.data.len() as u64).sum();
        let format = checkpoint.weight_format().unwrap_or_default();
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.to_string() == format);
        let dtype = dtype.with_context(|| format!("{name} has no weights"))?;
        Ok(Loaded {
            name,
            devices,
            device,
            dtype,
            looked_up_bytes: if config.tied_head { 0 } else { embedding },
            expert_bytes,
            config,
            load_s,
            executor,
        })
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::File(name) => f.write_str(name),
            Subject::Shape { name, weights } => write!(f, "{name} with random {weights} weights"),
        }
    }
}
