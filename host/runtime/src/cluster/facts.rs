//! The facts that a host reports about itself to the others.

use super::catalog::ModelFacts;
use crate::placement::{AgentDigest, Load};
use serde::{Deserialize, Serialize};
use skep_store::HostRow;
use std::collections::BTreeMap;

/// The part that a host takes in its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostRole {
    /// The host runs agents, and has no model: other hosts compute its generations.
    Gateway,
    /// The host computes prompts for decode hosts, and does nothing else.
    Prefill,
    /// The host does everything, but has prefill hosts compute long prompts.
    Decode,
    /// The host passes all requests on to the others.
    Balancer,
    /// The host does everything. A role that only a newer version knows is read as this one.
    #[default]
    #[serde(other)]
    All,
}

impl HostRole {
    /// Returns whether a host with this role runs agents, owns sessions and answers clients itself.
    pub fn runs_agents(self) -> bool {
        match self {
            HostRole::All | HostRole::Decode | HostRole::Gateway => true,
            HostRole::Prefill | HostRole::Balancer => false,
        }
    }

    /// Returns whether a host with this role computes models.
    pub fn computes(self) -> bool {
        match self {
            HostRole::All | HostRole::Decode | HostRole::Prefill => true,
            HostRole::Gateway | HostRole::Balancer => false,
        }
    }
}

/// Tokens that a host has to compute for the requests that it has, those that wait included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokensInFlight {
    /// Tokens of prompts.
    pub prefill: u64,
    /// Tokens of answers, as many as answers had on average until now.
    pub decode: u64,
    /// Median times that a token of a prompt and one of an answer take, in nanoseconds; 0 if none was computed yet.
    pub prefill_token_ns: u64,
    pub decode_token_ns: u64,
}

/// Facts that a host reports about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) models: Vec<String>,
    pub(crate) running_turns: u64,
    /// See [`crate::SharedCounts`]. A host of an earlier version reports none.
    #[serde(default)]
    pub(crate) counts: BTreeMap<String, u64>,
    /// The version of the stored agents that the host has started (see [`skep_store::NoticeKind::Agents`]). A host of an earlier
    /// version does not report it.
    #[serde(default)]
    pub(crate) agents: i64,
    #[serde(default)]
    pub(crate) role: HostRole,
    /// The models that the host computes for others, too.
    /// The name of the field is the one that hosts of earlier versions write.
    #[serde(default, rename = "catalogue")]
    pub(crate) catalog: Vec<ModelFacts>,
    #[serde(default)]
    pub(crate) load: Load,
    /// The agents whose sessions ran there recently, those first that ran last. At most [`crate::placement::MAX_WARM`].
    #[serde(default)]
    pub(crate) warm: Vec<AgentDigest>,
    /// Sequences that its models compute at this moment, those for other hosts included. A host of an earlier version does not
    /// report it.
    #[serde(default)]
    pub(crate) computing: Option<u32>,
    /// Whether the host gives KV pages to others.
    #[serde(default)]
    pub(crate) pages: bool,
    /// A host of an earlier version does not report it.
    #[serde(default)]
    pub(crate) tokens: TokensInFlight,
}

impl Facts {
    pub(super) fn encode(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers are always JSON")
    }

    /// Reads the facts of a host. `None` until the host has started completely, because it reports none before.
    pub(crate) fn of(row: &HostRow) -> Option<Facts> {
        serde_json::from_str(&row.facts).ok()
    }

    /// Returns the number of sequences that the host's models could compute in addition, without one that waits.
    pub(super) fn free_slots(&self) -> usize {
        let Load { running_turns, waiting, capacity, .. } = self.load;
        match (waiting, capacity) {
            (1.., _) => 0,
            // The host is of an earlier version, and does not report its load.
            (0, 0) => 1,
            (0, capacity) => capacity.saturating_sub(self.computing.unwrap_or(running_turns)) as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::members::tests::row;
    use skep_store::HostState;

    #[test]
    fn a_host_has_room_until_a_request_waits_or_all_its_sequences_run() {
        let free = |waiting, capacity, computing| {
            let load = Load { running_turns: 3, waiting, capacity, kv_percent: 0 };
            Facts { load, computing, ..Facts::default() }.free_slots()
        };
        assert_eq!((free(0, 8, Some(2)), free(0, 8, Some(9)), free(1, 8, Some(2))), (6, 0, 0));
        assert_eq!(free(0, 8, None), 5, "an earlier version reports turns only");
        assert_eq!(free(0, 0, None), 1, "an earlier version reports no load");
    }

    #[test]
    fn facts_of_other_versions_are_read() {
        let read = |facts: &str| Facts::of(&row(1, HostState::Serving, facts));
        let early = read(r#"{"models": ["a"], "running_turns": 2}"#).expect("an earlier version");
        assert_eq!((early.role, early.running_turns), (HostRole::All, 2));
        let later = read(r#"{"models": [], "running_turns": 0, "role": "new", "more": {}}"#);
        assert_eq!(later.expect("a later version").role, HostRole::All);
        let facts = Facts { role: HostRole::Gateway, ..Facts::default() };
        assert_eq!(read(&facts.encode()), Some(facts));
    }
}
