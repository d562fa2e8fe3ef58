//! `skep bench engine --suite`: a fixed list of workloads with their targets on a GPU, as a table.

use std::fmt;

use anyhow::{Result, bail};
use serde::Serialize;
use skep_kernels::gpu;
use skep_model::{DType, DeviceChoice, ExecutorOptions, MemoryPlan, Ordinals};

use super::against::{Against, Rival};
use super::ceilings::Ceilings;
use super::report::{Decode, Load, Prefill, Rates, shares};
use super::steps::{Amounts, measure};
use super::subject::{Loaded, Subject};
use crate::commands::bench::{command_line, today};
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};

/// Sizes of the workloads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub generate: usize,
    pub batch: usize,
    pub depth: usize,
    pub prompt: usize,
    pub repeat: u16,
}

/// Shapes of the large and of the small model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shapes {
    large: String,
    small: String,
}

/// Results of the whole list, in the order of its table.
#[derive(Debug, Serialize)]
pub(super) struct Suite {
    date: String,
    device: String,
    command: String,
    /// Load of the large model in BF16.
    load: Load,
    memory: MemoryPlan,
    ceilings: Rates,
    rows: Vec<Row>,
    against: Option<Against>,
}

/// A workload with its result and its target.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    work: String,
    measured: String,
    /// The value that is compared with the target; `None` if there was no ceiling to compare with.
    figure: Option<f64>,
    target: Target,
    reached: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Target {
    /// Share of a ceiling that was measured in the same run.
    ShareAtLeast(f64),
    TimesAtLeast(f64),
    MsAtMost(f64),
}

impl Plan {
    /// Returns the plan that the targets are for.
    pub(super) fn whole(repeat: u16) -> Self {
        Plan { generate: 128, batch: 64, depth: 1024, prompt: 4096, repeat }
    }

    fn decode(self) -> Amounts {
        let Plan { generate, repeat, .. } = self;
        Amounts { prompt: 0, generate, depth: 0, shared: 0, batch: 1, repeat }
    }

    fn batch(self) -> Amounts {
        Amounts { depth: self.depth, batch: self.batch, ..self.decode() }
    }

    fn prefill(self) -> Amounts {
        Amounts { prompt: self.prompt, generate: 0, ..self.decode() }
    }
}

impl Shapes {
    /// Returns the models that the targets are for, or the named one in place of both.
    pub(super) fn new(named: Option<&str>) -> Self {
        let or = |default: &str| named.unwrap_or(default).to_owned();
        Shapes { large: or("llama-3.1-8b"), small: or("smollm2-135m") }
    }
}

/// Returns the device that the suite runs on. It never falls back silently, because the figures are for one
/// device.
pub(super) fn device(asked: DeviceChoice, named: Option<&str>) -> Result<DeviceChoice> {
    let found = gpu::probe().is_ok_and(|devices| !devices.is_empty());
    let device = match asked {
        DeviceChoice::Auto if found => DeviceChoice::Cuda(Ordinals::FIRST),
        DeviceChoice::Auto => DeviceChoice::Cpu,
        asked => asked,
    };
    if device == DeviceChoice::Cpu && named.is_none() {
        bail!(
            "the suite's model has 8 billion parameters and is meant for a GPU, but this would run on the CPU\n  hint: choose \
             a smaller one, such as --suite --shape tiny"
        );
    }
    Ok(device)
}

