//! The reports of hosts about themselves, as another host reads them every half second.

use super::{AgentDigest, MAX_WARM, ROOM};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The work of a host. A host of an earlier version reports a capacity of zero, and nobody sends it sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Turns that run. Those that only wait for people, or behind others in their sessions, are not counted.
    pub running_turns: u32,
    /// Requests that wait for a model.
    pub waiting: u32,
    /// Number of sequences that its models compute at once; of a host that computes no model, the number of turns that run at once.
    pub capacity: u32,
    /// Percentage of the KV pages of its models that running sequences hold.
    pub kv_percent: u8,
}

/// A report of another host that serves.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub host: i64,
    /// The time of the report, by the clock of the host that reads it.
    pub at_ms: u64,
    pub load: Load,
    /// The agents whose sessions ran there recently.
    pub warm: Vec<AgentDigest>,
}

/// The reports of the other hosts that serve.
#[derive(Debug, Default)]
pub struct Reports {
    all: Vec<Report>,
    /// The positions of the reports that name an agent.
    warm: HashMap<AgentDigest, Vec<u32>>,
}

impl Load {
    /// Returns the share of the capacity that is in use once `more` turns have begun. It exceeds 1 if turns wait.
    pub fn utilization(&self, more: u32) -> f64 {
        if self.capacity == 0 {
            return f64::INFINITY;
        }
        let turns = (f64::from(self.running_turns) + f64::from(more)) / f64::from(self.capacity);
        turns.max(f64::from(self.kv_percent) / 100.0)
    }

    /// Returns the percentage of the capacity that is in use. It exceeds 100 if turns wait. `None` if the capacity is not known.
    pub fn percent(&self) -> Option<u32> {
        (self.capacity > 0).then(|| (self.utilization(0) * 100.0).round() as u32)
    }

    /// Returns whether there is room for another session once `more` turns have begun.
    pub(super) fn has_room(&self, more: u32) -> bool {
        self.waiting == 0 && self.utilization(more) < ROOM
    }

    /// Returns how many turns more there may be until this share of the capacity is in use.
    pub(super) fn room_below(&self, limit: f64) -> f64 {
        if self.capacity == 0 {
            return 0.0;
        }
        (limit - self.utilization(0)).max(0.0) * f64::from(self.capacity)
    }
}

impl Reports {
    /// Returns the reports of hosts. At most [`MAX_WARM`] agents of each are read.
    pub fn new(all: Vec<Report>) -> Self {
        let mut warm: HashMap<AgentDigest, Vec<u32>> = HashMap::new();
        for (position, report) in (0..).zip(&all) {
            for agent in report.warm.iter().take(MAX_WARM) {
                warm.entry(*agent).or_default().push(position);
            }
        }
        Reports { all, warm }
    }

    pub(super) fn all(&self) -> &[Report] {
        &self.all
    }

    /// Returns the reports of hosts where an agent is warm.
    pub(super) fn warm(&self, agent: AgentDigest) -> impl Iterator<Item = &Report> {
        let positions = self.warm.get(&agent).map(Vec::as_slice).unwrap_or_default();
        positions.iter().filter_map(move |position| self.all.get(*position as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_is_that_of_the_scarcer_resource() {
        let load = Load { running_turns: 2, waiting: 0, capacity: 8, kv_percent: 10 };
        assert_eq!((load.utilization(0), load.utilization(2)), (0.25, 0.5));
        assert_eq!(Load { kv_percent: 60, ..load }.utilization(2), 0.6);
        assert!(load.has_room(3) && !load.has_room(4));
        assert_eq!((load.room_below(0.75), load.room_below(0.25), load.room_below(0.1)), (4.0, 0.0, 0.0));
        assert_eq!((load.percent(), Load::default().percent()), (Some(25), None));
        assert!(!Load::default().has_room(0) && Load::default().room_below(9.0) == 0.0);
    }

    #[test]
    fn a_load_without_some_fields_can_be_read() {
        let load: Load = serde_json::from_str(r#"{"capacity": 4, "later": 1}"#).expect("it can be read");
        assert_eq!(load, Load { capacity: 4, ..Load::default() });
    }

    #[test]
    fn the_number_of_warm_agents_that_are_read_is_bounded() {
        let digests: Vec<AgentDigest> =
            (0..2 * MAX_WARM).map(|agent| AgentDigest::of("t", &agent.to_string(), "1")).collect();
        let (first, last) = (digests[0], digests[2 * MAX_WARM - 1]);
        let reports = Reports::new(vec![Report { host: 1, at_ms: 0, load: Load::default(), warm: digests }]);
        assert_eq!((reports.warm(first).count(), reports.warm(last).count()), (1, 0));
    }
}
