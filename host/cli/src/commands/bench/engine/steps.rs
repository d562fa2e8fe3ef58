//! The timed steps: prefill and decode of a model, without a scheduler or HTTP around them.

use std::ops::Range;
use std::time::Instant;

use anyhow::{Result, bail};
use serde::Serialize;
use skep_model::{
    Batch, BatchSequence, ExecutorOptions, LogitRow, LogitsWanted, PAGE_TOKENS, PageId, SampleRow, Sampling,
    StepAhead,
};

use super::super::median;
use super::subject::Loaded;

/// Amounts of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Amounts {
    /// Tokens to prefill in each sequence; 0 measures no prefill.
    pub prompt: usize,
    /// Tokens to decode in each sequence; 0 measures no decode.
    pub generate: usize,
    /// Tokens in the KV cache before each run.
    pub depth: usize,
    /// Tokens of the depth that all sequences have in common, in the same pages.
    pub shared: usize,
    /// Sequences that run at the same time.
    pub batch: usize,
    /// Number of runs of each kind; their median counts.
    pub repeat: u16,
}

/// Seconds for all sequences together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub prefill_s: Option<f64>,
    pub decode_s: Option<f64>,
}

impl Amounts {
    /// Returns options with room for exactly this work.
    pub(super) fn over(self, options: &ExecutorOptions) -> ExecutorOptions {
        let tokens = self.pages().saturating_mul(self.batch).saturating_mul(PAGE_TOKENS);
        ExecutorOptions {
            kv_tokens: Some(tokens),
            max_sequences: self.batch,
            max_logit_rows: self.batch,
            ..options.clone()
        }
    }

    /// Returns the maximum length of a sequence.
    fn tokens(self) -> usize {
        self.depth.saturating_add(self.prompt.max(self.generate))
    }

    /// Returns the number of pages that all sequences have in common.
    fn shared_pages(self) -> usize {
        self.shared.min(self.depth) / PAGE_TOKENS
    }

    /// Returns the number of pages of each sequence.
    fn pages(self) -> usize {
        self.tokens().div_ceil(PAGE_TOKENS).saturating_add(1)
    }
}

/// Measures the loaded model, which must have room for `amounts`.
pub(super) fn measure(loaded: &mut Loaded, amounts: Amounts) -> Result<Times> {
    let limit = loaded.executor.limits().context_length;
    let (tokens, name) = (amounts.tokens(), &loaded.name);
    if tokens > limit {
        bail!(
            "depth and tokens add up to {tokens}, but {name} has a context of {limit}\n  hint: reduce one of them"
        );
    }
    let Amounts { prompt, generate, depth, batch, repeat, .. } = amounts;
    let shared = amounts.shared_pages() * PAGE_TOKENS;
    let mut bench = Bench { loaded, amounts };
    (0..batch).try_for_each(|sequence| {
        let from = if sequence == 0 { 0 } else { shared };
        bench.prefill(sequence, from..depth)
    })?;
    let prefill_s = repeated(repeat, prompt > 0, || {
        (0..batch).try_for_each(|sequence| bench.prefill(sequence, depth..depth + prompt))
    })?;
    let decode_s = repeated(repeat, generate > 0, || bench.decode(generate))?;
    Ok(Times { prefill_s, decode_s })
}

/// Returns the median seconds of `work`, after one run to warm up.
fn repeated(times: u16, wanted: bool, mut work: impl FnMut() -> Result<()>) -> Result<Option<f64>> {
    if !wanted {
        return Ok(None);
    }
    work()?;
    let mut seconds = Vec::new();
    for _ in 0..times {
        let started = Instant::now();
        work()?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    Ok(Some(median(&mut seconds)))
}

/// A model with room for some sequences, whose first `depth` positions stay filled.
struct Bench<'a> {
    loaded: &'a mut Loaded,
    amounts: Amounts,
}

impl Bench<'_> {
    /// Computes the positions `range` of one sequence, in chunks that the executor takes at once.
    fn prefill(&mut self, sequence: usize, range: Range<usize>) -> Result<()> {
        let chunk = self.loaded.executor.limits().max_batch_tokens;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + chunk);
            let tokens = (start..end).map(|position| self.token(sequence, position)).collect();
            let logits = if end == range.end { LogitsWanted::Last } else { LogitsWanted::None };
            let sequences = vec![self.row(sequence, tokens, start, logits)];
            self.loaded.executor.forward(&Batch { sequences })?;
            start = end;
        }
        // The last step may still run: its logits are available once it is over.
        if !range.is_empty() {
            self.loaded.executor.logits(0)?;
        }
        Ok(())
    }

    /// Decodes `count` tokens greedily in every sequence, starting at the depth.
    fn decode(&mut self, count: usize) -> Result<()> {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let Amounts { depth, batch, .. } = self.amounts;
        let mut next: Vec<u32> = (0..batch).map(|sequence| self.token(sequence, depth)).collect();
        for step in 0..count {
            let start = depth + step;
            self.loaded.executor.forward(&self.decode_step(&next, start))?;
            let sample = |row: usize| SampleRow { step: step as u64, ..SampleRow::plain(row, &greedy) };
            let rows: Vec<_> = (0..batch).map(|row| LogitRow::Sample(sample(row))).collect();
            let chosen = match step + 1 < count {
                // The tokens of the following step are those that are drawn now.
                true => {
                    let following = self.decode_step(&next, start + 1);
                    let following = StepAhead { batch: following, drawn: (0..batch).collect() };
                    self.loaded.executor.sample_and_begin(&rows, &following)?.outputs
                }
                false => self.loaded.executor.sample(&rows)?,
            };
            next = chosen.iter().map(|output| output.token).collect();
        }
        Ok(())
    }

    fn decode_step(&self, tokens: &[u32], start: usize) -> Batch {
        let rows = tokens.iter().enumerate();
        let sequences =
            rows.map(|(row, &token)| self.row(row, vec![token], start, LogitsWanted::Last)).collect();
        Batch { sequences }
    }

    fn row(&self, sequence: usize, tokens: Vec<u32>, start: usize, logits: LogitsWanted) -> BatchSequence {
        let first = sequence * self.amounts.pages();
        let used = (start + tokens.len()).div_ceil(PAGE_TOKENS);
        let shared = self.amounts.shared_pages();
        let page = |index: usize| if index < shared { index } else { first + index };
        let pages = (0..used).map(|index| PageId(page(index) as u32)).collect();
        BatchSequence { tokens, start, pages, logits }
    }

    /// Returns a token of the vocabulary that differs from its neighbors and, after the shared ones, between sequences.
    fn token(&self, sequence: usize, position: usize) -> u32 {
        let is_shared = position < self.amounts.shared_pages() * PAGE_TOKENS;
        let sequence = if is_shared { 0 } else { sequence };
        let mixed =
            (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(sequence as u64 * 7919)
                >> 20;
        (mixed % self.loaded.config.vocabulary_size as u64) as u32
    }
}