/// Runs the whole suite.
pub(super) fn run(
    shapes: &Shapes,
    plan: Plan,
    options: ExecutorOptions,
    against: Option<&str>,
) -> Result<Suite> {
    let rival = against.map(Rival::run).transpose()?;
    let options = ExecutorOptions { max_batch_tokens: plan.prompt.max(plan.batch), ..options };
    let load = |shape: &str, weights: DType, options: ExecutorOptions| {
        let subject = Subject::Shape { name: shape.to_owned(), weights };
        let step = Terminal.begin(&subject.to_string(), None);
        let loaded = subject.load(options)?;
        step.finish("");
        Ok::<Loaded, anyhow::Error>(loaded)
    };
    let large = &shapes.large;
    let batch_room = plan.batch().over(&options);
    let room = plan.prefill().over(&options).kv_tokens.max(batch_room.kv_tokens);
    let mut loaded = load(large, DType::BF16, ExecutorOptions { kv_tokens: room, ..batch_room })?;
    let ceilings = Ceilings::of(&loaded, &options, plan.prompt)?;
    let one = decode(&mut loaded, plan.decode(), &ceilings)?;
    let many = decode(&mut loaded, plan.batch(), &ceilings)?;
    let times = measure(&mut loaded, plan.prefill())?;
    let (prefill, _) = shares(&loaded, plan.prefill(), times, &ceilings);
    let prefill = prefill.expect("a prompt was measured");
    let mut rows = vec![
        Row::of_one(large, &one),
        Row::of_many(large, plan, &many),
        Row::of_prefill(large, plan, &prefill),
    ];
    let (load_figures, memory, device) = (Load::of(&loaded), *loaded.executor.plan(), loaded.device.clone());
    drop(loaded);

    let room = plan.decode().over(&options);
    let mut loaded = load(large, DType::Q4_0, room.clone())?;
    let quantized = decode(&mut loaded, plan.decode(), &ceilings)?;
    rows.push(Row::of_quantized(large, &one, &quantized));
    drop(loaded);

    let mut loaded = load(&shapes.small, DType::BF16, room)?;
    let small = decode(&mut loaded, plan.decode(), &ceilings)?;
    rows.push(Row::of_small(&shapes.small, &small));
    drop(loaded);

    Ok(Suite {
        date: today(),
        device,
        command: command_line(),
        load: load_figures,
        memory,
        ceilings: ceilings.into(),
        against: rival.map(|rival| rival.beside(one.tok_per_s)),
        rows,
    })
}

fn decode(loaded: &mut Loaded, amounts: Amounts, ceilings: &Ceilings) -> Result<Decode> {
    let times = measure(loaded, amounts)?;
    Ok(shares(loaded, amounts, times, ceilings).1.expect("tokens were decoded"))
}

impl Target {
    fn figure(self, figure: f64) -> String {
        match self {
            Target::ShareAtLeast(_) => format!("{:.0} %", figure * 100.0),
            Target::TimesAtLeast(_) => format!("{figure:.2} ×"),
            Target::MsAtMost(_) => format!("{figure:.3} ms"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::ShareAtLeast(least) => write!(f, "≥ {:.0} %", least * 100.0),
            Target::TimesAtLeast(least) => write!(f, "≥ {least} ×"),
            Target::MsAtMost(most) => write!(f, "≤ {most} ms"),
        }
    }
}

impl Row {
    fn new(work: String, measured: String, figure: Option<f64>, target: Target) -> Self {
        let reached = figure.is_some_and(|figure| match target {
            Target::ShareAtLeast(least) | Target::TimesAtLeast(least) => figure >= least,
            Target::MsAtMost(most) => figure <= most,
        });
        Row { work, measured, figure, target, reached }
    }

    fn of_one(model: &str, decode: &Decode) -> Self {
        let Decode { tok_per_s, read_gb_per_s, read_share, .. } = decode;
        let measured = format!("{tok_per_s:.1} tok/s, {read_gb_per_s:.0} GB/s");
        Row::new(
            format!("{model} BF16, decode, 1 sequence"),
            measured,
            Some(*read_share),
            Target::ShareAtLeast(0.8),
        )
    }

    fn of_many(model: &str, plan: Plan, decode: &Decode) -> Self {
        let Plan { batch, depth, .. } = plan;
        let work = format!("{model} BF16, decode, {batch} sequences at {depth} tokens");
        let Decode { tok_per_s, ms_per_step, roofline_share, .. } = decode;
        let measured = format!("{tok_per_s:.1} tok/s, {ms_per_step:.2} ms per step");
        Row::new(work, measured, Some(*roofline_share), Target::ShareAtLeast(0.75))
    }

    fn of_prefill(model: &str, plan: Plan, prefill: &Prefill) -> Self {
        let work = format!("{model} BF16, prefill, {} tokens", plan.prompt);
        let Prefill { tok_per_s, tflop_per_s, weights_share, .. } = prefill;
        let measured = format!("{tok_per_s:.0} tok/s, {tflop_per_s:.2} TFLOP/s");
        Row::new(work, measured, *weights_share, Target::ShareAtLeast(0.65))
    }

    fn of_quantized(model: &str, plain: &Decode, quantized: &Decode) -> Self {
        let Decode { tok_per_s, read_gb_per_s, .. } = quantized;
        let measured = format!("{tok_per_s:.1} tok/s, {read_gb_per_s:.0} GB/s");
        let times = tok_per_s / plain.tok_per_s;
        let work = format!("{model} Q4_0, decode, 1 sequence, compared with BF16");
        Row::new(work, measured, Some(times), Target::TimesAtLeast(2.5))
    }

