//! The limits of a render: the steps that it takes and the bytes that it creates.
//!
//! Bytes are counted when they are created and are never returned. The memory in use at any time is therefore less
//! than the limit, and copying is limited too.

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

    /// Creates a meter without limits, for a template's input, which is limited elsewhere.
    pub(in super::super) fn unbounded() -> Meter {
        Meter::new(u64::MAX, u64::MAX)
    }

    /// Returns the number of bytes created so far.
    pub(in super::super) fn made(&self) -> u64 {
        self.bytes.get()
    }

    /// Charges `steps` steps. Must be called before the work is done.
    pub(super) fn step(&self, steps: usize) -> Result<(), Fault> {
        self.steps.set(self.steps.get().saturating_add(steps as u64));
        match self.steps.get() <= self.max_steps {
            true => Ok(()),
            false => {
                let message = format!("it did not finish within {} steps", self.max_steps);
                Err(Fault::new(message))
            }
        }
    }

    /// Charges the steps for reading `bytes` bytes. Must be called before they are read.
    pub(super) fn read(&self, bytes: usize) -> Result<(), Fault> {
        self.step(bytes / 32)
    }

    /// Charges `bytes` bytes of memory, and the steps for creating them. Must be called before the memory is
    /// allocated.
    pub(super) fn make(&self, bytes: usize) -> Result<(), Fault> {
        self.bytes.set(self.bytes.get().saturating_add(bytes as u64));
        if self.bytes.get() > self.max_bytes {
            return Err(Fault::new(format!(
                "it creates more than {} bytes of texts and lists",
                self.max_bytes
            )));
        }
        self.read(bytes)
    }
}
