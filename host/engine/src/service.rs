//! The service that a sequence got from the model, in tokens. Accounts and meters count it.

/// The tokens that a sequence got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Service {
    /// Prompt tokens, except for cached ones.
    pub prompt: usize,
    pub output: usize,
}

impl Service {
    /// Returns the number of all tokens, each counted once.
    pub fn tokens(self) -> usize {
        self.prompt + self.output
    }

    /// Returns the service after `earlier`, which must not exceed this one.
    pub fn since(self, earlier: Service) -> Service {
        Service { prompt: self.prompt - earlier.prompt, output: self.output - earlier.output }
    }
}
