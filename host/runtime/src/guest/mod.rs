//! One guest instance: a fresh wasmtime store with every limit enforced, for a single call.
//!
//! All guest code runs in a bounded store from this module: instantiation (a start function is guest code), descriptions
//! and turns. A guest may break itself, but it never stops the host.

mod backtrace;
mod command;
mod cpu;
mod engine;
mod entry;
mod exports;
mod slots;
mod verdict;

pub(crate) use engine::WasmEngine;
pub(crate) use entry::{Entry, Reply};
pub(crate) use exports::AgentPre;
pub(crate) use slots::InstanceSlot;

use crate::{
    Limits, RuntimeError,
    bindings::{handler, log::Level},
    capability::TurnContext,
    deadline::Deadline,
    limits::LimitTrap,
    tenancy::Tenancy,
};
use cpu::{CpuMeter, Metered};
use exports::GuestInstance;
use slots::InstanceSlots;
use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};
use verdict::Verdict;
use wasmtime::{AsContextMut, Store, UpdateDeadline, component::Accessor};

/// Maximum bytes of strings and lists that a guest passes in one call.
const MAX_CALL_BYTES: usize = 32 << 20;
/// Maximum number of resources, streams, futures and calls that a guest holds at once.
const MAX_HANDLES: usize = 4_096;
/// Time that a component has at least to describe itself, however short its turns are: it is deployed on busy machines, too.
const DESCRIBE_TIME: Duration = Duration::from_secs(1);

/// How a guest's call ended.
pub(crate) enum CallEnd<R, S> {
    /// The guest returned or trapped, or its deadline passed.
    Returned(Result<R, RuntimeError>),
    /// The caller stopped the guest, for the reason that its `stop` future gave.
    Stopped(S),
}

impl<R, S> CallEnd<R, S> {
    fn and_then<T>(self, then: impl FnOnce(R) -> Result<T, RuntimeError>) -> CallEnd<T, S> {
        match self {
            CallEnd::Returned(result) => CallEnd::Returned(result.and_then(then)),
            CallEnd::Stopped(why) => CallEnd::Stopped(why),
        }
    }
}

/// The code of a guest, and the limits under which it runs.
#[derive(Clone, Copy)]
pub(crate) struct Code<'a> {
    pub(crate) wasm: &'a WasmEngine,
    pub(crate) pre: &'a AgentPre,
    pub(crate) limits: &'a Limits,
}

/// The engine, and the slots in which its instances run. Clones share both.
#[derive(Clone)]
pub(crate) struct Instances {
    pub(crate) wasm: WasmEngine,
    slots: Arc<InstanceSlots>,
}

impl Instances {
    pub(crate) fn new(wasm: WasmEngine, max_instances: usize, tenancy: Tenancy) -> Self {
        Instances { wasm, slots: Arc::new(InstanceSlots::new(max_instances, tenancy)) }
    }

    /// Waits for a slot to run an instance. `depth` is the length of the chain of turns that wait
    /// for this one.
    pub(crate) async fn slot(&self, depth: usize, tenant: &str) -> InstanceSlot {
        self.slots.take(depth, tenant).await
    }

    /// Returns how many of the slots that all turns share are taken, and how many there are.
    pub(crate) fn taken(&self) -> (usize, usize) {
        self.slots.taken()
    }
}

/// Asks a component to describe itself.
pub(crate) async fn describe(
    code: Code<'_>,
    context: TurnContext,
) -> (Result<handler::Description, RuntimeError>, TurnContext) {
    let time = Duration::from_millis(code.limits.turn_ms.into()).max(DESCRIBE_TIME);
    let deadline = Deadline::new(Instant::now() + time);
    let forever = std::future::pending::<Infallible>();
    let (CallEnd::Returned(described), context) =
        call(code, deadline, forever, context, async |agent, accessor| agent.describe(accessor).await).await;
    (described, context)
}

/// Runs one turn until it finishes, its deadline passes or `stop` resolves.
pub(crate) async fn take_turn<S>(
    code: Code<'_>,
    deadline: Deadline,
    stop: impl Future<Output = S>,
    context: TurnContext,
    entry: Entry,
) -> (CallEnd<Reply, S>, TurnContext) {
    let entry = match entry {
        Entry::Message(message) if code.pre.is_command() => {
            let (left, context) = command::run(code, deadline, stop, context, message.text).await;
            return (left.and_then(|text| Ok(Reply::printed(text))), context);
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
    let deadline = Instant::now() + Duration::from_millis(code.limits.turn_ms.into());
    let made = Metered::new(code.pre.instantiate(store.as_context_mut()), meter);
    let made = tokio::time::timeout_at(deadline.into(), made).await;
    match made.map_err(|_elapsed| RuntimeError::DeadlineExceeded)? {
        Ok(_agent) => Ok(store),
        Err(trap) => Err(judge(code.limits, store.data_mut(), trap)),
    }
}

async fn call<R: Send + 'static, S>(
    code: Code<'_>,
    deadline: Deadline,
    stop: impl Future<Output = S>,
    context: TurnContext,
    body: impl AsyncFnOnce(&GuestInstance<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (CallEnd<R, S>, TurnContext) {
    let (left, mut context) = bounded(code, deadline, stop, context, body).await;
    let left = left.and_then(|ended| ended.map_err(|trap| judge(code.limits, &mut context, trap)));
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
    code: Code<'_>,
    deadline: Deadline,
    stop: impl Future<Output = S>,
    context: TurnContext,
    body: impl AsyncFnOnce(&GuestInstance<'_>, &Accessor<TurnContext>) -> wasmtime::Result<R>,
) -> (CallEnd<wasmtime::Result<R>, S>, TurnContext) {
    let (mut store, meter) = bounded_store(code, context);
    let ticking = code.wasm.tick();
    let run = async {
        let agent = code.pre.instantiate(store.as_context_mut()).await?;
        store.run_concurrent(async |accessor| body(&agent, accessor).await).await?
    };
    let left = tokio::select! {
        biased;
        ended = Metered::new(run, meter) => CallEnd::Returned(Ok(ended)),
        () = deadline.passed() => CallEnd::Returned(Err(RuntimeError::DeadlineExceeded)),
        why = stop => CallEnd::Stopped(why),
    };
    drop(ticking);
    let mut context = store.into_data();
    context.close();
    (left, context)
}

fn bounded_store(code: Code<'_>, context: TurnContext) -> (Store<TurnContext>, Arc<CpuMeter>) {
    let meter = Arc::new(CpuMeter::new(code.limits.cpu_ms, context.used()));
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
