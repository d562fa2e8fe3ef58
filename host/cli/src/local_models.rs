//! The models that a host computes itself: their settings, the checks of these settings together, and how each
//! one is loaded.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use skep_engine::{DEFAULT_LOAD_WAIT, Engine, EngineOptions, LoadProgress, LocalModel, ModelSet, check_name};
use skep_model::{DeviceChoice, ExecutorOptions};

use crate::catalog;
use crate::progress::{Progress, Step};
use crate::server::open_engine_as;
use crate::server_options::ServerOptions;

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
    pub load: LoadPolicy,
    pub load_wait: Option<Duration>,
    pub idle_unload: Option<Duration>,
}

impl ModelOptions {
    /// Returns the model of this source with the host's settings.
    pub fn of(source: impl Into<String>) -> Self {
        ModelOptions { source: source.into(), ..ModelOptions::default() }
    }

    /// Parses `SOURCE` or `NAME=SOURCE`. A path that exists is never taken apart.
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
        self.name.clone().or_else(|| catalog::name_of(&self.source))
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

/// Declares the models of a host, none of which is loaded yet.
pub fn declare(
    options: &ServerOptions,
    engine: &EngineOptions,
    progress: &Arc<dyn Progress + Send>,
) -> Result<ModelSet> {
    let models = options.local_models();
    check(&models)?;
    let mut set: Option<ModelSet> = None;
    for model in &models {
        let declared = local_model(model, options, engine, progress);
        set = Some(match set {
            None => ModelSet::new(declared),
            Some(set) => set.with(declared),
        });
    }
    let Some(set) = set else { bail!("this host has no model\n  hint: name one with --model") };
    for model in &models {
        let name = name_of(model);
        if model.is_default {
            set.set_default(&name)?;
        }
        for alias in &model.aliases {
            set.set_alias(alias, &name)?;
        }
    }
    Ok(set)
}

/// Loads the models that are to be there before the host accepts requests.
pub async fn load_at_start(models: &[ModelOptions], set: &ModelSet) -> Result<()> {
    for model in models.iter().filter(|model| model.load == LoadPolicy::Start) {
        let name = name_of(model);
        set.load(&name)?;
        if let skep_engine::ModelState::Failed(reason) = set.settled(&name).await? {
            bail!("{reason}");
        }
    }
    Ok(())
}

/// Returns the model's name. One whose source does not exist is reported under its source when it is loaded.
fn name_of(model: &ModelOptions) -> String {
    model.served_name().unwrap_or_else(|| model.source.clone())
}

fn local_model(
    model: &ModelOptions,
    options: &ServerOptions,
    engine: &EngineOptions,
    progress: &Arc<dyn Progress + Send>,
) -> LocalModel {
    let executor = ExecutorOptions {
        threads: options.threads,
        device: model.device.unwrap_or(options.executor.device),
        tensor_parallel: model.tensor_parallel.unwrap_or(options.executor.tensor_parallel),
        pipeline_parallel: model.pipeline_parallel.unwrap_or(options.executor.pipeline_parallel),
        kv_tokens: model.kv_tokens.or(options.executor.kv_tokens),
        ..options.executor
    };
    let engine = EngineOptions { context: model.context.or(engine.context), ..engine.clone() };
    let replicas = model.replicas.unwrap_or(options.replicas);
    let (name, source, progress) = (name_of(model), model.source.clone(), progress.clone());
    let named = name.clone();
    // Nobody deletes the files of a model that a host has loaded.
    let in_use = Mutex::new(None);
    let load = move |told: &LoadProgress| -> Result<Engine, String> {
        let both = Both { told: told.clone(), shown: progress.clone() };
        let held = catalog::hold(&source, &both).map_err(|error| format!("{error:#}"))?;
        *in_use.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        open_engine_as(Some(&named), &source, replicas, executor, engine.clone(), &both)
            .map_err(|error| format!("{error:#}"))
    };
    LocalModel {
        load_wait: model.load_wait.or(options.load_wait).unwrap_or(DEFAULT_LOAD_WAIT),
        idle_unload: model.idle_unload,
        ..LocalModel::new(name, executor.device.to_string(), load)
    }
}

/// Shows the progress of a load to the operator, and tells it to those who wait for the model.
struct Both {
    told: LoadProgress,
    shown: Arc<dyn Progress + Send>,
}

struct BothSteps {
    told: LoadProgress,
    shown: Box<dyn Step>,
}

impl Progress for Both {
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step> {
        self.told.begin(what, total_bytes);
        Box::new(BothSteps { told: self.told.clone(), shown: self.shown.begin(what, total_bytes) })
    }

    fn count(&self, what: &str, total: u64) -> Box<dyn Step> {
        self.told.begin(what, Some(total));
        Box::new(BothSteps { told: self.told.clone(), shown: self.shown.count(what, total) })
    }
}

impl Step for BothSteps {
    fn advance_to(&self, done: u64) {
        self.told.advance_to(done);
        self.shown.advance_to(done);
    }

    fn note(&self, text: &str) {
        self.shown.note(text);
    }

    fn finish(self: Box<Self>, result: &str) {
        self.shown.finish(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> ModelOptions {
        ModelOptions { name: Some(name.to_owned()), ..ModelOptions::of("smollm2-135m") }
    }

    #[test]
    fn a_flag_names_a_source_or_a_name_with_a_source() {
        for (text, name, source) in [
            ("smollm2-135m", None, "smollm2-135m"),
            ("small=smollm2-135m", Some("small"), "smollm2-135m"),
            ("small=hf:a/b:c.gguf", Some("small"), "hf:a/b:c.gguf"),
            ("models/a=b.gguf", None, "models/a=b.gguf"),
        ] {
            let parsed = ModelOptions::parse(text);
            assert_eq!((parsed.name.as_deref(), parsed.source.as_str()), (name, source));
        }
    }

    #[test]
    fn names_and_aliases_of_all_models_are_distinct() {
        let default = |name: &str| ModelOptions { is_default: true, ..named(name) };
        let alias = |name: &str, alias: &str| ModelOptions { aliases: vec![alias.into()], ..named(name) };
        check(&[default("a"), alias("b", "fast")]).expect("valid");
        for (models, expected) in [
            (vec![named("a"), named("a")], "two models are called \"a\""),
            (vec![ModelOptions::of("smollm2-135m"), named("smollm2-135m")], "two models are called"),
            (vec![default("a"), default("b")], "two models have `default = true`"),
            (vec![alias("a", "b"), named("b")], "the alias \"b\" is also the name"),
            (vec![alias("a", "x"), alias("b", "x")], "the alias \"x\" is also the name"),
            (vec![named("up/stream")], "which only models of other servers have"),
        ] {
            let error = check(&models).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
