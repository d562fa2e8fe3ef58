//! The wall clock of a host. All times that it stores or compares come from it. Tests use a clock that only they advance.
//!
//! The system clock may be set at any time. A jump is detected by comparing it with a monotonic clock, which cannot be set.
//! Schedules follow the new time at once. Time skipped by a jump forward does not age anything: [`Clock::elapsed_before`]
//! leaves it out, along with most of the time in which no host ran.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
#[cfg(test)]
use tokio::sync::watch;

/// A change of the system clock during a sleep is noticed after at most this long.
const LONGEST_SLEEP_MS: u64 = 30_000;
/// A wall clock that deviates from the monotonic clock by more than this was set. Smaller deviations are corrections by a
/// time server.
const JUMP_MS: u64 = 60_000;
/// Time without a running host ages sessions by at most this much, because it is unknown whether that time really passed.
const LONGEST_DOWNTIME_MS: u64 = 24 * 3_600_000;
/// Number of jumps that are remembered; the oldest ones are merged.
const MAX_SKIPS: usize = 64;

/// A wall clock that detects when it is set. Clones share what is known about past jumps.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    source: TimeSource,
    timeline: Arc<Mutex<Timeline>>,
}

#[derive(Clone, Debug, Default)]
enum TimeSource {
    #[default]
    System,
    #[cfg(test)]
    Manual(watch::Sender<Reading>),
}

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    /// Milliseconds since 1970-01-01 UTC, according to the system.
    wall_ms: u64,
    /// Milliseconds since an arbitrary moment, on a clock that cannot be set.
    steady_ms: u64,
}

/// The known past of the clock.
#[derive(Debug, Default)]
struct Timeline {
    last: Option<Reading>,
    /// Skipped periods of wall-clock time as half-open ranges, in order and disjoint.
    skips: Vec<(u64, u64)>,
    /// Number of times the clock was set back.
    set_back: u64,
}

impl Clock {
    /// Creates a clock that stays at `now_ms` until [`Clock::advance`] moves it.
    #[cfg(test)]
    pub(crate) fn at(now_ms: u64) -> Self {
        let source = TimeSource::Manual(watch::Sender::new(Reading { wall_ms: now_ms, steady_ms: 0 }));
        Clock { source, timeline: Arc::default() }
    }

    /// Lets time pass.
    #[cfg(test)]
    pub(crate) fn advance(&self, ms: u64) {
        self.manual().send_modify(|reading| {
            reading.wall_ms += ms;
            reading.steady_ms += ms;
        });
    }

    /// Sets the wall clock forward or back, without time passing.
    #[cfg(test)]
    pub(crate) fn jump(&self, ms: i64) {
        self.manual().send_modify(|reading| reading.wall_ms = reading.wall_ms.saturating_add_signed(ms));
    }

    #[cfg(test)]
    fn manual(&self) -> &watch::Sender<Reading> {
        let TimeSource::Manual(manual) = &self.source else { panic!("a test cannot move the system clock") };
        manual
    }

    /// Returns the milliseconds since 1970-01-01 UTC.
    pub(crate) fn now_ms(&self) -> u64 {
        self.read().wall_ms
    }

    /// Returns the time since 1970-01-01 UTC, as precisely as the system reports it.
    pub(crate) fn since_epoch(&self) -> Duration {
        match &self.source {
            TimeSource::System => since_epoch(),
            #[cfg(test)]
            TimeSource::Manual(manual) => Duration::from_millis(manual.borrow().wall_ms),
        }
    }

    /// Checks whether the clock was set since the last check, and returns how many times it has been set back so far.
    pub(crate) fn times_set_back(&self) -> u64 {
        let reading = self.read();
        let mut timeline = self.timeline();
        timeline.look(reading);
        timeline.set_back
    }

    /// Returns the skipped periods of wall-clock time, for the next host process.
    pub(crate) fn skips(&self) -> Vec<(u64, u64)> {
        let reading = self.read();
        let mut timeline = self.timeline();
        timeline.look(reading);
        timeline.skips.clone()
    }

    /// Takes over what an earlier host process knew at its last check, at `seen_ms`.
    pub(crate) fn resume(&self, seen_ms: u64, skips: Vec<(u64, u64)>) {
        let now_ms = self.now_ms();
        let mut timeline = self.timeline();
        timeline.skips = skips;
        if now_ms < seen_ms {
            timeline.return_to(now_ms);
            timeline.set_back += 1;
        } else if now_ms - seen_ms > LONGEST_DOWNTIME_MS {
            timeline.skip(seen_ms + LONGEST_DOWNTIME_MS, now_ms);
        }
    }

