//! Builder methods for the settings that every kind of generation takes.
//!
//! [`Conversation`](crate::Conversation) and [`Completion`](crate::Completion) share them through this macro.
//! Both have a field `options`.

macro_rules! option_methods {
    () => {
        /// Sets the maximum number of tokens to generate. The default is 1024, or the rest of the turn's
        /// limit if that is less.
        pub fn max_tokens(mut self, tokens: u32) -> Self {
            self.options.max_tokens = Some(tokens);
            self
        }

        /// Sets the temperature, from 0 to 2; 0 is greedy.
        pub fn temperature(mut self, temperature: f32) -> Self {
            self.options.sampling.temperature = Some(temperature);
            self
        }

        /// Sets the seed. The same seed and the same request give the same output.
        pub fn seed(mut self, seed: u64) -> Self {
            self.options.sampling.seed = Some(seed);
            self
        }

        /// Sets all sampling settings at once.
        pub fn sampling(mut self, sampling: crate::Sampling) -> Self {
            self.options.sampling = sampling;
            self
        }

        /// Adds a string that ends the text and is not part of it. May be called up to 16 times.
        pub fn with_stop(mut self, stop: impl Into<String>) -> Self {
            self.options.stop.push(stop.into());
            self
        }

        /// Does the same as [`with_stop`](Self::with_stop).
        #[deprecated(since = "0.1.0", note = "renamed to `with_stop`, because it does not stop anything")]
        pub fn stop(self, stop: impl Into<String>) -> Self {
            self.with_stop(stop)
        }

        /// Sets the format of the text, enforced while decoding. For JSON of a Rust type, see `extract`.
        pub fn output(mut self, output: crate::Output) -> Self {
            self.options.output = output;
            self
        }

        /// Hides the text from the caller while it is generated.
        pub fn hidden(mut self) -> Self {
            self.options.visible = false;
            self
        }
    };
}
pub(crate) use option_methods;
