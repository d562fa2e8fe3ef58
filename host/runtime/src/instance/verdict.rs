//! Why a guest stopped, in words that help its author.

use crate::{
    Limits, RuntimeError,
    capability::{TurnContext, log::cut},
};
use wasmtime::{Trap, component::ResourceTableError};

const MAX_MESSAGE_BYTES: usize = 2 << 10;

/// Raised by the host in the middle of guest code.
#[derive(Debug, thiserror::Error)]
#[error("limit {0} exceeded")]
pub(super) struct LimitTrap(&'static str);

impl LimitTrap {
    pub(super) const CPU: LimitTrap = LimitTrap("cpu_ms");
}

/// What the trap is judged by.
pub(super) struct Verdict<'a> {
    pub(super) limits: &'a Limits,
    pub(super) context: &'a TurnContext,
}

impl Verdict<'_> {
    pub(super) fn on(&self, error: wasmtime::Error) -> RuntimeError {
        let exceeded = |limit, message| RuntimeError::LimitExceeded { limit, message };
        if error.downcast_ref::<LimitTrap>().is_some() {
            return exceeded("cpu_ms", format!("the agent used {} ms of CPU time", self.limits.cpu_ms));
        }
        let trap = error.downcast_ref::<Trap>();
        if trap == Some(&Trap::StackOverflow) {
            return exceeded("stack", "the agent's calls nest too deeply".to_owned());
        }
        if matches!(error.downcast_ref(), Some(ResourceTableError::Full)) {
            return exceeded(
                "resources",
                "the agent holds too many conversations at once; drop them".to_owned(),
            );
        }
        if self.context.memory.refused() {
            let limit = self.limits.memory_mb;
            return exceeded("memory_mb", format!("the agent asked for more than {limit} MiB of memory"));
        }
        if trap == Some(&Trap::AsyncDeadlock) {
            return RuntimeError::Trap {
                message: "the agent waits for something that can never happen".into(),
            };
        }
        RuntimeError::Trap { message: self.describe(&error) }
    }

    /// What the guest said last is a better reason than where it stopped.
    fn describe(&self, error: &wasmtime::Error) -> String {
        let mut message = error.root_cause().to_string();
        if error.downcast_ref() == Some(&Trap::MemoryOutOfBounds) {
            message.push_str(" (calls that nest too deeply end so, too)");
        }
        if let Some(said) = self.context.log.last_error() {
            message = format!("{message}; it last logged: {said}");
        }
        cut(&message, MAX_MESSAGE_BYTES).to_owned()
    }
}
