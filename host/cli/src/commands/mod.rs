//! The command line. Each command has its own file, with its flags and its implementation.

mod ai;
mod approval;
mod backup;
mod bench;
mod build;
mod chat;
mod cluster;
mod completions;
mod config;
mod confirmation;
mod db;
mod delete;
pub mod demo;
mod deploy;
mod doctor;
mod event;
mod follow;
mod health;
mod held;
mod invoke;
mod kernels;
mod key;
mod kv;
mod kv_agent;
mod list;
mod logs;
mod mcp;
mod model;
mod new;
mod openapi;
mod out;
mod pull;
mod push;
mod registry_args;
mod requests;
mod restore;
mod rollback;
mod schedule;
mod secret;
mod session;
mod session_pages;
mod status;
mod tenant;
mod top;
mod turn;
mod turn_printer;
mod up;
mod usage;
mod webhook;
mod wit;

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::logging::{self, LogFormat};

/// Time that calls which still wait for a disk or for another program have at the end of a command.
const BLOCKED_TIME: Duration = Duration::from_secs(10);

/// Serve language models and run sandboxed WebAssembly agents beside them, in one process
#[derive(Debug, Parser)]
#[command(name = "skep", version, propagate_version = true, max_term_width = 110)]
#[command(after_help = "\
Get started:
  skep demo                       a real model, a real agent, one conversation
  skep new my-agent               create the crate of an agent
  skep up my-agent                start a host with that agent
  skep chat my-agent              talk to the agent (in another terminal)

Exit codes:
  0 success   1 failure   2 wrong usage   3 no host answered   4 the host refused

Environment:
  SKEP_URL    address of the host that commands talk to (default http://127.0.0.1:8080)
  SKEP_API_KEY
              API key for a host that requires one
  SKEP_HOME   folder for models, toolchain and data (default: the user's cache and data folders)
  SKEP_CUBINS folder with the GPU kernels that `skep kernels build` made
  SKEP_NIXL   folder with the library of NIXL, through which KV pages travel between hosts
  SKEP_CLUSTER_KEY
              the key of a cluster, for `skep up --cluster` without a key file
  NO_COLOR    turns colors off")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Log")]
struct LogArgs {
    /// Level (error, warn, info, debug, trace, off) or a filter such as `warn,skep_runtime=debug`
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log more: -v is info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "log_level")]
    verbose: u8,
    /// Format of the log, which goes to stderr
    #[arg(long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Up(up::Args),
    New(new::Args),
    Wit(wit::Args),
    Build(build::Args),
    Deploy(deploy::Args),
    Push(push::Args),
    Pull(pull::Args),
    Rollback(rollback::Args),
    Delete(delete::Args),
    List(list::Args),
    Status(status::Args),
    Top(top::Args),
    Usage(usage::Args),
    Invoke(invoke::Args),
    Turn(turn::Args),
    #[command(subcommand)]
    Session(session::Command),
    #[command(subcommand)]
    Secret(secret::Command),
    Chat(chat::Args),
    Logs(logs::Args),
    Requests(requests::Args),
    #[command(subcommand)]
    Approval(approval::Command),
    #[command(subcommand)]
    Ai(ai::Command),
    #[command(subcommand)]
    Mcp(mcp::Command),
    #[command(subcommand)]
    Schedule(schedule::Command),
    #[command(subcommand)]
    Event(event::Command),
    #[command(subcommand)]
    Webhook(webhook::Command),
    #[command(subcommand)]
    Key(key::Command),
    #[command(subcommand)]
    Tenant(tenant::Command),
    #[command(subcommand)]
    Config(config::Command),
    #[command(subcommand)]
    Cluster(cluster::Command),
    #[command(subcommand)]
    Kv(kv::Command),
    #[command(hide = true)]
    KvAgent(kv_agent::Args),
    #[command(subcommand)]
    Db(db::Command),
    Backup(backup::Args),
    Restore(restore::Args),
    #[command(subcommand)]
    Held(held::Command),
    #[command(subcommand)]
    Model(model::Command),
    #[command(subcommand)]
    Bench(bench::Command),
    #[command(subcommand)]
    Kernels(kernels::Command),
    Doctor(doctor::Args),
    Health(health::Args),
    Openapi(openapi::Args),
    Completions(completions::Args),
}

/// The host that a command talks to.
#[derive(Debug, clap::Args)]
struct HostArgs {
    /// Address of the host [default: SKEP_URL, or http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// API key, if the host requires one; SKEP_API_KEY keeps it out of the process list
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
}

impl HostArgs {
    fn client(&self) -> Result<crate::client::Client> {
        crate::client::Client::with_key(self.url.as_deref(), self.api_key.as_deref())
    }
}

