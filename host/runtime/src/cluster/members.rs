//! The hosts of the cluster, as of the last look.

use super::facts::{Facts, HostRole, TokensInFlight};
use crate::{
    name::SessionKey,
    placement::{self, Report, SessionHash},
};
use skep_store::{HostRow, HostState, HostVersions};
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Another host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub number: i64,
    /// The address at which the other hosts reach it.
    pub url: String,
}

/// A host of the cluster, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterHost {
    pub number: i64,
    pub url: String,
    pub version: String,
    pub versions: HostVersions,
    pub is_draining: bool,
    /// Whether it is the host that was asked.
    pub is_this: bool,
    pub started_at_ms: u64,
    /// Time since it was last heard from.
    pub seen_ms_ago: u64,
    /// Time after which others take over what it has, unless they hear from it before. `None` without a cluster.
    pub lease_left_ms: Option<u64>,
    pub role: HostRole,
    /// The models that it has itself.
    pub models: Vec<String>,
    /// Number of sessions that it owns.
    pub sessions: u64,
    pub running_turns: u64,
    /// Percentage of its capacity that is in use; more than 100 if turns wait. `None` if it does not say.
    pub load_percent: Option<u32>,
    /// Requests that wait for its models.
    pub waiting_requests: u64,
    pub tokens: TokensInFlight,
}

/// A host that takes work of others, and how much it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingHost {
    pub member: Member,
    pub tokens: TokensInFlight,
}

/// A host of the cluster, and what it reports about itself.
#[derive(Clone, Debug)]
pub(super) struct KnownHost {
    pub(super) row: HostRow,
    /// `None` until the host has started completely, because it reports nothing before.
    pub(super) facts: Option<Facts>,
}

/// The hosts that are not gone, by number. What they report is read once for each look, and not for each request.
#[derive(Default)]
pub(super) struct Members {
    /// The hosts, and the number of the look that found them.
    found: RwLock<(u64, Arc<Vec<KnownHost>>)>,
    /// Number of looks that have begun.
    looks: AtomicU64,
    /// Whether a host is gone whose work nobody has looked at yet.
    has_lost: AtomicBool,
}

/// A look at the hosts. It begins before they are read, so that looks at the same time end with the hosts of the last one.
pub(super) struct Look<'a> {
    members: &'a Members,
    number: u64,
}

impl Member {
    pub(super) fn of(row: &HostRow) -> Self {
        Member { number: row.number, url: row.url.clone() }
    }
}

impl KnownHost {
    pub(super) fn of(row: HostRow) -> Self {
        let facts = Facts::of(&row);
        KnownHost { row, facts }
    }

    /// Returns whether the host serves and has started completely.
    pub(super) fn serves(&self) -> bool {
        self.row.state == HostState::Serving && self.facts.is_some()
    }

    /// Returns whether it is a host other than `own`, runs agents, serves and has started completely.
    fn serves_beside(&self, own: i64) -> bool {
        self.row.number != own && self.serves() && self.role().runs_agents()
    }

    /// Returns the role of the host. One that has not started is taken for one that does everything.
    pub(super) fn role(&self) -> HostRole {
        self.facts.as_ref().map_or(HostRole::All, |facts| facts.role)
    }

    /// Returns the host with the work that it reports.
    fn working(&self) -> Option<WorkingHost> {
        let tokens = self.facts.as_ref()?.tokens;
        Some(WorkingHost { member: Member::of(&self.row), tokens })
    }
}

impl ClusterHost {
    pub(crate) fn of(row: HostRow, own: i64) -> Self {
        let Facts { models, running_turns, role, load, tokens, .. } = Facts::of(&row).unwrap_or_default();
        let lease_left_ms = Some(row.lease_left_ms());
        let HostRow { number, url, version, state, started_at_ms, seen_ms_ago, sessions, versions, .. } = row;
        let (is_draining, is_this) = (state == HostState::Draining, number == own);
        ClusterHost {
            number,
            url,
            version,
            versions,
            is_draining,
            is_this,
            started_at_ms,
            seen_ms_ago,
            lease_left_ms,
            role,
            models,
            sessions,
            running_turns,
            load_percent: load.percent(),
            waiting_requests: u64::from(load.waiting),
            tokens,
        }
    }
}

