//! A store in memory whose sessions are lists, and which can be made to do one thing wrong once, as a broken store of a
//! cluster would.

use std::collections::BTreeMap;

use super::{Effect, History, Line, Message, Moment, Outcome, Read, Wanted};

/// The mistake that the store makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// Acknowledges a message without storing it.
    LosesACommit,
    /// Stores a message twice, as two hosts that both run its turn would.
    CommitsTwice,
    /// Exchanges the last two entries, both of which are acknowledged.
    Reorders,
    /// Answers a read with the state before the last commit.
    ReadsStale,
    /// Answers a read with a state that was never there.
    ReadsTorn,
    /// Commits on top of what another owner saw, whose last commit is overwritten.
    HasTwoOwners,
    /// Commits a turn and answers that it failed.
    KeepsAFailedTurn,
    /// Gives a turn the number of the one before.
    RepeatsANumber,
    /// Stores a message in another session.
    MixesUpSessions,
    /// Forgets the event of a committed turn.
    LosesAnEffect,
    /// Emits the event of a turn twice.
    RepeatsAnEffect,
    /// Emits the event of a turn that failed.
    KeepsTheEffectOfAFailedTurn,
}

/// The store, its clock and everything that its clients see.
pub struct ModelStore {
    wrong: Wrong,
    /// Number of messages before the one that goes wrong.
    left: u64,
    now: Moment,
    sessions: BTreeMap<String, Vec<String>>,
    emitted: BTreeMap<String, usize>,
    history: History,
}

impl ModelStore {
    /// Creates a store that makes a mistake at the operation after `left` others that could have had it.
    pub fn new(wrong: Wrong, left: u64) -> Self {
        let (sessions, emitted) = (BTreeMap::new(), BTreeMap::new());
        Self { wrong, left, now: 0, sessions, emitted, history: History::default() }
    }

    /// Returns what goes wrong with this message or read.
    fn wrong(&mut self, kinds: &[Wrong]) -> Wrong {
        if !kinds.contains(&self.wrong) {
            return Wrong::Nothing;
        }
        match self.left {
            0 => std::mem::replace(&mut self.wrong, Wrong::Nothing),
            _ => {
                self.left -= 1;
                Wrong::Nothing
            }
        }
    }

    fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    /// Sends a message whose turn is committed, and emits an event.
    pub fn send(&mut self, session: &str, id: &str) {
        let sent = self.tick();
        let wrong = self.wrong(&[
            Wrong::LosesACommit,
            Wrong::CommitsTwice,
            Wrong::Reorders,
            Wrong::HasTwoOwners,
            Wrong::RepeatsANumber,
            Wrong::MixesUpSessions,
            Wrong::LosesAnEffect,
            Wrong::RepeatsAnEffect,
        ]);
        let entries = self.sessions.entry(session.to_owned()).or_default();
        if wrong == Wrong::HasTwoOwners {
            entries.pop();
        }
        let mut turn = entries.len() as u64 + 1;
        match wrong {
            Wrong::LosesACommit => {}
            Wrong::MixesUpSessions => {
                self.sessions.entry(format!("not-{session}")).or_default().push(id.to_owned());
            }
            Wrong::CommitsTwice => entries.extend([id.to_owned(), id.to_owned()]),
            Wrong::Reorders => entries.insert(entries.len().saturating_sub(1), id.to_owned()),
            Wrong::RepeatsANumber => {
                entries.push(id.to_owned());
                turn -= 1;
            }
            _ => entries.push(id.to_owned()),
        }
        let times = match wrong {
            Wrong::LosesAnEffect => 0,
            Wrong::RepeatsAnEffect => 2,
            _ => 1,
        };
        self.emitted.insert(id.to_owned(), times);
        let at = self.tick();
        self.record(session, id, sent, Outcome::Acknowledged { at, turn, place: turn });
    }

    /// Sends a message whose turn fails.
    pub fn send_in_vain(&mut self, session: &str, id: &str) {
        let sent = self.tick();
        match self.wrong(&[Wrong::KeepsAFailedTurn, Wrong::KeepsTheEffectOfAFailedTurn]) {
            Wrong::KeepsAFailedTurn => {
                self.sessions.entry(session.to_owned()).or_default().push(id.to_owned());
                self.emitted.insert(id.to_owned(), 1);
            }
            Wrong::KeepsTheEffectOfAFailedTurn => {
                self.emitted.insert(id.to_owned(), 1);
            }
            _ => {}
        }
        self.tick();
        self.record(session, id, sent, Outcome::Failed);
    }

    /// Sends a message whose answer is lost; it is committed or not.
    pub fn send_without_answer(&mut self, session: &str, id: &str, is_committed: bool) {
        let sent = self.tick();
        if is_committed {
            self.sessions.entry(session.to_owned()).or_default().push(id.to_owned());
            self.emitted.insert(id.to_owned(), 1);
        }
        self.record(session, id, sent, Outcome::Unknown);
    }

    /// Reads a session as a client does, and records what it saw.
    pub fn read(&mut self, session: &str) {
        let began = self.tick();
        let mut entries = self.sessions.get(session).cloned().unwrap_or_default();
        match self.wrong(&[Wrong::ReadsStale, Wrong::ReadsTorn]) {
            Wrong::ReadsStale => {
                entries.pop();
            }
            Wrong::ReadsTorn => {
                entries.remove(0);
            }
            _ => {}
        }
        let ended = self.tick();
        self.history.reads.push(Read { session: session.to_owned(), began, ended, entries });
    }

    fn record(&mut self, session: &str, id: &str, sent: Moment, outcome: Outcome) {
        let (session, id) = (session.to_owned(), id.to_owned());
        self.history.messages.push(Message { session, id, sent, outcome });
    }

    /// Returns the history with the sessions as they are now.
    pub fn end(self) -> History {
        let Self { mut history, sessions, emitted, .. } = self;
        let effects = history.messages.iter().map(|message| Effect {
            kind: "event",
            session: message.session.clone(),
            id: message.id.clone(),
            wanted: Wanted::WithCommit,
            seen: emitted.get(&message.id).copied().unwrap_or(0),
        });
        history.effects = effects.collect();
        let line = |(session, entries): (String, Vec<String>)| {
            let turns = entries.len() as u64;
            (session, Line { entries, turns, has_other_turns: false })
        };
        history.lines = sessions.into_iter().map(line).collect();
        history
    }
}