    /// Returns the time of day from which `ms` passed until `now_ms`. Skipped time is not counted.
    pub(crate) fn elapsed_before(&self, now_ms: u64, ms: u64) -> u64 {
        let reading = self.read();
        let mut timeline = self.timeline();
        timeline.look(reading);
        timeline.elapsed_before(now_ms, ms)
    }

    /// Returns the time of day at which `ms` will have passed since `began_ms`. Skipped time is not counted.
    pub(crate) fn elapsed_after(&self, began_ms: u64, ms: u64) -> u64 {
        let reading = self.read();
        let mut timeline = self.timeline();
        timeline.look(reading);
        timeline.elapsed_after(began_ms, ms)
    }

    /// Resolves when this clock reaches `at_ms`, or soon after the clock is set back.
    pub(crate) async fn sleep_until(&self, at_ms: u64) {
        match &self.source {
            TimeSource::System => {
                let set_back = self.times_set_back();
                loop {
                    let left_ms = at_ms.saturating_sub(now_ms());
                    if left_ms == 0 || self.times_set_back() != set_back {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(left_ms.min(LONGEST_SLEEP_MS))).await;
                }
            }
            #[cfg(test)]
            TimeSource::Manual(manual) => {
                let begin = *manual.borrow();
                let is_over = |now: &Reading| {
                    let elapsed_ms = now.steady_ms - begin.steady_ms;
                    now.wall_ms >= at_ms || now.wall_ms != begin.wall_ms + elapsed_ms
                };
                // The sender is part of `self`, so it is not dropped meanwhile.
                let _ = manual.subscribe().wait_for(is_over).await;
            }
        }
    }

    fn read(&self) -> Reading {
        match &self.source {
            TimeSource::System => Reading { wall_ms: now_ms(), steady_ms: steady_ms() },
            #[cfg(test)]
            TimeSource::Manual(manual) => *manual.borrow(),
        }
    }

    fn timeline(&self) -> MutexGuard<'_, Timeline> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timeline {
    fn look(&mut self, now: Reading) {
        let Some(last) = self.last.replace(now) else { return };
        let expected_ms = last.wall_ms + now.steady_ms.saturating_sub(last.steady_ms);
        if now.wall_ms > expected_ms + JUMP_MS {
            let by_s = (now.wall_ms - expected_ms) / 1000;
            tracing::warn!(by_s, "the system clock was set forward; the skipped time does not age sessions");
            self.skip(expected_ms, now.wall_ms);
        } else if expected_ms > now.wall_ms + JUMP_MS {
            let by_s = (expected_ms - now.wall_ms) / 1000;
            tracing::warn!(by_s, "the system clock was set back; schedules follow the new time");
            self.return_to(now.wall_ms);
            self.set_back += 1;
        }
    }

    fn skip(&mut self, from_ms: u64, to_ms: u64) {
        self.return_to(from_ms);
        self.skips.push((from_ms, to_ms));
        if self.skips.len() > MAX_SKIPS {
            let (from_ms, _) = self.skips.remove(0);
            self.skips[0].0 = from_ms;
        }
    }

    /// Forgets skipped periods after `now_ms`, because that time may still pass.
    fn return_to(&mut self, now_ms: u64) {
        self.skips.retain(|(from_ms, _)| *from_ms < now_ms);
        if let Some((_, to_ms)) = self.skips.last_mut() {
            *to_ms = now_ms.min(*to_ms);
        }
    }

    fn elapsed_before(&self, now_ms: u64, ms: u64) -> u64 {
        let (mut at_ms, mut left_ms) = (now_ms, ms);
        for (from_ms, to_ms) in self.skips.iter().rev().filter(|(_, to_ms)| *to_ms <= now_ms) {
            let lived_ms = at_ms - to_ms;
            if left_ms <= lived_ms {
                break;
            }
            left_ms -= lived_ms;
            at_ms = *from_ms;
        }
        at_ms.saturating_sub(left_ms)
    }

