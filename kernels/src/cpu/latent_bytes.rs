//! Attention of a few query rows over pages of latents in 8 bits, with integer dot products.
//!
//! Invariant: as in [`super::latent`], a row's result has the same bits whatever rows share its call. Queries are rounded to
//! 15 bits and a sign for each run of [`SCALE_RUN`] columns, weights to 15 bits for each run and block; the errors are a
//! hundredth of those of latents in 8 bits. Products of integers are summed exactly, so all tiers compute the same sums.
//! Rotated keys have 16 bits and are multiplied as floats.

// Loops over registers are written with indices, so that they stay in registers.
#![allow(clippy::needless_range_loop)]

use super::attention::{BLOCK, MAX_ROWS, QueryRow, softmax_weights};
use super::kv::{KvF16, KvFormat, MAX_LATENT, PAGE};
use super::latent::{LatentPage, SCALE_RUN};
use super::row_parts::row_parts;
use super::rows::{RowKernel, count};
use super::simd::Simd;
use super::softmax_state::{LANES, MASKED, State, ValueBlock};

/// The largest integer that a query or a weight is rounded to. A run of columns and a block of positions are both 128 long,
/// so sums of products with bytes are below 2 to the power of 30.
const LARGEST: f32 = 32767.0;
/// Columns of a page that are turned at once: 16 tokens of 64 bytes are 16 registers.
const CHUNK: usize = 64;
const MAX_RUNS: usize = MAX_LATENT / SCALE_RUN;
const BLOCK_PAGES: usize = BLOCK / PAGE;

/// Computes attention over pages of latents in 8 bits. Fields are those of [`super::latent::AttendLatents`].
pub(crate) struct AttendBytes<'a> {
    pub rows: &'a [QueryRow],
    pub query: *const f32,
    pub scale: f32,
    pub page: LatentPage,
    pub latents: *const u8,
    pub pages: &'a [u32],
    pub from: usize,
    pub to: usize,
    pub state: State,
    pub state_stride: usize,
}

/// The queries of a call, in the order in which they are read.
struct Queries {
    /// Integers, `[4 columns][row][2 pairs]`: columns 0 and 2, then columns 1 and 3.
    pairs: [u32; MAX_LATENT / 2 * MAX_ROWS],
    /// The value of an integer's unit, `[run][row]`.
    steps: [f32; MAX_RUNS * MAX_ROWS],
    /// The rotated columns, `[column][row]`.
    rotated: [f32; MAX_LATENT * MAX_ROWS],
}

/// A page whose lanes are tokens.
struct TurnedPage {
    /// The latents, `[4 columns][token][4 bytes]`.
    latents: [u8; PAGE * MAX_LATENT],
    /// The rotated keys, `[column][token]`.
    rotated: [f32; PAGE * MAX_LATENT],
}

/// The weights of a block for one run of columns, times the scales of the run.
struct RunWeights<const N: usize> {
    integers: [[i16; BLOCK]; N],
    /// The value of an integer's unit, for each row.
    steps: [f32; N],
}

/// The bytes that a call has on the stack for what it reads again and again.
pub(crate) const STACK_BYTES: usize =
    size_of::<Queries>() + size_of::<TurnedPage>() + size_of::<RunWeights<MAX_ROWS>>();

impl RowKernel for AttendBytes<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    #[inline(always)]
    unsafe fn run_rows<S: Simd, const N: usize>(self) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.attend::<S, N>() }
    }
}

