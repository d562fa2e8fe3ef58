//! A model of this process. Only this module changes its state.
//!
//! ```text
//! Unloaded, Failed --load--> Loading --> Loaded --unload--> Unloading --> Unloaded
//!                               |
//!                               +--> Failed
//! ```
//!
//! A request begins a load as well, unless a person has unloaded a model that is not declared as loaded on demand.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use skep_model::Sampling;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Semaphore, watch};

use super::device_turns::DeviceTurns;
use super::local_model::{DEFAULT_LOAD_WAIT, Loader, LocalModel};
use super::served::ModelState;
use crate::{Engine, EngineError, LoadProgress, ModelInfo};

/// Time after a failed load during which requests get its error at once, instead of trying again.
const FAILURE_KEPT: Duration = Duration::from_secs(10);
/// Time that running requests get before an idle model is unloaded.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// Interval at which a request looks whether the engine's executor has been replaced.
const RECOVERY_INTERVAL: Duration = Duration::from_millis(50);
/// Retry delay while an engine's executor is being replaced.
const RECOVERY_RETRY_MS: u32 = 5000;
/// Maximum number of requests that wait for one model.
const MAX_WAITING: usize = 1024;
/// Range of the retry delays that clients get during a load.
const RETRY_MS: std::ops::RangeInclusive<u64> = 500..=30_000;

/// A model with its state.
pub struct Slot {
    name: String,
    devices: Vec<String>,
    load_wait: Duration,
    idle_unload: Option<Duration>,
    on_demand: bool,
    /// Sampling parameters as far as they were known before the first load.
    declared_sampling: Option<Sampling>,
    /// Models that were given as a running engine cannot be loaded again, and are never unloaded.
    loader: Option<Loader>,
    state: watch::Sender<State>,
    /// The properties of the model, from its first load on.
    known: OnceLock<ModelInfo>,
    began: Instant,
    /// The last use, in milliseconds since `began`.
    used_ms: AtomicU64,
    /// Duration of the last load; 0 before the first.
    load_ms: AtomicU64,
    /// One permit for each further request that may wait.
    waiting: Semaphore,
}

enum State {
    Unloaded(Reload),
    Loading { progress: LoadProgress, since: Instant },
    Loaded(Engine),
    Unloading,
    Failed { reason: String, at: Instant },
}

/// The way in which an unloaded model is loaded again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reload {
    /// By the next request, or by a person.
    ByRequest,
    ByHand,
}

impl Slot {
    pub(super) fn fixed(engine: Engine) -> Arc<Slot> {
        let info = engine.info().clone();
        let slot = Slot::new(info.name.clone(), Vec::new(), None, State::Loaded(engine));
        Arc::new(Slot { known: OnceLock::from(info), ..slot })
    }

    pub(super) fn declared(declared: LocalModel) -> Arc<Slot> {
        let LocalModel { name, devices, load_wait, idle_unload, on_demand, sampling, loader } = declared;
        let slot = Slot::new(name, devices, Some(loader), State::Unloaded(Reload::ByRequest));
        Arc::new(Slot { load_wait, idle_unload, on_demand, declared_sampling: sampling, ..slot })
    }

    fn new(name: String, devices: Vec<String>, loader: Option<Loader>, state: State) -> Slot {
        Slot {
            name,
            devices,
            load_wait: DEFAULT_LOAD_WAIT,
            idle_unload: None,
            on_demand: true,
            declared_sampling: None,
            loader,
            state: watch::Sender::new(state),
            known: OnceLock::new(),
            began: Instant::now(),
            used_ms: AtomicU64::new(0),
            load_ms: AtomicU64::new(0),
            waiting: Semaphore::new(MAX_WAITING),
        }
    }

    /// Returns the name under which the model is served.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the model's properties, which its first load determines.
    pub fn known(&self) -> Option<&ModelInfo> {
        self.known.get()
    }

    /// Returns the sampling parameters of a request that sets none, if they are known.
    pub fn sampling(&self) -> Option<Sampling> {
        self.known.get().map(|known| known.sampling.clone()).or_else(|| self.declared_sampling.clone())
    }

    /// Returns the state now. It may change before the caller acts on it.
    pub fn state(&self) -> ModelState {
        match &*self.state.borrow() {
            State::Unloaded(_) => ModelState::Unloaded,
            State::Loading { progress, .. } => {
                ModelState::Loading { step: progress.text(), percent: progress.percent() }
            }
            State::Loaded(_) => ModelState::Loaded,
            State::Unloading => ModelState::Unloading,
            State::Failed { reason, .. } => ModelState::Failed(reason.clone()),
        }
    }

    /// Returns the engine if the model is loaded, and never waits for a load.
    pub fn engine(&self) -> Option<Engine> {
        match &*self.state.borrow() {
            State::Loaded(engine) => Some(engine.clone()),
            _ => None,
        }
    }

