//! Decides on which host of a cluster a session without an owner begins: at the host that got its first message, or at
//! another one.
//!
//! Everything here is a pure function of what the hosts report about themselves, of what this host has sent to them since then, and
//! of a time that the caller reads. So the benchmark of fleets drives the same code as a host.
//!
//! The rules, in this order:
//!
//! 1. A session stays where its first message arrived if its agent is warm there and there is room, because its clients then need
//!    no second host.
//! 2. Otherwise it begins at a host where its agent is warm and that has room: the beginning of its prompt is cached there.
//! 3. Otherwise it stays if there is room.
//! 4. Otherwise it begins at a host that is clearly less loaded, and stays if there is none.
//!
//! Reports are half a second old, and all hosts have the same ones. So that they do not all send their sessions to the same host, the
//! hash of a session names two of the good hosts, of which the less loaded one is taken, and a host sends to another one only its
//! share of the room there: what it has sent counts, and a share of less than one session is taken by chance.
//!
//! This module knows neither the database nor how hosts talk.

mod report;
mod sent;
mod warm;

pub use report::{Load, Report, Reports};
pub use sent::Sent;
pub use warm::{AgentDigest, MAX_WARM, WarmAgents};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

/// Share of a host's capacity from which on it has no room for sessions of others.
const ROOM: f64 = 0.75;
/// Difference of the shares of capacity in use from which on another host is clearly less loaded.
const MARGIN: f64 = 0.25;
/// Age from which on a report says nothing anymore: that of four meetings.
pub const MAX_REPORT_AGE_MS: u64 = 2_000;

/// The setting of where sessions begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// At the host that gets their first message.
    Here,
    /// At the host that gets their first message, unless another one is clearly better.
    #[default]
    Balanced,
}

/// The host at which a session begins, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Here(Stay),
    There { host: i64, reason: Move },
}

/// The reason why a session begins at the host that got its first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// The agent is warm here, and there is room.
    Warm,
    /// There is room.
    Room,
    /// There is no room, but no other host is clearly less loaded.
    Busy,
    /// The setting says so.
    Set,
}

/// The reason why a session begins at another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// The agent is warm there, and there is room.
    Warm,
    /// The other host is clearly less loaded.
    Load,
}

/// The host that got the first message of a session.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    pub load: Load,
    /// Whether sessions of the agent ran here recently.
    pub is_warm: bool,
}

/// A session without an owner.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    pub session: SessionHash,
    pub agent: AgentDigest,
}

/// The hash of a session, from which the weights of all hosts for it are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionHash(u64);

impl SessionHash {
    /// Returns the hash of a session of an agent.
    pub fn of(agent: &str, session: &str) -> Self {
        let mut hasher = Sha256::new();
        for part in [agent, session] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let hash: [u8; 32] = hasher.finalize().into();
        SessionHash(hash.iter().take(8).fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }
}

impl Choice {
    /// Returns the value of the label `outcome` in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Choice::Here(Stay::Warm) => "here_warm",
            Choice::Here(Stay::Room) => "here_room",
            Choice::Here(Stay::Busy) => "here_busy",
            Choice::Here(Stay::Set) => "here_set",
            Choice::There { reason: Move::Warm, .. } => "there_warm",
            Choice::There { reason: Move::Load, .. } => "there_load",
        }
    }
}

/// Returns the weight of a host for a session. Each session prefers the hosts with the highest weights (rendezvous hashing), so
/// its choice changes only if the chosen host ends.
pub fn weight(session: SessionHash, host: i64) -> u64 {
    mix(session.0 ^ mix(host.cast_unsigned()))
}

/// Returns the host with the highest weight for a session.
pub fn chosen(session: SessionHash, hosts: impl IntoIterator<Item = i64>) -> Option<i64> {
    hosts.into_iter().max_by_key(|host| weight(session, *host))
}

/// Decides where a session begins. `others` are the reports of the other hosts that serve, and `sent` says what this host has sent
/// to them.
pub fn place(own: &Own, others: &Reports, sent: &Sent, newcomer: Newcomer, now_ms: u64) -> Choice {
    let has_room = own.load.has_room(0);
    if own.is_warm && has_room {
        return Choice::Here(Stay::Warm);
    }
    let view = View { others, sent, session: newcomer.session, now_ms };
    let warm = others.warm(newcomer.agent).filter(|report| report.load.has_room(0));
    if let Some(host) = view.best(warm.map(|report| (report, ROOM))) {
        return Choice::There { host, reason: Move::Warm };
    }
    if has_room {
        return Choice::Here(Stay::Room);
    }
    let used = own.load.utilization(0);
    let better = others.all().iter().filter_map(|report| {
        let there = report.load.utilization(0);
        let is_better = there + MARGIN <= used || own.load.waiting > 0 && report.load.has_room(0);
        // Both hosts are to be equally loaded in the end, where neither has room.
        is_better.then_some((report, ROOM.max(f64::midpoint(there, used))))
    });
    match view.best(better) {
        Some(host) => Choice::There { host, reason: Move::Load },
        None => Choice::Here(Stay::Busy),
    }
}

