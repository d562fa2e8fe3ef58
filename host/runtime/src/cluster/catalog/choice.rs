//! The order in which the hosts of a cluster are asked for a generation.
//!
//! A session is computed at one host as long as that host serves, because only there its pages are in the KV cache. It leaves this host
//! only while requests wait there and its second choice has room: a prompt that is computed again then begins earlier than one that
//! waits. Requests without a session are spread.

use crate::cluster::{Facts, Member, members::KnownHost};
use sha2::{Digest, Sha256};
use skep_engine::{Affinity, ModelDigest};
use std::cmp::Reverse;

/// The model of a request. A host that has another model under its name is not asked.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) model: &'a str,
    /// `None` until a host has loaded the model.
    pub(super) digest: Option<&'a ModelDigest>,
}

/// Returns the other hosts that compute a model, in the order in which they are asked: by the hash of the session and the
/// host (rendezvous hashing), and hosts that drain after all others. The first two change places if requests wait at the
/// first one and the second one has room. `draw` takes the place of a session where there is none.
pub(super) fn ranked(
    hosts: &[KnownHost],
    own: i64,
    asked: Asked<'_>,
    affinity: &Affinity,
    draw: u64,
) -> Vec<Member> {
    let Asked { model, digest } = asked;
    let mut hosts: Vec<&KnownHost> =
        hosts.iter().filter(|host| host.row.number != own && host.computes(model, digest)).collect();
    hosts
        .sort_by_cached_key(|host| (!host.serves(), Reverse(weight(host.row.number, model, affinity, draw))));
    if let [first, second, ..] = &mut hosts[..]
        && waits(first)
        && has_room(second)
    {
        std::mem::swap(first, second);
    }
    hosts.into_iter().map(|host| Member::of(&host.row)).collect()
}

fn waits(host: &KnownHost) -> bool {
    host.facts.as_ref().is_some_and(|facts| facts.load.waiting > 0)
}

/// Returns whether a host takes work and reports that it could begin with it at once.
fn has_room(host: &KnownHost) -> bool {
    let reports_room = |facts: &Facts| facts.load.capacity > 0 && facts.free_slots() > 0;
    host.serves() && host.facts.as_ref().is_some_and(reports_room)
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
    use super::super::{
        ModelFacts,
        tests::{facts, model, row},
    };
    use super::*;
    use crate::placement::Load;
    use skep_store::{HostRow, HostState};

    const BIG: Asked<'static> = Asked { model: "big", digest: None };

    fn of(session: usize) -> Affinity {
        Affinity { tenant: "t".into(), session: Some(session.to_string()), ..Affinity::default() }
    }

    fn first(rows: &[HostRow], affinity: &Affinity) -> i64 {
        order(rows, BIG, affinity, 0)[0]
    }

    fn order(rows: &[HostRow], asked: Asked<'_>, affinity: &Affinity, draw: u64) -> Vec<i64> {
        let hosts: Vec<KnownHost> = rows.iter().cloned().map(KnownHost::of).collect();
        ranked(&hosts, 1, asked, affinity, draw).iter().map(|member| member.number).collect()
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
        let spread: Vec<i64> =
            (0..100).map(|draw| order(&rows(&[1, 2, 3]), BIG, &Affinity::default(), draw)[0]).collect();
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
            assert_eq!(order(&rows, BIG, &of(session), 0), [4, 2]);
        }
        assert!(order(&rows, Asked { model: "none", digest: None }, &of(1), 0).is_empty());
    }

    #[test]
    fn a_session_leaves_its_host_only_while_requests_wait_there_and_the_next_one_has_room() {
        let host = |number, state, waiting, computing| {
            let load = Load { waiting, capacity: 4, ..Load::default() };
            let catalog = vec![model("big")];
            let facts = Facts { load, catalog, computing: Some(computing), ..Facts::default() };
            row(number, state, &facts.encode())
        };
        let serving = |number, waiting, computing| host(number, HostState::Serving, waiting, computing);
        for session in 0..20 {
            let chosen = |rows: &[HostRow]| first(rows, &of(session));
            let preferred = chosen(&[serving(2, 0, 0), serving(3, 0, 0)]);
            let other = 5 - preferred;
            let full = serving(preferred, 0, 4);
            let queue = serving(preferred, 1, 4);
            assert_eq!(chosen(&[full, serving(other, 0, 0)]), preferred, "nobody waits there");
            assert_eq!(chosen(&[queue.clone(), serving(other, 0, 3)]), other);
            assert_eq!(chosen(&[queue.clone(), serving(other, 0, 4)]), preferred, "the other one is full");
            assert_eq!(chosen(&[queue.clone(), serving(other, 2, 0)]), preferred, "it would wait there, too");
            let draining = host(other, HostState::Draining, 0, 0);
            assert_eq!(chosen(&[queue.clone(), draining]), preferred);
            let silent = row(other, HostState::Serving, &facts(&["big"]));
            assert_eq!(chosen(&[queue, silent]), preferred, "an earlier version reports no room");
        }
    }

    #[test]
    fn a_host_with_another_model_of_the_same_name_is_not_asked() {
        let (one, two) = (ModelDigest::remote("test", "one"), ModelDigest::remote("test", "two"));
        let with = |number, digest: Option<&ModelDigest>| {
            let catalog = vec![ModelFacts { digest: digest.cloned(), ..model("big") }];
            row(number, HostState::Serving, &Facts { catalog, ..Facts::default() }.encode())
        };
        let rows = [with(2, Some(&one)), with(3, Some(&two)), with(4, None)];
        let mut asked = order(&rows, Asked { digest: Some(&one), ..BIG }, &of(1), 0);
        asked.sort_unstable();
        assert_eq!(asked, [2, 4], "one that has not loaded it may have it");
    }
}
