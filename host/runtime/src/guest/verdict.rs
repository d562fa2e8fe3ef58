//! Error messages for stopped guests, written to help the agent's author.

use super::{MAX_CALL_BYTES, backtrace, exports::NoExport};
use crate::{
    Limits, RuntimeError,
    capability::TurnContext,
    limits::{LimitTrap, MEMORIES_PER_AGENT, Refused},
    text::cut,
};
use wasmtime::{Trap, component::ResourceTableError};

const MAX_MESSAGE_BYTES: usize = 4 << 10;
const MAX_REASON_BYTES: usize = 1 << 10;

/// The message of wasmtime's own bound on the bytes that one call copies, which has no public type. A test verifies the text.
const CALL_TOO_LARGE: &str = "fuel allocated for hostcalls has been exhausted";

/// The prefix of the message of wasmtime's own bounds on the parts of a component, which have no public type either. The
/// next word names the kind of part.
const TOO_MANY_PARTS: &str = "resource limit exceeded: ";

/// Hint for a bound that no setting changes.
const FIXED: &str = "this bound is not configurable";

/// Returns a hint that names the settings that raise a limit.
fn settable(limit: &str) -> String {
    format!("raise `{limit}` under [limits] in agent.toml, up to the operator's ceiling in skep.toml")
}

/// The information from which the error for a trap is made.
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
            let setting =
                "the operator sets the stack of all agents with `stack_kb` under [runtime] in skep.toml";
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
            let message = format!("a single call passes more than {MAX_CALL_BYTES} bytes; {FIXED}");
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
                message: "the agent is deadlocked: it waits for something that can never happen".into(),
            };
        }
        RuntimeError::Trap { message: self.describe(&error) }
    }

    /// Returns the error for a component with too many parts. `part` starts with the kind of part.
    fn too_many(&self, part: &str) -> RuntimeError {
        let Limits { tables, instances, .. } = self.limits;
        let (limit, message) = match part.split(' ').next() {
            Some("table") => ("tables", format!("it has more than {tables} tables; {}", settable("tables"))),
            Some("instance") => {
                let setting = settable("instances");
                ("instances", format!("it has more than {instances} core instances; {setting}"))
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

    /// Describes a trap. The guest's last output is appended, because it explains more than where the guest stopped.
    fn describe(&self, error: &wasmtime::Error) -> String {
        let mut message = cut(&error.root_cause().to_string(), MAX_REASON_BYTES).to_owned();
        if error.downcast_ref() == Some(&Trap::MemoryOutOfBounds) {
            message.push_str(" (calls that nest too deeply can also cause this)");
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
