//! Suspended: the turn only waits for people, and holds neither a guest nor an instance.

use super::{
    Run, State,
    closing::{Closing, FailedReply},
    opened::Opened,
    opening::Opening,
};
use crate::{RuntimeError, session::message::StoredState};
use std::time::Instant;

/// A turn that waits for a person's decision, or for a turn that does.
///
/// Durable: everything, since the wait starts only once the journal is stored. A crash costs
/// nothing.
pub(super) struct Suspended {
    pub(super) opened: Opened,
    pub(super) since: Instant,
}

impl Suspended {
    /// Goes to `Opening` once the turn may continue, to be rerun from its journal. A turn that is
    /// stopped meanwhile, or whose journal cannot be stored, is `Closing`.
    pub(super) async fn wait(self, run: &mut Run<'_>) -> State {
        let Suspended { opened, since } = self;
        opened.turn.lets_others_resume();
        let suspension = opened.turn.approvals.suspension();
        run.end.set_suspension(suspension.clone());
        run.actor.suspensions.send_replace(suspension);
        let began = Instant::now();
        let decided = decided(run, &opened).await;
        run.actor.pauses.add(began..Instant::now());
        run.end.set_suspension(None);
        run.actor.suspensions.send_replace(None);
        match decided {
            Ok(()) => State::Opening(interrupted(opened, since)),
            Err(error) => {
                State::Closing(Closing { opened, answer: Err(FailedReply { error, context: None }) })
            }
        }
    }
}

/// Waits until the turn may continue.
async fn decided(run: &Run<'_>, opened: &Opened) -> Result<(), RuntimeError> {
    // If not, the journal returns the reason when it is closed.
    if !opened.journal.is_stored().await {
        return Err(RuntimeError::Cancelled);
    }
    let host = &run.actor.host;
    let mut gone = run.actor.gone.clone();
    tokio::select! {
        () = opened.turn.approvals.decided() => Ok(()),
        () = run.end.abandoned() => Err(RuntimeError::Cancelled),
        _ = gone.changed() => Err(RuntimeError::Cancelled),
        () = host.shutdown.begun() => Err(RuntimeError::ShuttingDown),
    }
}

/// Returns the turn as it is stored. Its caller keeps the same hold on it, and the time that it
/// spent suspended does not count.
fn interrupted(opened: Opened, since: Instant) -> Opening {
    let Opened { agent, key, journal, mut assignment, .. } = opened;
    let state = StoredState::Interrupted { key, seed: journal.seed(), digest: agent.digest.clone() };
    assignment.time.paused(since.elapsed());
    Opening { assignment, state }
}