impl Cli {
    /// Runs the command until it finishes.
    pub fn run(self) -> Result<()> {
        skep_outbound::tls::install_provider();
        let default_level = match self.command {
            // The MCP library logs, at every level, what its peers send.
            Command::Up(_) => "info,rmcp=error",
            // A database is copied by one long-running statement.
            Command::Backup(_) | Command::Db(_) => "error",
            // The turns of this benchmark fail on purpose.
            Command::Bench(bench::Command::Neighbors(_)) => "error",
            _ => "warn",
        };
        let level = match (self.log.log_level.as_deref(), self.log.verbose) {
            (Some(level), _) => level,
            (None, 0) => default_level,
            (None, 1) => "info",
            (None, 2) => "debug",
            (None, _) => "trace",
        };
        let (config, traces) = match &self.command {
            Command::Up(args) => {
                let config = args.config()?;
                let traces = args.traces(&config)?;
                (config, traces)
            }
            _ => (Config::default(), None),
        };
        let traces = logging::start(level, self.log.log_format, traces.as_ref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("cannot start the asynchronous runtime")?;
        let result = runtime.block_on(self.command.run(config));
        // The last spans end with the runtime. A disk that does not answer does not keep the process from ending.
        runtime.shutdown_timeout(BLOCKED_TIME);
        if let Some(traces) = traces {
            traces.shutdown();
        }
        result
    }
}

impl Command {
    /// Runs the command. `config` is the operator's configuration, which only a host uses.
    async fn run(self, config: Config) -> Result<()> {
        match self {
            Command::Demo(args) => demo::run(args).await,
            Command::Up(args) => up::run(args, config).await,
            Command::New(args) => new::run(&args),
            Command::Wit(args) => wit::run(&args),
            Command::Build(args) => build::run(&args),
            Command::Deploy(args) => deploy::run(args).await,
            Command::Push(args) => push::run(args).await,
            Command::Pull(args) => pull::run(args).await,
            Command::Rollback(args) => rollback::run(args).await,
            Command::Delete(args) => delete::run(args).await,
            Command::List(args) => list::run(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Top(args) => top::run(args).await,
            Command::Usage(args) => usage::run(args).await,
            Command::Invoke(args) => invoke::run(args).await,
            Command::Turn(args) => turn::run(args).await,
            Command::Session(command) => session::run(command).await,
            Command::Mcp(command) => mcp::run(command).await,
            Command::Secret(command) => secret::run(command).await,
            Command::Chat(args) => chat::run(args).await,
            Command::Logs(args) => logs::run(args).await,
            Command::Requests(args) => requests::run(args).await,
            Command::Approval(command) => approval::run(command).await,
            Command::Ai(command) => ai::run(command).await,
            Command::Schedule(command) => schedule::run(command).await,
            Command::Event(command) => event::run(command).await,
            Command::Webhook(command) => webhook::run(command).await,
            Command::Key(command) => key::run(command).await,
            Command::Tenant(command) => tenant::run(command).await,
            Command::Config(command) => config::run(command).await,
            Command::Cluster(command) => cluster::run(command).await,
            Command::Kv(command) => kv::run(command).await,
            Command::KvAgent(args) => kv_agent::run(&args),
            Command::Db(command) => db::run(command).await,
            Command::Backup(args) => backup::run(args).await,
            Command::Restore(args) => restore::run(args).await,
            Command::Held(command) => held::run(command).await,
            Command::Model(command) => model::run(command).await,
            Command::Bench(command) => bench::run(command).await,
            Command::Kernels(command) => kernels::run(command),
            Command::Doctor(args) => doctor::run(&args),
            Command::Health(args) => health::run(args).await,
            Command::Openapi(args) => openapi::run(&args),
            Command::Completions(args) => completions::run(&args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Returns every command that has no subcommands, with the words that call it.
    fn commands() -> Vec<(String, clap::Command)> {
        fn add(command: &clap::Command, path: &str, all: &mut Vec<(String, clap::Command)>) {
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                let path = format!("{path} {}", sub.get_name());
                match sub.has_subcommands() {
                    true => add(sub, &path, all),
                    false => all.push((path, sub.clone())),
                }
            }
        }
        let mut all = Vec::new();
        add(&Cli::command(), "skep", &mut all);
        all
    }

    #[test]
    fn every_command_shows_an_example_that_fits_a_terminal() {
        for (path, command) in commands() {
            let shown = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(shown.contains(&path), "`{path} --help` has no example");
            for line in shown.lines() {
                assert!(
                    line.chars().count() <= 100,
                    "`{path} --help` has a line that would be wrapped: {line}"
                );
            }
        }
    }

    #[test]
    fn every_argument_has_a_help_text() {
        for (path, command) in commands() {
            let silent: Vec<_> = command
                .get_arguments()
                .filter(|argument| argument.get_help().is_none())
                .map(|argument| argument.get_id().to_string())
                .collect();
            assert!(silent.is_empty(), "`{path} --help` does not describe {silent:?}");
        }
    }
}
