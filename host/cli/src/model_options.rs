//! The settings of the models that a host computes itself, and the checks of these settings together.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{Result, bail};
use skep_engine::check_name;
use skep_model::{DeviceChoice, MemoryFraction, WeightConversion};

use crate::catalog;

/// When a model is loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LoadPolicy {
    /// Before the host accepts requests.
    #[default]
    Start,
    /// By the first request for it.
    Demand,
}

/// Settings of one model. What is `None` is as the host's settings for all models say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// The name that requests use; `None` is the name that the source gives.
    pub name: Option<String>,
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, or a path.
    pub source: String,
    pub aliases: Vec<String>,
    pub is_default: bool,
    pub device: Option<DeviceChoice>,
    pub replicas: Option<NonZeroUsize>,
    pub tensor_parallel: Option<usize>,
    pub pipeline_parallel: Option<usize>,
    /// Maximum number of tokens of a sequence.
    pub context: Option<usize>,
    pub kv_tokens: Option<usize>,
    /// Fraction of a CUDA device's memory that the model may take.
    pub gpu_memory: Option<MemoryFraction>,
    pub weights: Option<WeightConversion>,
    /// The markup of tool calls, if it is not the one that the model's template shows.
    pub markup: Option<&'static str>,
    pub load: LoadPolicy,
    pub load_wait: Option<Duration>,
    pub idle_unload: Option<Duration>,
}

impl ModelOptions {
    /// Returns the model of this source with the host's settings.
    pub fn of(source: impl Into<String>) -> Self {
        ModelOptions { source: source.into(), ..ModelOptions::default() }
    }

    /// Parses `SOURCE` or `NAME=SOURCE`. A path that exists is never split.
    pub fn parse(text: &str) -> Self {
        match text.split_once('=') {
            Some((name, source)) if check_name(name).is_ok() && !std::path::Path::new(text).exists() => {
                ModelOptions { name: Some(name.to_owned()), ..ModelOptions::of(source) }
            }
            _ => ModelOptions::of(text),
        }
    }

    /// Returns the name that requests use. `None` means that there is no such model, which loading it reports.
    pub fn served_name(&self) -> Option<String> {
        self.name.clone().or_else(|| catalog::name_of(&self.source).ok())
    }
}

/// Checks the models of a host together.
pub fn check(models: &[ModelOptions]) -> Result<()> {
    if models.iter().filter(|model| model.is_default).count() > 1 {
        bail!(
            "two models have `default = true`\n  hint: only one model can be the default; without any it is the first"
        );
    }
    let mut names = BTreeSet::new();
    for model in models {
        let Some(name) = model.served_name() else { continue };
        if let Err(why) = check_name(&name) {
            bail!(
                "{why}\n  hint: give the model a name with `name` under [[model]], or --model NAME={}",
                model.source
            );
        }
        if !names.insert(name.clone()) {
            bail!(
                "two models are called {name:?}\n  hint: give one of them another name with `name` under [[model]], or \
                 --model NAME={}",
                model.source
            );
        }
    }
    for alias in models.iter().flat_map(|model| &model.aliases) {
        if let Err(why) = check_name(alias) {
            bail!("the alias {why}");
        }
        if !names.insert(alias.clone()) {
            bail!(
                "the alias {alias:?} is also the name or an alias of another model\n  hint: each name can mean only one model"
            );
        }
    }
    Ok(())
}
