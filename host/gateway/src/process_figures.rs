//! Metrics of the process, under the names that Prometheus' client libraries use. A metric that the system does not
//! provide is absent.

use crate::metrics::{BUILD, CPU_TIME, MAX_FILES, OPEN_FILES, RESIDENT, STARTED};

pub(crate) fn record() {
    metrics::gauge!(BUILD, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    #[cfg(target_os = "linux")]
    linux::record();
}

#[cfg(target_os = "linux")]
mod linux {
    use super::*;
    use rustix::{
        param::{clock_ticks_per_second, page_size},
        process::{Resource, getrlimit},
        time::{ClockId, clock_gettime},
    };
    use std::fs;

    pub(super) fn record() {
        if let Some(pages) = field("/proc/self/statm", 1) {
            metrics::gauge!(RESIDENT).set((pages * page_size() as u64) as f64);
        }
        let cpu_time = clock_gettime(ClockId::ProcessCPUTime);
        metrics::counter!(CPU_TIME).absolute(cpu_time.tv_sec.unsigned_abs());
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // The count includes the open directory itself.
            metrics::gauge!(OPEN_FILES).set(files.count().saturating_sub(1) as f64);
        }
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            metrics::gauge!(MAX_FILES).set(limit as f64);
        }
        if let Some(started) = started() {
            metrics::gauge!(STARTED).set(started);
        }
    }

    /// Returns the start time of the process in seconds since 1970.
    fn started() -> Option<f64> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The program name may contain spaces and brackets; the fields after it do not.
        let (_, rest) = stat.rsplit_once(')')?;
        let after_boot: u64 = rest.split_whitespace().nth(19)?.parse().ok()?;
        let system = fs::read_to_string("/proc/stat").ok()?;
        let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        Some(boot as f64 + after_boot as f64 / clock_ticks_per_second() as f64)
    }

    fn field(path: &str, number: usize) -> Option<u64> {
        fs::read_to_string(path).ok()?.split_whitespace().nth(number)?.parse().ok()
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::time::SystemTime;

        #[test]
        fn the_start_time_is_in_the_past() {
            let started = started().unwrap();
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
            assert!((now - 24.0 * 3600.0..=now + 2.0).contains(&started), "{started} at {now}");
            assert!(field("/proc/self/statm", 1).unwrap() > 0);
        }
    }
}