impl Look<'_> {
    /// Replaces the hosts, unless a look that began later has done so.
    pub(super) fn end(self, rows: Vec<HostRow>) {
        let present = rows.into_iter().filter(|row| row.state != HostState::Gone);
        let mut hosts: Vec<KnownHost> = present.map(KnownHost::of).collect();
        hosts.sort_by_key(|host| host.row.number);
        let mut found = self.members.found.write().unwrap_or_else(PoisonError::into_inner);
        if self.number < found.0 {
            return;
        }
        let is_there = |before: &KnownHost| hosts.iter().any(|host| host.row.number == before.row.number);
        if !found.1.iter().all(is_there) {
            self.members.note_loss();
        }
        *found = (self.number, Arc::new(hosts));
    }
}

impl Members {
    pub(super) fn look(&self) -> Look<'_> {
        Look { members: self, number: self.looks.fetch_add(1, Ordering::AcqRel) + 1 }
    }

    /// Records that a host is gone, so that its work is looked for.
    pub(super) fn note_loss(&self) {
        self.has_lost.store(true, Ordering::Release);
    }

    /// Returns whether a host was lost since the last call.
    pub(super) fn take_loss(&self) -> bool {
        self.has_lost.swap(false, Ordering::AcqRel)
    }

    pub(super) fn hosts(&self) -> Arc<Vec<KnownHost>> {
        self.found.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    pub(super) fn has_other_serving(&self, own: i64) -> bool {
        self.hosts().iter().any(|host| host.serves_beside(own))
    }

    /// Returns the addresses of the hosts that serve beside this one and have not reported this version of the agents yet.
    pub(super) fn behind(&self, own: i64, agents: i64) -> Vec<String> {
        let hosts = self.hosts();
        let is_behind = |host: &&KnownHost| {
            host.serves_beside(own) && host.facts.as_ref().is_some_and(|facts| facts.agents < agents)
        };
        hosts.iter().filter(is_behind).map(|host| host.row.url.clone()).collect()
    }

    /// Returns the hosts beside this one that give KV pages and have not ended. One of an earlier version does not know the
    /// question, and its answer would look like that of a stranger.
    pub(super) fn with_pages(&self, own: i64) -> Vec<Member> {
        let hosts = self.hosts();
        let gives = |host: &&KnownHost| {
            host.row.number != own && host.facts.as_ref().is_some_and(|facts| facts.pages)
        };
        hosts.iter().filter(gives).map(|host| Member::of(&host.row)).collect()
    }

    /// Returns the hosts beside this one that compute prompts of a model for others.
    pub(super) fn with_prefill(&self, own: i64, model: &str) -> Vec<WorkingHost> {
        let hosts = self.hosts();
        let computes = |host: &&KnownHost| {
            let has_model = |facts: &Facts| facts.models.iter().any(|known| known == model);
            host.row.number != own
                && host.serves()
                && host.role() == HostRole::Prefill
                && host.facts.as_ref().is_some_and(has_model)
        };
        hosts.iter().filter(computes).filter_map(KnownHost::working).collect()
    }

    /// Returns the hosts beside this one that run agents and serve.
    pub(super) fn with_agents(&self, own: i64) -> Vec<WorkingHost> {
        let hosts = self.hosts();
        hosts.iter().filter(|host| host.serves_beside(own)).filter_map(KnownHost::working).collect()
    }

    /// Returns the host that a session prefers among those that serve beside this one, so that the choice of a session changes
    /// only if its host ends.
    pub(super) fn chosen(&self, own: i64, key: &SessionKey) -> Option<Member> {
        let hosts = self.hosts();
        let serving = hosts.iter().filter(|host| host.serves_beside(own));
        let session = SessionHash::of(&key.agent, &key.session);
        let number = placement::chosen(session, serving.map(|host| host.row.number))?;
        hosts.iter().find(|host| host.row.number == number).map(|host| Member::of(&host.row))
    }

    /// Returns what the hosts that serve beside this one report, at a time of this host.
    pub(super) fn reports(&self, own: i64, now_ms: u64) -> Vec<Report> {
        let hosts = self.hosts();
        let reports = hosts.iter().filter(|host| host.serves_beside(own)).filter_map(|host| {
            let Facts { load, warm, .. } = host.facts.as_ref()?;
            let at_ms = now_ms.saturating_sub(host.row.seen_ms_ago);
            Some(Report { host: host.row.number, at_ms, load: *load, warm: warm.clone() })
        });
        reports.collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::placement::{AgentDigest, Load};

    pub(in crate::cluster) fn row(number: i64, state: HostState, facts: &str) -> HostRow {
        HostRow {
            number,
            url: format!("http://10.0.0.{number}:8080"),
            version: "1.0.0".into(),
            state,
            facts: facts.into(),
            started_at_ms: 1,
            seen_ms_ago: 1,
            sessions: 0,
            versions: HostVersions::OWN,
        }
    }

    fn key(session: usize) -> SessionKey {
        SessionKey { agent: "a".into(), session: session.to_string() }
    }

    #[test]
    fn a_session_keeps_its_successor_until_that_host_ends() {
        let facts = Facts::default().encode();
        let members = Members::default();
        let rows = |numbers: &[i64]| -> Vec<HostRow> {
            numbers.iter().map(|number| row(*number, HostState::Serving, &facts)).collect()
        };
        members.look().end(rows(&[1, 2, 3, 4]));
        assert!(!members.take_loss(), "nobody was there before");
        let chosen = |members: &Members| -> Vec<i64> {
            (0..100).map(|session| members.chosen(1, &key(session)).expect("others serve").number).collect()
        };
        let before = chosen(&members);
        assert!([2, 3, 4].iter().all(|host| before.contains(host)), "each host gets some: {before:?}");
        members.look().end(rows(&[1, 2, 3]));
        assert!(members.take_loss() && !members.take_loss(), "one is gone");
        let after = chosen(&members);
        assert!(before.iter().zip(&after).all(|(before, after)| *before == 4 || before == after));
        members.look().end(rows(&[1, 2, 3, 5]));
        assert!(!members.take_loss(), "one has come");
    }

    #[test]
    fn a_look_that_ends_late_does_not_hide_what_a_later_one_found() {
        let members = Members::default();
        let rows =
            |numbers: &[i64]| numbers.iter().map(|number| row(*number, HostState::Serving, "")).collect();
        let (early, late) = (members.look(), members.look());
        late.end(rows(&[1, 2]));
        early.end(rows(&[1, 2, 3]));
        assert_eq!(members.hosts().len(), 2);
        assert!(!members.take_loss(), "it was gone before it was seen");
        members.look().end(rows(&[2]));
        assert!(members.hosts().len() == 1 && members.take_loss());
    }

    #[test]
    fn hosts_that_have_not_started_the_newest_agents_are_behind() {
        let facts = |agents| Facts { agents, ..Facts::default() }.encode();
        let members = Members::default();
        members.look().end(vec![
            row(1, HostState::Serving, &facts(6)),
            row(2, HostState::Serving, &facts(7)),
            row(3, HostState::Serving, &facts(6)),
            row(4, HostState::Serving, r#"{"models":[],"running_turns":0}"#),
            row(5, HostState::Draining, &facts(6)),
            row(6, HostState::Serving, ""),
        ]);
        assert_eq!(members.behind(1, 7), ["http://10.0.0.3:8080", "http://10.0.0.4:8080"]);
        assert_eq!(members.behind(1, 6), ["http://10.0.0.4:8080"]);
    }

    #[test]
    fn hosts_that_drain_or_have_not_started_get_no_requests() {
        let facts = Facts::default().encode();
        let members = Members::default();
        members.look().end(vec![
            row(1, HostState::Serving, &facts),
            row(2, HostState::Draining, &facts),
            row(3, HostState::Serving, ""),
            row(4, HostState::Gone, &facts),
        ]);
        assert!(!members.has_other_serving(1));
        assert_eq!(members.chosen(1, &key(1)), None);
        assert!(members.has_other_serving(2));
        assert_eq!(members.chosen(2, &key(1)).map(|member| member.number), Some(1));
    }

    #[test]
    fn only_hosts_that_give_pages_are_asked_for_them() {
        let gives = Facts { pages: true, ..Facts::default() }.encode();
        let members = Members::default();
        members.look().end(vec![
            row(1, HostState::Serving, &gives),
            row(2, HostState::Draining, &gives),
            row(3, HostState::Serving, ""),
            row(4, HostState::Gone, &gives),
            row(5, HostState::Serving, &Facts::default().encode()),
            row(6, HostState::Serving, r#"{"models": [], "running_turns": 0}"#),
        ]);
        let asked: Vec<i64> = members.with_pages(1).iter().map(|member| member.number).collect();
        assert_eq!(asked, [2], "one that drains still answers, and one of an earlier version does not");
    }

    #[test]
    fn hosts_of_a_single_stage_get_no_sessions_and_only_prefill_hosts_get_prompts() {
        let of = |role| Facts { role, models: vec!["big".into()], ..Facts::default() }.encode();
        let members = Members::default();
        members.look().end(vec![
            row(1, HostState::Serving, &of(HostRole::All)),
            row(2, HostState::Serving, &of(HostRole::Prefill)),
            row(3, HostState::Serving, &of(HostRole::Balancer)),
            row(4, HostState::Serving, &of(HostRole::Decode)),
            row(5, HostState::Draining, &of(HostRole::Prefill)),
            row(6, HostState::Serving, &of(HostRole::Gateway)),
        ]);
        let numbers =
            |hosts: Vec<WorkingHost>| -> Vec<i64> { hosts.iter().map(|host| host.member.number).collect() };
        assert_eq!(numbers(members.with_agents(3)), [1, 4, 6]);
        assert_eq!(numbers(members.with_prefill(4, "big")), [2]);
        assert!(members.with_prefill(4, "small").is_empty() && members.with_prefill(2, "big").is_empty());
        let chosen = |session| members.chosen(1, &key(session)).expect("others serve").number;
        assert!((0..50).map(chosen).all(|host| [4, 6].contains(&host)));
        assert_eq!(members.reports(1, 9).iter().map(|report| report.host).collect::<Vec<_>>(), [4, 6]);
        members.look().end(vec![row(2, HostState::Serving, &of(HostRole::Prefill))]);
        assert!(!members.has_other_serving(1), "a prefill host takes nothing over");
    }

    #[test]
    fn only_hosts_that_serve_report_and_facts_of_other_versions_can_be_read() {
        let load = Load { running_turns: 6, waiting: 2, capacity: 4, kv_percent: 50 };
        let warm = vec![AgentDigest::of("local", "desk", "1")];
        let facts = Facts { load, warm: warm.clone(), ..Facts::default() }.encode();
        let members = Members::default();
        members.look().end(vec![
            row(1, HostState::Serving, &facts),
            row(2, HostState::Serving, &facts),
            row(3, HostState::Draining, &facts),
            row(4, HostState::Serving, ""),
            row(5, HostState::Serving, r#"{"models": [], "running_turns": 1, "later": true}"#),
        ]);
        let silent = Report { host: 5, at_ms: 99, load: Load::default(), warm: Vec::new() };
        let expected = vec![Report { host: 2, at_ms: 99, load, warm }, silent];
        assert_eq!(members.reports(1, 100), expected, "each was seen a millisecond ago");
        let described = ClusterHost::of(row(2, HostState::Serving, &facts), 1);
        assert_eq!((described.load_percent, described.waiting_requests), (Some(150), 2));
        assert_eq!((described.versions, described.lease_left_ms), (HostVersions::OWN, Some(9_999)));
        assert_eq!(ClusterHost::of(row(5, HostState::Serving, "{}"), 1).load_percent, None);
    }
}