    /// Returns the engine for a request, or the reason that there is none.
    pub(super) fn loaded(&self) -> Result<Engine, EngineError> {
        self.touch();
        self.engine().ok_or_else(|| self.missing())
    }

    /// Returns the engine for a request that does not wait. A model that is not loaded begins to load for later ones, unless a person
    /// has unloaded it.
    pub(super) fn at_once(self: &Arc<Self>, turns: &DeviceTurns) -> Result<Engine, EngineError> {
        let found = self.loaded().and_then(|engine| match engine.fault() {
            None => Ok(engine),
            Some(fault) => Err(EngineError::restarting(&self.name, &fault, RECOVERY_RETRY_MS)),
        });
        let may_load = match &*self.state.borrow() {
            State::Unloaded(reload) => *reload == Reload::ByRequest,
            State::Failed { at, .. } => at.elapsed() >= FAILURE_KEPT,
            State::Loading { .. } | State::Loaded(_) | State::Unloading => false,
        };
        if found.is_err() && may_load {
            self.load(turns)?;
            return Err(self.missing());
        }
        found
    }

    /// Returns the engine for a request. A model that is not loaded is loaded first, unless a person has unloaded it.
    pub(super) async fn ready(self: &Arc<Self>, turns: &DeviceTurns) -> Result<Engine, EngineError> {
        self.touch();
        let mut states = self.state.subscribe();
        let deadline = tokio::time::Instant::now() + self.load_wait;
        let mut wait_permit = None;
        loop {
            let mut failed = None;
            let needs_load = match &*states.borrow_and_update() {
                State::Loaded(engine) => match engine.fault() {
                    None => return Ok(engine.clone()),
                    Some(fault) => {
                        failed = Some(fault);
                        false
                    }
                },
                State::Failed { reason, at } if at.elapsed() < FAILURE_KEPT => {
                    return Err(EngineError::ModelUnloaded { name: self.name.clone(), why: reason.clone() });
                }
                State::Unloaded(Reload::ByHand) => break,
                State::Unloaded(Reload::ByRequest) | State::Failed { .. } => true,
                State::Loading { .. } | State::Unloading => false,
            };
            if needs_load {
                self.load(turns)?;
            }
            if wait_permit.is_none() {
                // If too many requests wait already, this one gets the same error as one that has waited too long.
                wait_permit = Some(self.waiting.try_acquire().map_err(|_| self.missing())?);
            }
            if let Some(fault) = failed {
                if tokio::time::Instant::now() >= deadline {
                    return Err(EngineError::restarting(&self.name, &fault, RECOVERY_RETRY_MS));
                }
                tokio::time::sleep(RECOVERY_INTERVAL).await;
                continue;
            }
            // The slot holds the sender, so only the deadline ends the wait without a change.
            if tokio::time::timeout_at(deadline, states.changed()).await.is_err() {
                break;
            }
        }
        Err(self.missing())
    }

    /// Begins a load unless the model is loaded or has begun to load. It runs in the background.
    pub(super) fn load(self: &Arc<Self>, turns: &DeviceTurns) -> Result<(), EngineError> {
        let Some(loader) = self.loader.clone() else { return Ok(()) };
        let progress = LoadProgress::default();
        let begun = self.state.send_if_modified(|state| match state {
            State::Unloaded(_) | State::Failed { .. } => {
                *state = State::Loading { progress: progress.clone(), since: Instant::now() };
                true
            }
            State::Unloading | State::Loading { .. } | State::Loaded(_) => false,
        });
        if !begun {
            return match self.state() {
                ModelState::Unloading => Err(self.missing()),
                _ => Ok(()),
            };
        }
        let (slot, turns) = (self.clone(), turns.clone());
        tokio::spawn(async move {
            progress.begin("waiting for the load of another model", None);
            let _turns = turns.of(&slot.devices).await;
            progress.begin("loading", None);
            let started = Instant::now();
            let loading = tokio::task::spawn_blocking(move || loader(&progress));
            let loaded = loading.await.unwrap_or_else(|_| Err("loading the model panicked".to_owned()));
            slot.load_ms.store(millis(started.elapsed()), Ordering::Relaxed);
            slot.finish_load(loaded);
        });
        Ok(())
    }

    fn finish_load(self: &Arc<Self>, loaded: Result<Engine, String>) {
        self.touch();
        match loaded {
            Ok(engine) => {
                self.known.get_or_init(|| engine.info().clone());
                tracing::info!(model = self.name, "the model is loaded");
                self.state.send_replace(State::Loaded(engine));
                if let Some(idle) = self.idle_unload {
                    tokio::spawn(unload_when_idle(Arc::downgrade(self), idle));
                }
            }
            Err(reason) => {
                tracing::error!(model = self.name, "the model cannot be loaded: {reason}");
                self.state.send_replace(State::Failed { reason, at: Instant::now() });
            }
        }
    }

