//! `skep demo`: shows all of Skep once, through its public interface.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};

use super::{out, turn_printer};
use crate::agent_source::AgentSource;
use crate::client::Client;
use crate::device_flag::DeviceFlag;
use crate::embedded::SourceTree;
use crate::progress::Terminal;
use crate::style;
use crate::{
    server::{self},
    server_options::{DataDir, ServerOptions},
};
use turn_printer::TurnReport;

/// Messages of the guest.
const MESSAGES: [&str; 4] = [
    "I would like to order two pizzas and a tea.",
    "Could we get three coffees?",
    "One pizza and one salad, please.",
    "I would like a soup",
];

/// Run a complete example: model, agent, tools, cache
///
/// Downloads the default model, builds an example agent to WebAssembly, starts a host on a free port, deploys
/// the agent over HTTP and talks to it. Succeeds only if the model called a tool with arguments that its
/// schema allows, and if the second turn found the first one in the cache.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep demo
  skep demo --threads 4
  skep demo --agent my-agent --say 'Please roll two dice' --say 'And once more, roll them'")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = crate::catalog::DEFAULT_MODEL)]
    model: String,
    /// Threads for the model's computation [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Folder of an agent to use instead of the room service
    #[arg(long, value_name = "DIR", requires = "say")]
    agent: Option<PathBuf>,
    /// Message to send instead of the usual ones; repeat it for more turns
    #[arg(long, value_name = "MESSAGE")]
    say: Vec<String>,
}

/// Starts a host with a model and an agent, and prints a conversation with the agent.
pub async fn run(args: Args) -> Result<()> {
    let paint = style::stdout();
    out::line(&paint.bold("1. Preparing the model, the agent and the host"))?;
    let source = tokio::task::block_in_place(|| {
        // The model comes first, because its download is what a new user waits for.
        crate::catalog::resolve(&args.model, &Terminal)?;
        let dir = match &args.agent {
            Some(dir) => dir.clone(),
            None => SourceTree::locate()?.demo(),
        };
        AgentSource::load(&dir, None, &Terminal)
    })?;
    let mut options = ServerOptions {
        listen: ([127, 0, 0, 1], 0).into(),
        data: DataDir::InMemory,
        model: args.model.clone(),
        threads: args.threads,
        ..ServerOptions::default()
    };
    args.device.apply(&mut options.executor);
    let server = server::start_with(options, Vec::new(), Arc::new(Terminal)).await?;
    let url = server.url();
    let engine = server.host.models().engines().next().context("the host has no model")?;
    let info = engine.info();
    out::line(&format!("  {url} with {} on {} ({})", info.name, info.device, info.memory))?;

    let client = Client::new(Some(&url))?;
    let agent =
        client.deploy(&source.manifest_toml, source.component).await.context("deploying the agent")?;
    out::line(&format!("  deployed {} with the tools {}", agent.name, agent.tools.join(", ")))?;

    out::line("")?;
    out::line(&paint.bold("2. A conversation over HTTP, with streamed answers"))?;
    let messages: Vec<&str> =
        if args.say.is_empty() { MESSAGES.to_vec() } else { args.say.iter().map(String::as_str).collect() };
    let mut reports = Vec::new();
    for message in messages {
        out::line(&format!("{} {message}", paint.green("you>")))?;
        let mut stream = client.stream(&agent.name, "demo", message).await?;
        let report =
            turn_printer::show(&mut stream).await.with_context(|| format!("the turn {message:?}"))?;
        out::line(&paint.dim(&format!("  {}", report.figures())))?;
        reports.push(report);
    }
    server.shutdown().await;

    out::line("")?;
    out::line(&paint.bold("3. What the conversation showed"))?;
    for line in verdict(&reports)? {
        out::line(&format!("  {} {line}", paint.green("✓")))?;
    }
    out::line("")?;
    out::line(&format!("{}\n{NEXT}", paint.bold("Now try")))
}

const NEXT: &str = "  skep new my-agent          create the crate of an agent
  skep up my-agent           start a host with that agent
  skep chat my-agent         talk to it, in another terminal
  skep bench engine          measure how fast the model runs here
  skep up                    start a host, and open its console at http://127.0.0.1:8080/ui
(with cargo: `cargo run --release -- up my-agent` and so on)";

/// Returns what the conversation showed, or an error with the reason why it showed nothing.
fn verdict(reports: &[TurnReport]) -> Result<Vec<String>> {
    if let Some(silent) = reports.iter().position(|report| report.turn.text.trim().is_empty()) {
        bail!("turn {} has no answer", silent + 1);
    }
    let answered = reports.iter().flat_map(|report| &report.tool_calls).find(|call| call.result.is_some());
    let Some(call) = answered else {
        let called = reports.iter().map(|report| report.tool_calls.len()).sum::<usize>();
        bail!("no tool call succeeded ({called} were made), so the demo does not show that tools work");
    };
    // The host checks arguments against the tool's schema before it calls the tool, so a result proves that
    // they are valid. Every schema of a tool requires an object.
    if !call.arguments.is_object() {
        bail!("the arguments of {} are {}, which is not an object", call.name, call.arguments);
    }
    let Some(second) = reports.get(1) else { bail!("the conversation had no second turn") };
    let cached = second.first_cached_tokens();
    if cached == 0 {
        bail!("the second turn computed its whole prompt again: no token came from the cache");
    }
    Ok(vec![
        format!("the model called {} with {}, which its schema allows", call.name, call.arguments),
        format!("the second turn found {cached} tokens of the conversation in the cache"),
        format!("{} turns were answered by a sandboxed component over HTTP", reports.len()),
    ])
}
