//! One turn: make it durable, run the guest, commit, and only then inform the caller.
//!
//! A turn is always in exactly one state. The documentation of each state says what of the turn is
//! durable, and the state's file holds the one function that leaves it.
//!
//! ```text
//!  stored message          message in memory
//!        |                         |
//!        v                         v
//!    Resuming ----------------> Opening <----------+
//!        |                         |               | somebody has decided
//!        | ended meanwhile         v               |
//!        |                      Running ----> Suspended
//!        |                         |               |
//!        |                         v               | the turn is stopped
//!        |                      Closing <----------+
//!        |                         |
//!        v                         v
//!      Ended <---------------- Committing
//!
//!    Resuming, Opening, Closing, Committing ---> Failing ---> Ended   the turn fails
//!    Resuming, Opening, Closing ----------------------------> Ended   its row stays open
//!    Opening -----------------------------------------------> Ended   it was never stored
//! ```
//!
//! No event is published before it is stored, and `Done` is published after the commit. A turn that
//! fails, or whose commit fails, changes nothing. A turn that a host shutdown or crash interrupts
//! stays open in the store if a client may still ask for it, and is rerun from its journal.

mod assignment;
mod closing;
mod committing;
mod ended;
mod failing;
mod opened;
mod opening;
mod request;
mod resuming;
mod running;
mod span;
mod suspended;
#[cfg(test)]
mod tests;

pub(crate) use request::TurnRequest;

use super::{actor::Actor, message::Message};
use crate::feed::{Live, TurnEnd};
use closing::Closing;
use committing::Committing;
use ended::Ended;
use failing::Failing;
use opening::Opening;
use resuming::Resuming;
use running::Running;
use std::{sync::Arc, time::Instant};
use suspended::Suspended;

/// The state of a turn, with everything that the turn holds in it.
enum State {
    Resuming(Resuming),
    Opening(Opening),
    Running(Running),
    Suspended(Suspended),
    Closing(Closing),
    Committing(Committing),
    Failing(Failing),
    Ended(Ended),
}

/// The parts that all transitions of a turn share: the actor of its session, the feed of its
/// followers, and its registration as live.
struct Run<'a> {
    actor: &'a mut Actor,
    end: &'a TurnEnd,
    live: &'a Arc<Live>,
}

impl State {
    fn of(message: Message, turn_id: &str, started: Instant) -> Self {
        match message {
            Message::InMemory(accepted) => State::Opening(Opening::new(accepted, turn_id, started)),
            Message::Stored(key) => State::Resuming(Resuming { key }),
        }
    }
}

impl Run<'_> {
    /// Ends the count of what the turn used, adds it to that of the agent's latest turns, and returns the stored form of the
    /// timeline.
    fn close_timeline(&self) -> Vec<u8> {
        let timeline = self.end.feed().timeline();
        if let Some(used) = timeline.used().end() {
            self.actor.host.recent_use.add(&self.actor.key.agent, used);
        }
        timeline.encode()
    }

    /// Runs the turn of `message` until it ends.
    async fn drive(mut self, message: Message, started: Instant) -> Ended {
        let run = &mut self;
        let mut state = State::of(message, run.end.feed().turn_id(), started);
        loop {
            state = match state {
                State::Resuming(resuming) => resuming.resume(run).await,
                State::Opening(opening) => opening.open(run).await,
                State::Running(running) => running.call_guest(run).await,
                State::Suspended(suspended) => suspended.wait(run).await,
                State::Closing(closing) => closing.close(run).await,
                State::Committing(committing) => committing.commit(run).await,
                State::Failing(failing) => failing.settle(run).await,
                State::Ended(ended) => return ended,
            }
        }
    }
}
