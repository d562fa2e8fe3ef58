//! Decodes text that grows token by token.
//!
//! Invariant: the concatenated chunks equal the result of decoding all tokens at once, wherever characters
//! are split.

use std::sync::Arc;

use super::Tokenizer;

/// A decoder for one sequence. It holds back the bytes of an incomplete character.
#[derive(Debug, Clone)]
pub struct TokenDecoder {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens that are not skipped.
    kept: Arc<[u32]>,
    held: Vec<u8>,
}

impl TokenDecoder {
    /// Creates a decoder at the start of a sequence. With `skip_special`, special tokens add no text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        TokenDecoder { tokenizer, skip_special, kept: Arc::default(), held: Vec::new() }
    }

    /// Returns a decoder that skips all special tokens but these.
    pub fn keeping(tokenizer: Arc<Tokenizer>, kept: Arc<[u32]>) -> Self {
        TokenDecoder { kept, ..TokenDecoder::new(tokenizer, true) }
    }

    /// Adds a token and returns the text that it completes, which may be empty.
    pub fn push(&mut self, id: u32) -> String {
        if !(self.skip_special && self.tokenizer.is_special(id)) || self.kept.contains(&id) {
            self.held.extend_from_slice(self.tokenizer.token_bytes(id).unwrap_or_default());
        }
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.held[..valid]));
                    let Some(invalid) = error.error_len() else {
                        self.held.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + invalid);
                }
            }
        }
    }

    /// Returns the rest of an incomplete character.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{SpecialTokens, tests::byte_level};

    fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip: bool) -> String {
        let mut decoder = TokenDecoder::new(tokenizer.clone(), skip);
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    #[test]
    fn decoded_chunks_concatenate_to_the_whole_text() {
        let tokenizer = Arc::new(byte_level());
        let ids = tokenizer.encode("hello ☕<|end|> naïve 🐝", SpecialTokens::Parse).unwrap();
        for end in 0..=ids.len() {
            for skip in [false, true] {
                assert_eq!(pieces(&tokenizer, &ids[..end], skip), tokenizer.decode(&ids[..end], skip));
            }
        }
    }

    #[test]
    fn kept_special_tokens_are_text() {
        let tokenizer = Arc::new(byte_level());
        let ids = tokenizer.encode("<|start|>hello<|end|>", SpecialTokens::Parse).unwrap();
        let mut decoder = TokenDecoder::keeping(tokenizer, [261].into());
        let text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        assert_eq!(text, "hello<|end|>");
    }

    #[test]
    fn decoded_chunks_of_random_bytes_concatenate_to_the_lossy_text() {
        let tokenizer = Arc::new(byte_level());
        let mut state = 7u64;
        for _ in 0..500 {
            let ids: Vec<u32> = (0..24)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Mostly bytes of multi-byte characters, so that every kind of split occurs.
                    let byte = (state >> 33) as u32 % 256;
                    if byte < 96 { byte } else { 0x80 | (byte & 0x7f) }
                })
                .collect();
            assert_eq!(pieces(&tokenizer, &ids, false), tokenizer.decode(&ids, false));
        }
    }
}
