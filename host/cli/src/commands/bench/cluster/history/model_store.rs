//! A store in memory whose sessions are lists, and which can be made to do one thing wrong once, as a broken store of a
//! cluster would.

use std::collections::BTreeMap;

use super::{
    Batch, BatchOutcome, Decision, Effect, History, Line, Message, Moment, Outcome, Read, Row, Verdict,
    Wanted, wanted_after,
};

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
    /// Queues a batch and forgets it.
    LosesABatch,
    /// Ends a batch without a result of its last item.
    LosesAnItem,
    /// Lists the result of an item twice.
    ListsAnItemTwice,
    /// Runs an item twice, as two hosts that both took it would.
    RunsAnItemTwice,
    /// Answers that an item is done, which did not run.
    SkipsAnItem,
    /// Accepts a second decision about a call, which is another one.
    AcceptsTwoDecisions,
    /// Makes a call that was denied.
    IgnoresADenial,
    /// Refuses a call that was approved.
    IgnoresAnApproval,
}

/// The store, its clock and everything that its clients see.
pub struct ModelStore {
    wrong: Wrong,
    /// Number of messages before the one that goes wrong.
    left: u64,
    now: Moment,
    sessions: BTreeMap<String, Vec<String>>,
    emitted: BTreeMap<String, usize>,
    /// How often each item of a batch had its effect.
    worked: BTreeMap<String, usize>,
    /// How often each call was made that waited for a decision.
    called: BTreeMap<String, usize>,
    history: History,
}

impl ModelStore {
    /// Creates a store that makes a mistake at the operation after `left` others that could have had it.
    pub fn new(wrong: Wrong, left: u64) -> Self {
        Self {
            wrong,
            left,
            now: 0,
            sessions: BTreeMap::new(),
            emitted: BTreeMap::new(),
            worked: BTreeMap::new(),
            called: BTreeMap::new(),
            history: History::default(),
        }
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

    /// Has a batch of two items carried out, and reads its results.
    pub fn run_batch(&mut self, id: &str) {
        let wrong = self.wrong(&[
            Wrong::LosesABatch,
            Wrong::LosesAnItem,
            Wrong::ListsAnItemTwice,
            Wrong::RunsAnItemTwice,
            Wrong::SkipsAnItem,
        ]);
        let items: Vec<String> = ["first", "last"].map(|item| format!("{id}-{item}")).into();
        let mut rows: Vec<Row> = items.iter().map(|item| Row { item: item.clone(), is_done: true }).collect();
        for item in &items {
            self.worked.insert(item.clone(), 1);
        }
        match wrong {
            Wrong::LosesAnItem => {
                rows.pop();
            }
            Wrong::ListsAnItemTwice => rows.push(rows[0].clone()),
            Wrong::RunsAnItemTwice => {
                self.worked.insert(items[0].clone(), 2);
            }
            Wrong::SkipsAnItem => {
                self.worked.insert(items[1].clone(), 0);
            }
            _ => {}
        }
        let outcome = match wrong {
            Wrong::LosesABatch => BatchOutcome::Gone,
            _ => BatchOutcome::Ended(rows),
        };
        self.history.batches.push(Batch { id: id.to_owned(), items, outcome });
    }

    /// Sends a message whose call waits for a decision, and decides about it. A second decision comes too late.
    pub fn send_and_decide(&mut self, session: &str, id: &str, approves: bool) {
        let wrong = match approves {
            true => self.wrong(&[Wrong::AcceptsTwoDecisions, Wrong::IgnoresAnApproval]),
            false => self.wrong(&[Wrong::AcceptsTwoDecisions, Wrong::IgnoresADenial]),
        };
        let second = match wrong {
            Wrong::AcceptsTwoDecisions => Verdict::Accepted,
            _ => Verdict::Late,
        };
        for (approves, verdict) in [(approves, Verdict::Accepted), (!approves, second)] {
            let (approval, about) = (format!("call of {id}"), id.to_owned());
            self.history.decisions.push(Decision { approval, about, approves, verdict });
        }
        let is_called = match wrong {
            Wrong::IgnoresADenial => true,
            Wrong::IgnoresAnApproval => false,
            _ => approves,
        };
        self.called.insert(id.to_owned(), usize::from(is_called));
        if !is_called {
            self.history.refused.insert(id.to_owned());
        }
        self.send(session, id);
    }

    fn record(&mut self, session: &str, id: &str, sent: Moment, outcome: Outcome) {
        let (session, id) = (session.to_owned(), id.to_owned());
        self.history.messages.push(Message { session, id, sent, outcome });
    }

    /// Returns the history with the sessions as they are now.
    pub fn end(self) -> History {
        let Self { mut history, sessions, emitted, worked, called, .. } = self;
        let mut effects = Vec::new();
        for message in &history.messages {
            effects.push(Effect {
                kind: "event",
                session: message.session.clone(),
                id: message.id.clone(),
                wanted: Wanted::WithCommit,
                seen: emitted.get(&message.id).copied().unwrap_or(0),
            });
        }
        for (id, seen) in called {
            let said = if seen > 0 { "done" } else { "refused" };
            let about: Vec<&Decision> =
                history.decisions.iter().filter(|decision| decision.about == id).collect();
            let wanted = wanted_after(&about, Some(said));
            effects.push(Effect { kind: "pay", session: String::new(), id, wanted, seen });
        }
        for batch in &history.batches {
            for item in &batch.items {
                let (session, id) = (batch.id.clone(), item.clone());
                let (wanted, seen) = (batch.wanted(item), worked.get(item).copied().unwrap_or(0));
                effects.push(Effect { kind: "batch", session, id, wanted, seen });
            }
        }
        history.effects = effects;
        let line = |(session, entries): (String, Vec<String>)| {
            let turns = entries.len() as u64;
            (session, Line { entries, turns, has_other_turns: false })
        };
        history.lines = sessions.into_iter().map(line).collect();
        history
    }
}
