//! Whether somebody still waits for what is computed. Rendering and encoding a long prompt asks between its steps.

use crate::EngineError;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Clones are one question. Of the default one nobody gives up.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Nobody waits any more.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// An error if nobody waits any more.
    pub fn check(&self) -> Result<(), EngineError> {
        if self.is_cancelled() { Err(EngineError::Cancelled) } else { Ok(()) }
    }
}
