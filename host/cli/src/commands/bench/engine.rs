//! `skep bench engine`: prefill and decode of a model, without scheduler or HTTP around them.

use std::ops::Range;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_kernels::arithmetic::{self, ArithmeticRate};
use skep_kernels::{Isa, bandwidth};
use skep_model::{
    Batch, BatchSequence, ExecutorOptions, LoadedModel, LogitRow, LogitsWanted, ModelConfig, PAGE_TOKENS,
    PageId, SampleRow, Sampling, physical_cores,
};

use super::{super::out, median};
use crate::catalog;
use crate::compute_flags::ComputeFlags;
use crate::progress::Terminal;

/// Measure prefill and decode of a model
///
/// Each figure is the median of several runs. `share` is how much of the memory bandwidth, measured here and now, the
/// weights alone take while decoding, and how much of its arithmetic the products alone take while prefilling.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench engine
  skep bench engine --prompt 2048 --generate 128 --depth 2048
  skep bench engine --batch 8 --threads 4 --json")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Threads [default: physical cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tokens to prefill
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    generate: usize,
    /// Tokens that are in the KV cache before each run
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    depth: usize,
    /// Sequences at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: u16,
    /// Runs of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
    #[command(flatten)]
    compute: ComputeFlags,
    /// Ranks that share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    tp: usize,
    /// Ranks that share the layers out
    #[arg(long, value_name = "N", default_value_t = 1)]
    pp: usize,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    isa: String,
    threads: usize,
    prompt: usize,
    generate: usize,
    depth: usize,
    batch: usize,
    repeat: u16,
    kv: String,
    load_s: f64,
    prefill_tok_per_s: Option<f64>,
    decode_tok_per_s: Option<f64>,
    decode_steps_per_s: Option<f64>,
    weight_bytes: u64,
    /// Of a buffer far larger than the caches, read by as many threads.
    bandwidth_gb_per_s: f64,
    /// Share of it that the weights take while decoding.
    bandwidth_share: Option<f64>,
    /// Of what stays in registers, by as many threads.
    int8_ops_per_s: f64,
    f32_ops_per_s: f64,
    /// Share of these rates at which the multiplications of prefill alone would run.
    compute_share: Option<f64>,
}

pub fn run(args: &Args) -> Result<()> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    let batch = usize::from(args.batch);
    let tokens = args.depth.saturating_add(args.prompt.max(args.generate));
    let pages = tokens.div_ceil(PAGE_TOKENS).saturating_add(1);
    let threads = args.threads.map_or_else(physical_cores, usize::from);
    let mut options = ExecutorOptions {
        threads: Some(threads),
        kv_tokens: Some(pages.saturating_mul(batch).saturating_mul(PAGE_TOKENS)),
        max_sequences: batch,
        max_logit_rows: batch,
        tensor_parallel: args.tp,
        pipeline_parallel: args.pp,
        ..ExecutorOptions::default()
    };
    args.compute.apply(&mut options);
    let started = Instant::now();
    let loaded = LoadedModel::open(&model.name, &model.path, options)
        .with_context(|| format!("cannot load {}", model.path.display()))?;
    let load_s = started.elapsed().as_secs_f64();
    let limit = loaded.executor.limits().context_length;
    if tokens > limit {
        bail!(
            "depth and tokens make {tokens}, but {} has a context of {limit}\n  hint: ask for less",
            model.name
        );
    }
    let bandwidth_gb_per_s = bandwidth::measure_read_gb_per_s(threads);
    let isa = options.isa.unwrap_or_else(Isa::detect);
    let arithmetic = arithmetic::measure(isa, threads);
    let floor_s = prefill_floor_s(&loaded.config, args.depth, args.prompt, arithmetic);
    let mut bench = Bench { model: loaded, batch, pages, depth: args.depth };
    for sequence in 0..batch {
        bench.prefill(sequence, 0..args.depth)?;
    }
    let prefill_s = repeated(args.repeat, args.prompt > 0, || {
        (0..batch).try_for_each(|sequence| bench.prefill(sequence, args.depth..args.depth + args.prompt))
    })?;
    let decode_s = repeated(args.repeat, args.generate > 0, || bench.decode(args.generate))?;
    let per_s =
        |tokens: usize, seconds: Option<f64>| seconds.map(|seconds| (tokens * batch) as f64 / seconds);
    let decode_steps_per_s = decode_s.map(|seconds| args.generate as f64 / seconds);
    let weight_bytes = bench.model.executor.plan().weight_bytes;
    let share = |steps: f64| steps * weight_bytes as f64 / (bandwidth_gb_per_s * 1e9);
    let report = Report {
        model: model.name,
        isa: isa.to_string(),
        threads,
        prompt: args.prompt,
        generate: args.generate,
        depth: args.depth,
        batch,
        repeat: args.repeat,
        kv: options.kv.to_string(),
        load_s,
        prefill_tok_per_s: per_s(args.prompt, prefill_s),
        decode_tok_per_s: per_s(args.generate, decode_s),
        decode_steps_per_s,
        weight_bytes,
        bandwidth_gb_per_s,
        bandwidth_share: decode_steps_per_s.map(share),
        int8_ops_per_s: arithmetic.int8_per_s,
        f32_ops_per_s: arithmetic.f32_per_s,
        compute_share: prefill_s.map(|seconds| floor_s * batch as f64 / seconds),
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { model, isa, threads, batch, depth, kv, load_s, .. } = report;
    out::line(&format!(
        "{model}: {threads} threads, {isa}, {kv} keys and values, batch {batch}, depth {depth}, loaded in {load_s:.2} s"
    ))?;
    if let Some(rate) = report.prefill_tok_per_s {
        out::line(&format!("  prefill {:>6} tokens  {rate:>9.1} tok/s", report.prompt))?;
    }
    if let Some(share) = report.compute_share {
        out::line(&format!(
            "  its products alone take {:.0} % of that at {:.0} Gop/s in int8 and {:.0} in float32, as measured",
            share * 100.0,
            report.int8_ops_per_s / 1e9,
            report.f32_ops_per_s / 1e9
        ))?;
    }
    if let Some(rate) = report.decode_tok_per_s {
        out::line(&format!("  decode  {:>6} tokens  {rate:>9.1} tok/s", report.generate))?;
    }
    if let Some(share) = report.bandwidth_share {
        out::line(&format!(
            "  weights of {:.1} MB take {:.0} % of the {:.1} GB/s measured",
            report.weight_bytes as f64 / 1e6,
            share * 100.0,
            report.bandwidth_gb_per_s
        ))?;
    }
    Ok(())
}

