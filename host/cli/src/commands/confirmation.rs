//! The question that is asked before something is deleted permanently.

use std::io::IsTerminal as _;

use anyhow::{Result, bail};

use crate::failure::Usage;

/// Asks the person at the terminal, and returns whether the answer is yes.
pub fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!(Usage(
            "cannot ask for confirmation: stdin is not a terminal\n  hint: --yes deletes without asking"
                .to_owned()
        ));
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
