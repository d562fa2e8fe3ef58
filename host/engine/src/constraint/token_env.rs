//! The model's tokenizer as llguidance needs it: the bytes of every token in a trie, special tokens
//! marked so that no text can spell them, and a way to tokenize forced bytes. Forced bytes must come back
//! exactly, so no space is put before them. Where the tokenizer would add or change something else (a space before each word,
//! a normalized character), the longest tokens of the trie are taken.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use skep_model::Tokenizer;

pub(super) struct TokenizerWithTrie {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl TokenizerWithTrie {
    /// Builds the trie. `vocabulary_size` is the width of the model's logits; ids without text get no bytes, so
    /// no mask allows them.
    pub fn new(tokenizer: Arc<Tokenizer>, vocabulary_size: usize, eos: &[u32]) -> Self {
        let size = u32::try_from(vocabulary_size).expect("token ids have 32 bits");
        let words: Vec<Vec<u8>> = (0..size).map(|id| trie_bytes(&tokenizer, id)).collect();
        let eos: Vec<u32> = eos.iter().copied().filter(|id| *id < size).collect();
        let mut trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
        if !eos.is_empty() {
            trie = trie.with_eos_tokens(&eos);
        }
        TokenizerWithTrie { tokenizer, trie }
    }

    fn tokenize_text(&self, text: &str) -> Vec<TokenId> {
        let exact = self.tokenizer.encode_inside(text).ok().filter(|ids| {
            let bytes = ids.iter().flat_map(|id| self.tokenizer.token_bytes(*id).unwrap_or_default());
            bytes.eq(text.as_bytes()) && ids.iter().all(|id| (*id as usize) < self.trie.vocab_size())
        });
        exact.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
    }
}

impl TokenizerEnv for TokenizerWithTrie {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenize_text(text))
    }

    /// Returns false, so that a mask allows every token that can spell forced text. Otherwise llguidance would
    /// leave only the tokens that this tokenizer makes of it, and a model may have learned others.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

fn trie_bytes(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if !tokenizer.is_special(id) {
        // No text contains the byte that marks special tokens, and a token of it would stand in their way.
        return if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
            Vec::new()
        } else {
            bytes.to_vec()
        };
    }
    let text = tokenizer.token_text(id).unwrap_or_default();
    [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::fixture;

    #[test]
    fn forced_text_has_the_tokens_of_the_model_without_a_space_before_it() {
        for space in fixture::spaces() {
            let tokenizer = Arc::new(fixture::spaced_tokenizer(&space, &["<s>", "</s>"]));
            let env = TokenizerWithTrie::new(tokenizer.clone(), tokenizer.vocabulary_size(), &[fixture::EOS]);
            let ids = |tokens: &[&str]| {
                tokens.iter().map(|text| tokenizer.token_id(text).unwrap()).collect::<Vec<_>>()
            };
            // The longest tokens would be `a`, `▁h` and `e`.
            assert_eq!(env.tokenize_bytes("a he".as_bytes()), ids(&["a", "▁", "he"]), "{space}");
            assert_eq!(env.tokenize_bytes(b"</s>h"), ids(&["</", "s>", "h"]), "{space}");
        }
    }
}
