//! `skep bench engine`: prefill and decode of a model, without a scheduler or HTTP around them.

mod against;
mod ceilings;
mod peer;
mod report;
mod steps;
mod subject;
mod suite;
mod work;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use skep_kernels::Isa;
use skep_model::{DType, DeviceChoice, ExecutorOptions, ModelConfig, physical_cores};

use super::super::out;
use crate::catalog;
use crate::compute_flags::ComputeFlags;
use crate::device_flag::kernel_folders;
use against::Rival;
use ceilings::Ceilings;
use peer::{Comparison, Peer};
use report::{Load, Report, shares};
use steps::{Amounts, measure};
use subject::Subject;
use suite::{Plan, Shapes, Suite};

/// Formats of random weights, by the name of the flag's value.
const WEIGHTS: [(&str, DType); 18] = [
    ("bf16", DType::BF16),
    ("f16", DType::F16),
    ("f32", DType::F32),
    ("q4_0", DType::Q4_0),
    ("q4_1", DType::Q4_1),
    ("q5_0", DType::Q5_0),
    ("q5_1", DType::Q5_1),
    ("q8_0", DType::Q8_0),
    ("q2_k", DType::Q2K),
    ("q3_k", DType::Q3K),
    ("q4_k", DType::Q4K),
    ("q5_k", DType::Q5K),
    ("q6_k", DType::Q6K),
    ("iq4_nl", DType::Iq4Nl),
    ("iq4_xs", DType::Iq4Xs),
    ("mxfp4", DType::Mxfp4),
    ("int4", DType::Int4),
    ("fp8", DType::F8E4M3),
];

/// Measure prefill and decode of a model
///
/// Each figure is the median of several runs. Shares are relative to what the memory can read and the CPU or
/// GPU can multiply, measured in the same run. With --shape the weights are random, and nothing is
/// downloaded.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench engine
  skep bench engine --prompt 2048 --generate 128 --depth 2048
  skep bench engine --batch 8 --threads 4 --json
  skep bench engine --batch 4 --depth 1200 --shared 1000 --prompt 0
  skep bench engine --model a-q4_0.gguf --model b-q8_0.gguf --against 'llama-bench -fa 1'
  skep bench engine --shape llama-3.1-8b --weights q4_0 --device cuda
  skep bench engine --suite --device cuda --against 'python3 kernels/bench/torch_decode.py'")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path; several with --against llama-bench [default: smollm2-135m]
    #[arg(long, value_name = "NAME|PATH", conflicts_with = "shape")]
    model: Vec<String>,
    /// Shape of a known model, with random weights
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(ModelConfig::SHAPES))]
    shape: Option<String>,
    /// Format of the random weights [default: bf16]
    #[arg(long, value_name = "FORMAT", requires = "shape", value_parser = weight_format(), hide_possible_values = true)]
    weights: Option<DType>,
    /// Threads [default: physical cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    work: WorkFlags,
    #[command(flatten)]
    compute: ComputeFlags,
    /// Tensor-parallel ranks, which share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    tp: usize,
    /// Pipeline-parallel ranks, which divide the layers among them
    #[arg(long, value_name = "N", default_value_t = 1)]
    pp: usize,
    /// Run the fixed list of workloads that a GPU is judged by, as a table with targets; --shape replaces its
    /// models
    #[arg(long, conflicts_with_all = ["model", "weights", "prompt", "generate", "depth", "shared", "batch", "chunk"])]
    suite: bool,
    /// Run this command as well, and compare. llama-bench, with its own flags, runs in turns with Skep on the same
    /// files; the last line of any other command must be JSON with its decode rate, {"tok_per_s": 123.4}
    #[arg(long, value_name = "COMMAND")]
    against: Option<String>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// The work that is measured.
#[derive(Debug, clap::Args)]
struct WorkFlags {
    /// Tokens to prefill
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    generate: usize,
    /// Tokens in the KV cache before each run
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    depth: usize,
    /// Tokens of the depth that all sequences share, such as a system prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    shared: usize,
    /// Sequences that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: u16,
    /// Tokens per step of a prefill
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Number of runs of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
}

