//! Checks what clients saw of batches: an acknowledged batch stays known, and each of its items has one row of results.

use std::collections::BTreeMap;

use super::{Faults, Kind, Wanted};

/// A batch, as its client knows it.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The client's name for it.
    pub id: String,
    /// The orders of its items, which no other message or item has.
    pub items: Vec<String>,
    pub outcome: BatchOutcome,
}

/// The outcome of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// Its client has not learned whether it was queued, or how it ended.
    Unknown,
    /// It was queued, and a host that was asked for it later did not know it.
    Gone,
    /// Contains its results.
    Ended(Vec<Row>),
}

/// The result of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub item: String,
    /// Whether the agent answered that it has carried the order out.
    pub is_done: bool,
}

impl Batch {
    /// Returns how often the effect of an item has to happen.
    pub fn wanted(&self, item: &str) -> Wanted {
        match &self.outcome {
            BatchOutcome::Ended(rows) if rows.iter().any(|row| row.item == item && row.is_done) => {
                Wanted::Once
            }
            _ => Wanted::AtMostOnce,
        }
    }

    pub(super) fn check(&self, faults: &mut Faults) {
        let Self { id, items, outcome } = self;
        let rows = match outcome {
            BatchOutcome::Unknown => return,
            BatchOutcome::Gone => {
                return faults.add(Kind::BatchLost, format!("the batch {id}, which was queued, is gone"));
            }
            BatchOutcome::Ended(rows) => rows,
        };
        let mut found: BTreeMap<&str, usize> = items.iter().map(|item| (item.as_str(), 0)).collect();
        for row in rows {
            match found.get_mut(row.item.as_str()) {
                Some(times) => *times += 1,
                None => {
                    let what = format!("the batch {id} has a result for {}, which it did not have", row.item);
                    faults.add(Kind::Unsent, what);
                }
            }
        }
        for (item, times) in found {
            match times {
                0 => faults.add(Kind::ItemLost, format!("{item} of the batch {id} has no result")),
                1 => {}
                _ => faults.add(Kind::ItemDoubled, format!("{item} of the batch {id} has {times} results")),
            }
        }
    }
}