/// Seconds that the products of a prompt take at least: those with weights in int8, those of attention in float32.
fn prefill_floor_s(config: &ModelConfig, depth: usize, tokens: usize, rate: ArithmeticRate) -> f64 {
    let (query, kv) = (config.head_count * config.head_size, config.kv_head_count * config.head_size);
    let hidden = config.hidden_size;
    let weights = hidden * (2 * query + 2 * kv + 3 * config.feed_forward_size);
    // Each token multiplies its queries with the keys up to its own, and its weights with as many values.
    let seen = (depth + 1..=depth + tokens).sum::<usize>();
    let layers = config.layer_count as f64;
    let int8 = layers * 2.0 * weights as f64 * tokens as f64;
    let f32 = layers * 4.0 * query as f64 * seen as f64;
    int8 / rate.int8_per_s + f32 / rate.f32_per_s
}

/// The median seconds of `work`, after one run to warm up.
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

/// A model with room for `batch` sequences, whose first `depth` positions stay as they were filled.
struct Bench {
    model: LoadedModel,
    batch: usize,
    /// Of each sequence.
    pages: usize,
    depth: usize,
}

impl Bench {
    /// Computes the positions `range` of one sequence, in chunks of what the executor takes at once.
    fn prefill(&mut self, sequence: usize, range: Range<usize>) -> Result<()> {
        let chunk = self.model.executor.limits().max_batch_tokens;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + chunk);
            let tokens = (start..end).map(|position| self.token(sequence, position)).collect();
            let logits = if end == range.end { LogitsWanted::Last } else { LogitsWanted::None };
            let sequences = vec![self.row(sequence, tokens, start, logits)];
            self.model.executor.forward(&Batch { sequences })?;
            start = end;
        }
        Ok(())
    }

    /// Decodes `count` tokens greedily in every sequence, from the depth on.
    fn decode(&mut self, count: usize) -> Result<()> {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let mut next: Vec<u32> = (0..self.batch).map(|sequence| self.token(sequence, self.depth)).collect();
        for step in 0..count {
            let start = self.depth + step;
            let rows = next.iter().enumerate();
            let sequences =
                rows.map(|(row, &token)| self.row(row, vec![token], start, LogitsWanted::Last)).collect();
            self.model.executor.forward(&Batch { sequences })?;
            let sample = |row: usize| SampleRow {
                row,
                sampling: &greedy,
                seed: 0,
                step: step as u64,
                mask: None,
                banned: &[],
                prompt: &[],
                output: &[],
                top_logprobs: None,
            };
            let rows: Vec<_> = (0..self.batch).map(|row| LogitRow::Sample(sample(row))).collect();
            let chosen = self.model.executor.sample(&rows)?;
            next = chosen.iter().map(|output| output.token).collect();
        }
        Ok(())
    }

    fn row(&self, sequence: usize, tokens: Vec<u32>, start: usize, logits: LogitsWanted) -> BatchSequence {
        let first = sequence * self.pages;
        let used = (start + tokens.len()).div_ceil(PAGE_TOKENS);
        let pages = (first..first + used).map(|page| PageId(page as u32)).collect();
        BatchSequence { tokens, start, pages, logits }
    }

    /// Some token of the vocabulary, different from its neighbours and in every sequence.
    fn token(&self, sequence: usize, position: usize) -> u32 {
        let mixed =
            (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(sequence as u64 * 7919)
                >> 20;
        (mixed % self.model.config.vocabulary_size as u64) as u32
    }
}
