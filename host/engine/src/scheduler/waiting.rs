//! Sequences that wait to run. Interactive sequences come before background ones. Within each class, preempted
//! sequences come first (they are the oldest work), then the tenant with the least service for its weight,
//! within it the agent with the least service, and among equals the one whose last turn was longest ago. The
//! sessions of an agent take turns, so that neither a busy session nor an agent with many sessions holds up the
//! others. Requests of one session run in order.
//!
//! While pages are scarce, sessions of one agent are ranked, and one of a higher rank gets its turn earlier. A session is
//! overtaken [`MAX_OVERTAKEN`] times at most; then it is the next one of its agent. Ranks change nothing between agents or
//! tenants.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::accounts::{Accounts, ServicePerWeight};
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::service::Service;
use crate::{LiveSetting, Priority, Weights};

/// Maximum number of turns that sessions of the same agent with a higher rank take before a session.
pub(super) const MAX_OVERTAKEN: u32 = 8;

pub(super) struct Waiting {
    interactive: Lanes,
    background: Lanes,
}

#[derive(Default)]
struct Lanes {
    preempted: VecDeque<Sequence>,
    /// Lanes that are not empty; the front one's last turn was longest ago.
    agents: VecDeque<AgentLane>,
    accounts: Accounts,
}

struct AgentLane {
    tenant: String,
    agent: Option<String>,
    /// Sessions that are not empty; the front one has the next turn.
    sessions: VecDeque<SessionLane>,
}

struct SessionLane {
    session: Option<String>,
    sequences: VecDeque<Sequence>,
    rank: u8,
    /// The number of turns of sessions that were behind this one, since its own last turn.
    overtaken: u32,
}

impl Waiting {
    /// Creates an empty queue, with separate accounts for interactive and background work.
    pub fn new(weights: &LiveSetting<Weights>) -> Self {
        let lanes = || Lanes { accounts: Accounts::new(weights.clone()), ..Lanes::default() };
        Waiting { interactive: lanes(), background: lanes() }
    }

    /// Adds a sequence behind the others of its session.
    pub fn push(&mut self, sequence: Sequence) {
        let lanes = self.class(sequence.request.priority);
        let affinity = &sequence.request.affinity;
        let same_agent = |lane: &AgentLane| lane.tenant == affinity.tenant && lane.agent == affinity.agent;
        let agent = match lanes.agents.iter().position(same_agent) {
            Some(at) => at,
            None => {
                let waiting = lanes.agents.iter().map(|lane| (lane.tenant.as_str(), lane.agent.as_deref()));
                lanes.accounts.come(affinity, waiting);
                let (tenant, agent) = (affinity.tenant.clone(), affinity.agent.clone());
                lanes.agents.push_back(AgentLane { tenant, agent, sessions: VecDeque::new() });
                lanes.agents.len() - 1
            }
        };
        let sessions = &mut lanes.agents[agent].sessions;
        match sessions.iter_mut().find(|lane| lane.session == affinity.session) {
            Some(lane) => lane.sequences.push_back(sequence),
            None => {
                let session = affinity.session.clone();
                let sequences = VecDeque::from([sequence]);
                sessions.push_back(SessionLane { session, sequences, rank: 0, overtaken: 0 });
            }
        }
    }

    /// Puts a preempted sequence before all sequences that have not run yet, oldest first.
    pub fn push_preempted(&mut self, sequence: Sequence) {
        let preempted = &mut self.class(sequence.request.priority).preempted;
        let at = preempted.partition_point(|other| other.id < sequence.id);
        preempted.insert(at, sequence);
    }

    /// Returns the sequence whose turn it is, skipping those that are held back.
    pub fn next(&self, is_held: impl Fn(&Sequence) -> bool) -> Option<&Sequence> {
        [&self.interactive, &self.background]
            .into_iter()
            .find_map(|lanes| lanes.in_order().find(|sequence| !is_held(sequence)))
    }

    /// Ranks the first `count` sessions by their next sequence, in the order in which agents and sessions would have their
    /// turns without ranks. All others have the lowest rank, which is zero.
    pub fn rank_sessions(&mut self, count: usize, rank: impl Fn(&Sequence) -> u8) {
        let mut left = count;
        for lanes in [&mut self.interactive, &mut self.background] {
            for agent in lanes.agents_in_order() {
                for session in &mut lanes.agents[agent].sessions {
                    let next = session.sequences.front().filter(|_| left > 0);
                    session.rank = next.map_or(0, &rank);
                    left = left.saturating_sub(1);
                }
            }
        }
    }

