//! Keeps what the latest turns of each agent used of the limits of a turn, in memory, to inform people.

use super::turn_use::UsedAmounts;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Number of ended turns of an agent whose use is kept.
const TURNS: usize = 20;

/// The use of the latest turns of an agent, by the names under `[limits]` in agent.toml and in their units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentTurns {
    /// Number of the turns.
    pub turns: usize,
    /// The use of the turn that ended last.
    pub latest: Vec<(&'static str, u64)>,
    /// The highest use of each limit.
    pub highest: Vec<(&'static str, u64)>,
}

/// The use of the latest turns that ended on this host, by agent.
#[derive(Debug, Default)]
pub(crate) struct RecentUse(Mutex<HashMap<String, VecDeque<UsedAmounts>>>);

impl RecentUse {
    pub(crate) fn add(&self, agent: &str, used: UsedAmounts) {
        let mut agents = self.lock();
        let turns = agents.entry(agent.to_owned()).or_default();
        if turns.len() == TURNS {
            turns.pop_front();
        }
        turns.push_back(used);
    }

    /// Returns the use of an agent's latest turns, or `None` if none of them has ended on this host.
    pub(crate) fn of(&self, agent: &str) -> Option<RecentTurns> {
        let agents = self.lock();
        let turns = agents.get(agent)?;
        let latest = *turns.back()?;
        let highest = turns.iter().fold(UsedAmounts::default(), |highest, used| highest.max(*used));
        Some(RecentTurns {
            turns: turns.len(),
            latest: latest.named().collect(),
            highest: highest.named().collect(),
        })
    }

    pub(crate) fn forget(&self, agent: &str) {
        self.lock().remove(agent);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, VecDeque<UsedAmounts>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Limits,
        deadline::Deadline,
        limits::{Counted, TurnUse},
    };
    use std::time::Instant;

    #[test]
    fn the_highest_use_is_that_of_the_latest_turns() {
        let recent = RecentUse::default();
        assert_eq!(recent.of("a"), None);
        for events in [90, 5].into_iter().chain(std::iter::repeat_n(3, TURNS - 1)) {
            let used = TurnUse::default();
            used.start(Limits::default(), Instant::now(), Deadline::new(Instant::now()));
            used.add(Counted::Events, events);
            recent.add("a", used.end().expect("it ran"));
        }
        let RecentTurns { turns, latest, highest } = recent.of("a").expect("turns have ended");
        assert_eq!(turns, TURNS);
        assert!(
            latest.contains(&("events", 3)) && highest.contains(&("events", 5)),
            "{latest:?} {highest:?}"
        );
        recent.forget("a");
        assert_eq!(recent.of("a"), None);
    }
}