    fn of_small(model: &str, decode: &Decode) -> Self {
        let measured = format!("{:.1} tok/s", decode.tok_per_s);
        let work = format!("{model} BF16, decode, 1 sequence, per token");
        Row::new(work, measured, Some(decode.ms_per_step), Target::MsAtMost(0.6))
    }

    fn for_people(&self) -> String {
        let Row { work, measured, figure, target, reached } = self;
        let figure = figure.map_or_else(|| "no ceiling".to_owned(), |figure| target.figure(figure));
        let reached = if *reached { "yes" } else { "no" };
        format!("| {work} | {measured} | {figure} | {target} | {reached} |")
    }
}

impl Suite {
    /// Prints a section of a Markdown file, as kernels/MEASURED.md has it.
    pub(super) fn for_people(&self) -> Result<()> {
        let Suite { date, device, command, load, memory, ceilings, rows, against } = self;
        out::line(&format!("## {date}, {device}\n\n`{command}`\n"))?;
        out::line(&format!(
            "Ceilings of this run: {:.0} GB/s for reads, {} for products with weights.",
            ceilings.read_gb_per_s,
            ceilings
                .weights_tflop_per_s
                .map_or_else(|| "nothing measured".to_owned(), |rate| format!("{rate:.2} TFLOP/s")),
        ))?;
        out::line(&format!(
            "Loaded in BF16 in {:.1} s ({:.1} GB/s): {memory}.\n",
            load.seconds, load.gb_per_s
        ))?;
        out::line("| Work | Measured | Figure | Target | Reached |\n|---|---|---|---|---|")?;
        rows.iter().try_for_each(|row| out::line(&row.for_people()))?;
        match against {
            Some(against) => out::line(&format!("\n{}", against.for_people())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_runs_on_the_cpu_with_a_small_shape() {
        let plan = Plan { generate: 4, batch: 3, depth: 40, prompt: 70, repeat: 1 };
        let options = ExecutorOptions { threads: Some(1), ..ExecutorOptions::default() };
        let suite = run(&Shapes::new(Some("tiny")), plan, options, Some("echo '{\"tok_per_s\": 1e-3}'"));
        let suite = suite.expect("it runs");
        assert_eq!((suite.device.as_str(), suite.rows.len()), ("cpu", 5));
        assert!(
            suite.rows.iter().all(|row| row.figure.is_some_and(|figure| figure > 0.0)),
            "{:?}",
            suite.rows
        );
        assert!(suite.rows[1].work.contains("3 sequences at 40 tokens"), "{}", suite.rows[1].work);
        // Two layers of 589,824 weights of two bytes, and two tables, one of which is only looked up.
        assert!(suite.memory.weight_bytes > 2 * 2 * 600_000, "{:?}", suite.memory);
        assert!(suite.against.expect("it was asked for").ratio > 1000.0);
    }

    #[test]
    fn a_target_is_either_a_minimum_or_a_maximum() {
        let row =
            |figure: f64, target| Row::new("w".to_owned(), "m".to_owned(), Some(figure), target).for_people();
        assert_eq!(row(0.8, Target::ShareAtLeast(0.8)), "| w | m | 80 % | ≥ 80 % | yes |");
        assert_eq!(row(2.49, Target::TimesAtLeast(2.5)), "| w | m | 2.49 × | ≥ 2.5 × | no |");
        assert_eq!(row(0.5, Target::MsAtMost(0.6)), "| w | m | 0.500 ms | ≤ 0.6 ms | yes |");
        assert_eq!(row(0.7, Target::MsAtMost(0.6)), "| w | m | 0.700 ms | ≤ 0.6 ms | no |");
        let unknown = Row::new("w".to_owned(), "m".to_owned(), None, Target::ShareAtLeast(0.65)).for_people();
        assert_eq!(unknown, "| w | m | no ceiling | ≥ 65 % | no |");
    }

    #[test]
    fn the_large_model_is_not_loaded_on_the_cpu() {
        let error = device(DeviceChoice::Cpu, None).expect_err("8 billion").to_string();
        assert!(error.contains("--shape tiny"), "{error}");
        assert_eq!(device(DeviceChoice::Cpu, Some("tiny")).expect("small"), DeviceChoice::Cpu);
        let cuda: DeviceChoice = "cuda:1".parse().expect("a device");
        assert_eq!(device(cuda, None).expect("as asked"), cuda);
    }
}