/// The other hosts from the perspective of one session.
struct View<'a> {
    others: &'a Reports,
    sent: &'a Sent,
    session: SessionHash,
    now_ms: u64,
}

impl View<'_> {
    /// Returns one of the hosts that take the session: of the two with the highest weights, the less loaded one. Each candidate
    /// comes with the share of its capacity that may be in use.
    fn best<'r>(&self, candidates: impl Iterator<Item = (&'r Report, f64)>) -> Option<i64> {
        let mut two: [Option<(u64, &Report)>; 2] = [None, None];
        for (report, limit) in candidates {
            if !self.takes(report, limit) {
                continue;
            }
            let entry = (weight(self.session, report.host), report);
            if two[0].is_none_or(|(first, _)| entry.0 > first) {
                two = [Some(entry), two[0]];
            } else if two[1].is_none_or(|(second, _)| entry.0 > second) {
                two[1] = Some(entry);
            }
        }
        let load = |report: &Report| report.load.utilization(self.sent.count(report.host, self.now_ms));
        match two {
            [Some((_, first)), Some((_, second))] if load(second) < load(first) => Some(second.host),
            [first, _] => first.map(|(_, report)| report.host),
        }
    }

    /// Returns whether a host takes the session: what it reported is fresh, it was not unreachable, and this host's share of its
    /// room is not used up.
    fn takes(&self, report: &Report, limit: f64) -> bool {
        let age = self.now_ms.saturating_sub(report.at_ms);
        if age > MAX_REPORT_AGE_MS || self.sent.avoids(report.host, self.now_ms) {
            return false;
        }
        // This host and all others but that one may send to it, which are as many as there are reports.
        let share = report.load.room_below(limit) / self.others.all().len().max(1) as f64;
        let left = share - f64::from(self.sent.count(report.host, self.now_ms));
        left > fraction(mix(weight(self.session, report.host)))
    }
}

