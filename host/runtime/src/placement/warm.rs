//! The agents whose sessions ran at a host recently, so that the beginnings of their prompts are probably cached there.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{cmp::Reverse, collections::HashMap};

/// Maximum number of agents that a host reports.
pub const MAX_WARM: usize = 512;
/// Time for which an agent counts as warm after its last turn.
const WARM_MS: u64 = 10 * 60 * 1_000;

/// Identifies a version of an agent for a tenant: the first four bytes of a SHA-256 hash. Two agents with the same digest only
/// cost a cached prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AgentDigest(u32);

/// The agents of one host, with the times of their last turns.
#[derive(Debug, Default)]
pub struct WarmAgents {
    used_at_ms: HashMap<AgentDigest, u64>,
}

impl AgentDigest {
    /// Returns the digest of a version of an agent for a tenant. Tenants share no cached pages.
    pub fn of(tenant: &str, agent: &str, version: &str) -> Self {
        let mut hasher = Sha256::new();
        for part in [tenant, agent, version] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let hash: [u8; 32] = hasher.finalize().into();
        AgentDigest(hash.iter().take(4).fold(0, |number, byte| (number << 8) | u32::from(*byte)))
    }
}

impl WarmAgents {
    /// Records that a turn of an agent begins.
    pub fn note(&mut self, agent: AgentDigest, now_ms: u64) {
        self.used_at_ms.insert(agent, now_ms);
        if self.used_at_ms.len() > MAX_WARM {
            // One agent has been added, so one leaves.
            let oldest = self.used_at_ms.iter().min_by_key(|(agent, at_ms)| (**at_ms, **agent));
            if let Some(oldest) = oldest.map(|(agent, _)| *agent) {
                self.used_at_ms.remove(&oldest);
            }
        }
    }

    /// Returns whether an agent is warm.
    pub fn has(&self, agent: AgentDigest, now_ms: u64) -> bool {
        self.used_at_ms.get(&agent).is_some_and(|at_ms| now_ms.saturating_sub(*at_ms) < WARM_MS)
    }

    /// Returns the warm agents, those first that ran last.
    pub fn recent(&self, now_ms: u64) -> Vec<AgentDigest> {
        let warm = self.used_at_ms.iter().filter(|(_, at_ms)| now_ms.saturating_sub(**at_ms) < WARM_MS);
        let mut warm: Vec<(Reverse<u64>, AgentDigest)> =
            warm.map(|(agent, at_ms)| (Reverse(*at_ms), *agent)).collect();
        warm.sort_unstable();
        warm.into_iter().map(|(_, agent)| agent).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(number: usize) -> AgentDigest {
        AgentDigest::of("local", &number.to_string(), "1")
    }

    #[test]
    fn the_agents_that_ran_last_are_reported_first_and_cool_down() {
        let mut warm = WarmAgents::default();
        warm.note(agent(1), 1_000);
        warm.note(agent(2), 2_000);
        warm.note(agent(1), 3_000);
        assert_eq!(warm.recent(4_000), [agent(1), agent(2)]);
        assert_eq!(warm.recent(2_000 + WARM_MS), [agent(1)]);
        assert!(warm.has(agent(1), 4_000) && !warm.has(agent(2), 2_000 + WARM_MS) && !warm.has(agent(3), 0));
    }

    #[test]
    fn the_agent_that_ran_longest_ago_leaves_first() {
        let mut warm = WarmAgents::default();
        for number in 0..=MAX_WARM {
            warm.note(agent(number), number as u64);
        }
        let recent = warm.recent(1_000);
        assert_eq!((recent.len(), recent[0]), (MAX_WARM, agent(MAX_WARM)));
        assert!(!warm.has(agent(0), 1_000));
    }

    #[test]
    fn a_full_report_is_small_and_versions_and_tenants_differ() {
        let digests: Vec<AgentDigest> = (0..MAX_WARM).map(agent).collect();
        let text = serde_json::to_string(&digests).expect("numbers are JSON");
        assert!(text.len() < 6 << 10, "{} bytes", text.len());
        assert_eq!(serde_json::from_str::<Vec<AgentDigest>>(&text).expect("the same form"), digests);
        let one = AgentDigest::of("a", "b", "1");
        assert!(one != AgentDigest::of("a", "b", "2") && one != AgentDigest::of("ab", "", "1"));
    }
}
