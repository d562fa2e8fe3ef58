//! The policies that a fleet is simulated with. They are the functions that hosts and engines use.

use rand::RngExt as _;
use rand::rngs::StdRng;
use serde::Serialize;
use skep_engine::policy::{self, Candidate};
use skep_runtime::placement::{AgentDigest, Choice, Newcomer, Own, Report, Reports, SessionHash, place};

use super::costs::Costs;
use super::host::Host;
use super::workload::Turn;

/// Time after which the others notice that a host is dead.
pub(super) const DETECTION_US: u64 = 1_500_000;

/// A way of choosing the host of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Policy {
    /// The replica router of an engine, over all hosts.
    Affinity,
    /// The same router, in turn.
    RoundRobin,
    /// The host with the fewest turns.
    LeastLoaded,
    /// A cluster's placement of new sessions, and the ownership of sessions afterwards.
    Placement,
}

/// A policy with what it remembers.
pub(super) struct Router {
    policy: Policy,
    turns: usize,
    candidates: Vec<Candidate>,
    /// The hosts that have the beginning of an agent's prompts in their caches.
    holders: Vec<Vec<u32>>,
    digests: Vec<AgentDigest>,
    reports: Reports,
    /// Chooses the host that a balancer sends a message to.
    draws: StdRng,
}

/// The state of the fleet when a turn is routed.
pub(super) struct Moment<'a> {
    pub(super) hosts: &'a mut [Host],
    pub(super) costs: &'a Costs,
    pub(super) now_us: u64,
    /// The host that had the last turn of the session.
    pub(super) home: Option<usize>,
}

/// The sizes of what hosts report.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct ReportSizes {
    /// Bytes of the report of one host, as it is stored.
    pub(super) report: u64,
    /// Bytes of the reports of all hosts in the memory of one.
    pub(super) view: u64,
}

impl Policy {
    pub(super) const ALL: [Policy; 4] =
        [Policy::RoundRobin, Policy::LeastLoaded, Policy::Affinity, Policy::Placement];

    pub(super) fn name(self) -> &'static str {
        match self {
            Policy::Affinity => "affinity",
            Policy::RoundRobin => "round robin",
            Policy::LeastLoaded => "least loaded",
            Policy::Placement => "placement",
        }
    }

    /// Returns whether the next turn of a session waits until it is known that its host is dead.
    pub(super) fn keeps_home(self) -> bool {
        matches!(self, Policy::Affinity | Policy::Placement)
    }
}

impl Router {
    pub(super) fn new(policy: Policy, hosts: usize, draws: StdRng) -> Self {
        let candidate =
            Candidate { is_open: true, prefill_tokens: 0, sequences: 0, cached_tokens: 0, vacant_tokens: 0 };
        Router {
            policy,
            turns: 0,
            candidates: vec![candidate; hosts],
            holders: Vec::new(),
            digests: Vec::new(),
            reports: Reports::default(),
            draws,
        }
    }

    /// Returns the host of a turn. `None` only if all hosts are dead.
    pub(super) fn route(&mut self, turn: &Turn, moment: &mut Moment<'_>) -> Option<usize> {
        if !moment.hosts.iter().any(Host::is_alive) {
            return None;
        }
        self.turns += 1;
        match self.policy {
            Policy::RoundRobin => {
                policy::take_turns(self.turns, &self.candidates).map(|choice| choice.replica)
            }
            Policy::LeastLoaded => {
                let hosts = &moment.hosts;
                // Equal hosts take turns.
                let in_turn = (0..hosts.len()).map(|host| (host + self.turns) % hosts.len());
                in_turn.filter(|host| hosts[*host].is_alive()).min_by_key(|host| hosts[*host].open_turns())
            }
            Policy::Affinity => self.by_affinity(turn, moment),
            Policy::Placement => Some(self.by_placement(turn, moment)),
        }
    }

    /// Records that a host is dead.
    pub(super) fn close(&mut self, host: usize) {
        self.candidates[host].is_open = false;
    }

    /// Records that a host has cached the beginning of an agent's prompts, or has it no more.
    pub(super) fn note_prefix(&mut self, agent: u32, host: usize, is_cached: bool) {
        if self.policy != Policy::Affinity {
            return;
        }
        let agent = agent as usize;
        if self.holders.len() <= agent {
            self.holders.resize_with(agent + 1, Vec::new);
        }
        let holders = &mut self.holders[agent];
        match (holders.iter().position(|holder| *holder as usize == host), is_cached) {
            (Some(place), false) => {
                holders.swap_remove(place);
            }
            (None, true) => holders.push(host as u32),
            _ => {}
        }
    }

