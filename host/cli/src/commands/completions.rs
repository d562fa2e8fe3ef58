//! `skep completions`: prints a completion script.

use anyhow::Result;
use clap::CommandFactory as _;
use clap_complete::Shell;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep completions bash > ~/.local/share/bash-completion/completions/skep
  skep completions zsh > ~/.zfunc/_skep
  skep completions fish > ~/.config/fish/completions/skep.fish")]
pub struct Args {
    /// Shell to print the script for
    shell: Shell,
}

/// Prints the completion script of a shell.
pub fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "skep", &mut script);
    super::out::piece(&String::from_utf8_lossy(&script))
}
