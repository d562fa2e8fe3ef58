//! `skep health`: asks a running host whether it accepts work.

use anyhow::Result;

use super::{HostArgs, out};

/// Check whether a running host accepts work
///
/// It needs no API key. The exit code is 0 if the host accepts work, 3 if no host answers within 4 seconds, and 4 if it answers
/// that it does not accept work, because it is stopping, its model fails, or its disk is full.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep health
  until skep health; do sleep 1; done   wait until a host is ready")]
pub struct Args {
    #[command(flatten)]
    host: HostArgs,
}

/// Asks the host whether it accepts work, and prints `ready` if it does.
pub async fn run(args: Args) -> Result<()> {
    args.host.client()?.check_ready().await?;
    out::line("ready")
}
