//! The memory of all models of a host, planned before any of them is loaded.
//!
//! Invariant: a model that does not fit beside the others is refused before its weights are read. On the CPU, a model
//! may take what is available and promised to no other model. Where no size of a KV cache is set, it follows from the
//! memory, and each model leaves room for those that are not loaded yet.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::{Context as _, Result, bail};
use indicatif::HumanBytes;
use skep_engine::{ModelSet, ModelState, WeakModelSet};
use skep_kernels::gpu;
use skep_model::planner::{LEAST_CPU_KV_TOKENS, default_tokens_on_cpu, memory_on_cpu, memory_on_device};
use skep_model::{Checkpoint, DeviceChoice, ExecutorOptions, MemoryPlan, ModelError, Ordinals};

use crate::catalog;
use crate::machine;
use crate::progress::Progress;

/// The models that share the memory of a host. Models can be added while it runs.
pub struct MemoryBudget {
    models: Mutex<Vec<BudgetedModel>>,
    /// The models with their states, known once all of them are declared.
    set: OnceLock<WeakModelSet>,
    cpu: Mutex<CpuMemory>,
    /// Reads how much memory is available on the CPU now.
    available: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

/// The memory of the models on the CPU.
#[derive(Default)]
struct CpuMemory {
    /// The memory that was available before any of the models was loaded.
    before: u64,
    /// The planned memory of each model that is or is being loaded, by name. The system counts a KV cache only as far as
    /// it has been used, so what is available does not show it.
    promised: BTreeMap<String, u64>,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        MemoryBudget {
            models: Mutex::default(),
            set: OnceLock::new(),
            cpu: Mutex::default(),
            available: Box::new(machine::available_memory_bytes),
        }
    }
}