impl AttendBytes<'_> {
    /// Processes the rows.
    ///
    /// # Safety
    /// The conditions of [`RowKernel::run_rows`] hold for `N` rows, their queries exist, and the pages cover `from..to`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const N: usize>(&self) {
        let rows = count::<S, N>(self.rows);
        let mut queries = Queries {
            pairs: [0; MAX_LATENT / 2 * MAX_ROWS],
            steps: [0.0; MAX_RUNS * MAX_ROWS],
            rotated: [0.0; MAX_LATENT * MAX_ROWS],
        };
        let mut turned = TurnedPage { latents: [0; PAGE * MAX_LATENT], rotated: [0.0; PAGE * MAX_LATENT] };
        let mut run_weights = RunWeights { integers: [[0; BLOCK]; N], steps: [0.0; N] };
        let mut scales = [0f32; BLOCK_PAGES * MAX_RUNS * PAGE];
        let mut scores = [[0f32; BLOCK]; N];
        let mut state = self.state;
        let mut at = self.from;
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.round_queries::<S>(rows, &mut queries);
            while at < self.to {
                let end = (at / BLOCK * BLOCK + BLOCK).min(self.to);
                let pages = (end - at).div_ceil(PAGE);
                for index in 0..pages {
                    let page = self.page_at(at / PAGE + index);
                    let scales = &mut scales[index * MAX_RUNS * PAGE..][..MAX_RUNS * PAGE];
                    self.turn::<S>(page, &mut turned, scales);
                    macro_rules! score {
                        ($first:tt, $rows:tt, $_at_once:tt) => {
                            self.score_rows::<S, { $rows }>(
                                &queries,
                                &turned,
                                scales,
                                $first,
                                index,
                                &mut scores,
                            )
                        };
                    }
                    row_parts!(S, rows, N, 2, score);
                }
                let (mut largest, mut totals) = ([MASKED; LANES], [0f32; LANES]);
                for r in 0..rows {
                    let row = &mut scores[r][..pages * PAGE];
                    (largest[r], totals[r]) = softmax_weights::<S>(row, at, &self.rows[r], false);
                }
                if at == self.from || self.state_stride > 0 {
                    state.clear::<S>(rows);
                }
                let factors = state.merge_totals::<S>(largest.as_ptr(), totals.as_ptr());
                let block = ValueBlock { weights: &scores, first_page: at / PAGE, pages, state, factors };
                for run in 0..self.page.scales() {
                    round_weights::<S, N>(&scores[..rows], &scales, pages, run, &mut run_weights);
                    macro_rules! gather {
                        ($first:tt, $rows:tt, $columns:tt) => {{
                            let (mut column, last) = (run * SCALE_RUN, self.columns_of(run));
                            while column + 16 * $columns <= last {
                                self.gather_values::<S, N, { $rows }, { $columns }>(
                                    &run_weights,
                                    &block,
                                    $first,
                                    column,
                                );
                                column += 16 * $columns;
                            }
                            while column < last {
                                self.gather_values::<S, N, { $rows }, 1>(
                                    &run_weights,
                                    &block,
                                    $first,
                                    column,
                                );
                                column += 16;
                            }
                        }};
                    }
                    row_parts!(S, rows, N, 2, gather);
                }
                state = state.after(self.state_stride);
                at = end;
            }
        }
    }

    /// Returns the end of the columns of a run.
    #[inline(always)]
    fn columns_of(&self, run: usize) -> usize {
        ((run + 1) * SCALE_RUN).min(self.page.latent)
    }

    /// # Safety
    /// The sequence has the page.
    #[inline(always)]
    unsafe fn page_at(&self, index: usize) -> *const u8 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.latents.add(self.pages[index] as usize * self.page.bytes()) }
    }

    /// Rounds the queries of all rows.
    ///
    /// # Safety
    /// The conditions of `attend` hold.
    #[inline(always)]
    unsafe fn round_queries<S: Simd>(&self, rows: usize, to: &mut Queries) {
        let LatentPage { latent, rotated, .. } = self.page;
        for r in 0..rows {
            // SAFETY: a query has as many values as a latent and a rotated key; runs are whole registers.
            unsafe {
                let query = self.query.add(self.rows[r].offset);
                for run in 0..self.page.scales() {
                    let (first, last) = (run * SCALE_RUN, self.columns_of(run));
                    let (mut peak, mut zeros) = (S::zero(), S::zero());
                    for column in (first..last).step_by(16) {
                        let value = S::load(query.add(column));
                        peak = S::max(peak, S::max(value, S::sub(S::zero(), value)));
                        zeros = S::fma(value, S::zero(), zeros);
                    }
                    let (step, inverse) = steps(S::max_lane(peak));
                    // Zero times infinity is not a number, so a query that is not finite makes its scores NaN, as without rounding.
                    to.steps[run * MAX_ROWS + r] = step + S::sum(zeros);
                    let (limit, inverse) = (S::splat(LARGEST), S::splat(inverse));
                    for column in (first..last).step_by(16) {
                        let value = S::mul(S::load(query.add(column)), inverse);
                        let value = S::max(S::min(value, limit), S::splat(-LARGEST));
                        let mut integers = [0i16; 16];
                        S::store_i16(integers.as_mut_ptr(), value);
                        for (four, [a, b, c, d]) in integers.as_chunks::<4>().0.iter().enumerate() {
                            let at = ((column / 4 + four) * MAX_ROWS + r) * 2;
                            (to.pairs[at], to.pairs[at + 1]) = (pair(*a, *c), pair(*b, *d));
                        }
                    }
                }
                for column in 0..rotated {
                    to.rotated[column * MAX_ROWS + r] = *query.add(latent + column);
                }
            }
        }
    }

    /// Turns a page, so that its lanes are tokens, and its scales: `[run][token]`.
    ///
    /// # Safety
    /// The page exists.
    #[inline(always)]
    unsafe fn turn<S: Simd>(&self, page: *const u8, to: &mut TurnedPage, scales: &mut [f32]) {
        let LatentPage { latent, rotated, .. } = self.page;
        let runs = self.page.scales();
        // SAFETY: the last chunk of a latent may end in what follows it in the page: the next latent, or the scales, which take
        // at least as many bytes as a chunk.
        unsafe {
            for column in (0..latent).step_by(CHUNK) {
                let mut rows = [S::zero_i(); 16];
                for token in 0..PAGE {
                    rows[token] = S::load_i(page.add(token * latent + column));
                }
                let rows = S::transpose(rows);
                for four in 0..16 {
                    S::store_i(to.latents.as_mut_ptr().add((column / 4 + four) * 4 * PAGE), rows[four]);
                }
            }
            let keys = page.add(self.page.rotated_at()).cast::<u16>();
            for column in (0..rotated).step_by(16) {
                let mut rows = [S::zero_i(); 16];
                for token in 0..PAGE {
                    let mut floats = [0f32; 16];
                    S::store(floats.as_mut_ptr(), KvF16::load::<S>(keys.add(token * rotated + column)));
                    rows[token] = S::load_i(floats.as_ptr().cast());
                }
                let rows = S::transpose(rows);
                for at in 0..16 {
                    let to = to.rotated.as_mut_ptr().add((column + at) * PAGE);
                    S::store_i(to.cast(), rows[at]);
                }
            }
            let from = page.add(self.page.scales_at()).cast::<f32>();
            for run in 0..runs {
                for token in 0..PAGE {
                    scales[run * PAGE + token] = from.add(token * runs + run).read_unaligned();
                }
            }
        }
    }

    /// Scores a turned page for `R` rows from `first` on. With few registers, the integers of a row are one sum instead of two.
    ///
    /// # Safety
    /// The conditions of `attend` hold, and there are the rows.
    #[inline(always)]
    unsafe fn score_rows<S: Simd, const R: usize>(
        &self,
        queries: &Queries,
        page: &TurnedPage,
        scales: &[f32],
        first: usize,
        index: usize,
        scores: &mut [[f32; BLOCK]],
    ) {
        let odd_sum = usize::from(S::MANY_REGISTERS);
        // SAFETY: the arrays have room for the largest page and for all rows.
        unsafe {
            let mut sums = [S::zero(); R];
            for run in 0..self.page.scales() {
                let mut integers = [[S::zero_i(); 2]; R];
                for four in run * SCALE_RUN / 4..self.columns_of(run) / 4 {
                    let [even, odd] = S::byte_pairs(S::load_i(page.latents.as_ptr().add(four * 4 * PAGE)));
                    let pairs = queries.pairs.as_ptr().add((four * MAX_ROWS + first) * 2);
                    for r in 0..R {
                        let query = S::splat_4(pairs.add(2 * r).cast());
                        integers[r][0] = S::dot_pairs(integers[r][0], even, query);
                    }
                    for r in 0..R {
                        let query = S::splat_4(pairs.add(2 * r + 1).cast());
                        integers[r][odd_sum] = S::dot_pairs(integers[r][odd_sum], odd, query);
                    }
                }
                let scale = S::load(scales.as_ptr().add(run * PAGE));
                for r in 0..R {
                    let sum = S::to_f32(S::add_i(integers[r][0], integers[r][1]));
                    let step = S::splat(queries.steps[run * MAX_ROWS + first + r]);
                    sums[r] = S::fma(sum, S::mul(scale, step), sums[r]);
                }
            }
            for column in 0..self.page.rotated {
                let keys = S::load(page.rotated.as_ptr().add(column * PAGE));
                for r in 0..R {
                    let query = S::splat(*queries.rotated.as_ptr().add(column * MAX_ROWS + first + r));
                    sums[r] = S::fma(keys, query, sums[r]);
                }
            }
            for r in 0..R {
                let score = S::mul(S::splat(self.scale), sums[r]);
                S::store(scores[first + r].as_mut_ptr().add(index * PAGE), score);
            }
        }
    }

    /// Sums `C` registers of a block's values for `R` rows from `first` on, from `column` on, and merges them into the state.
    ///
    /// # Safety
    /// The conditions of `attend` hold, there are the rows, and the columns are within the latent.
    #[inline(always)]
    unsafe fn gather_values<S: Simd, const N: usize, const R: usize, const C: usize>(
        &self,
        weights: &RunWeights<N>,
        block: &ValueBlock<'_>,
        first: usize,
        column: usize,
    ) {
        let latent = self.page.latent;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let integers: [*const i16; R] = std::array::from_fn(|r| weights.integers[first + r].as_ptr());
            let mut sums = [[S::zero_i(); C]; R];
            for p in 0..block.pages {
                let values = self.page_at(block.first_page + p).cast::<i8>().add(column);
                for token in (0..PAGE).step_by(2) {
                    let mut loaded = [S::zero_i(); C];
                    for c in 0..C {
                        let first = values.add(token * latent + 16 * c);
                        loaded[c] = S::load_pairs(first, first.add(latent));
                    }
                    for r in 0..R {
                        let weight = S::splat_4(integers[r].add(p * PAGE + token).cast());
                        for c in 0..C {
                            sums[r][c] = S::dot_pairs(sums[r][c], loaded[c], weight);
                        }
                    }
                }
            }
            let mut values = [[S::zero(); C]; R];
            for r in 0..R {
                let step = S::splat(weights.steps[first + r]);
                for c in 0..C {
                    values[r][c] = S::mul(S::to_f32(sums[r][c]), step);
                }
            }
            block.merge::<S, R, C>(&values, first, column);
        }
    }
}