/// Measures the model, and prints the results.
pub fn run(args: &Args) -> Result<()> {
    if args.suite {
        let suite = whole(args)?;
        return if args.json { out::json(&suite) } else { suite.for_people() };
    }
    if let Some(peer) = args.against.as_deref().and_then(Peer::parse) {
        let comparison = compare(args, peer)?;
        return if args.json { out::json(&comparison) } else { comparison.for_people() };
    }
    let report = one(args)?;
    if args.json { out::json(&report) } else { report.for_people() }
}

fn whole(args: &Args) -> Result<Suite> {
    let named = args.shape.as_deref();
    let mut options = args.options()?;
    options.device = suite::device(options.device, named)?;
    suite::run(&Shapes::new(named), Plan::whole(args.work.repeat), options, args.against.as_deref())
}

/// Measures Skep and llama.cpp in turns.
fn compare(args: &Args, peer: Peer) -> Result<Comparison> {
    let amounts = args.amounts();
    if args.shape.is_some() {
        bail!("llama-bench needs a file, and --shape has none\n  hint: name GGUF files with --model");
    }
    if amounts.prompt == 0 || amounts.generate == 0 || amounts.depth > 0 || amounts.batch > 1 {
        bail!("llama-bench is compared on prefill and decode of one sequence without a depth");
    }
    let default = [catalog::DEFAULT_MODEL.to_owned()];
    let models = if args.model.is_empty() { &default[..] } else { &args.model };
    peer.compare(models, amounts, args.options()?, args.threads())
}

fn one(args: &Args) -> Result<Report> {
    if args.model.len() > 1 {
        bail!("several models are measured only beside llama-bench\n  hint: add --against llama-bench");
    }
    let options = args.options()?;
    let amounts = args.amounts();
    if args.against.is_some() && amounts.generate == 0 {
        bail!("--against compares decoded tokens, but --generate 0 decodes none");
    }
    let rival = args.against.as_deref().map(Rival::run).transpose()?;
    let mut loaded = args.subject().load(amounts.over(&options))?;
    let step = loaded.executor.limits().max_batch_tokens;
    let ceilings = Ceilings::of(&loaded, &options, amounts.prompt.clamp(1, step))?;
    let times = measure(&mut loaded, amounts)?;
    let (prefill, decode) = shares(&loaded, amounts, times, &ceilings);
    let (load, memory) = (Load::of(&loaded), *loaded.executor.plan());
    let against = rival.zip(decode).map(|(rival, decode)| rival.beside(decode.tok_per_s));
    let kv = if loaded.device == "cpu" { options.kv.to_string() } else { "16-bit".to_owned() };
    Ok(Report {
        model: loaded.name,
        device: loaded.device,
        isa: options.isa.unwrap_or_else(Isa::detect).to_string(),
        threads: args.threads(),
        amounts,
        kv,
        load,
        memory,
        ceilings: ceilings.into(),
        prefill,
        decode,
        against,
    })
}

impl Args {
    fn threads(&self) -> usize {
        self.threads.map_or_else(physical_cores, usize::from)
    }

    fn options(&self) -> Result<ExecutorOptions> {
        let mut options = ExecutorOptions {
            device: DeviceChoice::Auto,
            kernels: kernel_folders()?,
            threads: Some(self.threads()),
            max_batch_tokens: self.work.chunk as usize,
            tensor_parallel: self.tp,
            pipeline_parallel: self.pp,
            ..ExecutorOptions::default()
        };
        self.compute.apply(&mut options);
        Ok(options)
    }

    fn subject(&self) -> Subject {
        match &self.shape {
            Some(name) => Subject::Shape { name: name.clone(), weights: self.weights.unwrap_or(DType::BF16) },
            None => Subject::File(
                self.model.first().cloned().unwrap_or_else(|| catalog::DEFAULT_MODEL.to_owned()),
            ),
        }
    }

    fn amounts(&self) -> Amounts {
        let WorkFlags { prompt, generate, depth, shared, batch, repeat, .. } = self.work;
        Amounts { prompt, generate, depth, shared, batch: batch.into(), repeat }
    }
}