/// Returns a number from 0 to 1, without 1, that is as evenly distributed as `bits`.
fn fraction(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns a number of which each bit depends on all bits of `value`, without a pattern (the output function of SplitMix64, Steele et
/// al., 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 10_000;
    const IDLE: Load = Load { running_turns: 0, waiting: 0, capacity: 100, kv_percent: 0 };
    const FULL: Load = Load { running_turns: 100, ..IDLE };

    fn busy(running_turns: u32) -> Load {
        Load { running_turns, ..IDLE }
    }

    fn agent() -> AgentDigest {
        AgentDigest::of("local", "desk", "1")
    }

    fn report(host: i64, load: Load) -> Report {
        Report { host, at_ms: NOW_MS, load, warm: Vec::new() }
    }

    fn warm(host: i64, load: Load) -> Report {
        Report { warm: vec![agent()], ..report(host, load) }
    }

    fn newcomer(session: usize) -> Newcomer {
        Newcomer { session: SessionHash::of("desk", &session.to_string()), agent: agent() }
    }

    fn decide(own: Load, is_warm: bool, others: Vec<Report>) -> Choice {
        place(&Own { load: own, is_warm }, &Reports::new(others), &Sent::default(), newcomer(1), NOW_MS)
    }

    fn there(host: i64, reason: Move) -> Choice {
        Choice::There { host, reason }
    }

    #[test]
    fn a_session_stays_while_there_is_room() {
        assert_eq!(decide(busy(70), false, vec![report(2, IDLE)]), Choice::Here(Stay::Room));
        assert_eq!(decide(IDLE, true, vec![warm(2, IDLE)]), Choice::Here(Stay::Warm));
        assert_eq!(decide(FULL, false, vec![]), Choice::Here(Stay::Busy));
    }

    #[test]
    fn a_session_begins_where_its_agent_is_warm_as_long_as_there_is_room() {
        let cold = report(2, IDLE);
        assert_eq!(decide(IDLE, false, vec![cold.clone(), warm(3, busy(50))]), there(3, Move::Warm));
        assert_eq!(decide(IDLE, false, vec![cold.clone(), warm(3, busy(76))]), Choice::Here(Stay::Room));
        let waits = Load { waiting: 1, ..IDLE };
        assert_eq!(decide(IDLE, false, vec![cold.clone(), warm(3, waits)]), Choice::Here(Stay::Room));
        let full_cache = Load { kv_percent: 90, ..IDLE };
        assert_eq!(decide(IDLE, false, vec![cold.clone(), warm(3, full_cache)]), Choice::Here(Stay::Room));
        // Here it is warm, too, but there is no room.
        assert_eq!(decide(FULL, true, vec![cold, warm(3, IDLE)]), there(3, Move::Warm));
    }

    #[test]
    fn a_host_without_room_sends_only_to_one_that_is_clearly_less_loaded() {
        assert_eq!(decide(busy(80), false, vec![report(2, busy(60))]), Choice::Here(Stay::Busy));
        assert_eq!(decide(busy(80), false, vec![report(2, busy(50))]), there(2, Move::Load));
        let waits = Load { waiting: 3, ..busy(60) };
        assert_eq!(decide(waits, false, vec![report(2, busy(60))]), there(2, Move::Load));
        assert_eq!(decide(waits, false, vec![report(2, waits)]), Choice::Here(Stay::Busy));
        // All are overloaded, this one more than the other.
        assert_eq!(decide(busy(900), false, vec![report(2, busy(300))]), there(2, Move::Load));
    }

    #[test]
    fn stale_reports_and_hosts_without_a_load_are_ignored() {
        let stale = Report { at_ms: NOW_MS - MAX_REPORT_AGE_MS - 1, ..warm(2, IDLE) };
        assert_eq!(decide(FULL, false, vec![stale]), Choice::Here(Stay::Busy));
        assert_eq!(decide(FULL, false, vec![warm(2, Load::default())]), Choice::Here(Stay::Busy));
    }

    #[test]
    fn an_unreachable_host_is_avoided_for_a_while() {
        let others = Reports::new(vec![warm(2, IDLE)]);
        let own = Own { load: IDLE, is_warm: false };
        let mut sent = Sent::default();
        assert_eq!(place(&own, &others, &sent, newcomer(1), NOW_MS), there(2, Move::Warm));
        sent.avoid(2, NOW_MS);
        assert_eq!(place(&own, &others, &sent, newcomer(1), NOW_MS + 1_000), Choice::Here(Stay::Room));
    }

    #[test]
    fn what_was_sent_counts_until_the_host_has_reported_it() {
        let others = Reports::new(vec![warm(2, busy(65))]);
        let own = Own { load: IDLE, is_warm: false };
        let mut sent = Sent::default();
        let mut placed = 0;
        for session in 0..100 {
            if let Choice::There { host, .. } = place(&own, &others, &sent, newcomer(session), NOW_MS) {
                sent.note(host, NOW_MS);
                placed += 1;
            }
        }
        assert_eq!(placed, 10, "75 % of the capacity is the limit");
    }

    #[test]
    fn many_hosts_with_the_same_reports_do_not_overrun_one_host() {
        // 1,000 hosts find one warm host with room for 75 sequences.
        let mut reports: Vec<Report> = (2..=1_000).map(|host| report(host, IDLE)).collect();
        reports.push(warm(1_001, IDLE));
        let others = Reports::new(reports);
        let own = Own { load: IDLE, is_warm: false };
        let sent = Sent::default();
        let moved = (0..1_000).filter(|session| {
            matches!(place(&own, &others, &sent, newcomer(*session), NOW_MS), Choice::There { .. })
        });
        let moved = moved.count();
        assert!((40..=110).contains(&moved), "each sends its share: {moved}");
    }

    #[test]
    fn sessions_spread_over_the_hosts_that_are_good() {
        let others = Reports::new((2..=9).map(|host| warm(host, IDLE)).collect());
        let own = Own { load: IDLE, is_warm: false };
        let (mut sent, mut counts) = (Sent::default(), [0u32; 10]);
        for session in 0..80 {
            let Choice::There { host, .. } = place(&own, &others, &sent, newcomer(session), NOW_MS) else {
                continue;
            };
            sent.note(host, NOW_MS);
            counts[usize::try_from(host).expect("positive")] += 1;
        }
        let sent_to = &counts[2..];
        assert!(sent_to.iter().all(|count| (4..=10).contains(count)), "{sent_to:?}");
    }

    #[test]
    fn a_session_changes_its_preferred_host_only_if_that_host_ends() {
        let hosts = [1, 2, 3, 4, 5];
        let prefers = |hosts: &[i64], session: usize| {
            chosen(newcomer(session).session, hosts.iter().copied()).expect("there are hosts")
        };
        for session in 0..200 {
            let (before, after) = (prefers(&hosts, session), prefers(&hosts[..4], session));
            assert!(before == 5 || before == after);
        }
        let mut counts = [0; 6];
        for session in 0..1_000 {
            counts[usize::try_from(prefers(&hosts, session)).expect("positive")] += 1;
        }
        assert!(counts[1..].iter().all(|count| (140..=260).contains(count)), "{counts:?}");
    }
}
