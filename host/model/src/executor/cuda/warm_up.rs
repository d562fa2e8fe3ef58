//! Runs steps of every kind before an executor serves, so that nothing is compiled, planned, loaded or recorded in a
//! request's time.
//!
//! Invariant: all steps use the spare page, which is never read, and what recordings take stays within the memory that
//! the plan reserves for them. Shapes beyond that are enqueued launch by launch.

use std::time::{Duration, Instant};

use skep_kernels::cuda::attention_decode::MAX_ROWS;
use skep_kernels::cuda::device::Device;

use super::CudaExecutor;
use super::step::{DecodeShape, bucket, stride};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::error::ModelError;
use crate::sampling::{LogitRow, SampleRow, Sampling};

/// The least number of rows of a prompt's step that has a size of its own.
const LEAST_PROMPT_ROWS: usize = 64;
/// Time between two reports of progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Is called with the number of steps that are prepared, and with the number of all.
pub(super) type Watch<'a> = &'a dyn Fn(usize, usize);

impl CudaExecutor {
    /// Runs steps of each kind on a page that is never read, and draws, so that anything a kernel does not support
    /// fails here.
    pub(super) fn try_steps(&mut self) -> Result<(), ModelError> {
        let most = self.leader().sizes.logit_rows;
        // Such a draw launches all kernels of sampling.
        let truncated = Sampling { top_p: 0.9, ..Sampling::default() };
        // Many rows, few rows, and one row, which is launched, recorded and replayed.
        for tokens in [MAX_ROWS as usize + 1, 2, 1, 1, 1] {
            let logits = LogitsWanted::Tail(tokens.min(most));
            let pages = vec![PageId(self.cuts.spare_page); tokens.div_ceil(PAGE_TOKENS)];
            let sequence = BatchSequence { tokens: vec![0; tokens], start: 0, pages, logits };
            self.try_step(&Batch { sequences: vec![sequence] })?;
            let row = SampleRow::plain(0, &truncated);
            self.draw(&[LogitRow::Sample(row)], None)?;
        }
        self.logit_rows = 0;
        Ok(())
    }

    /// Runs prompts of every size and records the steps of every shape that decode. `free` is the free memory before any
    /// step, as `free_bytes` returns it.
    pub(super) fn warm_up(&mut self, free: &[u64], watch: Watch<'_>) -> Result<(), ModelError> {
        let prompts = self.prompts();
        let shapes = self.shapes();
        let (mut done, all) = (0, prompts.len() + shapes.len());
        for rows in prompts {
            self.try_step(&self.prompt(rows))?;
            done += 1;
            watch(done, all);
        }
        self.check_recordings(free)?;
        for shape in shapes {
            if self.recordings.made.len() >= self.recordings.max_shapes {
                break;
            }
            // The first step of a shape plans and loads what the second one records.
            let batch = self.decode(shape);
            self.try_step(&batch)?;
            self.try_step(&batch)?;
            self.check_recordings(free)?;
            done += 1;
            watch(done, all);
        }
        self.logit_rows = 0;
        let taken = self.taken_bytes(free)?;
        for (memory, taken) in self.memory.iter_mut().zip(&taken) {
            memory.memory.graph_bytes = memory.memory.graph_bytes.max(*taken);
        }
        self.plan.graph_bytes = self.memory.iter().map(|rank| rank.memory.graph_bytes).sum();
        let recorded = self.recordings.made.len();
        tracing::info!(recorded, steps = all, bytes = taken.iter().sum::<u64>(), "prepared steps");
        Ok(())
    }

    /// Sets whether ranks time the algorithms of products that they have not computed yet.
    pub(super) fn set_measures(&self, measures: bool) {
        self.stages
            .iter()
            .flatten()
            .filter_map(|rank| rank.blas.as_ref())
            .for_each(|blas| blas.set_measures(measures));
    }

    fn try_step(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.logit_rows = self.put(batch, None)?;
        self.finish()
    }

    /// Returns the numbers of rows of the prompts to run.
    fn prompts(&self) -> Vec<usize> {
        let sizes = &self.leader().sizes;
        let most = sizes.rows.min(sizes.sequences.saturating_mul(self.limits.context_length));
        prompt_sizes(most)
    }

    /// Returns the shapes to record: all of them, or half as many as there may be, so that others can be recorded when
    /// they come.
    fn shapes(&self) -> Vec<DecodeShape> {
        let sizes = &self.leader().sizes;
        let mut shapes = decode_shapes(sizes.sequences, sizes.pages);
        if shapes.len() > self.recordings.max_shapes {
            shapes.truncate(self.recordings.max_shapes / 2);
        }
        shapes
    }

