//! The `skep` binary: parses the command line, runs the command and reports its error.

use std::process::ExitCode;

use clap::Parser as _;
use skep_cli::commands::Cli;
use skep_cli::failure;

/// The allocator of static builds, because musl's own takes several times as long for small allocations on several threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if failure::is_output_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            failure::report(&error);
            ExitCode::from(failure::exit_code(&error))
        }
    }
}
