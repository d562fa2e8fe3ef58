//! The settings that every kind of generation takes, as builder methods.
//!
//! Written once for [`Conversation`](crate::Conversation) and [`Completion`](crate::Completion), which both hold
//! a field `options`.

macro_rules! option_methods {
    () => {
        /// Upper bound of tokens produced. Without it: 1024, or what is left of the turn's limit if that is less.
        pub fn max_tokens(mut self, tokens: u32) -> Self {
            self.options.max_tokens = Some(tokens);
            self
        }

        /// 0 is greedy; 0 to 2.
        pub fn temperature(mut self, temperature: f32) -> Self {
            self.options.sampling.temperature = Some(temperature);
            self
        }

        /// The same seed and the same request give the same output.
        pub fn seed(mut self, seed: u64) -> Self {
            self.options.sampling.seed = Some(seed);
            self
        }

        /// Everything about choosing the next token at once.
        pub fn sampling(mut self, sampling: crate::Sampling) -> Self {
            self.options.sampling = sampling;
            self
        }

        /// A string that ends the text and is not part of it. May be called up to 16 times.
        pub fn stop(mut self, stop: impl Into<String>) -> Self {
            self.options.stop.push(stop.into());
            self
        }

        /// The form of the text, enforced while decoding. For JSON of a Rust type see `extract`.
        pub fn output(mut self, output: crate::Output) -> Self {
            self.options.output = output;
            self
        }

        /// Keeps the text from the caller while it is generated.
        pub fn hidden(mut self) -> Self {
            self.options.visible = false;
            self
        }
    };
}
pub(crate) use option_methods;
