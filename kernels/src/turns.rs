//! Groups of executors take turns on the CPUs of a process.
//!
//! Two pools that computed at the same time would wait at each barrier for threads that the operating system had given
//! to the other pool. Instead, one group computes at a time with all of its threads, and hands the CPUs over between
//! two operations. Groups that want to compute without a pause get equal times; one that computes now and then waits
//! only for the operation in progress.
//!
//! Invariant: no group waits for more than its fair share plus one operation of each other group.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The time by which a group may be ahead of one that waits. Turns of busy groups take twice this time.
const AHEAD: Duration = Duration::from_millis(1);

/// The CPUs that groups share.
#[derive(Default)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of threads that wait; read without the lock between operations.
    waiting: AtomicUsize,
    groups: AtomicU64,
}

#[derive(Default)]
struct State {
    holder: Option<Holder>,
    /// The number of threads that wait for each group.
    waiting: HashMap<u64, usize>,
    /// The time that each group has computed. A group that comes back after a pause starts level with the others.
    used: HashMap<u64, Duration>,
}

struct Holder {
    group: u64,
    /// Number of the group's executors that compute.
    inside: usize,
    since: Instant,
}

/// Executors that compute at the same time, because they divided the threads among them. Clones are the same group.
#[derive(Clone)]
pub struct TurnGroup {
    member: Arc<Member>,
}

struct Member {
    turns: Arc<Turns>,
    id: u64,
}

/// The right to compute, until it is dropped.
pub struct Turn {
    member: Arc<Member>,
}

impl Turns {
    /// Returns the CPUs of this process.
    pub fn of_process() -> Arc<Turns> {
        static OF_PROCESS: OnceLock<Arc<Turns>> = OnceLock::new();
        OF_PROCESS.get_or_init(Arc::default).clone()
    }

