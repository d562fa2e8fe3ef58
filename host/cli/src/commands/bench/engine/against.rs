//! Runs another program on the same work, for a ratio from one run on one machine.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::guest_build::bounded_command;
use crate::progress::{Progress as _, Terminal};

/// Time limit; loading and compiling a model in another framework takes minutes.
const LIMIT: Duration = Duration::from_secs(1800);

/// The last line that the program prints.
#[derive(Debug, Deserialize)]
struct PeerOutput {
    tok_per_s: f64,
}

/// Another program, and the tokens per second that it reports for decoding.
#[derive(Debug)]
pub(super) struct Rival {
    command: String,
    tok_per_s: f64,
}

/// Its rate, beside the rate that was measured here.
#[derive(Debug, Serialize)]
pub(super) struct Against {
    pub command: String,
    pub tok_per_s: f64,
    pub ratio: f64,
}

impl Rival {
    /// Runs the shell command to completion before anything is loaded here: it needs the memory too, and it
    /// may fail.
    pub(super) fn run(command: &str) -> Result<Self> {
        let step = Terminal.begin(command, None);
        let tok_per_s = tok_per_s(command)?;
        step.finish(&format!("{tok_per_s:.1} tok/s"));
        Ok(Rival { command: command.to_owned(), tok_per_s })
    }

    /// Compares the rate with the one that was measured here.
    pub(super) fn beside(self, ours_tok_per_s: f64) -> Against {
        let Rival { command, tok_per_s } = self;
        Against { command, tok_per_s, ratio: ours_tok_per_s / tok_per_s }
    }
}

impl Against {
    /// Returns the comparison as a sentence.
    pub(super) fn for_people(&self) -> String {
        let Against { command, tok_per_s, ratio } = self;
        format!("`{command}` decodes {tok_per_s:.1} tok/s; skep is {ratio:.2} times as fast.")
    }
}

/// Runs the shell command `line` and returns the tokens per second that it reports for decoding.
fn tok_per_s(line: &str) -> Result<f64> {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {line}")]).stdin(Stdio::null());
    let finished = bounded_command::run(command, LIMIT).with_context(|| format!("--against `{line}`"))?;
    if !finished.status.success() {
        bail!("--against `{line}` failed: {}", finished.last_words());
    }
    let last = finished.stdout.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    match serde_json::from_str::<PeerOutput>(last) {
        Ok(said) if said.tok_per_s.is_finite() && said.tok_per_s > 0.0 => Ok(said.tok_per_s),
        _ => bail!(
            "--against `{line}` ended with {last:?}\n  hint: its last line must be JSON with a positive \"tok_per_s\""
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::tok_per_s;

    #[test]
    fn the_last_line_of_another_program_is_its_rate() {
        let line = r#"printf 'compiling\n{"tok_per_s": 12.5, "card": "x"}\n\n'"#;
        assert_eq!(tok_per_s(line).expect("a rate"), 12.5);
        for (line, expected) in [
            ("echo 12.5", "must be JSON"),
            (r#"printf '{"tok_per_s": 0}'"#, "positive"),
            ("sh -c 'echo no torch here >&2; exit 3'", "failed: no torch here"),
            ("false", "failed: exit status: 1"),
        ] {
            let error = format!("{:#}", tok_per_s(line).expect_err(line));
            assert!(error.contains(expected), "{error}");
        }
    }
}
