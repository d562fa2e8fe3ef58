//! Tracks which calls of a turn are in flight, and which of them only wait for a person.

use std::sync::Arc;
use tokio::sync::watch;

/// The calls of one turn.
#[derive(Clone, Default)]
pub(super) struct Flight(Arc<watch::Sender<Calls>>);

#[derive(Default)]
struct Calls {
    in_flight: u32,
    waiting: u32,
}

/// Held by a call while it is in flight.
pub(super) struct CallInFlight(Flight);

/// Held in addition while a call waits for a person.
pub(crate) struct WaitingCall(Flight);

impl Flight {
    pub(super) fn call(&self) -> CallInFlight {
        self.change(|calls| calls.in_flight += 1);
        CallInFlight(self.clone())
    }

    pub(super) fn waits(&self) -> WaitingCall {
        self.change(|calls| calls.waiting += 1);
        WaitingCall(self.clone())
    }

    /// Resolves when there are calls in flight and all of them wait.
    pub(super) async fn only_waits(&self) {
        let only_waits = |calls: &Calls| calls.waiting > 0 && calls.waiting == calls.in_flight;
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.0.subscribe().wait_for(only_waits).await;
    }

    /// Applies a change. Watchers are woken only while a call waits, which is rare.
    fn change(&self, change: impl FnOnce(&mut Calls)) {
        self.0.send_if_modified(|calls| {
            change(calls);
            calls.waiting > 0
        });
    }
}

impl Drop for CallInFlight {
    fn drop(&mut self) {
        self.0.change(|calls| calls.in_flight -= 1);
    }
}

impl Drop for WaitingCall {
    fn drop(&mut self) {
        self.0.change(|calls| calls.waiting -= 1);
    }
}
