//! `skep model plan`: the memory of a model on given devices, planned without its weights.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use skep_model::planner::{
    CPU_RESERVE_PARTS, DRIVER_BYTES, Description, DeviceKind, Devices, LayoutPlan, MAX_CONFIG_BYTES, Plan,
    Request,
};
use skep_model::{Checkpoint, KvDtype};

use crate::catalog;
use crate::commands::out;
use crate::progress::Terminal;
use crate::style;

/// Context that a plan is made for if the model's own is longer.
const LONGEST_DEFAULT_CONTEXT: usize = 131_072;

/// Plan the memory of a model on devices, without its weights
///
/// Prints weights, activations, recorded graphs and the space for keys and values, for each way to divide the
/// model among the devices: tensor-parallel (TP), pipeline-parallel (PP) and expert-parallel (EP) ranks. For a
/// model that this Skep runs, this is what `skep up` allocates; for others it is an estimate by the same rules.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Devices:
  COUNTxNAME with a known name (B200, H200, H100, A100, A100-40, L40S, L4, A10G, RTX4090, RTX5090),
  or NAME:GiB, COUNTxNAME:GiB with any name; cpu:GiB is the memory of a machine

Examples:
  skep model plan smollm2-135m
  skep model plan config.json --devices 8xH200 --context 131072 --sequences 16
  skep model plan hf:Qwen/Qwen3-30B-A3B --devices 2xL40S --json
  skep model plan model.gguf --devices cpu:64 --kv i8
  skep model plan config.json --devices 2xH100 --kv fp8")]
pub struct Args {
    /// Model: a config.json, a model folder or file, a name, or hf:OWNER/REPO
    source: String,
    /// Devices to plan for [default: this machine's memory, as cpu]
    #[arg(long, value_name = "DEVICES")]
    devices: Option<Devices>,
    /// Tokens of each sequence [default: the model's context, at most 131072]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Sequences of that many tokens that have to fit
    #[arg(long, default_value_t = 1, value_name = "N")]
    sequences: usize,
    /// Format of keys and values: f16, i8 or f32, and f16 or fp8 on devices
    #[arg(long, default_value = "f16", value_name = "FORMAT")]
    kv: KvDtype,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the memory that the model takes on each device.
pub fn run(args: &Args) -> Result<()> {
    let model = catalog::resolve_configuration(&args.source, &Terminal)?;
    let description = describe(&model.path)?;
    let devices = match &args.devices {
        Some(devices) => devices.clone(),
        None => Devices::cpu(machine_memory()?),
    };
    let context = args.context.unwrap_or(description.context_length.min(LONGEST_DEFAULT_CONTEXT));
    let request = Request { devices, context, sequences: args.sequences, kv: args.kv };
    let plan = description.plan(&request).with_context(|| format!("cannot plan {}", model.name))?;
    match args.json {
        true => out::json(&as_json(&model.name, &description, &request, &plan)),
        false => print(&model.name, &description, &request, &plan),
    }
}

/// Describes a model by its files, or by its configuration alone where the files are not all there or not supported.
fn describe(path: &Path) -> Result<Description> {
    let is_configuration = path.extension().is_some_and(|extension| extension == "json");
    let configuration = match path.is_dir() {
        true => Some(path.join("config.json")).filter(|path| path.is_file()),
        false if is_configuration => Some(path.to_owned()),
        false => None,
    };
    if !is_configuration {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(Description::of_checkpoint(checkpoint)),
            Err(error) if configuration.is_none() => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
            Err(_) => {}
        }
    }
    let path = configuration.as_deref().unwrap_or(path);
    let bytes = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    if bytes > MAX_CONFIG_BYTES {
        bail!("{} has {bytes} bytes; a config.json has at most {MAX_CONFIG_BYTES}", path.display());
    }
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Description::from_config(&text).with_context(|| {
        format!("cannot plan {}\n  hint: give the config.json of a Hugging Face model", path.display())
    })
}

/// Returns the memory of this machine in bytes.
fn machine_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    match kib {
        Some(kib) => Ok(kib.saturating_mul(1024)),
        None => bail!(
            "the memory of this machine is unknown\n  hint: say what to plan for, such as --devices cpu:64"
        ),
    }
}

