//! The trap for an exceeded limit.

/// A trap that the host raises in the middle of guest code. It holds the name of the exceeded setting under `[limits]`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("limit {0} exceeded")]
pub(crate) struct LimitTrap(pub(crate) &'static str);

impl LimitTrap {
    pub(crate) const CPU: LimitTrap = LimitTrap("cpu_ms");
    pub(crate) const HOST_CALLS: LimitTrap = LimitTrap("host_calls");
    pub(crate) const HOST_CALL_BYTES: LimitTrap = LimitTrap("host_call_kb");
}
