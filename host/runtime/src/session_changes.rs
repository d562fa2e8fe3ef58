//! Announces committed turns to those that show sessions to clients.

use tokio::sync::broadcast;

/// Maximum number of announcements that wait for a slow receiver, which then learns that it missed some.
const WAITING: usize = 1_024;

/// A turn of a session that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionChange {
    pub agent: String,
    /// The host's id of the session.
    pub session: String,
    /// Whether the turn called a tool that says of itself that it changes nothing.
    pub read_only: bool,
}

/// The announcements of one host.
pub(crate) struct SessionChanges(broadcast::Sender<SessionChange>);

impl Default for SessionChanges {
    fn default() -> Self {
        SessionChanges(broadcast::Sender::new(WAITING))
    }
}

impl SessionChanges {
    pub(crate) fn announce(&self, change: impl FnOnce() -> SessionChange) {
        if self.0.receiver_count() > 0 {
            // The last receiver may be gone by now, and then nobody misses it.
            let _ = self.0.send(change());
        }
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<SessionChange> {
        self.0.subscribe()
    }
}
