//! `skep ai`: inference without an agent, directly or in batches.

mod batch;
mod run;
mod standing;

use anyhow::Result;

/// Ask a model directly, at once or in batches that run when there is capacity
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Run(run::Args),
    Batch(batch::Args),
    Status(standing::StatusArgs),
    Cancel(standing::CancelArgs),
}

pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run::run(args).await,
        Command::Batch(args) => batch::run(args).await,
        Command::Status(args) => standing::status(args).await,
        Command::Cancel(args) => standing::cancel(args).await,
    }
}