/// The settings of a model on which its memory depends.
#[derive(Clone)]
pub struct BudgetedModel {
    pub name: String,
    pub source: String,
    pub executor: ExecutorOptions,
    pub replicas: NonZeroUsize,
    /// Maximum number of tokens of a sequence, if it is set.
    pub context: Option<usize>,
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
        let Some(available) = (self.available)() else { return Ok(()) };
        let models = self.models();
        let chosen = models.iter().filter(|model| names.contains(&model.name));
        let mut plans = Vec::new();
        for model in chosen.filter(|model| model.devices().is_none()) {
            // A source that cannot be read is reported by the load of the model.
            let Ok(resolved) = catalog::resolve(&model.source, progress) else { continue };
            let Ok(plan) = Checkpoint::open(&resolved.path).and_then(|files| model.least_on_cpu(&files))
            else {
                continue;
            };
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
                let Some(room) = self.room_on_cpu(&model.name) else { return Ok(model.executor.clone()) };
                let resolved = catalog::resolve(&model.source, progress)?;
                // A file that cannot be read, and options that cannot be satisfied, are reported by the load.
                let Ok(files) = Checkpoint::open(&resolved.path) else { return Ok(model.executor.clone()) };
                let others = self.others(model);
                let later = others.iter().filter(|(other, loaded)| !loaded && other.devices().is_none());
                let later = later.filter_map(|(other, _)| other.least_if_here());
                let own = room.saturating_sub(later.fold(0, u64::saturating_add));
                let Ok(executor) = model.with_cache_within(&files, own) else {
                    return Ok(model.executor.clone());
                };
                let Ok(plan) = memory_on_cpu(&files, &executor, model.replicas) else { return Ok(executor) };
                self.check_on_cpu(model, &plan, room)?;
                self.cpu().promised.insert(model.name.clone(), plan.total_bytes());
                Ok(executor)
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

    /// Returns the memory on the CPU that a model may take: what is available now, and at most what the other models left
    /// of the memory before them.
    fn room_on_cpu(&self, name: &str) -> Option<u64> {
        let available = (self.available)()?;
        let mut cpu = self.cpu();
        cpu.promised.retain(|other, _| other != name && self.takes_memory(other).unwrap_or(false));
        let promised = cpu.promised.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        cpu.before = if cpu.promised.is_empty() { available } else { cpu.before.max(available) };
        Some(available.min(cpu.before.saturating_sub(promised)))
    }

    /// Returns whether a model is loaded, or is being loaded or unloaded. `None` means that the host does not have it any
    /// more.
    fn takes_memory(&self, name: &str) -> Option<bool> {
        // The states are known as soon as all models are declared, which is before the first load.
        let Some(set) = self.set.get().and_then(WeakModelSet::upgrade) else { return Some(false) };
        let state = set.find(Some(name)).ok()?.state();
        Some(matches!(state, ModelState::Loading { .. } | ModelState::Loaded | ModelState::Unloading))
    }

    /// Returns the other models that the host still has, each with whether it takes memory already.
    fn others(&self, model: &BudgetedModel) -> Vec<(BudgetedModel, bool)> {
        let others = self.models().into_iter().filter(|other| other.name != model.name);
        others.filter_map(|other| self.takes_memory(&other.name).map(|taken| (other, taken))).collect()
    }

    fn cpu(&self) -> MutexGuard<'_, CpuMemory> {
        self.cpu.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Returns the names of the devices that the model is loaded on.
    pub fn device_names(&self) -> Vec<String> {
        match self.devices() {
            None => vec!["cpu".to_owned()],
            Some(devices) => devices.iter().map(|device| format!("cuda:{device}")).collect(),
        }
    }

    /// Returns the least memory on the CPU that the model can be loaded with.
    fn least_on_cpu(&self, files: &Checkpoint) -> Result<MemoryPlan, ModelError> {
        let tokens = self.executor.kv_tokens.unwrap_or(LEAST_CPU_KV_TOKENS);
        let options = ExecutorOptions { kv_tokens: Some(tokens), ..self.executor.clone() };
        memory_on_cpu(files, &options, self.replicas)
    }

    /// Returns the least memory on the CPU that the model can be loaded with, if its files are on this machine.
    fn least_if_here(&self) -> Option<u64> {
        let path = catalog::path_without_pull(&self.source).ok()??;
        let plan = Checkpoint::open(&path).and_then(|files| self.least_on_cpu(&files));
        plan.ok().map(|plan| plan.total_bytes())
    }

    /// Returns the options to load the model with on the CPU, in which the size of the KV cache follows from the memory if
    /// no size is set.
    fn with_cache_within(&self, files: &Checkpoint, bytes: u64) -> Result<ExecutorOptions, ModelError> {
        let tokens = match self.executor.kv_tokens {
            Some(tokens) => tokens,
            None => default_tokens_on_cpu(files, &self.executor, self.replicas, self.context, bytes)?,
        };
        Ok(ExecutorOptions { kv_tokens: Some(tokens), ..self.executor.clone() })
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use skep_engine::{LoadProgress, LocalModel};

    use super::*;
    use crate::progress::Silent;

    const GIB: u64 = 1 << 30;

    fn files() -> Checkpoint {
        Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa"))
            .expect("a model")
    }

    fn model(name: &str, kv_tokens: Option<usize>) -> BudgetedModel {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa");
        BudgetedModel {
            name: name.to_owned(),
            source: source.display().to_string(),
            executor: ExecutorOptions { kv_tokens, ..ExecutorOptions::default() },
            replicas: NonZeroUsize::MIN,
            context: None,
        }
    }

    fn bytes_with(kv_tokens: usize) -> u64 {
        let model = model("any", Some(kv_tokens));
        memory_on_cpu(&files(), &model.executor, model.replicas).expect("a plan").total_bytes()
    }

    /// Returns the number of tokens with which a model takes about this memory.
    fn tokens_of(bytes: u64) -> usize {
        let per_page = bytes_with(32) - bytes_with(16);
        ((bytes - bytes_with(16)) / per_page) as usize * 16
    }

    /// Models whose loads are admitted and then take until the test ends them.
    struct Loads {
        set: ModelSet,
        budget: Arc<MemoryBudget>,
        ended: Arc<Mutex<BTreeSet<String>>>,
        available: Arc<AtomicU64>,
    }

    impl Loads {
        fn of(models: &[BudgetedModel]) -> Loads {
            let available = Arc::new(AtomicU64::new(0));
            let read = available.clone();
            let budget = Arc::new(MemoryBudget {
                available: Box::new(move || Some(read.load(Ordering::Relaxed))),
                ..MemoryBudget::default()
            });
            let ended = Arc::<Mutex<BTreeSet<String>>>::default();
            let mut set: Option<ModelSet> = None;
            for model in models {
                budget.add(model.clone());
                let (budget, ended, model) = (budget.clone(), ended.clone(), model.clone());
                let name = model.name.clone();
                let load = move |progress: &LoadProgress| {
                    budget.admit(&model, &Silent).map_err(|error| format!("{error:#}"))?;
                    progress.begin("admitted", None);
                    while !ended.lock().expect("no panic").contains(&model.name) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err("the test ended it".to_owned())
                };
                // They would wait for each other on one device.
                let declared = LocalModel::new(name.clone(), name, load);
                set = Some(match set {
                    None => ModelSet::new(declared),
                    Some(set) => set.with(declared),
                });
            }
            let set = set.expect("a model");
            budget.watch(&set);
            Loads { set, budget, ended, available }
        }

        /// Starts a load while this memory is available, and waits until it is admitted or refused.
        async fn load(&self, name: &str, available: u64) -> Result<(), String> {
            self.available.store(available, Ordering::Relaxed);
            self.set.load(name).expect("declared");
            loop {
                match self.set.find(Some(name)).expect("declared").state() {
                    ModelState::Failed(reason) => return Err(reason),
                    ModelState::Loading { step, .. } if step == "admitted" => return Ok(()),
                    _ => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        }

        async fn end(&self, name: &str) {
            self.ended.lock().expect("no panic").insert(name.to_owned());
            self.set.settled(name).await.expect("declared");
        }
    }

    #[tokio::test]
    async fn memory_that_another_model_was_promised_counts_before_it_is_used() {
        let six = Some(tokens_of(6 * GIB));
        let loads = Loads::of(&[model("a", six), model("b", six), model("c", Some(tokens_of(3 * GIB)))]);
        loads.load("a", 10 * GIB).await.expect("it fits alone");
        // Most of its pages have not been written to, so the system still calls nine GiB available.
        let refused = loads.load("b", 9 * GIB).await.expect_err("four GiB are left");
        assert!(refused.contains("b needs 6.00 GiB of memory"), "{refused}");
        assert!(refused.contains(", and 4.00 GiB are available beside a\n"), "{refused}");
        loads.load("c", 9 * GIB).await.expect("it fits beside the first");
        // Others use the rest of the machine's memory.
        loads.end("c").await;
        let refused = loads.load("c", 2 * GIB).await.expect_err("two GiB are left");
        assert!(refused.contains(", and 2.00 GiB are available beside a\n"), "{refused}");
        loads.end("a").await;
        loads.load("b", 9 * GIB).await.expect("the first model is gone");
        loads.end("b").await;
    }

    #[test]
    fn a_model_leaves_the_memory_of_its_devices_that_models_loaded_later_need() {
        let on = |name: &str, devices: &str| BudgetedModel {
            executor: ExecutorOptions {
                device: DeviceChoice::Cuda(devices.parse().expect("ordinals")),
                ..model(name, Some(4096)).executor
            },
            ..model(name, None)
        };
        let budget = MemoryBudget::default();
        let (same, both, other) = (on("same", "0"), on("both", "0,1"), on("other", "1"));
        for model in [on("a", "0"), same.clone(), both.clone(), other, model("cpu", Some(4096))] {
            budget.add(model);
        }
        let bytes = |model: &BudgetedModel| model.on_device().expect("its files are here");
        let admitted = budget.admit(&on("a", "0"), &Silent).expect("the device decides about the rest");
        assert_eq!(admitted.reserved_bytes, bytes(&same) + bytes(&both));
        assert!(bytes(&same) > 0);
    }

    #[tokio::test]
    async fn a_cache_without_a_size_takes_what_the_memory_holds_beside_later_models() {
        let loads = Loads::of(&[model("a", None), model("later", None)]);
        let tokens = |available: u64| {
            loads.available.store(available, Ordering::Relaxed);
            let admitted = loads.budget.admit(&model("a", None), &Silent);
            admitted.map(|executor| executor.kv_tokens).map_err(|error| error.to_string())
        };
        let least = bytes_with(LEAST_CPU_KV_TOKENS);
        assert_eq!(tokens(bytes_with(20_000) + least), Ok(Some(20_000)));
        assert_eq!(tokens(64 * GIB), Ok(Some(skep_model::CPU_KV_TOKENS)), "its context is short");
        let refused = tokens(least / 2).expect_err("not even a small cache fits");
        assert!(refused.contains("a needs ") && refused.contains("hint: "), "{refused}");
        let set = Some(tokens_of(GIB));
        let executor = loads.budget.admit(&model("a", set), &Silent).map(|executor| executor.kv_tokens);
        assert!(executor.is_err(), "a size that is set is never changed");
    }
}
