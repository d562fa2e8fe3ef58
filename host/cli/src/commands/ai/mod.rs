//! `skep ai`: inference without an agent, directly or in batches.

mod batch;
mod batch_status;
mod run;

use anyhow::Result;

/// Ask a model directly, at once or in batches that run when there is capacity
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Run(run::Args),
    Batch(batch::Args),
    Status(batch_status::StatusArgs),
    Cancel(batch_status::CancelArgs),
}

/// Runs the chosen subcommand.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run::run(args).await,
        Command::Batch(args) => batch::run(args).await,
        Command::Status(args) => batch_status::status(args).await,
        Command::Cancel(args) => batch_status::cancel(args).await,
    }
}
