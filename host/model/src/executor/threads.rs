//! Chooses the number of threads and divides them.

use skep_kernels::pool::MAX_THREADS;
use skep_kernels::{Isa, WorkerPool};

use super::{CpuAffinity, ExecutorOptions, option};
use crate::error::ModelError;

/// Returns the number of cores, not counting additional hardware threads, which do not help arithmetic
/// that saturates a core.
pub fn physical_cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    let per_core = siblings.map_or(1, |list| list.trim().split([',', '-']).count().max(1));
    (available / per_core).clamp(1, MAX_THREADS)
}

/// Returns the share of part `index` when `whole` threads are divided into `parts`. Shares differ by at
/// most one, and none is empty.
pub(crate) fn share_of(whole: usize, index: usize, parts: usize) -> usize {
    (whole / parts + usize::from(index < whole % parts)).max(1)
}

/// Returns the instruction tier and the number of threads that the options request.
pub(super) fn tier_and_threads(options: &ExecutorOptions) -> Result<(Isa, usize), ModelError> {
    let isa = tier(options.isa.unwrap_or_else(Isa::detect), Isa::supported)?;
    let threads = options.threads.unwrap_or_else(physical_cores);
    if threads == 0 || threads > MAX_THREADS {
        return Err(option("threads", format!("{threads} is not between 1 and {MAX_THREADS}")));
    }
    Ok((isa, threads))
}

/// Returns the tier if the machine supports it. A requested tier is never replaced by another.
fn tier(isa: Isa, supported: impl Fn(Isa) -> bool) -> Result<Isa, ModelError> {
    if supported(isa) {
        return Ok(isa);
    }
    let known: Vec<String> =
        Isa::ALL.into_iter().filter(|isa| supported(*isa)).map(|isa| isa.to_string()).collect();
    Err(option("isa", format!("this machine does not support {isa}; it supports {}", known.join(", "))))
}

impl CpuAffinity {
    /// Starts a pool of `threads` threads.
    pub(super) fn pool(self, threads: usize) -> Result<WorkerPool, ModelError> {
        Ok(match self {
            CpuAffinity::Unpinned => WorkerPool::new(threads)?,
            CpuAffinity::Pinned(first) => WorkerPool::pinned(threads, first)?,
        })
    }

    /// Returns the affinity of the threads that come after `threads` threads.
    pub(crate) fn after(self, threads: usize) -> Self {
        match self {
            CpuAffinity::Unpinned => CpuAffinity::Unpinned,
            CpuAffinity::Pinned(first) => CpuAffinity::Pinned(first + threads),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_an_unsupported_tier_and_lists_the_supported_ones() {
        let old_machine = |isa: Isa| isa <= Isa::Avx2;
        assert_eq!(tier(Isa::Avx2, old_machine).unwrap(), Isa::Avx2);
        let error = tier(Isa::Avx512, old_machine).unwrap_err().to_string();
        assert!(error.contains("avx512") && error.contains("portable, avx2"), "{error}");
    }

    #[test]
    fn shares_differ_by_at_most_one_and_add_up_to_the_whole() {
        for (whole, parts) in [(3, 3), (7, 2), (16, 5)] {
            let shares: Vec<usize> = (0..parts).map(|index| share_of(whole, index, parts)).collect();
            assert_eq!(shares.iter().sum::<usize>(), whole);
            assert!(shares[0] - shares[parts - 1] <= 1, "{shares:?}");
        }
        assert_eq!(share_of(2, 2, 3), 1, "every part needs a thread");
    }
}
