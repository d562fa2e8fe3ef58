//! Checks what clients saw of sessions against the sessions as they are at the end: every acknowledged message is
//! committed once, in an order that real time allows, and no read shows anything else than the beginning of that line.
//! Checks batches and decisions about calls as well, and the effects of everything outside of the hosts.
//!
//! The checker knows nothing of hosts and HTTP. It trusts its input in one thing: all moments are of one clock, and a
//! message was sent no earlier, and its answer came no later, than the history says.

mod batches;
mod decisions;
#[cfg(test)]
mod model_store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use serde::Serialize;

pub use batches::{Batch, BatchOutcome, Row};
pub use decisions::{Decision, Verdict, wanted as wanted_after};

/// Microseconds since the start of the run.
pub type Moment = u64;

/// Everything that clients saw, and the sessions at the end.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub messages: Vec<Message>,
    pub reads: Vec<Read>,
    /// The sessions at the end, when nothing ran anymore.
    pub lines: BTreeMap<String, Line>,
    pub effects: Vec<Effect>,
    pub batches: Vec<Batch>,
    pub decisions: Vec<Decision>,
    /// Messages whose agent learned that a call was refused.
    pub refused: BTreeSet<String>,
}

/// A message, however often its client had to send it.
#[derive(Clone, Debug)]
pub struct Message {
    pub session: String,
    /// Its text and its idempotency key, which no other message has.
    pub id: String,
    pub sent: Moment,
    pub outcome: Outcome,
}

/// The outcome of a message, as its client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Acknowledged {
        at: Moment,
        /// Number of the turn in its session.
        turn: u64,
        /// Number of entries in the state when the turn had added its own.
        place: u64,
    },
    /// The host answered that the turn failed, which changes nothing.
    Failed,
    /// No answer came: the turn may be committed, once.
    Unknown,
}

/// A read of a session.
#[derive(Clone, Debug)]
pub struct Read {
    pub session: String,
    pub began: Moment,
    pub ended: Moment,
    pub entries: Vec<String>,
}

/// The committed turns of a session in their order.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Ids of the messages.
    pub entries: Vec<String>,
    /// Number of turns that the session has.
    pub turns: u64,
    /// Whether other turns, such as those of alarms, run in the session too, so that the numbers only grow.
    pub has_other_turns: bool,
}

/// How often an effect of a message was counted outside of the hosts. Repeated deliveries of one event count once.
#[derive(Clone, Debug)]
pub struct Effect {
    pub kind: &'static str,
    pub session: String,
    pub id: String,
    pub wanted: Wanted,
    pub seen: usize,
}

/// How often an effect outside the cluster has to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Once if the turn is committed, and otherwise never.
    WithCommit,
    /// Once, because the client learned that it happened.
    Once,
    /// The effect is not part of the commit, and its outcome is unknown.
    AtMostOnce,
    /// Never, because nobody has approved it.
    Never,
}

/// A violation, with one sentence about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    pub what: String,
}

/// The kind of a fault in a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An acknowledged message is not in the session.
    Lost,
    /// A message is in the session more than once.
    Doubled,
    /// A message whose turn failed is in the session.
    Undead,
    /// No client sent this entry to this session.
    Unsent,
    /// The numbers of the turns are not those of one line.
    Misnumbered,
    /// A message that was sent after another one had been acknowledged comes before it.
    Reordered,
    /// A read shows something that was never the state.
    Torn,
    /// A read lacks what was acknowledged, or read, before it began.
    Stale,
    /// An effect of a committed turn did not happen.
    EffectLost,
    /// An effect happened more than once.
    EffectDoubled,
    /// An effect happened without its turn, or without its approval.
    EffectUnfounded,
    /// A batch that was queued is gone.
    BatchLost,
    /// An item of a batch that has ended has no result.
    ItemLost,
    /// An item of a batch has more than one result.
    ItemDoubled,
    /// A call was approved, and its agent was refused it.
    DecisionLost,
    /// More than one decision about a call was accepted.
    DecisionDoubled,
}

impl Kind {
    /// Returns whether something that was promised is missing.
    pub fn is_loss(self) -> bool {
        matches!(self, Kind::Lost | Kind::EffectLost | Kind::BatchLost | Kind::ItemLost | Kind::DecisionLost)
    }

