//! The order in which the members of a route are tried.

use std::hash::{DefaultHasher, Hash, Hasher as _};

use rand::RngExt as _;
use skep_engine::Affinity;

use super::Member;

/// The way in which a route chooses among the models that take a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first one in the order of the options.
    #[default]
    Ordered,
    /// Each gets its share of the sessions. A session stays with its model, whose prefix cache knows it.
    Weighted,
}

impl Choice {
    /// Sorts the members that take a request. Those with a problem come last, because a request that finds no
    /// other may still succeed.
    pub(super) fn sort(self, members: &mut [&Member], affinity: &Affinity) {
        if self == Choice::Weighted {
            let request: u64 = rand::rng().random();
            members.sort_by(|a, b| {
                let score = |member: &Member| score(member, affinity, request);
                score(a).total_cmp(&score(b))
            });
        }
        members.sort_by_cached_key(|member| member.model.problem().is_some());
    }
}

/// Returns the member's score in a draw by weight: the lowest score wins. Scores depend only on the session and on
/// the member, so a session keeps its order, and a member that is added or removed moves only its own sessions.
fn score(member: &Member, affinity: &Affinity, request: u64) -> f64 {
    let mut hash = DefaultHasher::new();
    member.model.name().hash(&mut hash);
    match &affinity.session {
        Some(session) => (&affinity.tenant, &affinity.agent, session).hash(&mut hash),
        None => request.hash(&mut hash),
    }
    // Uniform in (0, 1]; the top 53 bits are the precision of the type.
    let uniform = ((hash.finish() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    match member.weight {
        0 => f64::INFINITY,
        weight => -uniform.ln() / f64::from(weight),
    }
}
