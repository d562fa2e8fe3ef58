//! Errors in a template or in its rendering.

use std::fmt;

#[derive(Debug)]
pub(in super::super) struct Fault {
    message: String,
    line: Option<u32>,
}

impl Fault {
    /// Creates an error. `message` must not quote the template's input.
    pub(in super::super) fn new(message: impl Into<String>) -> Fault {
        Fault { message: message.into(), line: None }
    }

    /// Adds the line number, unless one is already known.
    pub(super) fn at(self, line: u32) -> Fault {
        Fault { line: self.line.or(Some(line)), ..self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.line.map_or(Ok(()), |line| write!(f, " (line {line} of the template)"))
    }
}
