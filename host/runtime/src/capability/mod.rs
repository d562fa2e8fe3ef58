//! Host functions for guests: one module per WIT interface, and the context that they share.
//!
//! A [`TurnContext`] lives in the wasmtime store of one turn. Only what the session takes out of it to commit outlives the
//! turn.
//!
//! The module of an interface has one order: a header with the interface's name, its bounds, the types that a turn holds,
//! the implementation of the bindings' `Host` traits, which reads arguments and converts errors, then the methods of the
//! types, helpers, and tests. In a folder, `mod.rs` has the header and the `Host` traits, and each
//! other file a part of the interface's work.

mod call_budget;
pub(crate) mod events;
mod http;
pub(crate) mod inference;
pub(crate) mod log;
pub(crate) mod schedule;
mod session_quota;
pub(crate) mod state;
mod timer;
pub(crate) mod tools;
mod turn;
mod wasi;

pub(crate) use inference::{
    CommittedConversations, ConversationSet, StoredConversation, check_conversation, is_quick_conversation,
    left_use,
};
pub(crate) use session_quota::{SessionQuota, check_size};
pub(crate) use turn::{Reach, Turn};

use crate::{
    Limits, bindings,
    limits::{InstanceLimiter, TurnUse},
};
use call_budget::CallBudget;
use events::TurnEvents;
use log::TurnLog;
use schedule::ScheduleView;
use state::StateView;
use std::sync::Arc;
use tokio::task::JoinSet;
use wasi::{CommandOutput, Wasi};
use wasmtime::component::{HasData, Linker, ResourceTable};

/// Maximum number of host resources that a guest may hold at once.
const MAX_RESOURCES: usize = 1_024;

/// The data that the host functions of one turn work on.
pub(crate) struct TurnContext {
    /// `None` while an agent describes itself, because there is no session then.
    pub(crate) turn: Option<Arc<Turn>>,
    pub(crate) state: StateView,
    pub(crate) conversations: ConversationSet,
    pub(crate) log: TurnLog,
    /// `None` while an agent describes itself, like `events`.
    pub(crate) schedules: Option<ScheduleView>,
    pub(crate) events: Option<TurnEvents>,
    pub(crate) limiter: InstanceLimiter,
    calls: CallBudget,
    table: ResourceTable,
    wasi: Wasi,
    /// Generations that the guest reads as streams. They are aborted when the turn ends.
    streams: JoinSet<()>,
}

impl TurnContext {
    pub(crate) fn new(
        turn: Option<Arc<Turn>>,
        state: StateView,
        conversations: ConversationSet,
        log: TurnLog,
        limits: &Limits,
    ) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(MAX_RESOURCES);
        let (wasi, streams) = (Wasi::default(), JoinSet::new());
        let used = used_by(turn.as_deref());
        let limiter = InstanceLimiter::new(limits, used.clone());
        let calls = CallBudget::new(limits, used.clone());
        let log = log.within(limits.log_kb, used);
        TurnContext {
            turn,
            state,
            conversations,
            log,
            schedules: None,
            events: None,
            limiter,
            calls,
            table,
            wasi,
            streams,
        }
    }

    /// Returns the counts of what the turn uses. Those of an agent that describes itself are thrown away.
    pub(crate) fn used(&self) -> Arc<TurnUse> {
        used_by(self.turn.as_deref())
    }

    /// Makes the guest a command: `input` is its standard input, and its standard output does not go to the log.
    pub(crate) fn as_command(&mut self, input: String) {
        self.wasi = Wasi::for_command(input);
    }

    /// Takes the output of a command, after [`TurnContext::close`].
    pub(crate) fn take_output(&mut self) -> CommandOutput {
        self.wasi.take_output()
    }

    /// Returns the end of the guest's standard error, after [`TurnContext::close`].
    pub(crate) fn last_printed(&self) -> Option<&str> {
        self.wasi.last_error()
    }

    /// Aborts running streams and collects the guest's output.
    pub(crate) fn close(&mut self) {
        self.streams.abort_all();
        self.wasi.drain_into(&mut self.log);
    }
}

fn used_by(turn: Option<&Turn>) -> Arc<TurnUse> {
    turn.map(|turn| turn.journal.turn_use().clone()).unwrap_or_default()
}

/// The marker type by which wasmtime finds the context in a store.
pub(crate) struct Capabilities;

impl HasData for Capabilities {
    type Data<'a> = &'a mut TurnContext;
}

/// Links every interface that any agent may import. Imports that an agent may not have were refused earlier.
pub(crate) fn add_to_linker(linker: &mut Linker<TurnContext>) -> wasmtime::Result<()> {
    bindings::inference::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::inference_sync::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::state::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::tools::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::timer::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::http::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::log::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::schedule::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    bindings::events::add_to_linker::<_, Capabilities>(linker, |context| context)?;
    wasmtime_wasi::p2::add_to_linker_async(linker)
}
