//! How many threads compute, and who gets them.

use skep_kernels::Isa;
use skep_kernels::pool::MAX_THREADS;

use super::{ExecutorOptions, option};
use crate::error::ModelError;

/// Cores without their second hardware threads, which do not help arithmetic that saturates a core.
pub fn physical_cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    let per_core = siblings.map_or(1, |list| list.trim().split([',', '-']).count().max(1));
    (available / per_core).clamp(1, MAX_THREADS)
}

/// What part `index` of `parts` gets of `whole` threads: parts differ by one at most, and none is empty.
pub(crate) fn share_of(whole: usize, index: usize, parts: usize) -> usize {
    (whole / parts + usize::from(index < whole % parts)).max(1)
}

/// The instruction tier and the number of threads that the options ask for.
pub(super) fn tier_and_threads(options: &ExecutorOptions) -> Result<(Isa, usize), ModelError> {
    let isa = options.isa.unwrap_or_else(Isa::detect);
    if !isa.supported() {
        return Err(option("isa", format!("this machine does not support {isa}")));
    }
    let threads = options.threads.unwrap_or_else(physical_cores);
    if threads == 0 || threads > MAX_THREADS {
        return Err(option("threads", format!("{threads} is not between 1 and {MAX_THREADS}")));
    }
    Ok((isa, threads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_differ_by_one_at_most_and_make_the_whole() {
        for (whole, parts) in [(3, 3), (7, 2), (16, 5)] {
            let shares: Vec<usize> = (0..parts).map(|index| share_of(whole, index, parts)).collect();
            assert_eq!(shares.iter().sum::<usize>(), whole);
            assert!(shares[0] - shares[parts - 1] <= 1, "{shares:?}");
        }
        assert_eq!(share_of(2, 2, 3), 1, "everybody needs a thread");
    }
}
