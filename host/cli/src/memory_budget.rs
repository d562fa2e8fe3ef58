//! The memory of all models of a host, planned before any of them is loaded.
//!
//! Invariant: a model that does not fit beside the others is refused before its weights are read. On the CPU, a model
//! needs what is available; on a CUDA device, where a KV cache takes what is left, each model leaves room for those that
//! are not loaded yet.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, Result, bail};
use indicatif::HumanBytes;
use skep_engine::{ModelSet, ModelState, WeakModelSet};
use skep_kernels::gpu;
use skep_model::planner::{memory_on_cpu, memory_on_device};
use skep_model::{Checkpoint, DeviceChoice, ExecutorOptions, MemoryPlan, Ordinals};

use crate::catalog;
use crate::machine;
use crate::progress::Progress;

/// The models that share the memory of a host. Models can be added while it runs.
#[derive(Default)]
pub struct MemoryBudget {
    models: Mutex<Vec<BudgetedModel>>,
    /// The models with their states, known once all of them are declared.
    set: OnceLock<WeakModelSet>,
}

/// The settings of a model on which its memory depends.
#[derive(Clone)]
pub struct BudgetedModel {
    pub name: String,
    pub source: String,
    pub executor: ExecutorOptions,
    pub replicas: NonZeroUsize,
}

impl MemoryBudget {
    /// Adds a model, which replaces a model of the same name.
    pub fn add(&self, model: BudgetedModel) {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.retain(|known| known.name != model.name);
        models.push(model);
    }

    /// Makes the states of the models known, so that loads see which of the others are loaded.
    pub fn watch(&self, set: &ModelSet) {
        // The models of a host are declared once.
        let _ = self.set.set(set.downgrade());
    }

    /// Checks that the named models fit into the machine's memory together. A model alone is checked when it is loaded.
    pub fn check_together(&self, names: &[String], progress: &dyn Progress) -> Result<()> {
        if names.len() < 2 {
            return Ok(());
        }
        let Some(available) = machine::available_memory_bytes() else { return Ok(()) };
        let models = self.models();
        let chosen = models.iter().filter(|model| names.contains(&model.name));
        let mut plans = Vec::new();
        for model in chosen.filter(|model| model.devices().is_none()) {
            // A source that cannot be read is reported by the load of the model.
            let Ok(resolved) = catalog::resolve(&model.source, progress) else { continue };
            let Ok(plan) = model.on_cpu(&resolved.path) else { continue };
            plans.push((&model.name, plan));
        }
        let needed = plans.iter().fold(0u64, |sum, (_, plan)| sum.saturating_add(plan.total_bytes()));
        if needed <= available {
            return Ok(());
        }
        let mut each = String::new();
        for (name, plan) in &plans {
            let _ = write!(each, "\n  {name}: {plan}");
        }
        bail!(
            "the models need {} of memory, and {} are available{each}\n  hint: give models smaller KV caches with \
             `kv_tokens` under [[model]], or let some be loaded on demand with `load = \"demand\"`",
            HumanBytes(needed),
            HumanBytes(available)
        )
    }

    /// Checks that a model fits beside those that are loaded, and returns the options to load it with.
    pub fn admit(&self, model: &BudgetedModel, progress: &dyn Progress) -> Result<ExecutorOptions> {
        match model.devices() {
            None => {
                if let Some(available) = machine::available_memory_bytes() {
                    let resolved = catalog::resolve(&model.source, progress)?;
                    // A file that cannot be read, and options that cannot be satisfied, are reported by the load.
                    if let Ok(plan) = model.on_cpu(&resolved.path) {
                        self.check_on_cpu(model, &plan, available)?;
                    }
                }
                Ok(model.executor.clone())
            }
            Some(devices) => {
                let others = self.others(model);
                let others = others.iter().filter(|(other, loaded)| {
                    let shares = |theirs: Ordinals| {
                        devices.iter().any(|own| theirs.iter().any(|device| device == own))
                    };
                    !loaded && other.devices().is_some_and(shares)
                });
                let room = others.map(|(other, _)| other.on_device().unwrap_or(0));
                Ok(ExecutorOptions {
                    reserved_bytes: room.fold(0, u64::saturating_add),
                    ..model.executor.clone()
                })
            }
        }
    }

    fn check_on_cpu(&self, model: &BudgetedModel, plan: &MemoryPlan, available: u64) -> Result<()> {
        if plan.total_bytes() <= available {
            return Ok(());
        }
        let others = self.others(model);
        let loaded = others.iter().filter(|(other, loaded)| *loaded && other.devices().is_none());
        let names: Vec<&str> = loaded.map(|(other, _)| other.name.as_str()).collect();
        let beside = if names.is_empty() { String::new() } else { format!(" beside {}", names.join(", ")) };
        bail!(
            "{} needs {} of memory ({plan}), and {} are available{beside}\n  hint: give it a smaller KV cache with \
             `kv_tokens`, or unload a model with `skep model unload`",
            model.name,
            HumanBytes(plan.total_bytes()),
            HumanBytes(available)
        )
    }

    /// Returns the other models that the host still has, each with whether it is loaded.
    fn others(&self, model: &BudgetedModel) -> Vec<(BudgetedModel, bool)> {
        let set = self.set.get().and_then(WeakModelSet::upgrade);
        let is_loaded = |name: &str| match &set {
            Some(set) => {
                let state = set.find(Some(name)).ok()?.state();
                Some(matches!(state, ModelState::Loaded | ModelState::Unloading))
            }
            None => Some(false),
        };
        let others = self.models().into_iter().filter(|other| other.name != model.name);
        others.filter_map(|other| is_loaded(&other.name).map(|loaded| (other, loaded))).collect()
    }

    fn models(&self) -> Vec<BudgetedModel> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl BudgetedModel {
    /// Returns the CUDA devices that the model runs on; `None` means the CPU.
    fn devices(&self) -> Option<Ordinals> {
        match self.executor.device {
            DeviceChoice::Cpu => None,
            DeviceChoice::Cuda(devices) => Some(devices),
            DeviceChoice::Auto => gpu::probe().ok().and_then(|devices| Ordinals::first(devices.len())),
        }
    }

    fn on_cpu(&self, path: &Path) -> Result<MemoryPlan> {
        Ok(memory_on_cpu(&Checkpoint::open(path)?, &self.executor, self.replicas)?)
    }

    /// Returns the memory that the model will take on each of its devices, if its files are there.
    fn on_device(&self) -> Result<u64> {
        let devices = self.devices().and_then(|devices| NonZeroUsize::new(devices.count()));
        let devices = devices.context("the model has no device")?;
        let path = catalog::path_without_pull(&self.source)?.context("the model is not on this machine")?;
        let memory = gpu::probe().ok().and_then(|devices| devices.first().map(|device| device.memory_bytes));
        let memory = memory.unwrap_or_default();
        let plan =
            memory_on_device(&Checkpoint::open(&path)?, &self.executor, self.replicas, devices, memory);
        Ok(plan?.total_bytes())
    }
}