    fn prompt(&self, rows: usize) -> Batch {
        let context = self.limits.context_length;
        let sequence = |first: usize| {
            let count = context.min(rows - first);
            let pages = vec![PageId(self.cuts.spare_page); count.div_ceil(PAGE_TOKENS)];
            BatchSequence { tokens: vec![0; count], start: 0, pages, logits: LogitsWanted::Last }
        };
        Batch { sequences: (0..rows).step_by(context).map(sequence).collect() }
    }

    fn decode(&self, shape: DecodeShape) -> Batch {
        let spare = PageId(self.cuts.spare_page);
        let sequence = |row: usize| {
            // One sequence decides how long the page tables are.
            let pages = vec![spare; if row == 0 { shape.stride } else { 1 }];
            BatchSequence { tokens: vec![0], start: 0, pages, logits: LogitsWanted::Last }
        };
        Batch { sequences: (0..shape.rows).map(sequence).collect() }
    }

    /// Stops recording if the memory that recordings and loaded code took since `free` was measured exceeds what is
    /// reserved for them.
    fn check_recordings(&mut self, free: &[u64]) -> Result<(), ModelError> {
        let taken = self.taken_bytes(free)?;
        let exceeds = |(index, taken): (usize, &u64)| *taken > self.memory[index].memory.graph_bytes;
        if !taken.iter().enumerate().any(exceeds) {
            return Ok(());
        }
        let recorded = self.recordings.made.len();
        let bytes = taken.iter().sum::<u64>();
        tracing::warn!(
            recorded,
            bytes,
            "the memory for recorded steps is used up; other steps are not recorded"
        );
        self.recordings.max_shapes = recorded;
        Ok(())
    }

    /// Returns the free memory of each rank's device.
    pub(super) fn free_bytes(&self) -> Result<Vec<u64>, ModelError> {
        self.stages.iter().flatten().map(|rank| Ok(rank.device.memory()?.free)).collect()
    }

    /// Returns the memory that was taken since `free` was measured, by rank. Ranks on one device share what was taken
    /// there.
    fn taken_bytes(&self, free: &[u64]) -> Result<Vec<u64>, ModelError> {
        let ranks = || self.stages.iter().flatten();
        let here = |device: &Device| ranks().filter(|rank| rank.device.shares_memory_with(device)).count();
        let taken = |(rank, (before, after)): (&super::Rank, (&u64, u64))| {
            before.saturating_sub(after).div_ceil(here(&rank.device).max(1) as u64)
        };
        Ok(ranks().zip(free.iter().zip(self.free_bytes()?)).map(taken).collect())
    }
}

/// Logs the progress of a long preparation.
pub(super) fn report() -> impl Fn(usize, usize) {
    let last = std::cell::Cell::new(Instant::now());
    move |done, all| {
        if last.get().elapsed() >= REPORT_INTERVAL {
            tracing::info!(done, all, "preparing steps");
            last.set(Instant::now());
        }
    }
}

/// Returns sizes of prompts, each twice the one before, up to the largest.
fn prompt_sizes(most: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = std::iter::successors(Some(LEAST_PROMPT_ROWS), |rows| rows.checked_mul(2))
        .take_while(|rows| *rows < most)
        .collect();
    sizes.push(most);
    sizes
}

/// Returns all shapes of steps that decode up to `most_rows` rows, with page tables of up to `most_pages` pages. Short
/// contexts come first.
fn decode_shapes(most_rows: usize, most_pages: usize) -> Vec<DecodeShape> {
    let longest = stride(most_pages);
    let strides = std::iter::successors(Some(stride(1)), |stride| Some(stride * 2))
        .take_while(|stride| *stride <= longest);
    let of_stride = |stride: usize| {
        let next = move |rows: &usize| Some(bucket(rows + 1)).filter(|rows| *rows <= most_rows);
        std::iter::successors(Some(1), next).map(move |rows| DecodeShape { rows, stride })
    };
    strides.flat_map(of_stride).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_double_up_to_the_largest_step() {
        assert_eq!(prompt_sizes(2048), [64, 128, 256, 512, 1024, 2048]);
        assert_eq!(prompt_sizes(300), [64, 128, 256, 300]);
        assert_eq!(prompt_sizes(20), [20]);
    }

    #[test]
    fn every_decode_step_has_one_of_the_shapes() {
        let shapes = decode_shapes(bucket(70), 200);
        for rows in 1..=bucket(70) {
            for pages in [1, 64, 65, 128, 129, 200] {
                let shape = DecodeShape { rows: bucket(rows), stride: stride(pages) };
                assert!(shapes.contains(&shape), "{shape:?}");
            }
        }
        // 1, 2, 4, 8, then multiples of 8 up to 64, then 96.
        assert_eq!(shapes.len(), (4 + 7 + 1) * 3);
        assert!(shapes.is_sorted_by_key(|shape| (shape.stride, shape.rows)));
    }
}
