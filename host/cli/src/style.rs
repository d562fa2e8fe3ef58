//! Colors for text that a person reads. They are used only on a terminal, and never if `NO_COLOR` is set or
//! `TERM` is `dumb`.

use std::io::IsTerminal;

/// Colors text, or returns it unchanged if colors are off.
#[derive(Debug, Clone, Copy)]
pub struct Painter {
    enabled: bool,
}

/// Returns the painter for text on stdout.
pub fn stdout() -> Painter {
    Painter { enabled: std::io::stdout().is_terminal() && wanted() }
}

/// Returns the painter for text on stderr.
pub fn stderr() -> Painter {
    Painter { enabled: std::io::stderr().is_terminal() && wanted() }
}

/// Writes warnings to stderr, each on a line.
pub fn warn(warnings: &[String]) {
    for warning in warnings {
        eprintln!("{} {warning}", stderr().yellow("warning:"));
    }
}

fn wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

impl Painter {
    /// Returns the text in bold.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Returns the text dimmed.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Returns the text in bold red.
    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Returns the text in green.
    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Returns the text in yellow.
    pub fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Returns the text in cyan.
    pub fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.enabled { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}