    /// Returns a new group that shares these CPUs.
    pub fn group(self: &Arc<Self>) -> TurnGroup {
        let id = self.groups.fetch_add(1, Ordering::Relaxed);
        TurnGroup { member: Arc::new(Member { turns: self.clone(), id }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnGroup {
    /// Waits until the group may compute.
    pub fn take(&self) -> Turn {
        self.member.enter();
        Turn { member: self.member.clone() }
    }

    /// Hands the CPUs over if another group is to go first, and waits until this group may continue. It may be called only
    /// by a thread for which [`TurnGroup::take`] returned a turn that is still held.
    pub fn pause(&self) {
        let turns = &self.member.turns;
        if turns.waiting.load(Ordering::Relaxed) > 0 && turns.lock().must_yield(Instant::now()) {
            self.member.leave();
            self.member.enter();
        }
    }
}

impl Member {
    fn enter(&self) {
        let Member { turns, id } = self;
        let mut state = turns.lock();
        if !state.is_active(*id) {
            state.join(*id, Instant::now());
        }
        while !state.may_enter(*id, Instant::now()) {
            *state.waiting.entry(*id).or_default() += 1;
            turns.waiting.fetch_add(1, Ordering::Relaxed);
            state = turns.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            turns.waiting.fetch_sub(1, Ordering::Relaxed);
            state.stop_waiting(*id);
        }
        match &mut state.holder {
            Some(holder) => holder.inside += 1,
            None => state.holder = Some(Holder { group: *id, inside: 1, since: Instant::now() }),
        }
    }

    fn leave(&self) {
        let mut state = self.turns.lock();
        let Some(holder) = &mut state.holder else { return };
        holder.inside -= 1;
        if holder.inside == 0 {
            let (group, took) = (holder.group, holder.since.elapsed());
            state.holder = None;
            *state.used.entry(group).or_default() += took;
            self.turns.changed.notify_all();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.member.leave();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.turns.lock().used.remove(&self.id);
    }
}

impl State {
    fn is_active(&self, group: u64) -> bool {
        self.waiting.contains_key(&group) || self.holder.as_ref().is_some_and(|holder| holder.group == group)
    }

    /// Levels a group that begins to compute with the others: time that it left unused is not saved up.
    fn join(&mut self, group: u64, now: Instant) {
        let holder = self.holder.as_ref().map(|holder| holder.group);
        let others = self.waiting.keys().copied().chain(holder);
        if let Some(least) = others.map(|other| self.used(other, now)).min() {
            let used = self.used.entry(group).or_default();
            *used = (*used).max(least.saturating_sub(AHEAD));
        }
    }

    fn used(&self, group: u64, now: Instant) -> Duration {
        let current = self.holder.as_ref().filter(|holder| holder.group == group);
        let current = current.map_or(Duration::ZERO, |holder| now.saturating_duration_since(holder.since));
        self.used.get(&group).copied().unwrap_or_default() + current
    }

    /// Returns whether the holder has used more than it may while another group waits.
    fn must_yield(&self, now: Instant) -> bool {
        let Some(holder) = &self.holder else { return false };
        let used = self.used(holder.group, now);
        let mut others = self.waiting.keys().filter(|other| **other != holder.group);
        others.any(|other| self.used(*other, now) + AHEAD <= used)
    }

    fn may_enter(&self, group: u64, now: Instant) -> bool {
        match &self.holder {
            Some(holder) => holder.group == group && !self.must_yield(now),
            None => {
                let own = (self.used(group, now), group);
                self.waiting.keys().all(|other| own <= (self.used(*other, now), *other))
            }
        }
    }

    fn stop_waiting(&mut self, group: u64) {
        if let Some(threads) = self.waiting.get_mut(&group) {
            *threads -= 1;
            if *threads == 0 {
                self.waiting.remove(&group);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Computes operations of `length` in steps of `operations` until `until`, and returns the time computed.
    fn compute(group: &TurnGroup, operations: usize, length: Duration, until: Instant) -> Duration {
        let mut computed = Duration::ZERO;
        while Instant::now() < until {
            let _turn = group.take();
            for _ in 0..operations {
                group.pause();
                std::thread::sleep(length);
                computed += length;
            }
        }
        computed
    }

    #[test]
    fn one_group_computes_at_a_time_and_its_executors_together() {
        let turns = Arc::<Turns>::default();
        let (one, other) = (turns.group(), turns.group());
        let inside = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let together = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (index, group) in [(0, one.clone()), (0, one.clone()), (1, other.clone())] {
                let (inside, together) = (&inside, &together);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let _turn = group.take();
                        let same = inside[index].fetch_add(1, Ordering::SeqCst);
                        together.fetch_or(same > 0, Ordering::SeqCst);
                        assert_eq!(inside[1 - index].load(Ordering::SeqCst), 0, "the other group computes");
                        std::thread::sleep(Duration::from_micros(50));
                        inside[index].fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(together.into_inner(), "executors of a group never computed together");
        assert!(turns.lock().holder.is_none());
    }

    #[test]
    fn groups_get_equal_times_however_long_their_steps_are() {
        let turns = Arc::<Turns>::default();
        let (short, long) = (turns.group(), turns.group());
        let until = Instant::now() + Duration::from_millis(400);
        let (short, long) = std::thread::scope(|scope| {
            let short = scope.spawn(|| compute(&short, 4, Duration::from_micros(200), until));
            let long = scope.spawn(|| compute(&long, 200, Duration::from_micros(200), until));
            (short.join().unwrap(), long.join().unwrap())
        });
        let share = short.as_secs_f64() / (short + long).as_secs_f64();
        // By turns of equal number they would get 2 %; the bounds leave room for a busy machine.
        assert!((0.15..0.85).contains(&share), "the short steps got {share:.2} of the time");
    }

    #[test]
    fn an_idle_group_accumulates_no_credit() {
        let now = Instant::now();
        let mut state = State::default();
        state.used.insert(1, Duration::from_secs(100));
        state.waiting.insert(1, 1);
        state.join(2, now);
        assert_eq!(state.used(2, now), Duration::from_secs(100) - AHEAD);
        // It goes first, but only until it is as far as the other.
        state.holder = Some(Holder { group: 2, inside: 1, since: now });
        assert!(!state.must_yield(now + AHEAD));
        assert!(state.must_yield(now + 2 * AHEAD));
    }

    #[test]
    fn a_panic_gives_the_turn_back() {
        let turns = Arc::<Turns>::default();
        let (one, other) = (turns.group(), turns.group());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _turn = one.take();
            panic!("an operation failed");
        }));
        assert!(panicked.is_err());
        drop(other.take());
        drop((one, other));
        assert!(turns.lock().used.is_empty(), "groups that are gone leave nothing behind");
    }
}
