//! Why a guest stopped, in words that help its author.

use super::{MAX_CALL_BYTES, backtrace, limiter::Refused};
use crate::{
    Limits, RuntimeError,
    capability::{TurnContext, log::cut},
    engine::MEMORIES_PER_AGENT,
    exports::NoExport,
};
use wasmtime::{Trap, component::ResourceTableError};

const MAX_MESSAGE_BYTES: usize = 4 << 10;
const MAX_REASON_BYTES: usize = 1 << 10;

/// Raised by the host in the middle of guest code: the line under `[limits]` that was exceeded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("limit {0} exceeded")]
pub(crate) struct LimitTrap(&'static str);

impl LimitTrap {
    pub(crate) const CPU: LimitTrap = LimitTrap("cpu_ms");
    pub(crate) const HOST_CALLS: LimitTrap = LimitTrap("host_calls");
    pub(crate) const HOST_CALL_BYTES: LimitTrap = LimitTrap("host_call_kb");
}

/// wasmtime's own bound of what one call copies has no public type. A test holds this to its words.
const CALL_TOO_LARGE: &str = "fuel allocated for hostcalls has been exhausted";

/// Nor has its own bound of what a component is made of; the word after this says of what it is too much.
const TOO_MANY_PARTS: &str = "resource limit exceeded: ";

/// Of a bound that no setting moves.
const FIXED: &str = "the host allows no more";

/// Which lines allow more.
fn settable(limit: &str) -> String {
    format!("`{limit}` under [limits] in agent.toml asks for more, in skep.toml it is the operator's ceiling")
}

/// What the trap is judged by.
pub(super) struct Verdict<'a> {
    pub(super) limits: &'a Limits,
    pub(super) context: &'a TurnContext,
}

impl Verdict<'_> {
    pub(super) fn on(&self, error: wasmtime::Error) -> RuntimeError {
        let exceeded = |limit, message| RuntimeError::LimitExceeded { limit, message };
        if let Some(LimitTrap(limit)) = error.downcast_ref() {
            return exceeded(limit, format!("the agent {}; {}", self.excess(limit), settable(limit)));
        }
        if let Some(missing) = error.downcast_ref::<NoExport>() {
            return RuntimeError::AgentFailed { message: missing.to_string() };
        }
        let trap = error.downcast_ref::<Trap>();
        if trap == Some(&Trap::StackOverflow) {
            let setting = "`stack_kb` under [runtime] in skep.toml is what the operator gives each agent";
            return exceeded(
                "stack_kb",
                format!("the agent's calls nest too deeply for its stack; {setting}"),
            );
        }
        let cause = error.root_cause().to_string();
        if let Some(part) = cause.strip_prefix(TOO_MANY_PARTS) {
            return self.too_many(part);
        }
        if cause.contains(CALL_TOO_LARGE) {
            let message = format!("one call passes more than {MAX_CALL_BYTES} bytes; {FIXED}");
            return exceeded("call_bytes", message);
        }
        if matches!(error.downcast_ref(), Some(ResourceTableError::Full)) {
            return exceeded(
                "resources",
                "the agent holds too many conversations at once; drop them".to_owned(),
            );
        }
        match self.context.limiter.refused() {
            Some(Refused::Memory) => {
                let (limit, setting) = (self.limits.memory_mb, settable("memory_mb"));
                let message = format!("the agent asked for more than {limit} MiB of memory; {setting}");
                return exceeded("memory_mb", message);
            }
            Some(Refused::Table) => {
                let (limit, setting) = (self.limits.table_elements, settable("table_elements"));
                let message = format!("the agent asked for a table of more than {limit} entries; {setting}");
                return exceeded("table_elements", message);
            }
            None => {}
        }
        if trap == Some(&Trap::AsyncDeadlock) {
            return RuntimeError::Trap {
                message: "the agent waits for something that can never happen".into(),
            };
        }
        RuntimeError::Trap { message: self.describe(&error) }
    }

    /// `part` begins with the word for what a component has too many of.
    fn too_many(&self, part: &str) -> RuntimeError {
        let Limits { tables, instances, .. } = self.limits;
        let (limit, message) = match part.split(' ').next() {
            Some("table") => ("tables", format!("it has more than {tables} tables; {}", settable("tables"))),
            Some("instance") => {
                let setting = settable("instances");
                ("instances", format!("it is made of more than {instances} core instances; {setting}"))
            }
            _ => ("memories", format!("it has more than {MEMORIES_PER_AGENT} memories; {FIXED}")),
        };
        RuntimeError::LimitExceeded { limit, message }
    }

    fn excess(&self, limit: &str) -> String {
        let Limits { cpu_ms, host_calls, host_call_kb, .. } = self.limits;
        match limit {
            "cpu_ms" => format!("used {cpu_ms} ms of CPU time"),
            "host_calls" => format!("called the host {host_calls} times in a turn"),
            _ => format!("exchanged {host_call_kb} KiB with the host in a turn"),
        }
    }

    /// What the guest said last is a better reason than where it stopped.
    fn describe(&self, error: &wasmtime::Error) -> String {
        let mut message = cut(&error.root_cause().to_string(), MAX_REASON_BYTES).to_owned();
        if error.downcast_ref() == Some(&Trap::MemoryOutOfBounds) {
            message.push_str(" (calls that nest too deeply end so, too)");
        }
        if let Some(functions) = backtrace::named(error) {
            message.push_str(&format!("; it was in {functions}"));
        }
        match (self.context.log.last_error(), self.context.last_printed()) {
            (Some(said), _) => message.push_str(&format!("; it last logged: {said}")),
            (None, Some(said)) => message.push_str(&format!("; it last printed: {said}")),
            (None, None) => {}
        }
        cut(&message, MAX_MESSAGE_BYTES).to_owned()
    }
}