fn weight_format() -> impl clap::builder::TypedValueParser<Value = DType> {
    PossibleValuesParser::new(WEIGHTS.map(|(name, _)| name)).map(|text| {
        let named = WEIGHTS.into_iter().find(|(name, _)| *name == text);
        named.expect("one of the possible values").1
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    fn read(flags: &[&str]) -> Result<Args, String> {
        let words = ["engine"].into_iter().chain(flags.iter().copied());
        Wrapper::try_parse_from(words).map(|wrapper| wrapper.args).map_err(|error| error.to_string())
    }

    #[test]
    fn a_shape_replaces_a_model_and_every_format_has_a_name() {
        assert_eq!(read(&[]).expect("defaults").subject(), Subject::File("smollm2-135m".to_owned()));
        for (name, weights) in WEIGHTS {
            // Everybody calls this one by its short name.
            let is_short = (name, weights) == ("fp8", DType::F8E4M3);
            assert!(is_short || weights.to_string().to_lowercase() == name, "{name}");
            let args = read(&["--shape", "tiny", "--weights", name]).expect(name);
            assert_eq!(args.subject(), Subject::Shape { name: "tiny".to_owned(), weights });
        }
        for (flags, expected) in [
            (["--shape", "huge"].as_slice(), "llama-3.1-8b, qwen2.5-0.5b, smollm2-135m, tiny"),
            (&["--shape", "tiny", "--model", "x"], "cannot be used with"),
            (&["--weights", "bf16"], "--shape <NAME>"),
            (&["--shape", "tiny", "--weights", "int9"], "bf16"),
            (&["--suite", "--depth", "5"], "cannot be used with"),
            (&["--device", "gpu"], "one of auto, cpu, cuda, cuda:0,1"),
        ] {
            let error = read(flags).expect_err("they do not go together");
            assert!(error.contains(expected), "{flags:?}: {error}");
        }
    }

    #[test]
    fn a_shape_is_measured_with_shares_of_the_machines_ceilings() {
        let flags = "--shape tiny --weights q4_0 --device cpu --threads 1 --prompt 20 --generate 4 --depth 9 --batch 2";
        let mut flags: Vec<&str> = flags.split(' ').collect();
        flags.extend(["--repeat", "1", "--against", "echo '{\"tok_per_s\": 0.5}'"]);
        let report = one(&read(&flags).expect("good flags")).expect("measured");
        assert_eq!((report.model.as_str(), report.device.as_str()), ("tiny with random Q4_0 weights", "cpu"));
        let (prefill, decode) = (report.prefill.expect("20 tokens"), report.decode.expect("4 tokens"));
        assert!(prefill.share > prefill.weights_share && prefill.weights_share > Some(0.0), "{prefill:?}");
        assert!(decode.roofline_share >= decode.read_share && decode.read_share > 0.0, "{decode:?}");
        // Two layers and the head take 18 bytes for 32 values, beside small vectors; the embedding is only
        // looked up.
        let weights = ((2 * 589_824 + 262_144) / 32 * 18) as f64;
        assert!((weights..weights + 40_000.0).contains(&decode.read_bytes_per_step), "{decode:?}");
        assert!((decode.ms_per_step * decode.tok_per_s / 2e3 - 1.0).abs() < 1e-9, "{decode:?}");
        let against = report.against.expect("it was asked for");
        assert_eq!(against.ratio, decode.tok_per_s / 0.5);
        assert!(
            report.load.seconds > 0.0 && report.memory.kv_bytes > 0 && report.ceilings.read_gb_per_s > 0.0
        );

        let nothing = ["--shape", "tiny", "--generate", "0", "--against", "true"];
        let error = one(&read(&nothing).expect("good flags")).expect_err("nothing to compare").to_string();
        assert!(error.contains("--generate 0 decodes none"), "{error}");
        let long = ["--shape", "tiny", "--device", "cpu", "--threads", "1", "--prompt", "9000"];
        let error = one(&read(&long).expect("good flags")).expect_err("too long").to_string();
        assert!(error.contains("has a context of 8192"), "{error}");
    }
}
