//! One guest instance: a fresh store with every bound in force, for one call.
//!
//! Every path on which guest code runs goes through [`call`]: instantiation (a start function is guest code), a
//! description, a turn. What the guest may do to itself it may do; the host goes on.

mod cpu;
mod memory;
mod verdict;

pub(crate) use memory::MemoryLimiter;
pub(crate) use verdict::LimitTrap;

use crate::{
    Limits, RuntimeError,
    bindings::{Agent, AgentPre, handler},
    capability::TurnContext,
    component::Deployed,
    engine::WasmEngine,
    session::{Entry, Reply},
};
use cpu::{CpuMeter, Metered};
use std::{sync::Arc, time::Instant};
use verdict::Verdict;
use wasmtime::{AsContextMut, Store, UpdateDeadline};

/// Of strings and lists that a guest passes in one call.
const MAX_CALL_BYTES: usize = 32 << 20;
/// Resources, streams, futures and calls that a guest holds at once.
const MAX_HANDLES: usize = 4_096;

/// Asks a component what it is.
pub(crate) async fn describe(
    wasm: &WasmEngine,
    pre: &AgentPre,
    limits: &Limits,
    context: TurnContext,
) -> (Result<handler::Description, RuntimeError>, TurnContext) {
    let deadline = Instant::now() + std::time::Duration::from_millis(limits.turn_ms.into());
    call(wasm, pre, limits, deadline, std::future::pending(), context, async |agent, accessor| {
        accessor.with(|mut store| agent.handler(store.as_context_mut()))?.call_describe(accessor).await
    })
    .await
}

/// Runs one turn, until it ends, its deadline comes or `stop` resolves.
pub(crate) async fn take_turn(
    wasm: &WasmEngine,
    agent: &Arc<Deployed>,
    deadline: Instant,
    stop: impl Future<Output = ()>,
    context: TurnContext,
    entry: Entry,
) -> (Result<Reply, RuntimeError>, TurnContext) {
    call(wasm, &agent.pre, &agent.limits, deadline, stop, context, async |agent, accessor| {
        Ok(match entry {
            Entry::Message(message) => {
                let guest = accessor.with(|mut store| agent.handler(store.as_context_mut()))?;
                guest.call_on_message(accessor, message).await?.into()
            }
            Entry::Alarm(alarm) => {
                let guest = accessor.with(|mut store| agent.alarms(store.as_context_mut()))?;
                guest.call_on_alarm(accessor, alarm).await?.into()
            }
            Entry::Event(event) => {
                let guest = accessor.with(|mut store| agent.events(store.as_context_mut()))?;
                guest.call_on_event(accessor, event).await?.into()
            }
            Entry::Tool(invocation) => {
                let guest = accessor.with(|mut store| agent.tools(store.as_context_mut()))?;
                guest.call_call_tool(accessor, invocation).await?.into()
            }
        })
    })
    .await
}

/// Makes an instance of which nothing is called. A start function is guest code: it has the bounds of a turn.
pub(crate) async fn instantiate(
    wasm: &WasmEngine,
    agent: &Arc<Deployed>,
    context: TurnContext,
) -> Result<Store<TurnContext>, RuntimeError> {
    let (mut store, meter) = bounded_store(wasm, &agent.limits, context);
    let _ticking = wasm.tick();
    let deadline = Instant::now() + std::time::Duration::from_millis(agent.limits.turn_ms.into());
    let made = Metered::new(agent.pre.instantiate(store.as_context_mut()), meter);
    let made = tokio::time::timeout_at(deadline.into(), made).await;
    match made.map_err(|_elapsed| RuntimeError::DeadlineExceeded)? {
        Ok(_agent) => Ok(store),
        Err(trap) => Err(Verdict { limits: &agent.limits, context: store.data() }.on(trap)),
    }
}

async fn call<R: Send + 'static>(
    wasm: &WasmEngine,
    pre: &AgentPre,
    limits: &Limits,
    deadline: Instant,
    stop: impl Future<Output = ()>,
    context: TurnContext,
    body: impl AsyncFnOnce(&Agent<'_>, &wasmtime::component::Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (Result<R, RuntimeError>, TurnContext) {
    let (mut store, meter) = bounded_store(wasm, limits, context);
    let ticking = wasm.tick();
    let run = async {
        let agent = pre.instantiate(store.as_context_mut()).await?;
        store.run_concurrent(async |accessor| body(&agent, accessor).await).await?
    };
    let ended = tokio::select! {
        ended = tokio::time::timeout_at(deadline.into(), Metered::new(run, meter)) => {
            ended.map_err(|_elapsed| RuntimeError::DeadlineExceeded)
        }
        () = stop => Err(RuntimeError::Cancelled),
    };
    drop(ticking);
    let mut context = store.into_data();
    context.close();
    let result = match ended {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(trap)) => Err(Verdict { limits, context: &context }.on(trap)),
        Err(stopped) => Err(stopped),
    };
    (result, context)
}

fn bounded_store(
    wasm: &WasmEngine,
    limits: &Limits,
    context: TurnContext,
) -> (Store<TurnContext>, Arc<CpuMeter>) {
    let meter = Arc::new(CpuMeter::new(limits.cpu_ms));
    let mut store = Store::new(&wasm.engine, context);
    store.limiter(|context| &mut context.memory);
    store.set_hostcall_fuel(MAX_CALL_BYTES);
    store.set_max_component_handles(MAX_HANDLES);
    // The guest is stopped at every tick that it runs through, to give way to others and to have its time looked at. The
    // first tick may come at once and does not count: a short call would wait behind all others that are ready.
    store.set_epoch_deadline(2);
    let metered = meter.clone();
    store.epoch_deadline_callback(move |_| {
        if metered.is_over() {
            return Err(LimitTrap::CPU.into());
        }
        Ok(UpdateDeadline::Yield(1))
    });
    (store, meter)
}
