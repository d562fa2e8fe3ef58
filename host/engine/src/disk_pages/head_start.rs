//! Lets a request compute the first of the pages that the disk has for it while the others are read, if nothing else is to be
//! computed.
//!
//! At rates `c` and `r` of computing and reading, both are done at the same time if the first `c / (r + c)` of the pages are
//! computed, and the request waits for that much less of the read. Pages that are read have no place in the prefix tree before
//! those in front of them are computed, so the read keeps them until then.
//!
//! Computing what can be read would slow down other sequences. So a request that does not have the replica for itself waits for all
//! its pages.

use std::time::{Duration, Instant};

use skep_cache::Digest;
use skep_model::PAGE_TOKENS;

use super::DiskPages;
use super::promotion::{PAGES_AT_ONCE, Promotion, Reader, Reading, Source};
use crate::Affinity;
use crate::kv::{SequencePages, pages_for};
use crate::scheduler::{HeadStart, Scheduler};
use crate::sequence_id::SequenceId;

/// Minimum part of the pages that is computed. With less, a request waits for all of them.
const LEAST_SHARE: f64 = 0.1;
/// Minimum number of pages that are computed.
const LEAST_PAGES: usize = 4;
/// Maximum number of bytes that are read while a step computes, in host memory.
const AHEAD_BYTES: usize = 128 << 20;

/// The parts of the pages that the disk has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Number of pages, from the first one on, that are computed.
    computed: usize,
    /// Maximum number of pages that are computed in a step.
    in_step: usize,
    /// Number of pages that may be read meanwhile.
    ahead: usize,
}

impl DiskPages {
    /// Lets a request compute the first of its `missing` pages, which are on disk and follow the first `in_memory` ones, while the
    /// others are read. `read` and `compute` are the times that all of them would take. Returns `None` if the request has to wait
    /// for all of them.
    pub(super) fn begin_head_start(
        &mut self,
        id: SequenceId,
        (affinity, tokens): (&Affinity, &[u32]),
        (missing, in_memory): (&[Digest], usize),
        (read, compute): (Duration, Duration),
        scheduler: &mut Scheduler,
    ) -> Option<()> {
        if self.reads_always() || !self.speed.is_measured() || !scheduler.is_idle() {
            return None;
        }
        let Division { computed, in_step, ahead } =
            Division::of(missing.len(), self.page_bytes, (read, compute))?;
        let names = missing[computed..].to_vec();
        // The sequence counts on room for all its pages, those included that the read has.
        if pages_for(tokens.len()) + names.len() > self.room(scheduler) {
            return None;
        }
        let disk = self.disk.as_ref()?;
        let pages = disk.tier.read_ahead(disk.layout, names.clone(), ahead)?;
        let reading = Reading { source: Source::Disk, names, pages, report: None };
        let first = in_memory + computed;
        let head_start = HeadStart { tokens: first * PAGE_TOKENS, step_tokens: in_step * PAGE_TOKENS };
        scheduler.give_head_start(id, head_start);
        let page_time = self.speed.compute_time(PAGE_TOKENS);
        let reader = Reader::HeadStart { id, first, ahead, page_time };
        let tokens = &tokens[..(in_memory + missing.len()) * PAGE_TOKENS];
        let deadline = Instant::now() + self.patience(read, compute);
        let held = SequencePages::default();
        self.promotions.push(Promotion::new(reader, (affinity, tokens), reading, held, deadline));
        Some(())
    }
}

impl Division {
    /// Divides `pages` pages by the times that reading and computing all of them take, or returns `None` if computing some of
    /// them gains little.
    fn of(pages: usize, page_bytes: usize, (read, compute): (Duration, Duration)) -> Option<Self> {
        let (read_s, compute_s) = (read.as_secs_f64(), compute.as_secs_f64());
        let share = read_s / (read_s + compute_s);
        let computed = (pages as f64 * share) as usize;
        // If neither takes any time, the share is not a number, and nothing is gained.
        let gains = share >= LEAST_SHARE && computed >= LEAST_PAGES && computed < pages;
        let ahead = (AHEAD_BYTES / page_bytes.max(1)).max(PAGES_AT_ONCE).min(pages);
        // While these are computed, `ahead` pages are read.
        let in_step = (ahead as f64 * read_s / compute_s) as usize;
        gains.then_some(Division { computed, in_step: in_step.max(1), ahead })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn division(pages: usize, page_bytes: usize, read: u64, compute: u64) -> Option<(usize, usize, usize)> {
        let times = (Duration::from_millis(read), Duration::from_millis(compute));
        let divided = Division::of(pages, page_bytes, times);
        divided.map(|Division { computed, in_step, ahead }| (computed, in_step, ahead))
    }

    #[test]
    fn both_parts_take_the_same_time() {
        // A third is computed in a third of 600 ms, while two thirds are read in two thirds of 300 ms.
        assert_eq!(division(300, MIB, 300, 600), Some((100, 64, 128)));
        assert_eq!(division(300, MIB, 590, 600), Some((148, 125, 128)));
        assert_eq!(division(300, 64 * MIB, 300, 600), Some((100, 4, 8)), "pages are large");
        assert_eq!(division(30, 1024, 300, 600), Some((10, 15, 30)), "there are few of them");
    }

    #[test]
    fn a_small_gain_is_not_worth_it() {
        assert_eq!(division(300, MIB, 60, 600), None, "less than a tenth would be computed");
        assert_eq!(division(300, MIB, 70, 600).map(|(computed, ..)| computed), Some(31));
        assert_eq!(division(9, MIB, 300, 600), None, "three pages would be computed");
        assert_eq!(division(300, MIB, 0, 0), None);
    }
}
