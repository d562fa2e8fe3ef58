//! `skep model`: pulls, lists, recommends, plans, deletes, inspects and verifies models.

mod inspect;
mod list;
mod plan;
mod prune;
mod pull;
mod recommend;
mod rm;
mod verify;

use anyhow::Result;

/// Pull, list, recommend, plan, delete, inspect and verify models
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
}

pub fn run(command: Command) -> Result<()> {
    tokio::task::block_in_place(|| match command {
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => list::run(&args),
        Command::Recommend(args) => recommend::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Prune(args) => prune::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Plan(args) => plan::run(&args),
    })
}
