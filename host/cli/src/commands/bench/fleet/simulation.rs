//! The course of a fleet, event by event. Only turns that are open are simulated in detail; a session takes twelve bytes here, and
//! four in the workload.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::Result;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::balance::Balance;
use super::cache::Entry;
use super::costs::Costs;
use super::host::Host;
use super::policy::{DETECTION_US, Moment, Policy, ReportSizes, Router};
use super::times::Times;
use super::workload::{Turn, Workload};

/// Time between two reports of a host.
const REPORT_US: u64 = 500_000;

/// The plan of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) policy: Policy,
    pub(super) hosts: u32,
    pub(super) costs: &'a Costs,
    pub(super) seed: u64,
    /// Number of hosts that die at once, and the number of turns after which they do.
    pub(super) deaths: u32,
    pub(super) deaths_after: u64,
}

/// The figures of a run.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) turns: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) first_token: Times,
    pub(super) balance: Balance,
    /// Turns whose host died, and that ran again elsewhere.
    pub(super) interrupted: u64,
    /// Sessions whose last turn was at a host that died, at its death.
    pub(super) of_dead_hosts: u64,
    /// Sessions that changed their host because it had died, and for another reason.
    pub(super) moved_from_dead: u64,
    pub(super) moved_from_living: u64,
    pub(super) reports: ReportSizes,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Report,
    /// A turn whose host is dead, or may be, is sent again.
    Again(Turn),
    End {
        host: u32,
        id: u64,
    },
}

/// A session between its turns.
#[derive(Debug, Clone, Copy, Default)]
struct Session {
    /// The host of the last turn, plus one; zero before the first one.
    host: u32,
    /// Tokens of the last prompt.
    prompt_tokens: u32,
    /// Number of times that the conversation was cut.
    cuts: u32,
}

struct Simulation<'a> {
    plan: Plan<'a>,
    hosts: Vec<Host>,
    router: Router,
    sessions: Vec<Session>,
    /// The events by their times, and those of the same time in the order in which they were added.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    added: u64,
    /// Turns that have arrived and have not ended.
    open: u64,
    evicted: Vec<Entry>,
    figures: Figures,
}

/// Runs a workload through a fleet.
pub(super) fn run(plan: Plan<'_>, workload: &mut Workload) -> Result<Figures> {
    let hosts: Vec<Host> = (0..plan.hosts).map(|_| Host::new(plan.costs)).collect();
    // The policies draw from numbers of their own, so that all of them get the same turns.
    let draws = StdRng::seed_from_u64(plan.seed ^ 0x0072_6f75_7465_7273);
    let mut simulation = Simulation {
        plan,
        router: Router::new(plan.policy, hosts.len(), draws),
        hosts,
        sessions: Vec::new(),
        events: BinaryHeap::new(),
        added: 0,
        open: 0,
        evicted: Vec::new(),
        figures: Figures::default(),
    };
    simulation.run(workload)?;
    Ok(simulation.figures)
}

impl Session {
    /// Returns the host of the last turn.
    fn home(&self) -> Option<usize> {
        (self.host as usize).checked_sub(1)
    }
}

