//! Histories that are right, and those of a store that does one thing wrong.

use super::model_store::{ModelStore, Wrong};
use super::*;

fn kinds(history: &History) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = history.faults().into_iter().map(|fault| fault.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// Runs clients on a store that does this wrong, after it has worked a while.
fn run(wrong: Wrong, left: u64) -> History {
    let mut store = ModelStore::new(wrong, left);
    for round in 0..8 {
        for session in ["a", "b"] {
            store.send(session, &format!("{session}-{round}"));
            store.read(session);
            store.send_in_vain(session, &format!("{session}-{round}-failed"));
            store.send_without_answer(session, &format!("{session}-{round}-lost"), round % 2 == 0);
            store.send(session, &format!("{session}-{round}-next"));
            store.read(session);
            store.run_batch(&format!("{session}-{round}-batch"));
            store.send_and_decide(session, &format!("{session}-{round}-decided"), round % 2 == 0);
        }
    }
    store.end()
}

#[test]
fn a_store_that_works_has_no_faults() {
    let history = run(Wrong::Nothing, 0);
    assert_eq!(history.faults(), []);
    let count = |outcome: fn(&Outcome) -> bool| {
        history.messages.iter().filter(|message| outcome(&message.outcome)).count()
    };
    assert_eq!(count(|outcome| matches!(outcome, Outcome::Acknowledged { .. })), 48);
    assert_eq!((count(|outcome| *outcome == Outcome::Failed), history.reads.len()), (16, 32));
    assert_eq!((history.batches.len(), history.decisions.len()), (16, 32));
    assert_eq!(history.answer_times_ms(), [0.001; 48], "a microsecond each");
}

#[test]
fn everything_that_a_store_can_do_wrong_is_found() {
    for (wrong, kind) in [
        (Wrong::LosesACommit, Kind::Lost),
        (Wrong::CommitsTwice, Kind::Doubled),
        (Wrong::Reorders, Kind::Reordered),
        (Wrong::ReadsStale, Kind::Stale),
        (Wrong::ReadsTorn, Kind::Torn),
        (Wrong::HasTwoOwners, Kind::Lost),
        (Wrong::KeepsAFailedTurn, Kind::Undead),
        (Wrong::RepeatsANumber, Kind::Misnumbered),
        (Wrong::MixesUpSessions, Kind::Unsent),
        (Wrong::LosesAnEffect, Kind::EffectLost),
        (Wrong::RepeatsAnEffect, Kind::EffectDoubled),
        (Wrong::KeepsTheEffectOfAFailedTurn, Kind::EffectUnfounded),
        (Wrong::LosesABatch, Kind::BatchLost),
        (Wrong::LosesAnItem, Kind::ItemLost),
        (Wrong::ListsAnItemTwice, Kind::ItemDoubled),
        (Wrong::RunsAnItemTwice, Kind::EffectDoubled),
        (Wrong::SkipsAnItem, Kind::EffectLost),
        (Wrong::AcceptsTwoDecisions, Kind::DecisionDoubled),
        (Wrong::IgnoresADenial, Kind::EffectUnfounded),
        (Wrong::IgnoresAnApproval, Kind::DecisionLost),
    ] {
        // The message before each of these is acknowledged in its session.
        for left in [5, 6, 7] {
            let found = kinds(&run(wrong, left));
            assert!(found.contains(&kind), "{wrong:?} after {left}: {found:?}");
        }
    }
}

/// A history of the session `s`, written by hand.
#[derive(Default)]
struct ByHand(History);

impl ByHand {
    fn with(mut self, id: &str, sent: Moment, outcome: Outcome) -> Self {
        self.0.messages.push(Message { session: "s".to_owned(), id: id.to_owned(), sent, outcome });
        self
    }

    fn acknowledged(self, id: &str, sent: Moment, at: Moment, turn: u64) -> Self {
        self.with(id, sent, Outcome::Acknowledged { at, turn, place: turn })
    }

    fn read(mut self, began: Moment, ended: Moment, entries: &[&str]) -> Self {
        self.0.reads.push(Read { session: "s".to_owned(), began, ended, entries: texts(entries) });
        self
    }

    /// Returns the kinds of faults if the session ends with these entries.
    fn ends(mut self, entries: &[&str]) -> Vec<Kind> {
        let line = Line { entries: texts(entries), turns: entries.len() as u64, has_other_turns: false };
        self.0.lines.insert("s".to_owned(), line);
        kinds(&self.0)
    }
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn messages_that_were_under_way_together_have_either_order() {
    let together = || ByHand::default().acknowledged("first", 10, 40, 1).acknowledged("second", 20, 30, 2);
    assert_eq!(together().ends(&["first", "second"]), []);
    let swapped = ByHand::default().acknowledged("first", 10, 40, 2).acknowledged("second", 20, 30, 1);
    assert_eq!(swapped.ends(&["second", "first"]), []);
    // The second one was sent after the first one had been acknowledged.
    let after = ByHand::default().acknowledged("first", 10, 20, 2).acknowledged("second", 30, 40, 1);
    assert_eq!(after.ends(&["second", "first"]), [Kind::Reordered]);
}

#[test]
fn a_message_without_an_answer_is_committed_once_at_any_later_time_or_never() {
    let history = || ByHand::default().acknowledged("a", 10, 20, 1).with("b", 30, Outcome::Unknown);
    assert_eq!(history().ends(&["a"]), []);
    assert_eq!(history().ends(&["a", "b"]), []);
    assert_eq!(history().acknowledged("c", 40, 50, 2).ends(&["a", "c", "b"]), [], "it may be late");
    assert_eq!(history().ends(&["a", "b", "b"]), [Kind::Doubled]);
    let early = ByHand::default().acknowledged("a", 10, 20, 2).with("b", 30, Outcome::Unknown);
    assert_eq!(early.ends(&["b", "a"]), [Kind::Reordered], "it was not sent yet");
}

#[test]
fn a_read_shows_committed_writes_and_may_show_pending_ones() {
    let history = || ByHand::default().acknowledged("a", 10, 20, 1).acknowledged("b", 30, 60, 2);
    for (began, ended, entries, faults) in [
        (25, 28, &["a", "b"][..], &[Kind::Torn][..]),
        (1, 5, &[], &[]),
        (12, 14, &[], &[]),
        (12, 14, &["a"], &[]),
        (25, 28, &["a"], &[]),
        (25, 28, &[], &[Kind::Stale]),
        (40, 45, &["a"], &[]),
        (40, 45, &["a", "b"], &[]),
        (70, 75, &["a", "b"], &[]),
        (70, 75, &["a"], &[Kind::Stale]),
        (70, 75, &["b"], &[Kind::Torn]),
        (70, 75, &["a", "b", "c"], &[Kind::Torn]),
    ] {
        let found = history().read(began, ended, entries).ends(&["a", "b"]);
        assert_eq!(found, faults, "from {began} to {ended}: {entries:?}");
    }
    // Another client has seen the second message already.
    let back = history().read(40, 45, &["a", "b"]).read(50, 55, &["a"]);
    assert_eq!(back.ends(&["a", "b"]), [Kind::Stale]);
    let together = history().read(40, 55, &["a", "b"]).read(50, 57, &["a"]);
    assert_eq!(together.ends(&["a", "b"]), []);
}

#[test]
fn numbers_have_gaps_only_where_other_turns_run() {
    let mut history = ByHand::default().with("a", 1, Outcome::Acknowledged { at: 2, turn: 1, place: 1 });
    history = history.with("b", 3, Outcome::Acknowledged { at: 4, turn: 3, place: 2 });
    let ended = |turns: u64, has_other_turns: bool| {
        let line = Line { entries: texts(&["a", "b"]), turns, has_other_turns };
        let lines = [("s".to_owned(), line)].into();
        kinds(&History { lines, ..history.0.clone() })
    };
    assert_eq!(ended(3, true), []);
    assert_eq!(ended(3, false), [Kind::Misnumbered]);
    assert_eq!(ended(1, true), [Kind::Misnumbered], "there are fewer turns than entries");
}

#[test]
fn a_missing_session_counts_as_losing_its_acknowledged_turns() {
    let history = ByHand::default().acknowledged("a", 1, 2, 1).with("b", 3, Outcome::Unknown).0;
    assert_eq!(kinds(&history), [Kind::Lost]);
}

#[test]
fn effects_outside_a_commit_happen_at_most_once_and_those_that_clients_know_of_once() {
    let effect = |wanted: Wanted, seen: usize| {
        let (session, id) = ("s".to_owned(), "a".to_owned());
        let effects = vec![Effect { kind: "call", session, id, wanted, seen }];
        kinds(&History { effects, ..History::default() })
    };
    assert_eq!(effect(Wanted::AtMostOnce, 0), []);
    assert_eq!(effect(Wanted::AtMostOnce, 1), []);
    assert_eq!(effect(Wanted::AtMostOnce, 2), [Kind::EffectDoubled]);
    assert_eq!(effect(Wanted::Once, 1), []);
    assert_eq!(effect(Wanted::Once, 0), [Kind::EffectLost]);
    assert_eq!(effect(Wanted::WithCommit, 1), [Kind::EffectUnfounded]);
    assert_eq!(effect(Wanted::Never, 0), []);
    assert_eq!(effect(Wanted::Never, 1), [Kind::EffectUnfounded]);
}

#[test]
fn a_call_happens_only_if_somebody_may_have_approved_it() {
    use Verdict::{Accepted, Late, Unknown};
    for (decisions, said, expected) in [
        (&[(true, Accepted)][..], Some("done"), Wanted::Once),
        (&[(true, Accepted)], None, Wanted::AtMostOnce),
        (&[(true, Unknown)], Some("done"), Wanted::Once),
        (&[(true, Unknown), (false, Unknown)], None, Wanted::AtMostOnce),
        (&[(true, Late), (false, Unknown)], None, Wanted::AtMostOnce),
        (&[(true, Late), (false, Accepted)], Some("done"), Wanted::Never),
        (&[(false, Accepted)], Some("refused"), Wanted::Never),
        // The answer to it was lost, and it was sent again.
        (&[(true, Late)], Some("done"), Wanted::Once),
        (&[], None, Wanted::Never),
    ] {
        let decisions: Vec<Decision> = decisions
            .iter()
            .map(|(approves, verdict)| Decision {
                approval: "call".to_owned(),
                about: "a".to_owned(),
                approves: *approves,
                verdict: *verdict,
            })
            .collect();
        let about: Vec<&Decision> = decisions.iter().collect();
        assert_eq!(wanted_after(&about, said), expected, "{decisions:?}");
    }
}