    /// Returns the first `count` sequences in the order in which they would run, interactive ones before background ones.
    pub fn first(&self, count: usize) -> Vec<&Sequence> {
        [&self.interactive, &self.background].into_iter().flat_map(Lanes::in_order).take(count).collect()
    }

    /// Returns all sequences, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        [&self.interactive, &self.background].into_iter().flat_map(|lanes| {
            let queued = lanes.agents.iter().flat_map(|agent| &agent.sessions);
            queued.flat_map(|session| &session.sequences).chain(&lanes.preempted)
        })
    }

    /// Removes a sequence and ends the turn of its agent and its session.
    pub fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        [&mut self.interactive, &mut self.background].into_iter().find_map(|lanes| lanes.take(id))
    }

    /// Charges a sequence's tenant and agent for service that it got.
    pub fn charge(&mut self, sequence: &Sequence, service: Service) {
        let request = &sequence.request;
        self.class(request.priority).accounts.charge(&request.affinity, service);
    }

    #[cfg(test)]
    pub fn accounts(&self) -> usize {
        self.interactive.accounts.len()
    }

    /// Returns the number of waiting sequences in both classes.
    pub fn len(&self) -> usize {
        self.interactive.len() + self.background.len()
    }

    /// Removes and returns all sequences for which `gone` holds.
    pub fn remove_if(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed = Vec::new();
        for class in [&mut self.interactive, &mut self.background] {
            let queued = class.agents.iter_mut().flat_map(|agent| &mut agent.sessions);
            for lane in queued.map(|session| &mut session.sequences).chain([&mut class.preempted]) {
                if lane.iter().any(&mut gone) {
                    let (out, keep): (Vec<_>, Vec<_>) = lane.drain(..).partition(&mut gone);
                    lane.extend(keep);
                    removed.extend(out);
                }
            }
            class.drop_empty();
        }
        removed
    }

    fn class(&mut self, priority: Priority) -> &mut Lanes {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Background => &mut self.background,
        }
    }
}

impl Lanes {
    /// Iterates over all sequences in the order in which they would run if none of them used up a turn.
    fn in_order(&self) -> impl Iterator<Item = &Sequence> {
        let agents = self.agents_in_order().into_iter().map(move |at| &self.agents[at]);
        let sessions = agents.flat_map(AgentLane::in_order);
        self.preempted.iter().chain(sessions.flat_map(|session| &session.sequences))
    }

    /// Returns the positions of the agents in the order in which they would have their turns.
    fn agents_in_order(&self) -> Vec<usize> {
        let service = |lane: &AgentLane| self.accounts.service(&lane.tenant, lane.agent.as_deref());
        let mut agents: Vec<(ServicePerWeight, usize)> = self.agents.iter().map(service).zip(0..).collect();
        agents.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        agents.into_iter().map(|(_, at)| at).collect()
    }

    fn len(&self) -> usize {
        let sessions = self.agents.iter().flat_map(|agent| &agent.sessions);
        self.preempted.len() + sessions.map(|session| session.sequences.len()).sum::<usize>()
    }

    fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        if let Some(at) = self.preempted.iter().position(|sequence| sequence.id == id) {
            return self.preempted.remove(at);
        }
        for agent in 0..self.agents.len() {
            for session in 0..self.agents[agent].sessions.len() {
                let lane = &mut self.agents[agent].sessions[session].sequences;
                let Some(at) = lane.iter().position(|sequence| sequence.id == id) else { continue };
                let taken = lane.remove(at)?;
                self.accounts.take_turn(&taken.request.affinity);
                let mut lane = self.agents.remove(agent)?;
                for passed in lane.sessions.range_mut(..session) {
                    passed.overtaken = passed.overtaken.saturating_add(1);
                }
                let had_its_turn = lane.sessions.remove(session)?;
                lane.sessions.push_back(SessionLane { rank: 0, overtaken: 0, ..had_its_turn });
                self.agents.push_back(lane);
                self.drop_empty();
                return Some(taken);
            }
        }
        None
    }

    fn drop_empty(&mut self) {
        for agent in &mut self.agents {
            agent.sessions.retain(|session| !session.sequences.is_empty());
        }
        self.agents.retain(|agent| !agent.sessions.is_empty());
    }
}

impl AgentLane {
    /// Returns the sessions in the order in which they would have their turns.
    fn in_order(&self) -> Vec<&SessionLane> {
        let mut sessions: Vec<&SessionLane> = self.sessions.iter().collect();
        sessions.sort_by_key(|session| Reverse(session.precedence()));
        sessions
    }
}

impl SessionLane {
    /// Returns the rank, or the highest one if the session was overtaken often enough.
    fn precedence(&self) -> u8 {
        if self.overtaken >= MAX_OVERTAKEN { u8::MAX } else { self.rank }
    }
}
