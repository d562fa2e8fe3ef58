//! The text of a scripted generation, in chunks.

use std::collections::VecDeque;

use crate::host::{HostStream, Task};
use crate::{Generation, InferenceError};

/// A stream of a generation that was made in full before it began.
pub struct MemoryStream {
    pieces: VecDeque<String>,
    generation: Generation,
    ended: bool,
}

impl MemoryStream {
    /// Creates a stream of `pieces`, whose text together is that of `generation`.
    pub fn new(pieces: VecDeque<String>, generation: Generation) -> Self {
        Self { pieces, generation, ended: false }
    }
}

impl HostStream for MemoryStream {
    fn next(&mut self) -> Task<'_, Option<String>> {
        assert!(!self.ended, "the stream was read after its end, which would trap in a component");
        let piece = self.pieces.pop_front();
        self.ended = piece.is_none();
        Box::pin(async { piece })
    }

    fn finish(self: Box<Self>) -> Task<'static, Result<Generation, InferenceError>> {
        Box::pin(async move { Ok(self.generation) })
    }
}
