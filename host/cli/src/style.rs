//! Colours, where a person sees them: on a terminal, unless `NO_COLOR` is set or the terminal is dumb.

use std::io::IsTerminal;

/// Paints text, or leaves it as it is.
#[derive(Debug, Clone, Copy)]
pub struct Painter {
    enabled: bool,
}

/// For text that goes to stdout.
pub fn stdout() -> Painter {
    Painter { enabled: std::io::stdout().is_terminal() && wanted() }
}

/// For text that goes to stderr.
pub fn stderr() -> Painter {
    Painter { enabled: std::io::stderr().is_terminal() && wanted() }
}

fn wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

impl Painter {
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    pub fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.enabled { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}