/// Rounds the weights of a block, times the scales of one run.
///
/// # Safety
/// Call inside a dispatched kernel; there are at most [`BLOCK_PAGES`] pages.
#[inline(always)]
unsafe fn round_weights<S: Simd, const N: usize>(
    weights: &[[f32; BLOCK]],
    scales: &[f32; BLOCK_PAGES * MAX_RUNS * PAGE],
    pages: usize,
    run: usize,
    to: &mut RunWeights<N>,
) {
    // SAFETY: accesses are within a block.
    unsafe {
        for r in 0..weights.len() {
            let mut peak = S::zero();
            for p in 0..pages {
                peak = S::max(peak, scaled::<S>(&weights[r], scales, p, run));
            }
            let (step, inverse) = steps(S::max_lane(peak));
            to.steps[r] = step;
            let (limit, inverse) = (S::splat(LARGEST), S::splat(inverse));
            for p in 0..pages {
                let value = S::min(S::mul(scaled::<S>(&weights[r], scales, p, run), inverse), limit);
                S::store_i16(to.integers[r].as_mut_ptr().add(p * PAGE), value);
            }
        }
    }
}

/// Returns the weights of a page, times the scales of one run. It is not a closure, because the compiler may call a closure, which
/// then lacks the features of the kernel.
///
/// # Safety
/// Call inside a dispatched kernel; the page is within the block.
#[inline(always)]
unsafe fn scaled<S: Simd>(
    weights: &[f32; BLOCK],
    scales: &[f32; BLOCK_PAGES * MAX_RUNS * PAGE],
    page: usize,
    run: usize,
) -> S::F {
    // SAFETY: accesses are within a block.
    unsafe {
        let scales = S::load(scales.as_ptr().add((page * MAX_RUNS + run) * PAGE));
        S::mul(S::load(weights.as_ptr().add(page * PAGE)), scales)
    }
}

/// Returns the value of an integer's unit if the largest magnitude becomes [`LARGEST`], and the inverse.
#[inline(always)]
fn steps(largest: f32) -> (f32, f32) {
    if largest > 1e-30 && largest < 1e30 { (largest / LARGEST, LARGEST / largest) } else { (0.0, 0.0) }
}

/// Returns two integers as the 4 bytes that [`Simd::splat_4`] reads.
#[inline(always)]
fn pair(first: i16, second: i16) -> u32 {
    let ([a, b], [c, d]) = (first.to_le_bytes(), second.to_le_bytes());
    u32::from_ne_bytes([a, b, c, d])
}
