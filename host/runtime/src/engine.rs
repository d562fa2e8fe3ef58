//! The WebAssembly engine: the one place where wasmtime is configured, and the clock that interrupts guests.
//!
//! Two engines with different settings reject each other's compiled code, so there is exactly one constructor.

use crate::{RuntimeError, RuntimeOptions};
use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// How often a running guest gives way to others and its limits are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(5);
/// Core instances, memories and tables that one component may have.
pub(crate) const CORE_INSTANCES_PER_AGENT: u32 = 16;
pub(crate) const MEMORIES_PER_AGENT: u32 = 4;
pub(crate) const TABLES_PER_AGENT: u32 = 16;
/// Entries of one table.
pub(crate) const TABLE_ELEMENTS: usize = 100_000;

/// A wasmtime engine with its ticker. The last clone stops the ticker.
#[derive(Clone)]
pub(crate) struct WasmEngine {
    pub(crate) engine: Engine,
    _ticker: Arc<Ticker>,
}

impl WasmEngine {
    /// With pooled memory if the machine lets us reserve the address space, else with memory on demand.
    pub(crate) fn new(options: &RuntimeOptions) -> Result<Self, RuntimeError> {
        let engine = match Engine::new(&config(Some(pool(options)))) {
            Ok(engine) => {
                tracing::info!(instances = options.max_instances, "instances are pooled");
                engine
            }
            Err(error) => {
                tracing::warn!(
                    reason = %format!("{error:#}"),
                    "address space for pooled instances cannot be reserved; instances are allocated on demand"
                );
                Engine::new(&config(None)).map_err(|error| RuntimeError::Internal {
                    message: format!("the WebAssembly engine does not start: {error:#}"),
                })?
            }
        };
        Ok(WasmEngine { _ticker: Arc::new(Ticker::start(engine.clone())?), engine })
    }
}

fn config(pool: Option<PoolingAllocationConfig>) -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .wasm_component_model_async(true)
        .epoch_interruption(true)
        .max_wasm_stack(512 << 10)
        .async_stack_size(2 << 20)
        // Nothing that toolchains emit unasked, and more to attack.
        .wasm_relaxed_simd(false)
        .wasm_memory64(false);
    if let Some(pool) = pool {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

fn pool(options: &RuntimeOptions) -> PoolingAllocationConfig {
    let instances = u32::try_from(options.max_instances).unwrap_or(u32::MAX);
    let mut pool = PoolingAllocationConfig::default();
    // Most components have one memory and a few core instances; the pool holds that for all of them, and the bounds
    // for one component are higher.
    pool.total_component_instances(instances)
        .total_stacks(instances.saturating_mul(2))
        .total_core_instances(instances.saturating_mul(4))
        .total_memories(instances.saturating_mul(2))
        .total_tables(instances.saturating_mul(4))
        .max_core_instances_per_component(CORE_INSTANCES_PER_AGENT)
        .max_memories_per_component(MEMORIES_PER_AGENT)
        .max_tables_per_component(TABLES_PER_AGENT)
        .max_memories_per_module(MEMORIES_PER_AGENT)
        .max_tables_per_module(TABLES_PER_AGENT)
        .table_elements(TABLE_ELEMENTS)
        .max_memory_size((options.ceilings.memory_mb as usize).saturating_mul(1 << 20));
    pool
}

/// A thread that advances the engine's epoch.
struct Ticker {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(engine: Engine) -> Result<Self, RuntimeError> {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("skep-epoch".into())
            .spawn(move || {
                while let Err(mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(TICK) {
                    engine.increment_epoch();
                }
            })
            .map_err(|error| RuntimeError::Internal {
                message: format!("the thread that interrupts guests does not start: {error}"),
            })?;
        Ok(Ticker { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
