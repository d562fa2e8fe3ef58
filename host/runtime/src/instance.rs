//! One guest instance: a fresh wasmtime store with every limit enforced, for a single call.
//!
//! All guest code runs in a bounded store from this module: instantiation (a start function is guest code), descriptions
//! and turns. A guest may break itself, but it never stops the host.

mod backtrace;
mod command;
mod cpu;
mod places;
mod verdict;

pub(crate) use places::{InstancePlace, InstancePlaces, OWN_OF_ALL_DEPTHS};

use crate::{
    Limits, RuntimeError,
    bindings::{handler, log::Level},
    capability::TurnContext,
    component::Deployed,
    engine::WasmEngine,
    exports::{Agent, AgentPre},
    limits::LimitTrap,
    session::{Entry, Reply},
};
use cpu::{CpuMeter, Metered};
use std::{convert::Infallible, sync::Arc, time::Instant};
use verdict::Verdict;
use wasmtime::{AsContextMut, Store, UpdateDeadline, component::Accessor};

/// Maximum bytes of strings and lists that a guest passes in one call.
const MAX_CALL_BYTES: usize = 32 << 20;
/// Maximum number of resources, streams, futures and calls that a guest holds at once.
const MAX_HANDLES: usize = 4_096;

/// How a guest's call ended.
pub(crate) enum Left<R, S> {
    /// The guest returned or trapped, or its deadline passed.
    Returned(Result<R, RuntimeError>),
    /// The caller stopped the guest, for the reason that its `stop` future gave.
    Stopped(S),
}

impl<R, S> Left<R, S> {
    fn and_then<T>(self, then: impl FnOnce(R) -> Result<T, RuntimeError>) -> Left<T, S> {
        match self {
            Left::Returned(result) => Left::Returned(result.and_then(then)),
            Left::Stopped(why) => Left::Stopped(why),
        }
    }
}

/// Asks a component to describe itself.
pub(crate) async fn describe(
    wasm: &WasmEngine,
    pre: &AgentPre,
    limits: &Limits,
    context: TurnContext,
) -> (Result<handler::Description, RuntimeError>, TurnContext) {
    let deadline = Instant::now() + std::time::Duration::from_millis(limits.turn_ms.into());
    let forever = std::future::pending::<Infallible>();
    let (Left::Returned(described), context) =
        call(wasm, pre, limits, deadline, forever, context, async |agent, accessor| {
            agent.describe(accessor).await
        })
        .await;
    (described, context)
}

/// Runs one turn until it finishes, its deadline passes or `stop` resolves.
pub(crate) async fn take_turn<S>(
    wasm: &WasmEngine,
    agent: &Arc<Deployed>,
    deadline: Instant,
    stop: impl Future<Output = S>,
    context: TurnContext,
    entry: Entry,
) -> (Left<Reply, S>, TurnContext) {
    let entry = match entry {
        Entry::Message(message) if agent.pre.is_command() => {
            let (left, context) = command::run(wasm, agent, deadline, stop, context, message.text).await;
            return (left.and_then(|text| Ok(Reply::printed(text))), context);
        }
        entry => entry,
    };
    call(wasm, &agent.pre, &agent.limits, deadline, stop, context, async |agent, accessor| {
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
        Err(trap) => Err(judge(&agent.limits, store.data_mut(), trap)),
    }
}

async fn call<R: Send + 'static, S>(
    wasm: &WasmEngine,
    pre: &AgentPre,
    limits: &Limits,
    deadline: Instant,
    stop: impl Future<Output = S>,
    context: TurnContext,
    body: impl AsyncFnOnce(&Agent<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (Left<R, S>, TurnContext) {
    let (left, mut context) = bounded(wasm, pre, limits, deadline, stop, context, body).await;
    let left = left.and_then(|ended| ended.map_err(|trap| judge(limits, &mut context, trap)));
    (left, context)
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

/// Runs `body` on a new instance. The inner error says why the guest stopped, the outer one that its
/// deadline passed.
async fn bounded<R: Send + 'static, S>(
    wasm: &WasmEngine,
    pre: &AgentPre,
    limits: &Limits,
    deadline: Instant,
    stop: impl Future<Output = S>,
    context: TurnContext,
    body: impl AsyncFnOnce(&Agent<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (Left<wasmtime::Result<R>, S>, TurnContext) {
    let (mut store, meter) = bounded_store(wasm, limits, context);
    let ticking = wasm.tick();
    let run = async {
        let agent = pre.instantiate(store.as_context_mut()).await?;
        store.run_concurrent(async |accessor| body(&agent, accessor).await).await?
    };
    let left = tokio::select! {
        ended = tokio::time::timeout_at(deadline.into(), Metered::new(run, meter)) => {
            Left::Returned(ended.map_err(|_elapsed| RuntimeError::DeadlineExceeded))
        }
        why = stop => Left::Stopped(why),
    };
    drop(ticking);
    let mut context = store.into_data();
    context.close();
    (left, context)
}

fn bounded_store(
    wasm: &WasmEngine,
    limits: &Limits,
    context: TurnContext,
) -> (Store<TurnContext>, Arc<CpuMeter>) {
    let meter = Arc::new(CpuMeter::new(limits.cpu_ms));
    let mut store = Store::new(&wasm.engine, context);
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
