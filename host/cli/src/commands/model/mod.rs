//! `skep model`: pulls, lists, recommends, plans, deletes, inspects, verifies, cuts and synthesizes models, and loads and unloads those
//! of a running host.

mod alias;
mod inspect;
mod list;
mod load;
mod plan;
mod prune;
mod pull;
mod recommend;
mod rm;
mod status;
mod synthesize;
mod unload;
mod upcycle;
mod verify;

use anyhow::Result;

/// Pull, list, recommend, plan, delete, inspect, verify, cut and synthesize models, and load and unload those of a running host
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Pull(pull::Args),
    List(list::Args),
    Recommend(recommend::Args),
    Rm(rm::Args),
    Prune(prune::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Plan(plan::Args),
    Upcycle(upcycle::Args),
    Synthesize(synthesize::Args),
    Status(status::Args),
    Load(load::Args),
    Unload(unload::Args),
    Alias(alias::Args),
}

/// Runs the chosen subcommand.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Status(args) => status::run(args).await,
        Command::Load(args) => load::run(args).await,
        Command::Unload(args) => unload::run(args).await,
        Command::Alias(args) => alias::run(args).await,
        files => tokio::task::block_in_place(|| with_files(files)),
    }
}

/// Runs a command that needs no host.
fn with_files(command: Command) -> Result<()> {
    match command {
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => list::run(&args),
        Command::Recommend(args) => recommend::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Prune(args) => prune::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Upcycle(args) => upcycle::run(&args),
        Command::Synthesize(args) => synthesize::run(&args),
        Command::Status(_) | Command::Load(_) | Command::Unload(_) | Command::Alias(_) => {
            unreachable!("these commands ask a host")
        }
    }
}