    /// Returns whether something happened twice.
    pub fn is_double(self) -> bool {
        matches!(self, Kind::Doubled | Kind::EffectDoubled | Kind::ItemDoubled | Kind::DecisionDoubled)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}

impl History {
    /// Returns every violation that the history shows.
    pub fn faults(&self) -> Vec<Fault> {
        let mut sessions: BTreeMap<&str, Session<'_>> = BTreeMap::new();
        for message in &self.messages {
            sessions.entry(&message.session).or_default().messages.push(message);
        }
        for read in &self.reads {
            sessions.entry(&read.session).or_default().reads.push(read);
        }
        for session in self.lines.keys() {
            sessions.entry(session).or_default();
        }
        let nothing = Line::default();
        let mut faults = Faults::default();
        for (name, session) in &sessions {
            let line = self.lines.get(*name).unwrap_or(&nothing);
            Check::new(name, session, line).run(&mut faults);
        }
        self.check_effects(&mut faults);
        for batch in &self.batches {
            batch.check(&mut faults);
        }
        decisions::check(&self.decisions, &self.refused, &mut faults);
        faults.0
    }

    /// Returns the times in milliseconds from sending each acknowledged message to its answer.
    pub fn answer_times_ms(&self) -> Vec<f64> {
        let time = |message: &Message| match message.outcome {
            Outcome::Acknowledged { at, .. } => Some(at.saturating_sub(message.sent) as f64 / 1e3),
            Outcome::Failed | Outcome::Unknown => None,
        };
        self.messages.iter().filter_map(time).collect()
    }

    /// Returns whether an effect that has to happen has not happened.
    pub fn awaits_effects(&self) -> bool {
        let mut faults = Faults::default();
        self.check_effects(&mut faults);
        faults.0.iter().any(|fault| fault.kind == Kind::EffectLost)
    }

    fn check_effects(&self, faults: &mut Faults) {
        for effect in &self.effects {
            let line = self.lines.get(&effect.session);
            effect.check(line.is_some_and(|line| line.entries.contains(&effect.id)), faults);
        }
    }
}

/// Everything that clients saw of one session.
#[derive(Default)]
struct Session<'a> {
    messages: Vec<&'a Message>,
    reads: Vec<&'a Read>,
}

#[derive(Default)]
struct Faults(Vec<Fault>);

impl Faults {
    fn add(&mut self, kind: Kind, what: String) {
        self.0.push(Fault { kind, what });
    }
}

/// The check of one session.
struct Check<'a> {
    name: &'a str,
    session: &'a Session<'a>,
    line: &'a Line,
    /// The message that each entry is, if one was sent.
    sent: Vec<Option<&'a Message>>,
    /// Position of the first entry of each id, and the number of its entries.
    found: HashMap<&'a str, (usize, usize)>,
}

impl<'a> Check<'a> {
    fn new(name: &'a str, session: &'a Session<'a>, line: &'a Line) -> Self {
        let by_id: HashMap<&str, &Message> =
            session.messages.iter().map(|message| (message.id.as_str(), *message)).collect();
        let mut found: HashMap<&str, (usize, usize)> = HashMap::new();
        for (position, entry) in line.entries.iter().enumerate() {
            found.entry(entry).or_insert((position, 0)).1 += 1;
        }
        let sent = line.entries.iter().map(|entry| by_id.get(entry.as_str()).copied()).collect();
        Self { name, session, line, sent, found }
    }

    fn run(&self, faults: &mut Faults) {
        self.check_counts(faults);
        self.check_numbers(faults);
        self.check_order(faults);
        let whole: Vec<&Read> =
            self.session.reads.iter().copied().filter(|read| self.is_prefix(read, faults)).collect();
        self.check_freshness(whole, faults);
    }

    /// Checks that each message is there as often as its outcome allows, and nothing else.
    fn check_counts(&self, faults: &mut Faults) {
        let name = self.name;
        for message in &self.session.messages {
            let id = &message.id;
            let times = self.found.get(id.as_str()).map_or(0, |(_, times)| *times);
            match (message.outcome, times) {
                (Outcome::Acknowledged { turn, .. }, 0) => {
                    faults.add(Kind::Lost, format!("{id} of {name}, acknowledged as turn {turn}, is gone"));
                }
                (Outcome::Failed, 1..) => {
                    faults
                        .add(Kind::Undead, format!("{id} of {name} is committed, although its turn failed"));
                }
                (_, 2..) => {
                    faults.add(Kind::Doubled, format!("{id} of {name} is committed {times} times"));
                }
                _ => {}
            }
        }
        for (entry, sent) in self.line.entries.iter().zip(&self.sent) {
            if sent.is_none() {
                faults.add(Kind::Unsent, format!("{name} has {entry}, which nobody sent to it"));
            }
        }
    }