    fn elapsed_after(&self, began_ms: u64, ms: u64) -> u64 {
        let mut at_ms = began_ms.saturating_add(ms);
        for (from_ms, to_ms) in self.skips.iter().filter(|(_, to_ms)| *to_ms > began_ms) {
            let from_ms = (*from_ms).max(began_ms);
            if at_ms <= from_ms {
                break;
            }
            at_ms = at_ms.saturating_add(to_ms - from_ms);
        }
        at_ms
    }
}

/// Returns a time that nobody can set. On Linux it also advances while the machine is suspended.
#[cfg(unix)]
fn steady_ms() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = rustix::time::ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(clock);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds * 1_000 + nanos / 1_000_000
}

/// Returns the wall time, for lack of a monotonic clock. Jumps are not detected then.
#[cfg(not(unix))]
fn steady_ms() -> u64 {
    now_ms()
}

/// Reads the system clock, in milliseconds since 1970-01-01 UTC.
fn now_ms() -> u64 {
    u64::try_from(since_epoch().as_millis()).unwrap_or(u64::MAX)
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;

    #[test]
    fn time_skipped_by_a_jump_forward_is_not_counted() {
        let clock = Clock::at(1_000 * HOUR);
        clock.times_set_back();
        clock.advance(10 * HOUR);
        clock.jump(90 * HOUR as i64);
        clock.times_set_back();
        clock.advance(5 * HOUR);
        let now = clock.now_ms();
        assert_eq!(now, 1_105 * HOUR);
        for (lived, from) in [(0, 1_105), (5, 1_100), (6, 1_009), (15, 1_000), (20, 995)] {
            assert_eq!(clock.elapsed_before(now, lived * HOUR), from * HOUR, "{lived} hours");
        }
        assert_eq!(clock.times_set_back(), 0);
        for (from, lives, until) in
            [(1_000, 10, 1_010), (1_000, 11, 1_101), (1_005, 7, 1_102), (1_050, 3, 1_103), (1_102, 4, 1_106)]
        {
            assert_eq!(
                clock.elapsed_after(from * HOUR, lives * HOUR),
                until * HOUR,
                "{lives} hours from {from} on"
            );
        }
    }

    #[test]
    fn correcting_the_clock_forgets_the_skipped_time() {
        let clock = Clock::at(1_000 * HOUR);
        clock.times_set_back();
        clock.jump(90 * HOUR as i64);
        assert_eq!(clock.skips(), [(1_000 * HOUR, 1_090 * HOUR)]);
        clock.advance(HOUR);
        clock.jump(-(90 * HOUR as i64));
        assert_eq!(clock.times_set_back(), 1);
        assert_eq!(
            clock.skips(),
            [(1_000 * HOUR, 1_001 * HOUR)],
            "remembering an hour less than possible is safe"
        );
        clock.jump(-(50 * HOUR as i64));
        assert_eq!((clock.skips(), clock.times_set_back()), (vec![], 2));
    }

    #[test]
    fn small_corrections_by_a_time_server_are_not_jumps() {
        let clock = Clock::at(HOUR);
        for step in [500, -500, 30_000, -30_000] {
            clock.times_set_back();
            clock.jump(step);
        }
        assert_eq!((clock.times_set_back(), clock.skips()), (0, vec![]));
    }

    #[test]
    fn time_without_a_host_counts_for_at_most_a_day() {
        let clock = Clock::at(1_000 * HOUR);
        clock.resume(990 * HOUR, vec![(1, 2)]);
        assert_eq!(clock.skips(), [(1, 2)]);
        clock.resume(100 * HOUR, vec![]);
        assert_eq!(clock.skips(), [(124 * HOUR, 1_000 * HOUR)]);
        clock.resume(2_000 * HOUR, vec![(500 * HOUR, 1_800 * HOUR)]);
        assert_eq!(clock.skips(), [(500 * HOUR, 1_000 * HOUR)]);
    }

    #[test]
    fn the_number_of_remembered_jumps_is_bounded() {
        let clock = Clock::at(0);
        for _ in 0..200 {
            clock.advance(HOUR);
            clock.times_set_back();
            clock.jump(HOUR as i64);
        }
        assert_eq!(clock.skips().len(), MAX_SKIPS);
    }

    #[tokio::test]
    async fn a_sleeper_is_woken_when_the_clock_is_set_back() {
        let clock = Clock::at(100 * HOUR);
        tokio::join!(clock.sleep_until(101 * HOUR), async { clock.jump(-(50 * HOUR as i64)) });
        clock.sleep_until(0).await;
    }
}
