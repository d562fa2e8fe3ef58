//! One guest instance: a fresh wasmtime store with every limit enforced, for a single call.
//!
//! All guest code runs in a bounded store from this module: instantiation (a start function is guest code), descriptions
//! and turns. A guest may break itself, but it never stops the host.

mod backtrace;
mod command;
mod cpu;
mod engine;
mod exports;
mod places;
mod verdict;

pub(crate) use engine::WasmEngine;
pub(crate) use exports::AgentPre;
pub(crate) use places::{InstancePlace, InstancePlaces};

use crate::{
    Limits, RuntimeError,
    bindings::{handler, log::Level},
    capability::TurnContext,
    limits::LimitTrap,
    session::{Entry, Reply},
};
use cpu::{CpuMeter, Metered};
use exports::GuestInstance;
use std::{sync::Arc, time::Instant};
use verdict::Verdict;
use wasmtime::{AsContextMut, Store, UpdateDeadline, component::Accessor};

/// Maximum bytes of strings and lists that a guest passes in one call.
const MAX_CALL_BYTES: usize = 32 << 20;
/// Maximum number of resources, streams, futures and calls that a guest holds at once.
const MAX_HANDLES: usize = 4_096;

/// The code of a guest, and the limits under which it runs.
#[derive(Clone, Copy)]
pub(crate) struct Code<'a> {
    pub(crate) wasm: &'a WasmEngine,
    pub(crate) pre: &'a AgentPre,
    pub(crate) limits: &'a Limits,
}

/// Asks a component to describe itself.
pub(crate) async fn describe(
    code: Code<'_>,
    context: TurnContext,
) -> (Result<handler::Description, RuntimeError>, TurnContext) {
    let deadline = Instant::now() + std::time::Duration::from_millis(code.limits.turn_ms.into());
    call(code, deadline, std::future::pending(), context, async |agent, accessor| {
        agent.describe(accessor).await
    })
    .await
}

/// Runs one turn until it finishes, its deadline passes or `stop` resolves.
pub(crate) async fn take_turn(
    code: Code<'_>,
    deadline: Instant,
    stop: impl Future<Output = ()>,
    context: TurnContext,
    entry: Entry,
) -> (Result<Reply, RuntimeError>, TurnContext) {
    let entry = match entry {
        Entry::Message(message) if code.pre.is_command() => {
            let (ended, context) = command::run(code, deadline, stop, context, message.text).await;
            return (ended.map(Reply::printed), context);
        }
        entry => entry,
    };
    call(code, deadline, stop, context, async |agent, accessor| {
        Ok(match entry {
            Entry::Message(message) => agent.on_message(accessor, message).await?.into(),
            Entry::Alarm(alarm) => agent.on_alarm(accessor, alarm).await?.into(),
            Entry::Event(event) => agent.on_event(accessor, event).await?.into(),
            Entry::Tool(invocation) => agent.call_tool(accessor, invocation).await?.into(),
        })
    })
    .await
}

/// Creates an instance without calling any export. A start function is guest code, so the bounds of a turn apply to it.
pub(crate) async fn instantiate(
    code: Code<'_>,
    context: TurnContext,
) -> Result<Store<TurnContext>, RuntimeError> {
    let (mut store, meter) = bounded_store(code, context);
    let _ticking = code.wasm.tick();
    let deadline = Instant::now() + std::time::Duration::from_millis(code.limits.turn_ms.into());
    let made = Metered::new(code.pre.instantiate(store.as_context_mut()), meter);
    let made = tokio::time::timeout_at(deadline.into(), made).await;
    match made.map_err(|_elapsed| RuntimeError::DeadlineExceeded)? {
        Ok(_agent) => Ok(store),
        Err(trap) => Err(judge(code.limits, store.data_mut(), trap)),
    }
}

async fn call<R: Send + 'static>(
    code: Code<'_>,
    deadline: Instant,
    stop: impl Future<Output = ()>,
    context: TurnContext,
    body: impl AsyncFnOnce(&GuestInstance<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (Result<R, RuntimeError>, TurnContext) {
    let (ended, mut context) = bounded(code, deadline, stop, context, body).await;
    let result = ended.and_then(|ended| ended.map_err(|trap| judge(code.limits, &mut context, trap)));
    (result, context)
}

/// Converts a trap to an error. If the guest trapped by itself, the error is also written to its log, whatever language
/// the guest is written in.
fn judge(limits: &Limits, context: &mut TurnContext, trap: wasmtime::Error) -> RuntimeError {
    let error = Verdict { limits, context }.on(trap);
    if matches!(error, RuntimeError::Trap { .. }) {
        context.log.write(Level::Error, &error.to_string());
    }
    error
}

/// Runs `body` on a new instance. The inner error says why the guest stopped, the outer one why the host stopped it.
async fn bounded<R: Send + 'static>(
    code: Code<'_>,
    deadline: Instant,
    stop: impl Future<Output = ()>,
    context: TurnContext,
    body: impl AsyncFnOnce(&GuestInstance<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (Result<wasmtime::Result<R>, RuntimeError>, TurnContext) {
    let (mut store, meter) = bounded_store(code, context);
    let ticking = code.wasm.tick();
    let run = async {
        let agent = code.pre.instantiate(store.as_context_mut()).await?;
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
    (ended, context)
}

fn bounded_store(code: Code<'_>, context: TurnContext) -> (Store<TurnContext>, Arc<CpuMeter>) {
    let meter = Arc::new(CpuMeter::new(code.limits.cpu_ms));
    let mut store = Store::new(&code.wasm.engine, context);
    store.limiter(|context| &mut context.limiter);
    store.set_hostcall_fuel(MAX_CALL_BYTES);
    store.set_max_component_handles(MAX_HANDLES);
    // A running guest is interrupted at every tick, to yield to others and to have its CPU time checked. The first tick may
    // come at once and does not count; otherwise a short call would wait behind all other ready tasks.
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