    /// Records that a host begins a turn of an agent.
    pub(super) fn note_turn(&mut self, agent: u32, host: &mut Host, now_us: u64) {
        if self.policy == Policy::Placement {
            let digest = self.digest(agent);
            host.warm.note(digest, now_us / 1_000);
        }
    }

    /// Has all hosts report. Returns how large that is, measured at a few of them.
    pub(super) fn report(&mut self, hosts: &[Host], costs: &Costs, now_us: u64) -> ReportSizes {
        if self.policy != Policy::Placement {
            return ReportSizes::default();
        }
        let now_ms = now_us / 1_000;
        let mut reports = Vec::with_capacity(hosts.len());
        for (number, host) in (0..).zip(hosts) {
            // A host that is dead has reported before, and nobody knows yet.
            let at_us = host.died_us.unwrap_or(now_us);
            if now_us - at_us < DETECTION_US {
                let warm = host.warm.recent(now_ms);
                reports.push(Report { host: number, at_ms: at_us / 1_000, load: host.load(costs), warm });
            }
        }
        let sizes = sizes(&reports);
        self.reports = Reports::new(reports);
        sizes
    }

    fn by_affinity(&mut self, turn: &Turn, moment: &Moment<'_>) -> Option<usize> {
        let Moment { hosts, costs, now_us, home } = moment;
        for (candidate, host) in self.candidates.iter_mut().zip(hosts.iter()) {
            candidate.prefill_tokens = host.prefill_tokens(*now_us, costs);
            candidate.sequences = host.open_turns();
            candidate.vacant_tokens = host.cache.vacant() as usize;
        }
        let holders = self.holders.get(turn.agent as usize).map(Vec::as_slice).unwrap_or_default();
        for holder in holders {
            self.candidates[*holder as usize].cached_tokens = costs.prefix_tokens as usize;
        }
        if let Some(home) = *home {
            self.candidates[home].cached_tokens = hosts[home].cached_tokens(turn, costs) as usize;
        }
        let choice = policy::choose(turn.prompt_tokens as usize, *home, &self.candidates);
        for host in holders.iter().map(|holder| *holder as usize).chain(*home) {
            self.candidates[host].cached_tokens = 0;
        }
        choice.map(|choice| choice.replica)
    }

    /// Returns the owner of the session, or the host at which it begins. Its message arrives at any host that lives.
    fn by_placement(&mut self, turn: &Turn, moment: &mut Moment<'_>) -> usize {
        if let Some(home) = moment.home.filter(|home| moment.hosts[*home].is_alive()) {
            return home;
        }
        let front = loop {
            let host = self.draws.random_range(0..moment.hosts.len());
            if moment.hosts[host].is_alive() {
                break host;
            }
        };
        let (agent, now_ms) = (self.digest(turn.agent), moment.now_us / 1_000);
        let session = SessionHash::of("fleet", &turn.session.to_string());
        loop {
            let at = &moment.hosts[front];
            let own = Own { load: at.load(moment.costs), is_warm: at.warm.has(agent, now_ms) };
            let newcomer = Newcomer { session, agent };
            let Choice::There { host, .. } = place(&own, &self.reports, &at.sent, newcomer, now_ms) else {
                return front;
            };
            // A host that is dead is not chosen a second time.
            let Ok(chosen) = usize::try_from(host) else { return front };
            if moment.hosts[chosen].is_alive() {
                moment.hosts[front].sent.note(host, now_ms);
                return chosen;
            }
            moment.hosts[front].sent.avoid(host, now_ms);
        }
    }

    fn digest(&mut self, agent: u32) -> AgentDigest {
        for number in self.digests.len()..=agent as usize {
            self.digests.push(AgentDigest::of("fleet", &number.to_string(), "1"));
        }
        self.digests[agent as usize]
    }
}

/// Returns the sizes of reports. Those in memory are the fields, and each warm agent once in its report and once in the index.
fn sizes(reports: &[Report]) -> ReportSizes {
    const MEASURED: usize = 16;
    let measured = &reports[..reports.len().min(MEASURED)];
    let texts = measured.iter().map(|report| serde_json::to_string(&(report.load, &report.warm)));
    let bytes: usize = texts.map(|text| text.map_or(0, |text| text.len())).sum();
    let warm: usize = reports.iter().map(|report| report.warm.len()).sum();
    let view = size_of_val(reports) + warm * (size_of::<AgentDigest>() + size_of::<u32>());
    ReportSizes { report: (bytes / measured.len().max(1)) as u64, view: view as u64 }
}
