//! What a render may take: steps, and bytes that it makes.
//!
//! Bytes are counted when they are made and never given back, so what a render has in memory at once is less than what it
//! may make, and copying is bounded as well.

use super::Fault;
use std::cell::Cell;

#[derive(Debug)]
pub(in super::super) struct Meter {
    max_steps: u64,
    max_bytes: u64,
    steps: Cell<u64>,
    bytes: Cell<u64>,
}

impl Meter {
    pub(in super::super) fn new(max_steps: u64, max_bytes: u64) -> Meter {
        Meter { max_steps, max_bytes, steps: Cell::new(0), bytes: Cell::new(0) }
    }

    /// For what a template is given: it is bounded elsewhere.
    pub(in super::super) fn unbounded() -> Meter {
        Meter::new(u64::MAX, u64::MAX)
    }

    /// The bytes that were made so far.
    pub(in super::super) fn made(&self) -> u64 {
        self.bytes.get()
    }

    /// Before work that takes so many steps.
    pub(super) fn step(&self, steps: usize) -> Result<(), Fault> {
        self.steps.set(self.steps.get().saturating_add(steps as u64));
        match self.steps.get() <= self.max_steps {
            true => Ok(()),
            false => {
                let message = format!("it did not end within {} steps", self.max_steps);
                Err(Fault::new(message))
            }
        }
    }

    /// Before bytes are looked through.
    pub(super) fn read(&self, bytes: usize) -> Result<(), Fault> {
        self.step(bytes / 32)
    }

    /// Before memory is taken. Making bytes is work, too.
    pub(super) fn make(&self, bytes: usize) -> Result<(), Fault> {
        self.bytes.set(self.bytes.get().saturating_add(bytes as u64));
        if self.bytes.get() > self.max_bytes {
            return Err(Fault::new(format!(
                "it makes more than {} bytes of texts and lists",
                self.max_bytes
            )));
        }
        self.read(bytes)
    }
}
