//! Failing: the reason why the turn failed is written to its row.

use super::{Run, State, assignment::Assignment, ended::Ended, opened::Opened};
use crate::{
    RuntimeError,
    event::turn_events::TurnEnding,
    name::SessionKey,
    session::{Settlement, StoredFailure},
    token_budget::TokenSpend,
};
use skep_store::{LogEntry, NewEvent, TurnFailure, TurnKey};

/// A turn that has failed, but whose row still says that it is open.
///
/// Durable afterwards: why the turn failed, its log lines, the tokens that it used and the
/// announcement of its failure, all in one transaction. Nothing else of the turn is kept. If the
/// store refuses the write, a task retries it and keeps the turn live until then.
pub(super) struct Failing {
    pub(super) key: TurnKey,
    /// The turn's number in its session, 0 if the turn was not opened.
    pub(super) number: u64,
    pub(super) logs: Vec<LogEntry>,
    /// `None` if the turn was not opened. What it used before is then counted from its journal.
    pub(super) spend: Option<TokenSpend>,
    /// `None` if the turn's message cannot be read.
    pub(super) ending: Option<TurnEnding>,
    pub(super) error: RuntimeError,
}

impl Failing {
    /// Creates the failure of a turn that could not be opened, now or again.
    pub(super) fn unopened(key: TurnKey, ending: Option<TurnEnding>, error: RuntimeError) -> Self {
        Failing { key, number: 0, logs: Vec::new(), spend: None, ending, error }
    }

    /// Creates the failure of a turn that was opened.
    pub(super) fn opened(opened: Opened, logs: Vec<LogEntry>, error: RuntimeError) -> Self {
        let Opened { key, number, turn, assignment: Assignment { ending, .. }, .. } = opened;
        Failing { key, number, logs, spend: Some(turn.spend()), ending: Some(ending), error }
    }

    /// Goes to `Ended`, after the first attempt to write.
    pub(super) async fn settle(self, run: &Run<'_>) -> State {
        let Failing { key, number, logs, spend, ending, error } = self;
        let host = &run.actor.host;
        let SessionKey { agent, session } = run.actor.key.clone();
        let at_ms = host.clock.now_ms();
        let event = ending.as_ref().and_then(|ending| ending.failed(&host.outbox, &error, at_ms));
        let events: Vec<NewEvent> = host.outbox.with_room(event).await.into_iter().collect();
        // If the calling turn is rerun, it must not repeat the call: part of it may already have
        // happened.
        let keeps_key = number > 0 && ending.as_ref().is_some_and(TurnEnding::is_of_another_agents_call);
        let failure = TurnFailure {
            key,
            agent,
            session,
            number,
            at_ms,
            error: StoredFailure::encode(&error),
            keeps_key,
            logs,
            events,
            token_use: spend.as_ref().and_then(TokenSpend::row),
            usage: spend.as_ref().map(TokenSpend::usage).unwrap_or_default(),
            timeline: run.close_timeline(),
        };
        Settlement { failure, spend, _live: run.live.clone() }.write(host).await;
        Ended::Failed(error).into()
    }
}