fn print(name: &str, model: &Description, request: &Request, plan: &Plan) -> Result<()> {
    let say = |name: &str, value: String| out::line(&format!("{name:12}{value}"));
    let totals = model.totals();
    let billions = |parameters: u64| match parameters as f64 / 1e9 {
        billions if billions < 1.0 => format!("{:.1} million", billions * 1e3),
        billions => format!("{billions:.1} billion"),
    };
    say("model", format!("{name} ({}), {} layers", model.family, model.layer_count()))?;
    let (all, active) = (billions(totals.parameters), billions(totals.active_parameters));
    say("parameters", format!("{all}, {active} active for each token"))?;
    let gigabytes = |bytes: u64| format!("{:.1} GB ({})", bytes as f64 / 1e9, HumanBytes(bytes));
    say("checkpoint", format!("{}, {}", gigabytes(totals.checkpoint_bytes), model.format))?;
    let kv = request.kv;
    say("KV cache", format!("{} B a token in {kv}", model.kv_bytes_per_token(kv)))?;
    let context = request.context;
    let (first, last) = (model.decode_bytes_per_token(1, kv), model.decode_bytes_per_token(context, kv));
    say("decode", format!("reads {} a token, {} at {context} tokens", HumanBytes(first), HumanBytes(last)))?;
    match model.obstacle_on(&request.devices) {
        None => say("runs here", "yes".to_owned())?,
        Some(reason) => {
            say("runs here", format!("no: {reason}"))?;
            say("", format!("it needs {}", model.parts().join("; ")))?;
        }
    }
    say("devices", request.devices.to_string())?;
    out::line("")?;
    let rows: Vec<_> = plan.layouts.iter().map(|layout| row(layout, request)).collect();
    if rows.is_empty() {
        out::line("The model cannot be divided among these devices.")?;
    } else {
        let header =
            ["TP", "PP", "EP", "WEIGHTS", "ACTIVATIONS", "GRAPHS", "KV", "KV TOKENS", "SEQUENCES", ""];
        out::table(header, &rows)?;
    }
    out::line("")?;
    for note in notes(model, request, plan) {
        out::line(&style::stdout().dim(&format!("- {note}")))?;
    }
    Ok(())
}

fn row(layout: &LayoutPlan, request: &Request) -> [String; 10] {
    let device = &layout.device;
    let bytes = |bytes: u64| HumanBytes(bytes).to_string();
    let verdict = match layout.missing_bytes {
        0 => String::new(),
        missing => {
            let each = if request.devices.count > 1 && !is_cpu(request) { " on each device" } else { "" };
            format!("does not fit: needs {:.1} GiB more{each}", missing as f64 / f64::from(1 << 30))
        }
    };
    [
        layout.tensor_parallel.to_string(),
        layout.pipeline_parallel.to_string(),
        layout.expert_parallel.to_string(),
        bytes(device.weight_bytes),
        bytes(device.activation_bytes),
        bytes(device.graph_bytes),
        bytes(device.kv_bytes),
        layout.kv_tokens.to_string(),
        layout.sequences.to_string(),
        verdict,
    ]
}

/// Returns what the figures assume.
fn notes(model: &Description, request: &Request, plan: &Plan) -> Vec<String> {
    let mut notes = Vec::new();
    notes.push(match is_cpu(request) {
        true => format!("bytes are of all ranks together; 1/{CPU_RESERVE_PARTS} of the memory stays free for the system"),
        false => format!(
            "sizes are for the device with the least memory; {} of each device are reserved for the driver, kernels and libraries",
            HumanBytes(DRIVER_BYTES)
        ),
    });
    let (context, kv) = (request.context, request.kv);
    notes.push(format!("SEQUENCES counts sequences of {context} tokens, whose pages are all kept"));
    if let Some((layers, window)) = model.windowed_layers() {
        notes.push(format!(
            "{layers} of {} layers attend to {window} tokens; on the CPU, where `window_tokens` bounds what they keep, a \
             sequence of {context} tokens takes as little as {} instead of {}",
            model.layer_count(),
            HumanBytes(model.kv_bytes_of_sequence(context, kv)),
            HumanBytes(model.kv_bytes_per_token(kv).saturating_mul(context as u64))
        ));
    }
    match model.totals().draft_bytes {
        0 => {}
        bytes => {
            notes.push(format!("layers that predict further tokens ({}) are not loaded", HumanBytes(bytes)))
        }
    }
    notes.extend(model.notes.iter().cloned());
    if !plan.is_exact {
        notes.push("an estimate: Skep has no executor on these devices that could run the model".to_owned());
    }
    notes.extend(plan.excluded.iter().map(|reason| format!("left out: {reason}")));
    notes
}

fn is_cpu(request: &Request) -> bool {
    request.devices.device.kind == DeviceKind::Cpu
}

fn as_json(name: &str, model: &Description, request: &Request, plan: &Plan) -> Value {
    let kv = request.kv;
    let device = &request.devices.device;
    let obstacle = model.obstacle_on(&request.devices);
    json!({
        "name": name, "family": model.family, "layers": model.layer_count(), "format": model.format,
        "totals": model.totals(),
        "context_length": model.context_length,
        "kv_bytes_per_token": model.kv_bytes_per_token(kv),
        "kv_bytes_of_sequence_in_windows": model.kv_bytes_of_sequence(request.context, kv),
        "decode_bytes_per_token": model.decode_bytes_per_token(request.context, kv),
        "runs_here": obstacle.is_none(), "obstacle": obstacle, "needs": model.parts(),
        "devices": {"count": request.devices.count, "name": device.name, "memory_bytes": device.memory_bytes},
        "context": request.context, "sequences": request.sequences, "kv": kv.to_string(),
        "is_exact": plan.is_exact, "layouts": plan.layouts, "notes": notes(model, request, plan),
    })
}
