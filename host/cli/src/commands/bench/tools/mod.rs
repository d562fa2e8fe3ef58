//! `skep bench tools`: the quality of structured output, and the effect of the constraint on it.
//!
//! Each case is answered three times from the same messages: free, constrained, and by a peer. Whatever the
//! model gets right by itself, it has to get right constrained as well.

mod answer;
mod cases;
mod comparison;
mod conforms;
mod ours;
mod peer;
mod plain_chat;
mod report;
mod spelling;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use skep_engine::{Engine, EngineOptions};
use skep_model::{DeviceChoice, ExecutorOptions};

use super::super::out;
use crate::catalog;
use crate::device_flag::DeviceFlag;
use crate::engines;
use crate::progress::{Progress as _, Terminal};
use answer::ModelAnswer;
use cases::{AskedSpelling, Case, Group};
use ours::{Draws, Pair};
use peer::Peer;
use report::Report;

/// Template that shows tools as Skep's prompts do for a model whose own template does not support them, for
/// servers with llama.cpp's templates.
const PEER_TEMPLATE: &str = include_str!("peer.jinja");

/// Measure the quality of structured output and of tool calls
///
/// 200 cases in five groups: extraction of an object by a schema, the choice among five tools, nested
/// arguments, parallel calls, and refusals, where no tool fits. Each case shows the model a few examples,
/// whose JSON is compact, spaced or pretty-printed. An answer is right if its values are right, however it is
/// spelled.
///
/// Columns: `free` is the model without a mask, with its text parsed as JSON or for calls; `constrained` has
/// the same prompt, token by token, with the schema or the tools as clients send them; `peer` is another
/// server with the same messages. The text below the table says how often the constraint changed a valid
/// answer, and why. Decoding is greedy, unless --recommended samples as requests do that set no temperature.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench tools
  skep bench tools --check --json answers.json
  skep bench tools --cases nested --cases parallel --limit 10
  skep bench tools --recommended 1            with the sampling parameters of requests that set none
  skep bench tools --chat                     the effect of declared tools on plain answers

Compare with llama-server on the same file (`skep model pull smollm2-135m` prints its path).
The file's own template does not support tools; this one shows them as Skep does:
  skep bench tools --peer-template > tools.jinja
  llama-server --model FILE.gguf --jinja --chat-template-file tools.jinja --port 8081 --threads 2
  skep bench tools --against http://127.0.0.1:8081 --spelling spaced --check")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Threads of the model's computation [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Ask this server as well, which must have OpenAI's routes
    #[arg(long, value_name = "URL")]
    against: Option<String>,
    /// Run only the cases of this group; may be given several times
    #[arg(long = "cases", value_name = "GROUP", value_enum)]
    groups: Vec<Group>,
    /// Maximum number of cases per group, or of questions with --chat
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Spelling of the JSON in the examples. A server that rewrites calls, as llama-server does, sees
    /// `spaced` examples of them in any case, so that is the spelling that compares the two on the same
    /// prompts
    #[arg(long, value_name = "SPELLING", value_enum, default_value = "own")]
    spelling: AskedSpelling,
    /// Cases that run at the same time; only with 1 are the reported times those of single cases
    #[arg(long, value_name = "N", default_value = "1")]
    concurrency: NonZeroUsize,
    /// Sample as the model's authors recommend, with the seed N, instead of greedily
    #[arg(long, value_name = "N", conflicts_with_all = ["chat", "check", "against"])]
    recommended: Option<u64>,
    /// Exit with 1 if a right free answer is wrong constrained, if an accepted one was changed, or if the
    /// peer has over 3 right answers more than the constrained model
    #[arg(long)]
    check: bool,
    /// Measure plain answers with and without declared tools, none of which may be called
    #[arg(long, conflicts_with_all = ["against", "groups", "check", "spelling", "concurrency"])]
    chat: bool,
    /// Print a chat template for the other server, which shows tools, calls and results as Skep does for a
    /// model whose own template does not support them
    #[arg(long, exclusive = true)]
    peer_template: bool,
    /// Write the whole report, with all answers, as JSON to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Answers the cases, and prints the results.
pub async fn run(args: Args) -> Result<()> {
    if args.peer_template {
        return out::line(PEER_TEMPLATE.trim_end());
    }
    let limit = args.limit.unwrap_or(usize::MAX);
    if args.chat {
        let report = plain_chat::measure(&args.engine()?, limit).await?;
        return args.print(&report, || report.for_people());
    }
    let groups = if args.groups.is_empty() { Group::ALL.as_slice() } else { &args.groups };
    let mut cases = Vec::new();
    for group in Group::ALL.into_iter().filter(|group| groups.contains(group)) {
        cases.extend(cases::of_group(group, limit, args.spelling)?);
    }
    let peer = args.against.as_deref().map(Peer::new).transpose()?;
    // The peer comes before our own engine, so that a wrong address is reported at once.
    let peers = match &peer {
        Some(peer) => of_peer(peer, &cases, args.concurrency.get()).await?,
        None => Vec::new(),
    };
    let engine = args.engine()?;
    let draws = match args.recommended {
        Some(seed) => Draws { sampling: engine.info().sampling.clone(), seed: Some(seed) },
        None => Draws { sampling: ours::greedy(), seed: None },
    };
    let pairs = of_engine(&engine, &cases, &draws, args.concurrency.get()).await?;
    let model = format!("{}, {draws}", engine.info().name);
    let report = Report::new(model, peer.map(|peer| peer.url), &cases, pairs, peers);
    args.print(&report, || report.for_people())?;
    match report.failures() {
        failures if args.check && !failures.is_empty() => bail!("{}", failures.join("; ")),
        _ => Ok(()),
    }
}

async fn of_engine(engine: &Engine, cases: &[Case], draws: &Draws, concurrency: usize) -> Result<Vec<Pair>> {
    let step = Terminal.count("free and constrained", cases.len() as u64);
    let pairs = stream::iter(cases).map(|case| ours::answer(engine, case, draws)).buffered(concurrency);
    let pairs = pairs.enumerate().map(|(index, pair)| {
        step.advance_to(index as u64 + 1);
        pair
    });
    let pairs = pairs.try_collect().await?;
    step.finish("");
    Ok(pairs)
}

async fn of_peer(peer: &Peer, cases: &[Case], concurrency: usize) -> Result<Vec<ModelAnswer>> {
    let step = Terminal.count(&format!("peer {}", peer.url), cases.len() as u64);
    let answers = stream::iter(cases).map(|case| peer.answer(case)).buffered(concurrency);
    let answers = answers.enumerate().map(|(index, answer)| {
        step.advance_to(index as u64 + 1);
        answer
    });
    let answers = answers.try_collect().await?;
    step.finish("");
    Ok(answers)
}

impl Args {
    fn engine(&self) -> Result<Engine> {
        let mut executor = ExecutorOptions {
            device: DeviceChoice::Auto,
            threads: self.threads,
            ..ExecutorOptions::default()
        };
        self.device.apply(&mut executor);
        tokio::task::block_in_place(|| {
            engines::open_engine(
                &self.model,
                NonZeroUsize::MIN,
                executor,
                EngineOptions::default(),
                &Terminal,
            )
        })
    }

    fn print(&self, report: &impl Serialize, for_people: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.json {
            Some(file) if file == Path::new("-") => out::json(report),
            Some(file) => {
                let text = serde_json::to_string_pretty(report)?;
                std::fs::write(file, text + "\n")
                    .with_context(|| format!("cannot write {}", file.display()))?;
                for_people()
            }
            None => for_people(),
        }
    }
}
