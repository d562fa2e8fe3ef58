//! What is wrong with a template, or with what it does.

use std::fmt;

#[derive(Debug)]
pub(in super::super) struct Fault {
    message: String,
    line: Option<u32>,
}

impl Fault {
    /// `message` must not quote what a template was given.
    pub(in super::super) fn new(message: impl Into<String>) -> Fault {
        Fault { message: message.into(), line: None }
    }

    /// In this line, if it is not known better.
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
