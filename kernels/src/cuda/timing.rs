//! Times work on a device with events.
//!
//! Invariant: nothing that was timed is in the queue anymore when a function returns.

use super::device::{Device, Event};
use crate::KernelError;

/// Maximum number of repetitions in a run.
const MAX_REPEATS: f64 = 1000.0;
/// Minimum number of runs of long work that is recorded.
const MIN_RUNS: usize = 3;
/// The shortest time that is reported, below the resolution of any clock.
const CLOCK_MS: f64 = 1e-6;

/// The number of runs, of which the median is taken, and their length.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub runs: usize,
    /// Minimum duration of a run. Shorter work is repeated, because two events are about a microsecond apart however little
    /// work is between them.
    pub run_ms: f64,
}

impl Pace {
    /// Returns how often work is repeated in a run, given how long it takes once.
    fn repeats(self, ms: f64) -> usize {
        (self.run_ms / ms).ceil().clamp(1.0, MAX_REPEATS) as usize
    }

    /// Returns the number of runs if one takes this long. Long ones have fewer runs, which vary less.
    fn runs_of(self, ms: f64) -> usize {
        let fitting = (self.runs as f64 * self.run_ms / ms) as usize;
        fitting.clamp(MIN_RUNS.min(self.runs), self.runs).max(1)
    }
}

/// Returns the median time in milliseconds that the device takes for `work`.
pub(super) fn median_ms(
    device: &Device,
    pace: Pace,
    mut work: impl FnMut() -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let timer = Timer::new(device)?;
    let mut run = |times: usize| Ok(timer.run(|| (0..times).try_for_each(|_| work()))? / times as f64);
    // The first run plans the work and loads its code.
    run(1)?;
    let times = pace.repeats(run(1)?);
    median(pace.runs.max(1), || run(times))
}

/// Returns the median time in milliseconds that the device takes for `work` in a recording, which holds it many times. The
/// time that the host takes for a launch does not count. `work` gets the number of the repetition.
pub(super) fn recorded_ms(
    device: &Device,
    pace: Pace,
    mut work: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let timer = Timer::new(device)?;
    // The first run plans the work and loads its code, which cannot be recorded.
    timer.run(|| work(0))?;
    let times = pace.repeats(timer.run(|| work(1))?);
    let recording = device.record(Vec::new(), || (0..times).try_for_each(&mut work))?;
    let run = || timer.run(|| recording.replay());
    let runs = pace.runs_of(run()?);
    Ok((median(runs, run)? / times as f64).max(CLOCK_MS))
}

fn median(runs: usize, run: impl FnMut() -> Result<f64, KernelError>) -> Result<f64, KernelError> {
    let mut found = std::iter::repeat_with(run).take(runs).collect::<Result<Vec<f64>, _>>()?;
    found.sort_by(f64::total_cmp);
    Ok(found[found.len() / 2].max(CLOCK_MS))
}

/// Two events around a run.
struct Timer<'a> {
    begin: Event,
    end: Event,
    device: &'a Device,
}

impl<'a> Timer<'a> {
    fn new(device: &'a Device) -> Result<Self, KernelError> {
        Ok(Timer { begin: device.timed_event()?, end: device.timed_event()?, device })
    }

    /// Returns the milliseconds that the device takes for what `work` queues.
    fn run(&self, work: impl FnOnce() -> Result<(), KernelError>) -> Result<f64, KernelError> {
        self.begin.record()?;
        let queued = work().and_then(|()| self.end.record());
        // A part may be in the queue even if the rest failed.
        self.device.synchronize()?;
        queued?;
        Ok(f64::from(self.begin.milliseconds_until(&self.end)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::Emulation;

    #[test]
    fn short_work_is_repeated_and_long_work_is_not() {
        let pace = Pace { runs: 9, run_ms: 5.0 };
        for (ms, expected) in [(7.0, 1), (5.0, 1), (1.0, 5), (0.3, 17), (0.0, 1000), (1e-9, 1000)] {
            assert_eq!(pace.repeats(ms), expected, "{ms} ms");
        }
        for (ms, expected) in [(0.0, 9), (5.0, 9), (9.0, 5), (500.0, 3)] {
            assert_eq!(pace.runs_of(ms), expected, "{ms} ms");
        }
    }

    #[test]
    fn failed_work_is_an_error() {
        let device = Device::emulated(Emulation::default());
        let pace = Pace { runs: 1, run_ms: 0.0 };
        let error = KernelError::TooLarge { op: "test", what: "it" };
        assert_eq!(median_ms(&device, pace, || Err(error.clone())), Err(error.clone()));
        assert_eq!(recorded_ms(&device, pace, |_| Err(error.clone())), Err(error));
    }

    #[test]
    fn recorded_work_is_numbered_and_its_time_is_that_of_one_repetition() {
        let device = Device::emulated(Emulation::default());
        let [from, to] = [0, 1].map(|_| device.zeroed(1 << 20).unwrap());
        let mut numbers = Vec::new();
        let pace = Pace { runs: 3, run_ms: 2.0 };
        let ms = recorded_ms(&device, pace, |number| {
            numbers.push(number);
            device.copy(from.slice(), to.slice())
        });
        assert!(ms.unwrap() > 0.0);
        assert_eq!(numbers[..2], [0, 1], "not recorded");
        assert!(numbers[2..].iter().copied().eq(0..numbers.len() - 2), "{numbers:?}");
    }
}