    /// Begins to unload the model at a person's request. It is loaded again by a person, or by the next request if it is
    /// declared as loaded on demand.
    pub(super) fn unload_by_hand(self: &Arc<Self>, deadline: Duration) -> Result<(), EngineError> {
        self.unload(deadline, if self.on_demand { Reload::ByRequest } else { Reload::ByHand })
    }

    /// Begins to unload the model. New requests do not get it; running ones may use it until the deadline.
    pub(super) fn unload(self: &Arc<Self>, deadline: Duration, reload: Reload) -> Result<(), EngineError> {
        if self.loader.is_none() {
            let message =
                format!("{} was given to this process as a running engine and stays loaded", self.name);
            return Err(EngineError::invalid("model", message));
        }
        let mut engine = None;
        let mut is_loading = false;
        self.state.send_if_modified(|state| match state {
            State::Loaded(running) => {
                engine = Some(running.clone());
                *state = State::Unloading;
                true
            }
            State::Failed { .. } | State::Unloaded(_) => {
                *state = State::Unloaded(reload);
                true
            }
            State::Loading { .. } => {
                is_loading = true;
                false
            }
            State::Unloading => false,
        });
        if is_loading {
            return Err(self.missing());
        }
        let Some(engine) = engine else { return Ok(()) };
        let slot = self.clone();
        tokio::spawn(async move {
            engine.retire(deadline).await;
            tracing::info!(model = slot.name, "the model is unloaded");
            slot.state.send_replace(State::Unloaded(reload));
        });
        Ok(())
    }

    /// Waits until the model is neither being loaded nor being unloaded.
    pub(super) async fn settled(&self) -> ModelState {
        let mut states = self.state.subscribe();
        let is_settled = |state: &State| !matches!(state, State::Loading { .. } | State::Unloading);
        // The slot holds the sender, so the wait cannot fail.
        let _ = states.wait_for(is_settled).await;
        self.state()
    }

    /// Returns the error of a request that did not get the model.
    fn missing(&self) -> EngineError {
        let name = self.name.clone();
        match &*self.state.borrow() {
            State::Loading { progress, since } => EngineError::ModelLoading {
                name,
                retry_after_ms: self.retry_ms(since.elapsed(), progress),
                progress: progress.describe(),
            },
            State::Unloading => EngineError::ModelLoading {
                name,
                retry_after_ms: *RETRY_MS.start() as u32,
                progress: "it is being unloaded first".to_owned(),
            },
            State::Loaded(_) => EngineError::ModelLoading {
                name,
                retry_after_ms: *RETRY_MS.start() as u32,
                progress: "loading is almost complete".to_owned(),
            },
            State::Unloaded(Reload::ByRequest) => {
                EngineError::ModelUnloaded { name, why: "nobody has loaded it".to_owned() }
            }
            State::Unloaded(Reload::ByHand) => {
                let why = format!(
                    "an operator has unloaded it\n  hint: `skep model load {name}` or POST /v1/models loads it again"
                );
                EngineError::ModelUnloaded { name, why }
            }
            State::Failed { reason, .. } => EngineError::ModelUnloaded { name, why: reason.clone() },
        }
    }

    /// Estimates what is left of a load, from its progress or from how long the last one took.
    fn retry_ms(&self, elapsed: Duration, progress: &LoadProgress) -> u32 {
        let elapsed_ms = millis(elapsed);
        let whole_ms = match (progress.percent(), self.load_ms.load(Ordering::Relaxed)) {
            (Some(percent @ 5..), _) => elapsed_ms * 100 / u64::from(percent),
            (_, 0) => elapsed_ms.saturating_mul(2),
            (_, last_ms) => last_ms,
        };
        whole_ms.saturating_sub(elapsed_ms).clamp(*RETRY_MS.start(), *RETRY_MS.end()) as u32
    }

    fn touch(&self) {
        self.used_ms.store(millis(self.began.elapsed()), Ordering::Relaxed);
    }

    fn idle_for(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_millis(self.used_ms.load(Ordering::Relaxed)))
    }
}

/// Unloads the model once nobody has used it for this time, and then ends.
async fn unload_when_idle(slot: Weak<Slot>, idle: Duration) {
    loop {
        let wait = {
            let Some(slot) = slot.upgrade() else { return };
            let State::Loaded(_) = &*slot.state.borrow() else { return };
            idle.saturating_sub(slot.idle_for())
        };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
            continue;
        }
        let Some(slot) = slot.upgrade() else { return };
        let in_use = match &*slot.state.borrow() {
            State::Loaded(engine) => engine.is_in_use(),
            _ => return,
        };
        if in_use {
            slot.touch();
            continue;
        }
        tracing::info!(model = slot.name, idle_s = idle.as_secs(), "the model has been idle and is unloaded");
        // Only a model without a loader cannot be unloaded.
        let _ = slot.unload(IDLE_DEADLINE, Reload::ByRequest);
        return;
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
