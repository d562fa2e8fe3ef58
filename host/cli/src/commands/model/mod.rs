//! `skep model`: pulls, lists, inspects and verifies models.

mod inspect;
mod list;
mod pull;
mod verify;

use anyhow::Result;

/// Pull, list, inspect and verify models
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Pull(pull::Args),
    List(list::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
}

pub fn run(command: Command) -> Result<()> {
    tokio::task::block_in_place(|| match command {
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => list::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
    })
}