    /// Checks that the acknowledged turns are numbered as they lie in the line.
    fn check_numbers(&self, faults: &mut Faults) {
        let (name, line) = (self.name, self.line);
        let entries = line.entries.len() as u64;
        let is_whole = if line.has_other_turns { line.turns >= entries } else { line.turns == entries };
        if !is_whole {
            faults.add(Kind::Misnumbered, format!("{name} has {} turns, but {entries} entries", line.turns));
        }
        let mut last = 0;
        for (position, message) in self.sent.iter().enumerate() {
            let Some(Message { id, outcome: Outcome::Acknowledged { turn, place, .. }, .. }) = message else {
                continue;
            };
            let is = position as u64 + 1;
            // Doubled entries have been reported, and shift what follows them.
            if *place != is {
                let what = format!("{id} of {name} was entry {place} for its client, and is entry {is}");
                faults.add(Kind::Misnumbered, what);
            }
            let is_numbered = if line.has_other_turns { *turn > last } else { *turn == is };
            if !is_numbered {
                let what = format!("{id} of {name} was acknowledged as turn {turn}, and is entry {is}");
                faults.add(Kind::Misnumbered, what);
            }
            last = *turn;
        }
    }

    /// Checks that no message comes before one that was acknowledged before it was sent.
    fn check_order(&self, faults: &mut Faults) {
        let mut earliest: Option<(Moment, &str)> = None;
        for message in self.sent.iter().rev().copied().flatten() {
            if let Some((at, later)) = earliest
                && at < message.sent
            {
                let what = format!(
                    "{} of {} comes before {later}, which was acknowledged before it was sent",
                    message.id, self.name
                );
                faults.add(Kind::Reordered, what);
            }
            if let Outcome::Acknowledged { at, .. } = message.outcome
                && earliest.is_none_or(|(known, _)| at < known)
            {
                earliest = Some((at, &message.id));
            }
        }
    }

    /// Checks that a read is a beginning of the line, of messages that were sent before it ended.
    fn is_prefix(&self, read: &Read, faults: &mut Faults) -> bool {
        let (name, length) = (self.name, read.entries.len());
        if self.line.entries.get(..length) != Some(&read.entries[..]) {
            let what = format!("a read of {name} with {length} entries is not a beginning of its line");
            faults.add(Kind::Torn, what);
            return false;
        }
        let early = self.sent[..length].iter().flatten().find(|message| message.sent > read.ended);
        if let Some(message) = early {
            let what = format!("a read of {name} shows {} before it was sent", message.id);
            faults.add(Kind::Torn, what);
        }
        true
    }

    /// Checks that each read has everything that was acknowledged, or read, before it began.
    fn check_freshness(&self, mut reads: Vec<&Read>, faults: &mut Faults) {
        let mut known: Vec<(Moment, usize)> = Vec::new();
        for message in &self.session.messages {
            if let Outcome::Acknowledged { at, .. } = message.outcome
                && let Some((position, _)) = self.found.get(message.id.as_str())
            {
                known.push((at, position + 1));
            }
        }
        known.extend(reads.iter().map(|read| (read.ended, read.entries.len())));
        known.sort_unstable();
        reads.sort_by_key(|read| read.began);
        let (mut next, mut least) = (0, 0);
        for read in reads {
            while let Some((_, length)) = known.get(next).filter(|(at, _)| *at < read.began) {
                least = least.max(*length);
                next += 1;
            }
            let length = read.entries.len();
            if length < least {
                let what = format!(
                    "a read of {} shows {length} entries, but {least} were known before it began",
                    self.name
                );
                faults.add(Kind::Stale, what);
            }
        }
    }
}

impl Effect {
    fn check(&self, is_committed: bool, faults: &mut Faults) {
        let Effect { kind, session, id, wanted, seen } = self;
        let has_to_be = match wanted {
            Wanted::WithCommit => is_committed,
            Wanted::Once => true,
            Wanted::AtMostOnce | Wanted::Never => false,
        };
        match *seen {
            0 if has_to_be => {
                faults.add(Kind::EffectLost, format!("the {kind} of {id} in {session} did not happen"));
            }
            1.. if *wanted == Wanted::WithCommit && !is_committed => {
                let what = format!("the {kind} of {id} in {session} happened without its turn");
                faults.add(Kind::EffectUnfounded, what);
            }
            1.. if *wanted == Wanted::Never => {
                let what = format!("the {kind} of {id} in {session} happened, and nobody had approved it");
                faults.add(Kind::EffectUnfounded, what);
            }
            2.. => {
                let what = format!("the {kind} of {id} in {session} happened {seen} times");
                faults.add(Kind::EffectDoubled, what);
            }
            _ => {}
        }
    }
}
