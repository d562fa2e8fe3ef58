//! The models that a host computes itself: how each one is declared and loaded.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use skep_engine::{DEFAULT_LOAD_WAIT, Engine, EngineOptions, LoadProgress, LocalModel, ModelSet};
use skep_model::{Checkpoint, ExecutorOptions, Sampling};

use crate::catalog;
use crate::engines::{open_engine_as, with_room_for};
use crate::memory_budget::{BudgetedModel, MemoryBudget};
use crate::model_options::{LoadPolicy, ModelOptions, check};
use crate::progress::{Progress, Step};
use crate::server_options::ServerOptions;

/// Declares the models of a host, none of which is loaded yet.
pub fn declare(
    options: &ServerOptions,
    engine: &EngineOptions,
    progress: &Arc<dyn Progress + Send>,
    budget: &Arc<MemoryBudget>,
) -> Result<ModelSet> {
    let models = options.local_models();
    check(&models)?;
    let mut set: Option<ModelSet> = None;
    for model in &models {
        let declared = local_model(model, options, engine, progress, budget);
        set = Some(match set {
            None => ModelSet::new(declared),
            Some(set) => set.with(declared),
        });
    }
    let set = match set {
        Some(set) => set,
        None if !options.cluster.role.computes() => ModelSet::empty(),
        None => bail!("this host has no model\n  hint: name one with --model"),
    };
    for model in &models {
        let name = name_of(model);
        if model.is_default {
            set.set_default(&name)?;
        }
        for alias in &model.aliases {
            set.set_alias(alias, &name)?;
        }
    }
    budget.watch(&set);
    Ok(set)
}

/// Loads the models that are to be there before the host accepts requests, if all of them fit.
pub async fn load_at_start(
    models: &[ModelOptions],
    set: &ModelSet,
    budget: &Arc<MemoryBudget>,
    progress: &Arc<dyn Progress + Send>,
) -> Result<()> {
    let first = models.iter().filter(|model| model.load == LoadPolicy::Start);
    let names: Vec<String> = first.map(name_of).collect();
    let (planned, budget, progress) = (names.clone(), budget.clone(), progress.clone());
    let check = move || budget.check_together(&planned, &*progress);
    tokio::task::spawn_blocking(check).await.context("planning the memory of the models panicked")??;
    for name in names {
        set.load(&name)?;
        if let skep_engine::ModelState::Failed(reason) = set.settled(&name).await? {
            bail!("{reason}");
        }
    }
    Ok(())
}

/// Returns the model's name. One whose source does not exist is reported under its source when it is loaded.
pub fn name_of(model: &ModelOptions) -> String {
    model.served_name().unwrap_or_else(|| model.source.clone())
}

/// Returns the settings of a model that decide how much memory it takes.
fn budgeted(model: &ModelOptions, options: &ServerOptions, engine: &EngineOptions) -> BudgetedModel {
    let executor = ExecutorOptions {
        threads: options.threads,
        device: model.device.unwrap_or(options.executor.device),
        tensor_parallel: model.tensor_parallel.unwrap_or(options.executor.tensor_parallel),
        pipeline_parallel: model.pipeline_parallel.unwrap_or(options.executor.pipeline_parallel),
        kv_tokens: model.kv_tokens.or(options.executor.kv_tokens),
        gpu_memory: model.gpu_memory.or(options.executor.gpu_memory),
        weights: model.weights.unwrap_or(options.executor.weights),
        ..options.executor.clone()
    };
    BudgetedModel {
        name: name_of(model),
        source: model.source.clone(),
        executor: with_room_for(executor, engine),
        context: engine.context,
        replicas: model.replicas.unwrap_or(options.replicas),
    }
}

/// Declares a model. What its own settings leave out is as in `options`.
pub fn local_model(
    model: &ModelOptions,
    options: &ServerOptions,
    engine: &EngineOptions,
    progress: &Arc<dyn Progress + Send>,
    budget: &Arc<MemoryBudget>,
) -> LocalModel {
    let engine =
        EngineOptions { context: model.context.or(engine.context), markup: model.markup, ..engine.clone() };
    let budgeted = budgeted(model, options, &engine);
    budget.add(budgeted.clone());
    let (name, devices) = (budgeted.name.clone(), budgeted.device_names());
    let sampling = sampling_before_load(&budgeted.source);
    let (budget, progress) = (budget.clone(), progress.clone());
    // Nobody deletes the files of a model that a host has loaded.
    let in_use = Mutex::new(None);
    let load = move |shared: &LoadProgress| -> Result<Engine, String> {
        let both = Both { shared: shared.clone(), shown: progress.clone() };
        let BudgetedModel { name, source, replicas, .. } = &budgeted;
        let held = catalog::hold(source, &both).map_err(|error| format!("{error:#}"))?;
        *in_use.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        let executor = budget.admit(&budgeted, &both).map_err(|error| format!("{error:#}"))?;
        open_engine_as(Some(name), source, *replicas, executor, engine.clone(), &both)
            .map_err(|error| format!("{error:#}"))
    };
    LocalModel {
        load_wait: model.load_wait.or(options.load_wait).unwrap_or(DEFAULT_LOAD_WAIT),
        idle_unload: model.idle_unload,
        on_demand: model.load == LoadPolicy::Demand,
        sampling,
        devices,
        ..LocalModel::new(name, "cpu", load)
    }
}

/// Returns the sampling parameters that a load will find: those in the model's files if they are on this machine, or else
/// those of the catalog.
fn sampling_before_load(source: &str) -> Option<Sampling> {
    // A file that cannot be read is reported by the load.
    let path = catalog::path_without_pull(source).ok().flatten();
    let in_files = path.and_then(|path| Checkpoint::open(&path).ok()?.sampling().ok()?);
    catalog::default_sampling(source, in_files)
}

/// Reports the progress of a load to the operator and to requests that wait for the model.
struct Both {
    shared: LoadProgress,
    shown: Arc<dyn Progress + Send>,
}

struct BothSteps {
    shared: LoadProgress,
    shown: Box<dyn Step>,
}

impl Progress for Both {
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step> {
        self.shared.begin(what, total_bytes);
        Box::new(BothSteps { shared: self.shared.clone(), shown: self.shown.begin(what, total_bytes) })
    }

    fn count(&self, what: &str, total: u64) -> Box<dyn Step> {
        self.shared.begin(what, Some(total));
        Box::new(BothSteps { shared: self.shared.clone(), shown: self.shown.count(what, total) })
    }
}

impl Step for BothSteps {
    fn advance_to(&self, done: u64) {
        self.shared.advance_to(done);
        self.shown.advance_to(done);
    }

    fn expect_bytes(&self, total: u64) {
        self.shared.expect(total);
        self.shown.expect_bytes(total);
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
            (vec![named("up/stream")], "which is reserved for the names of upstream models"),
        ] {
            let error = check(&models).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
