//! Loads that share a device follow one another, so that each of them sees the memory that the earlier ones took.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// The locks of all devices. Clones share them.
#[derive(Clone, Default)]
pub(super) struct DeviceTurns {
    devices: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
}

impl DeviceTurns {
    /// Waits for the turns of all these devices, and holds them until the result is dropped.
    pub async fn of(&self, devices: &[String]) -> Vec<OwnedMutexGuard<()>> {
        // Everyone locks in the same order, so nobody waits for someone who waits for them.
        let mut names: Vec<&String> = devices.iter().collect();
        names.sort();
        names.dedup();
        let mut held = Vec::with_capacity(names.len());
        for name in names {
            let device = self.device(name);
            held.push(device.lock_owned().await);
        }
        held
    }

    fn device(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.entry(name.to_owned()).or_default().clone()
    }
}