impl Simulation<'_> {
    fn run(&mut self, workload: &mut Workload) -> Result<()> {
        let mut next = workload.next()?;
        self.add(next.map_or(0, |turn| turn.at_us), Event::Report);
        while next.is_some() || self.open > 0 {
            let event_us = self.events.peek().map_or(u64::MAX, |Reverse((at_us, _, _))| *at_us);
            match next {
                Some(turn) if turn.at_us < event_us => {
                    next = workload.next()?;
                    self.figures.turns += 1;
                    self.open += 1;
                    if self.plan.deaths > 0 && self.figures.turns == self.plan.deaths_after {
                        self.kill(turn.at_us);
                    }
                    let turn = Turn { cuts: self.cuts(&turn), ..turn };
                    self.arrive(turn, turn.at_us);
                }
                _ => {
                    let Some(Reverse((now_us, _, event))) = self.events.pop() else { break };
                    match event {
                        Event::Report => self.report(now_us, next.map(|turn| turn.at_us)),
                        Event::Again(turn) => self.arrive(turn, now_us),
                        Event::End { host, id } => self.end(host as usize, id, now_us),
                    }
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, at_us: u64, event: Event) {
        self.added += 1;
        self.events.push(Reverse((at_us, self.added, event)));
    }

    /// Returns how often the conversation of a turn was cut. A prompt that is shorter than the one before shows that it was, because
    /// it would otherwise have grown.
    fn cuts(&mut self, turn: &Turn) -> u32 {
        let session = turn.session as usize;
        if self.sessions.len() <= session {
            self.sessions.resize(session + 1, Session::default());
        }
        let session = &mut self.sessions[session];
        session.cuts += u32::from(turn.prompt_tokens < session.prompt_tokens);
        session.prompt_tokens = turn.prompt_tokens;
        session.cuts
    }

    /// Routes a turn, unless its host is dead and nobody knows that yet.
    fn arrive(&mut self, turn: Turn, now_us: u64) {
        let session = turn.session as usize;
        let home = self.sessions[session].home();
        if let Some(died_us) = home.and_then(|home| self.hosts[home].died_us)
            && self.plan.policy.keeps_home()
            && now_us < died_us + DETECTION_US
        {
            return self.add(died_us + DETECTION_US, Event::Again(turn));
        }
        let mut moment = Moment { hosts: &mut self.hosts, costs: self.plan.costs, now_us, home };
        let Some(host) = self.router.route(&turn, &mut moment) else {
            // Nobody is left to answer.
            self.open -= 1;
            return;
        };
        match home {
            Some(home) if home != host && self.hosts[home].is_alive() => self.figures.moved_from_living += 1,
            Some(home) if home != host => self.figures.moved_from_dead += 1,
            _ => {}
        }
        self.sessions[session].host = host as u32 + 1;
        self.router.note_turn(turn.agent, &mut self.hosts[host], now_us);
        self.hosts[host].push(turn);
        self.begin(host, now_us);
    }

    /// Begins to run a turn of a host, if a sequence is free.
    fn begin(&mut self, host: usize, now_us: u64) {
        let id = self.added + 1;
        let begun = self.hosts[host].begin(id, now_us, self.plan.costs, &mut self.evicted);
        let Some((turn, course)) = begun else { return };
        self.figures.prompt_tokens += u64::from(turn.prompt_tokens);
        self.figures.cached_tokens += u64::from(course.cached_tokens);
        self.figures.first_token.add(course.first_token_us - turn.at_us);
        for entry in self.evicted.drain(..) {
            if let Entry::Prefix(agent) = entry {
                self.router.note_prefix(agent, host, false);
            }
        }
        // The conversation may have evicted it for a moment.
        self.router.note_prefix(turn.agent, host, true);
        self.add(course.end_us, Event::End { host: host as u32, id });
    }

    fn end(&mut self, host: usize, id: u64, now_us: u64) {
        // A turn of a host that has died runs again elsewhere.
        if self.hosts[host].end(id) {
            self.open -= 1;
            self.begin(host, now_us);
        }
    }

    fn report(&mut self, now_us: u64, next_us: Option<u64>) {
        self.figures.reports = self.router.report(&self.hosts, self.plan.costs, now_us);
        self.figures.balance.look(&self.hosts, now_us);
        // A fleet without turns has no news.
        let idle_until = if self.open == 0 { next_us.unwrap_or(0) } else { 0 };
        self.add((now_us + REPORT_US).max(idle_until), Event::Report);
    }

    /// Ends some of the hosts. Which ones depends on the seed alone.
    fn kill(&mut self, now_us: u64) {
        let mut draws = StdRng::seed_from_u64(self.plan.seed ^ 0x0064_6561_7468_7300);
        let mut alive: Vec<usize> = (0..self.hosts.len()).collect();
        for _ in 0..self.plan.deaths.min(self.plan.hosts - 1) {
            let host = alive.swap_remove(draws.random_range(0..alive.len()));
            self.router.close(host);
            for turn in self.hosts[host].kill(now_us) {
                self.figures.interrupted += 1;
                self.add(now_us + DETECTION_US, Event::Again(turn));
            }
        }
        let homes = self.sessions.iter().filter_map(Session::home);
        self.figures.of_dead_hosts = homes.filter(|home| !self.hosts[*home].is_alive()).count() as u64;
        self.figures.balance.note_deaths(now_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::fleet::workload::{Drawn, Sizes};

    const SIZES: Sizes = Sizes { hosts: 20, sessions: 4_000, turns: 20_000, agents: 12, load: 0.5, seed: 3 };

    fn figures_of(policy: Policy, deaths: u32, sizes: Sizes) -> Figures {
        let costs = Costs { kv_tokens: 262_144, ..Costs::for_tests() };
        let mut workload = Workload::Drawn(Box::new(Drawn::new(sizes, &costs)));
        let deaths_after = sizes.turns / 2;
        let plan = Plan { policy, hosts: sizes.hosts, costs: &costs, seed: sizes.seed, deaths, deaths_after };
        run(plan, &mut workload).expect("it is drawn")
    }

    fn hit_rate(figures: &Figures) -> f64 {
        figures.cached_tokens as f64 / figures.prompt_tokens as f64
    }

    #[test]
    fn a_run_depends_on_its_seed_alone() {
        for policy in Policy::ALL {
            let run =
                |seed: u64| format!("{:?}", figures_of(policy, 2, Sizes { seed, turns: 5_000, ..SIZES }));
            assert_eq!(run(3), run(3), "{policy:?}");
            assert_ne!(run(3), run(4), "{policy:?}");
        }
    }

    #[test]
    fn all_turns_of_a_session_are_at_one_host_while_it_lives() {
        let figures = figures_of(Policy::Placement, 0, SIZES);
        assert_eq!((figures.turns, figures.moved_from_living, figures.moved_from_dead), (20_000, 0, 0));
        let turns = figures_of(Policy::RoundRobin, 0, SIZES);
        assert!(turns.moved_from_living > 10_000, "{}", turns.moved_from_living);
    }

    #[test]
    fn only_the_sessions_of_dead_hosts_move() {
        let figures = figures_of(Policy::Placement, 2, SIZES);
        assert_eq!((figures.turns, figures.moved_from_living), (20_000, 0));
        assert!(figures.of_dead_hosts > 0 && figures.interrupted > 0);
        assert!((1..=figures.of_dead_hosts).contains(&figures.moved_from_dead), "{figures:?}");
    }

    #[test]
    fn policies_that_know_what_is_cached_hit_more() {
        let rates = Policy::ALL.map(|policy| hit_rate(&figures_of(policy, 0, SIZES)));
        let [in_turn, least_loaded, affinity, placement] = rates;
        assert!(affinity > in_turn + 0.1 && affinity > least_loaded + 0.1, "{rates:?}");
        assert!(placement > in_turn + 0.1 && placement > least_loaded + 0.1, "{rates:?}");
    }

    #[test]
    fn every_turn_ends_though_the_fleet_is_overloaded_and_nearly_all_hosts_die() {
        let sizes = Sizes { hosts: 4, turns: 2_000, load: 3.0, ..SIZES };
        for policy in Policy::ALL {
            let figures = figures_of(policy, 4, sizes);
            assert_eq!(figures.turns, 2_000);
            assert!(figures.prompt_tokens > 2_000 * 1_000, "{policy:?}");
        }
    }
}
