//! Errors of commands: how they are printed, and the exit code that each one leads to.
//!
//! An error message may carry a hint after a line break (`"...\n  hint: ..."`), anywhere in the chain of
//! causes. The causes are printed as one line, followed by the hints.

use std::fmt;

use crate::style;

/// Exit code of every other failure. `skep --help` lists all exit codes.
pub const EXIT_FAILURE: u8 = 1;
/// Exit code of a command line that cannot be understood.
pub const EXIT_USAGE: u8 = 2;
/// Exit code when no host answered.
pub const EXIT_UNREACHABLE: u8 = 3;
/// Exit code when the host answered with an error.
pub const EXIT_REFUSED: u8 = 4;

const HINT: &str = "\n  hint: ";

/// No server answered.
#[derive(Debug)]
pub struct Unreachable {
    pub url: String,
    pub cause: String,
}

/// The server answered with an error.
#[derive(Debug)]
pub struct Refused {
    pub code: String,
    pub message: String,
}

/// The command line parsed, but its values make no sense.
#[derive(Debug)]
pub struct Usage(pub String);

/// The reader of our output went away, as in `skep list | head -1`. This is not reported as a failure. Only
/// `commands/out.rs` makes this error, because a connection that its server closes during an upload has a broken pipe, too,
/// and that is a failure.
#[derive(Debug)]
pub struct OutputClosed;

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, cause } = self;
        write!(
            f,
            "no server answers at {url}: {cause}{HINT}start one with `skep up`, or name another with --url or SKEP_URL"
        )
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of the output went away")
    }
}

impl std::error::Error for Unreachable {}
impl std::error::Error for Refused {}
impl std::error::Error for Usage {}
impl std::error::Error for OutputClosed {}

/// Returns the exit code for `error`.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Unreachable>() {
        EXIT_UNREACHABLE
    } else if error.is::<Usage>() {
        EXIT_USAGE
    } else if error.is::<Refused>() {
        EXIT_REFUSED
    } else {
        EXIT_FAILURE
    }
}

/// Returns whether `error` is [`OutputClosed`].
pub fn is_output_closed(error: &anyhow::Error) -> bool {
    error.is::<OutputClosed>()
}

/// Prints `error` to stderr.
pub fn report(error: &anyhow::Error) {
    let (message, hints) = split(error);
    let paint = style::stderr();
    eprintln!("{} {message}", paint.red("error:"));
    for hint in hints {
        eprintln!("  {} {hint}", paint.cyan("hint:"));
    }
}

/// Joins the chain of causes into one line, and collects the hints in it.
fn split(error: &anyhow::Error) -> (String, Vec<String>) {
    let mut messages: Vec<String> = Vec::new();
    let mut hints = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let mut parts = text.split(HINT);
        let message = parts.next().unwrap_or_default().trim_end().to_owned();
        hints.extend(parts.map(str::to_owned));
        // Many errors already include the text of their cause; it is not repeated.
        if !message.is_empty() && !messages.iter().any(|said| said.contains(&message)) {
            messages.push(message);
        }
    }
    (messages.join(": "), hints)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context as _, anyhow};

    #[test]
    fn hints_follow_the_causes_and_no_cause_is_repeated() {
        let error = Err::<(), _>(anyhow!("inner went wrong\n  hint: mend it"))
            .context("outer: inner went wrong")
            .context("first\n  hint: look here")
            .expect_err("an error");
        let (message, hints) = split(&error);
        assert_eq!(message, "first: outer: inner went wrong");
        assert_eq!(hints, ["look here", "mend it"]);
    }

    #[test]
    fn exit_codes_distinguish_an_absent_server_from_a_refusal() {
        let absent = anyhow!(Unreachable { url: "http://x".into(), cause: "refused".into() })
            .context("listing agents");
        assert_eq!(exit_code(&absent), EXIT_UNREACHABLE);
        let refused = anyhow!(Refused { code: "agent_not_found".into(), message: "no agent".into() });
        assert_eq!(exit_code(&refused), EXIT_REFUSED);
        assert_eq!(exit_code(&anyhow!("anything else")), EXIT_FAILURE);
    }

    #[test]
    fn a_broken_connection_is_a_failure_and_a_closed_output_is_none() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(!is_output_closed(&anyhow!(broken).context("the host did not answer")));
        assert!(is_output_closed(&anyhow!(OutputClosed).context("printing the sessions")));
    }
}
