//! `skep kv-agent`: the helper process of a host, which moves KV pages through NIXL.

use std::os::fd::AsFd as _;

use anyhow::Result;
use skep_transfer::{TransferError, serve};

/// Move KV pages through NIXL, for the host that starts this command
///
/// Internal: a host of a cluster starts it, talks to it over its standard input, and ends it. A fault of the library
/// then ends this process and not the host.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep kv-agent     # fails: only a host can start it, see transfer under [kv] in skep up --help")]
pub struct Args {}

/// Serves the host until it ends.
pub fn run(_: &Args) -> Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    match serve(socket) {
        Ok(never) => match never {},
        Err(error @ TransferError::NotStarted(_)) => {
            Err(anyhow::Error::from(error).context("`skep kv-agent` is started by a host"))
        }
        // The host was notified, and logs it.
        Err(_) => Ok(()),
    }
}
