//! The question before something is deleted for good.

use std::io::IsTerminal as _;

use anyhow::{Result, bail};

use crate::failure::Usage;

/// Whether the person at the terminal says yes.
pub fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!(Usage("nobody is there to be asked\n  hint: --yes deletes without a question".to_owned()));
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
