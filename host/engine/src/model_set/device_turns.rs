//! Loads of one device follow one another, so that each of them sees the memory that the earlier ones took.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The locks of all devices. Clones share them.
#[derive(Clone, Default)]
pub(super) struct DeviceTurns {
    devices: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
}

impl DeviceTurns {
    pub fn of(&self, device: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.entry(device.to_owned()).or_default().clone()
    }
}
