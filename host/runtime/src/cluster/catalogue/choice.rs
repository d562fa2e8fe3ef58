//! The order in which the hosts of a cluster are asked for a generation.
//!
//! A session is computed at one host as long as that serves, because only there its pages are in the KV cache. Requests without a
//! session are spread.

use super::ModelFacts;
use crate::cluster::{Facts, Member};
use sha2::{Digest, Sha256};
use skep_engine::Affinity;
use skep_store::{HostRow, HostState};
use std::cmp::Reverse;

/// Returns the other hosts that compute a model, in the order in which they are asked: by the hash of the session and the host
/// (rendezvous hashing), those that drain last. `draw` takes the place of a session where there is none.
pub(super) fn ranked(rows: &[HostRow], own: i64, model: &str, affinity: &Affinity, draw: u64) -> Vec<Member> {
    let mut hosts: Vec<&HostRow> =
        rows.iter().filter(|row| row.number != own && facts_of(row, model).is_some()).collect();
    hosts.sort_by_cached_key(|row| {
        (row.state != HostState::Serving, Reverse(weight(row.number, model, affinity, draw)))
    });
    hosts.into_iter().map(Member::of).collect()
}

/// Returns what a host reports about a model that it computes.
fn facts_of(row: &HostRow, model: &str) -> Option<ModelFacts> {
    Facts::of(row)?.catalogue.into_iter().find(|known| known.name == model)
}

fn weight(host: i64, model: &str, affinity: &Affinity, draw: u64) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(host.to_le_bytes());
    let Affinity { tenant, agent, session, .. } = affinity;
    let Some(session) = session else {
        hasher.update(draw.to_le_bytes());
        return hasher.finalize().into();
    };
    for part in [model, tenant, agent.as_deref().unwrap_or_default(), session] {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{facts, row};
    use super::*;

    fn of(session: usize) -> Affinity {
        Affinity { tenant: "t".into(), session: Some(session.to_string()), ..Affinity::default() }
    }

    fn first(rows: &[HostRow], affinity: &Affinity) -> i64 {
        ranked(rows, 1, "big", affinity, 0)[0].number
    }

    #[test]
    fn a_session_stays_at_its_host_until_that_ends() {
        let rows = |numbers: &[i64]| -> Vec<HostRow> {
            numbers.iter().map(|number| row(*number, HostState::Serving, &facts(&["big"]))).collect()
        };
        let chosen =
            |rows: &[HostRow]| -> Vec<i64> { (0..100).map(|session| first(rows, &of(session))).collect() };
        let before = chosen(&rows(&[1, 2, 3, 4]));
        assert!([2, 3, 4].iter().all(|host| before.contains(host)), "each host gets some: {before:?}");
        let after = chosen(&rows(&[1, 2, 3]));
        assert!(before.iter().zip(&after).all(|(before, after)| *before == 4 || before == after));
        let spread: Vec<i64> = (0..100)
            .map(|draw| ranked(&rows(&[1, 2, 3]), 1, "big", &Affinity::default(), draw)[0].number)
            .collect();
        assert!([2, 3].iter().all(|host| spread.contains(host)), "without a session: {spread:?}");
    }

    #[test]
    fn only_hosts_that_compute_the_model_are_asked_and_those_that_drain_last() {
        let rows = [
            row(1, HostState::Serving, &facts(&["big"])),
            row(2, HostState::Draining, &facts(&["big"])),
            row(3, HostState::Serving, &facts(&["small"])),
            row(4, HostState::Serving, &facts(&["small", "big"])),
            row(5, HostState::Serving, ""),
        ];
        for session in 0..20 {
            let asked: Vec<i64> =
                ranked(&rows, 1, "big", &of(session), 0).into_iter().map(|member| member.number).collect();
            assert_eq!(asked, [4, 2]);
        }
        assert!(ranked(&rows, 1, "none", &of(1), 0).is_empty());
    }
}
