//! Keeps what the choice of where sessions begin depends on: the load and the warm agents of this host, the reports of the other
//! hosts, and what was sent to them since.

use crate::{
    name::SessionKey,
    placement::{
        self, AgentDigest, Choice, Load, Newcomer, Own, Placement, Report, Reports, Sent, SessionHash, Stay,
        WarmAgents,
    },
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Instant,
};

pub(super) struct Placing {
    setting: Placement,
    /// All times are milliseconds since this one.
    began: Instant,
    /// The load of this host at its last report.
    load: Mutex<Load>,
    others: RwLock<Arc<Reports>>,
    sent: Mutex<Sent>,
    warm: Mutex<WarmAgents>,
}

impl Placing {
    pub(super) fn new(setting: Placement) -> Self {
        Placing {
            setting,
            began: Instant::now(),
            // There is room until the first report says otherwise.
            load: Mutex::new(Load { capacity: u32::MAX, ..Load::default() }),
            others: RwLock::default(),
            sent: Mutex::default(),
            warm: Mutex::default(),
        }
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Replaces the load of this host.
    pub(super) fn set_load(&self, load: Load) {
        *lock(&self.load) = load;
    }

    /// Replaces the reports of the other hosts.
    pub(super) fn set_others(&self, reports: Vec<Report>) {
        let reports = Arc::new(Reports::new(reports));
        *self.others.write().unwrap_or_else(PoisonError::into_inner) = reports;
    }

    /// Records that a turn of an agent begins here.
    pub(super) fn note_turn(&self, agent: AgentDigest) {
        let now_ms = self.now_ms();
        lock(&self.warm).note(agent, now_ms);
    }

    /// Returns the agents that are warm here, those first that ran last.
    pub(super) fn warm(&self) -> Vec<AgentDigest> {
        lock(&self.warm).recent(self.now_ms())
    }

    /// Chooses where a session without an owner begins. `running_turns` is the number of turns that run here at this moment.
    pub(super) fn choose(&self, key: &SessionKey, agent: AgentDigest, running_turns: u32) -> Choice {
        if self.setting == Placement::Here {
            return Choice::Here(Stay::Set);
        }
        let now_ms = self.now_ms();
        let load = Load { running_turns, ..*lock(&self.load) };
        let own = Own { load, is_warm: lock(&self.warm).has(agent, now_ms) };
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner).clone();
        let newcomer = Newcomer { session: SessionHash::of(&key.agent, &key.session), agent };
        placement::place(&own, &others, &lock(&self.sent), newcomer, now_ms)
    }

    /// Counts a session that begins at a host.
    pub(super) fn note_sent(&self, host: i64) {
        let now_ms = self.now_ms();
        lock(&self.sent).note(host, now_ms);
    }

    /// Returns how many sessions recently began at a host because of a choice of this one.
    pub(super) fn sent(&self, host: i64) -> u32 {
        let now_ms = self.now_ms();
        lock(&self.sent).count(host, now_ms)
    }

    /// Makes sessions avoid a host for a while, because a message did not get there.
    pub(super) fn avoid(&self, host: i64) {
        let now_ms = self.now_ms();
        lock(&self.sent).avoid(host, now_ms);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_this_moment_decides_and_the_setting_keeps_sessions_here() {
        let key = SessionKey { agent: "a".into(), session: "s".into() };
        let agent = AgentDigest::of("t", "a", "1");
        let load = Load { capacity: 10, ..Load::default() };
        for setting in [Placement::Balanced, Placement::Here] {
            let placing = Placing::new(setting);
            placing.set_load(load);
            placing.set_others(vec![Report { host: 2, at_ms: placing.now_ms(), load, warm: Vec::new() }]);
            let busy = placing.choose(&key, agent, 10);
            if setting == Placement::Here {
                assert_eq!(busy, Choice::Here(Stay::Set));
                continue;
            }
            assert!(matches!(busy, Choice::There { host: 2, .. }), "{busy:?}");
            assert_eq!(placing.choose(&key, agent, 1), Choice::Here(Stay::Room));
            placing.note_turn(agent);
            assert_eq!(placing.warm(), [agent]);
            assert_eq!(placing.choose(&key, agent, 1), Choice::Here(Stay::Warm));
            for _ in 0..10 {
                placing.note_sent(2);
            }
            let busy = placing.choose(&key, agent, 10);
            assert_eq!(busy, Choice::Here(Stay::Busy), "the other one has its share");
        }
    }
}
