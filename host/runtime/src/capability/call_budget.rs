//! Limits on the number of host calls in one turn and on the bytes that they exchange.
//!
//! A call costs the host more than the guest: asking for all messages of a conversation a million times is cheap for the
//! guest. Arguments and results both count.

use crate::{
    Limits,
    capability::TurnContext,
    limits::{Counted, LimitTrap, TurnUse},
};
use std::sync::Arc;

/// The remaining calls and bytes of a turn.
#[derive(Debug)]
pub(crate) struct CallBudget {
    calls: u32,
    bytes: usize,
    used: Arc<TurnUse>,
}

impl CallBudget {
    pub(crate) fn new(limits: &Limits, used: Arc<TurnUse>) -> Self {
        CallBudget { calls: limits.host_calls, bytes: limits.host_call_kb as usize * 1024, used }
    }

    fn call(&mut self) -> Result<(), LimitTrap> {
        self.calls = self.calls.checked_sub(1).ok_or(LimitTrap::HOST_CALLS)?;
        self.used.add(Counted::HostCalls, 1);
        Ok(())
    }

    fn pass(&mut self, bytes: usize) -> Result<(), LimitTrap> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or(LimitTrap::HOST_CALL_BYTES)?;
        self.used.add(Counted::HostCallBytes, bytes as u64);
        Ok(())
    }
}

impl TurnContext {
    /// Counts a call and its argument bytes. A guest that exceeds its limits traps.
    pub(super) fn charge(&mut self, argument_bytes: usize) -> wasmtime::Result<()> {
        self.calls.call()?;
        Ok(self.calls.pass(argument_bytes)?)
    }

    /// Counts the bytes that a call returns.
    pub(super) fn charge_result(&mut self, bytes: usize) -> wasmtime::Result<()> {
        Ok(self.calls.pass(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_and_the_last_byte_are_still_allowed() {
        let limits = Limits { host_calls: 2, host_call_kb: 1, ..Limits::default() };
        let mut budget = CallBudget::new(&limits, Arc::default());
        budget.call().expect("one of two");
        budget.call().expect("two of two");
        assert_eq!(budget.call().expect_err("three of two"), LimitTrap::HOST_CALLS);
        budget.pass(1_000).expect("1000 of 1024 bytes");
        budget.pass(24).expect("the remaining 24 bytes");
        assert_eq!(budget.pass(1).expect_err("no byte is left"), LimitTrap::HOST_CALL_BYTES);
    }
}
