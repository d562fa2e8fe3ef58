//! Checks decisions about calls that wait for them: at most one decision about a call is accepted, and it counts.

use std::collections::{BTreeMap, BTreeSet};

use super::{Faults, Kind, Wanted};

/// A decision about the call of a message, as whoever made it knows it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The host's id for the call that waits.
    pub approval: String,
    /// The id of the message.
    pub about: String,
    pub approves: bool,
    pub verdict: Verdict,
}

/// The answer to a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accepted,
    /// The host answered that the call does not wait anymore.
    Late,
    /// No answer came: the decision may count.
    Unknown,
}

/// Returns how often the effect of a call has to happen about which these decisions were made. `said` is the agent's word about it.
pub fn wanted(decisions: &[&Decision], said: Option<&str>) -> Wanted {
    let may_be_approved =
        decisions.iter().any(|decision| decision.approves && decision.verdict != Verdict::Late);
    let is_denied =
        decisions.iter().any(|decision| !decision.approves && decision.verdict == Verdict::Accepted);
    match said {
        _ if !may_be_approved && (is_denied || decisions.is_empty()) => Wanted::Never,
        Some("done") => Wanted::Once,
        _ => Wanted::AtMostOnce,
    }
}

/// Checks all decisions. `refused` has the messages whose agent learned that its call was refused.
pub(super) fn check(decisions: &[Decision], refused: &BTreeSet<String>, faults: &mut Faults) {
    let mut accepted: BTreeMap<&str, Vec<&Decision>> = BTreeMap::new();
    for decision in decisions.iter().filter(|decision| decision.verdict == Verdict::Accepted) {
        accepted.entry(&decision.approval).or_default().push(decision);
    }
    for (approval, decisions) in accepted {
        let about = &decisions[0].about;
        if decisions.len() > 1 {
            let what =
                format!("{} decisions about the call {approval} of {about} were accepted", decisions.len());
            faults.add(Kind::DecisionDoubled, what);
        } else if decisions[0].approves && refused.contains(about) {
            let what = format!("the call {approval} of {about} was approved, and its agent was refused it");
            faults.add(Kind::DecisionLost, what);
        }
    }
}
