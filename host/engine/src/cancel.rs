//! A flag that shows a computation whether anyone still waits for its result. Rendering and encoding a long
//! prompt check it between their steps.

use crate::EngineError;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A cancellation flag. Clones share it; the default flag belongs to a caller that never cancels.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Records that nobody waits for the result anymore.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns whether nobody waits for the result anymore.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Returns an error if nobody waits for the result anymore.
    pub fn check(&self) -> Result<(), EngineError> {
        if self.is_cancelled() { Err(EngineError::Cancelled) } else { Ok(()) }
    }
}
