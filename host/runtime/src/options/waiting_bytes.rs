//! Limits on the bytes of waiting messages.

/// Limits on the bytes of messages that wait or whose turns run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingBytes {
    pub session: usize,
    pub tenant: usize,
    pub host: usize,
}

impl Default for WaitingBytes {
    fn default() -> Self {
        WaitingBytes { session: 32 << 20, tenant: 128 << 20, host: 512 << 20 }
    }
}
