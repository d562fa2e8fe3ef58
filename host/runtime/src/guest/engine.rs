//! The WebAssembly engine: the only place where wasmtime is configured, and the ticker that interrupts guests.
//!
//! Two engines with different settings reject each other's compiled code, so there is exactly one constructor.

use super::places::OWN_OF_ALL_DEPTHS;
use crate::{RuntimeError, RuntimeOptions, limits::MEMORIES_PER_AGENT};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, Thread},
    time::Duration,
};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Number of ticks for which the ticker continues after the last guest, so that consecutive turns do not wake it each
/// time: waking it costs more than the turn's instance.
const IDLE_TICKS: u32 = 50;
/// Interval at which a running guest yields to others and its limits are checked.
const TICK: Duration = Duration::from_millis(1);
/// Stack space for host functions, in addition to what the guest may use.
const HOST_STACK_BYTES: usize = 1_536 << 10;

/// Number of bytes of a freed instance's memory that are reset in place and stay resident in its pool slot: returning them
/// to the system, and the page faults of the next instance, would cost more.
const MEMORY_KEEP_RESIDENT: usize = 256 << 10;
const TABLE_KEEP_RESIDENT: usize = 16 << 10;

/// A wasmtime engine with its ticker. Dropping the last clone stops the ticker.
#[derive(Clone)]
pub(crate) struct WasmEngine {
    pub(crate) engine: Engine,
    ticker: Arc<Ticker>,
}

impl WasmEngine {
    /// Creates an engine with pooled instances if the address space for them can be reserved, and one that allocates on
    /// demand otherwise.
    pub(crate) fn new(options: &RuntimeOptions) -> Result<Self, RuntimeError> {
        let engine = match Engine::new(&config(options, Some(pool(options)))) {
            Ok(engine) => {
                tracing::debug!(instances = options.max_instances, "instances are pooled");
                engine
            }
            Err(error) => {
                tracing::warn!(
                    reason = %format!("{error:#}"),
                    "address space for pooled instances cannot be reserved; instances are allocated on demand"
                );
                Engine::new(&config(options, None)).map_err(|error| RuntimeError::Internal {
                    message: format!("the WebAssembly engine failed to start: {error:#}"),
                })?
            }
        };
        Ok(WasmEngine { ticker: Arc::new(Ticker::start(engine.clone())?), engine })
    }

    /// Registers a running guest. The caller holds the returned guard while the guest runs.
    pub(crate) fn tick(&self) -> Ticking {
        self.ticker.shared.guest_begins(self.ticker.thread());
        Ticking(self.ticker.shared.clone())
    }
}

fn config(options: &RuntimeOptions, pool: Option<PoolingAllocationConfig>) -> Config {
    let stack_bytes = (options.stack_kb as usize) << 10;
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .wasm_component_model_async(true)
        .epoch_interruption(true)
        .max_wasm_stack(stack_bytes)
        .async_stack_size(stack_bytes + HOST_STACK_BYTES)
        // Toolchains do not emit these by default, and they add attack surface.
        .wasm_relaxed_simd(false)
        .wasm_memory64(false);
    if let Some(pool) = pool {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

fn pool(options: &RuntimeOptions) -> PoolingAllocationConfig {
    let instances = u32::try_from(options.max_instances + OWN_OF_ALL_DEPTHS).unwrap_or(u32::MAX);
    let (ceilings, mut pool) = (&options.ceilings, PoolingAllocationConfig::default());
    // Most components have one memory and a few core instances. The totals of the pool assume that; the bounds for a
    // single component are higher.
    pool.total_component_instances(instances)
        .total_stacks(instances.saturating_mul(2))
        .total_core_instances(instances.saturating_mul(4))
        .total_memories(instances.saturating_mul(2))
        .total_tables(instances.saturating_mul(4))
        .max_core_instances_per_component(ceilings.instances)
        .max_memories_per_component(MEMORIES_PER_AGENT)
        .max_tables_per_component(ceilings.tables)
        .max_memories_per_module(MEMORIES_PER_AGENT)
        .max_tables_per_module(ceilings.tables)
        .table_elements(ceilings.table_elements as usize)
        .max_memory_size((ceilings.memory_mb as usize).saturating_mul(1 << 20));
    // Without the pagemap scan, wasmtime would clear the lowest addresses, which a guest may never have touched.
    if PoolingAllocationConfig::is_pagemap_scan_available() {
        pool.pagemap_scan(Enabled::Yes)
            .linear_memory_keep_resident(MEMORY_KEEP_RESIDENT)
            .table_keep_resident(TABLE_KEEP_RESIDENT);
    }
    pool
}

/// The thread that advances the engine's epoch while any guest runs.
struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    guests: AtomicUsize,
    /// Whether the thread sleeps until it is unparked.
    parked: AtomicBool,
    stopped: AtomicBool,
}

/// A guard that keeps the epoch advancing until it is dropped.
pub(crate) struct Ticking(Arc<Shared>);

impl Ticker {
    fn start(engine: Engine) -> Result<Self, RuntimeError> {
        let shared = Arc::new(Shared::default());
        let seen = shared.clone();
        let thread = std::thread::Builder::new().name("skep-epoch".into()).spawn(move || seen.tick(&engine));
        let thread = thread.map_err(|error| RuntimeError::Internal {
            message: format!("the thread that interrupts guests failed to start: {error}"),
        })?;
        Ok(Ticker { shared, thread: Some(thread) })
    }

    fn thread(&self) -> &Thread {
        self.thread.as_ref().expect("the thread is taken only when the ticker is dropped").thread()
    }
}

impl Shared {
    fn guest_begins(&self, ticker: &Thread) {
        self.guests.fetch_add(1, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) {
            ticker.unpark();
        }
    }

    fn tick(&self, engine: &Engine) {
        let mut idle_ticks = 0;
        while !self.stopped.load(Ordering::SeqCst) {
            if self.guests.load(Ordering::SeqCst) > 0 {
                idle_ticks = 0;
            } else if idle_ticks < IDLE_TICKS {
                idle_ticks += 1;
            } else {
                self.park_until_a_guest_begins();
                continue;
            }
            std::thread::sleep(TICK);
            engine.increment_epoch();
        }
    }

    /// Parks the thread until a guest runs. A guest that starts after `parked` is set unparks the thread; one that started
    /// earlier is seen in `guests`.
    fn park_until_a_guest_begins(&self) {
        self.parked.store(true, Ordering::SeqCst);
        while self.guests.load(Ordering::SeqCst) == 0 && !self.stopped.load(Ordering::SeqCst) {
            std::thread::park();
        }
        self.parked.store(false, Ordering::SeqCst);
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.guests.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
