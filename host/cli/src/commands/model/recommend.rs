//! `skep model recommend`: which models of the catalog a machine can run, and how fast they would decode.

use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context as _, Result};
use indicatif::DecimalBytes;
use serde_json::{Value, json};
use skep_engine::EngineOptions;
use skep_kernels::bandwidth;
use skep_model::planner::memory_on_cpu;
use skep_model::{Checkpoint, ExecutorOptions, physical_cores};

use super::list::{described, say_what_is_missing};
use crate::catalog::{self, CatalogEntry, Kind, Support};
use crate::commands::out;
use crate::engines::with_room_for;
use crate::machine;
use crate::progress::{Progress as _, Terminal};

/// Memory of a host besides weights and KV cache: code, buffers, agents.
const OVERHEAD_BYTES: u64 = 256 << 20;
/// Decode speed that reads fluently.
const FLUENT_TOKENS_PER_S: f64 = 10.0;
const GB: f64 = 1e9;

/// Show the models that this machine can run, with the decode speed to expect
///
/// Decoding reads all active weights and the KV cache for every token, so its speed is at most the memory bandwidth
/// divided by these bytes. The bandwidth is measured. For a GPU or another machine, give both figures yourself.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model recommend
  skep model recommend --context 32768
  skep model recommend --memory 80 --bandwidth 3350      for a GPU with these figures
  skep model recommend --json")]
pub struct Args {
    /// Tokens of context that the KV cache holds and each step reads
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    context: u64,
    /// Memory in GB [default: what is available here]
    #[arg(long, value_name = "GB", value_parser = positive)]
    memory: Option<f64>,
    /// Memory bandwidth in GB/s [default: measured here]
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    bandwidth: Option<f64>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("not a positive number".to_owned()) }
}

/// The memory that a model would take, and its speed.
struct Estimate {
    entry: &'static CatalogEntry,
    runs: bool,
    kv_bytes: u64,
    memory_bytes: u64,
    /// Whether the memory was planned from the model's files, as a host plans it.
    is_planned: bool,
    tokens_per_s: f64,
}

impl Estimate {
    fn of(entry: &'static CatalogEntry, context: u64, gb_per_s: f64) -> Self {
        let kv_bytes = entry.kv_bytes(context.min(entry.context));
        Estimate {
            entry,
            runs: entry.support() == Support::Runs,
            kv_bytes,
            memory_bytes: entry.bytes() + kv_bytes + OVERHEAD_BYTES,
            is_planned: false,
            tokens_per_s: gb_per_s * GB / (entry.weight_bytes_per_token() + kv_bytes as f64),
        }
    }

    /// Plans the memory from the model's files, if they are on this machine.
    fn planned(self, context: u64) -> Self {
        let path = catalog::present(self.entry).ok().flatten();
        match path.and_then(|path| planned_bytes(&path, context)) {
            Some(bytes) => Estimate { memory_bytes: bytes + OVERHEAD_BYTES, is_planned: true, ..self },
            None => self,
        }
    }
}

/// Returns the memory of a model's weights, buffers and a KV cache of `context` tokens, or `None` if the files cannot be read.
fn planned_bytes(path: &Path, context: u64) -> Option<u64> {
    let kv_tokens = Some(usize::try_from(context).ok()?);
    let options =
        with_room_for(ExecutorOptions { kv_tokens, ..Default::default() }, &EngineOptions::default());
    let plan = memory_on_cpu(&Checkpoint::open(path).ok()?, &options, NonZeroUsize::MIN).ok()?;
    Some(plan.total_bytes())
}

/// Prints the models that fit the memory, with the decode speed to expect.
pub fn run(args: &Args) -> Result<()> {
    let threads = physical_cores();
    let memory = match args.memory {
        Some(gb) => (gb * GB) as u64,
        None => machine::available_memory_bytes().context(
            "cannot determine how much memory is available on this system\n  hint: give it with --memory",
        )?,
    };
    let gb_per_s = args.bandwidth.unwrap_or_else(|| {
        let step = Terminal.begin("measuring the memory bandwidth", None);
        let measured = bandwidth::measure_read_gb_per_s(threads);
        step.finish(&format!("{measured:.1} GB/s with {threads} threads"));
        measured
    });
    let estimates = catalog::entries()
        .iter()
        .map(|entry| Estimate::of(entry, args.context, gb_per_s).planned(args.context.min(entry.context)));
    let (mut fitting, too_large): (Vec<_>, Vec<_>) =
        estimates.partition(|estimate| estimate.memory_bytes <= memory);
    fitting.sort_by_key(|estimate| (!estimate.runs, std::cmp::Reverse(estimate.entry.parameters.total)));
    let chosen = choice(&fitting);
    let source = |given: bool| if given { "given" } else { "measured" };
    let method = format!(
        "tokens/s = {gb_per_s:.1} GB/s ({}) / (active share of the file + KV cache of {} tokens in 16 bits); memory = file \
         + that cache + {}, of {} ({}); that of a model on this machine is planned from its files",
        source(args.bandwidth.is_some()),
        args.context,
        DecimalBytes(OVERHEAD_BYTES),
        DecimalBytes(memory),
        if args.memory.is_some() { "given" } else { "available" },
    );
    if args.json {
        let models: Result<Vec<Value>> = fitting.iter().map(in_json).collect();
        let too_large: Vec<_> = too_large.iter().map(|estimate| &estimate.entry.name).collect();
        return out::json(&json!({
            "memory_bytes": memory, "bandwidth_gb_per_s": gb_per_s, "threads": threads, "context": args.context,
            "overhead_bytes": OVERHEAD_BYTES, "method": method, "recommended": chosen.map(|chosen| &chosen.entry.name),
            "models": models?, "too_large": too_large,
        }));
    }
    let rows: Vec<_> = fitting
        .iter()
        .map(|estimate| {
            let runs = if estimate.runs { "yes" } else { "not yet" };
            let speed = match estimate.entry.kind {
                Kind::Chat => speed_text(estimate.tokens_per_s),
                Kind::Embedding => "–".to_owned(),
            };
            let entry = estimate.entry;
            [
                entry.name.clone(),
                DecimalBytes(estimate.memory_bytes).to_string(),
                speed,
                runs.to_owned(),
                entry.good_for.clone(),
            ]
        })
        .collect();
    out::table(["MODEL", "MEMORY", "TOKENS/S", "RUNS TODAY", "GOOD FOR"], &rows)?;
    say_what_is_missing(fitting.iter().map(|estimate| estimate.entry))?;
    if !too_large.is_empty() {
        let names: Vec<_> = too_large.iter().map(|estimate| estimate.entry.name.as_str()).collect();
        out::line(&format!("too large: {}", names.join(", ")))?;
    }
    out::line(&method)?;
    if args.memory.is_none() && skep_kernels::gpu::probe().is_ok_and(|devices| !devices.is_empty()) {
        out::line("this is the processor; for the GPU, give its figures with --memory and --bandwidth")?;
    }
    match chosen {
        Some(chosen) => out::line(&format!("recommended: skep up --model {}", chosen.entry.name)),
        None => out::line("no model of the catalog fits into this memory"),
    }
}

/// Returns the largest chat model that runs and decodes fluently, or else the fastest one that runs.
fn choice(fitting: &[Estimate]) -> Option<&Estimate> {
    let mut running: Vec<_> =
        fitting.iter().filter(|estimate| estimate.runs && estimate.entry.kind == Kind::Chat).collect();
    running.sort_by_key(|estimate| estimate.entry.parameters.total);
    let fluent = running.iter().rev().find(|estimate| estimate.tokens_per_s >= FLUENT_TOKENS_PER_S);
    fluent.or_else(|| running.iter().max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s))).copied()
}

fn speed_text(tokens_per_s: f64) -> String {
    if tokens_per_s < 10.0 { format!("{tokens_per_s:.1}") } else { format!("{tokens_per_s:.0}") }
}

fn in_json(estimate: &Estimate) -> Result<Value> {
    let mut value = described(estimate.entry)?;
    value["memory_bytes"] = json!(estimate.memory_bytes);
    value["memory_is_planned"] = json!(estimate.is_planned);
    value["kv_bytes"] = json!(estimate.kv_bytes);
    value["weight_bytes_per_token"] = json!(estimate.entry.weight_bytes_per_token());
    let speed = (estimate.entry.kind == Kind::Chat).then_some(estimate.tokens_per_s);
    value["expected_tokens_per_s"] = json!(speed);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(name: &str, gb_per_s: f64) -> Estimate {
        Estimate::of(catalog::entry(name).expect("an entry"), 4096, gb_per_s)
    }

    #[test]
    fn speed_is_bandwidth_over_the_bytes_of_a_token() {
        let small = estimate(catalog::DEFAULT_MODEL, 35.0);
        assert_eq!(small.kv_bytes, 4096 * 23_040);
        let expected = 35e9 / (98_362_432.0 + 4096.0 * 23_040.0);
        assert!((small.tokens_per_s - expected).abs() < 1e-9, "{} {expected}", small.tokens_per_s);
        assert_eq!(small.memory_bytes, 98_362_432 + 4096 * 23_040 + OVERHEAD_BYTES);
        let (dense, experts) = (estimate("qwen3-32b", 100.0), estimate("qwen3-30b-a3b", 100.0));
        let ratio = experts.tokens_per_s / dense.tokens_per_s;
        assert!(ratio > 7.0, "a token of a mixture of experts reads its active share only: {ratio}");
    }

    #[test]
    fn the_memory_of_files_is_that_of_their_plan() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa");
        let [short, long] = [4096, 8192].map(|context| planned_bytes(&path, context).expect("a model"));
        // Two layers or more with keys and values of 2 heads of 16 values, in 16 bits.
        let checkpoint = Checkpoint::open(&path).expect("a model");
        let layers = checkpoint.config().layer_count as u64;
        assert_eq!(long - short, 4096 * layers * 2 * 2 * 16 * 2);
        assert!(short > checkpoint.bytes(), "weights, buffers and the cache");
        assert_eq!(planned_bytes(Path::new("/nonexistent"), 4096), None);
    }

    #[test]
    fn the_largest_fluent_model_that_runs_is_recommended() {
        let names = ["smollm2-135m", "qwen3-1.7b", "qwen3-8b", "kimi-k2.5", "qwen3-embedding-0.6b"];
        let at = |gb_per_s: f64| {
            let estimates: Vec<_> = names.iter().map(|name| estimate(name, gb_per_s)).collect();
            choice(&estimates).map(|chosen| chosen.entry.name.clone())
        };
        assert_eq!(at(200.0).as_deref(), Some("qwen3-8b"));
        assert_eq!(at(35.0).as_deref(), Some("qwen3-1.7b"));
        assert_eq!(at(0.1).as_deref(), Some("smollm2-135m"), "nothing is fluent");
        assert!(choice(&[]).is_none());
    }
}
