//! Converts text to token ids and back, with the exact bytes of each token.
//!
//! Invariant: the bytes of a sequence are the concatenation of its tokens' bytes, so text can be produced token by
//! token. Byte-level alphabets and byte-fallback tokens are decoded once, when the tokenizer is loaded.

mod decoder;
mod gguf;
mod reads;
mod section_cache;
mod sections;
mod tiktoken;
mod words;

#[cfg(test)]
mod published_tests;

use std::collections::HashMap;
use std::str::FromStr;

use serde_json::Value as Json;
use tokenizers::AddedToken;
use tokenizers::models::bpe::BPE;

pub use decoder::TokenDecoder;
pub(crate) use gguf::from_gguf;
pub use reads::reads_pre_tokenizer;
pub use section_cache::SectionCache;
pub use sections::Before;

use crate::error::ModelError;

/// The treatment of text that spells a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The text becomes that token.
    Parse,
    /// The text stays text, so user input cannot end the user's turn.
    Literal,
}

/// A tokenizer. It never adds tokens that are not in the text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    tokens: Vec<Option<Token>>,
    without_space: sections::WithoutSpace,
    /// Is true if some added tokens are found only in normalized text.
    has_normalized_tokens: bool,
}

struct Token {
    text: String,
    bytes: Vec<u8>,
    special: bool,
}

/// The encoding of bytes in the texts of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// Each byte is one of 256 printable characters (GPT-2's table).
    ByteLevel,
    /// `▁` is a space and `<0xNN>` is a byte (SentencePiece).
    Metaspace,
    Plain,
}

const MAX_VOCABULARY: usize = 1 << 22;
const MAX_GAP: usize = 1 << 16;

impl Tokenizer {
    /// Parses a `tokenizer.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ModelError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| broken(format!("tokenizer.json is not valid UTF-8: {error}")))?;
        let tokenizer = tokenizers::Tokenizer::from_str(text)
            .map_err(|error| broken(format!("tokenizer.json cannot be parsed: {error}")))?;
        Self::new(tokenizer)
    }

    /// Parses a `tiktoken.model` with the tokenizer_config.json beside it.
    pub fn from_tiktoken(ranks: &[u8], config: &Json) -> Result<Self, ModelError> {
        tiktoken::from_ranks(ranks, config)
    }

    /// Returns the tokenizer as a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Result<String, ModelError> {
        serde_json::to_string(&self.inner).map_err(|error| broken(error.to_string()))
    }

    fn new(mut tokenizer: tokenizers::Tokenizer) -> Result<Self, ModelError> {
        // Truncation and padding are for training. The model's context bounds a prompt.
        tokenizer.with_truncation(None).map_err(|error| broken(error.to_string()))?;
        tokenizer.with_padding(None);
        let spelling = Spelling::of(&tokenizer);
        let vocabulary = tokenizer.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |last| *last as usize + 1);
        // Large gaps between ids would turn a small file into a large table.
        let limit = MAX_VOCABULARY.min(2 * vocabulary.len() + MAX_GAP);
        if size == 0 || size > limit {
            return Err(broken(format!(
                "the largest id of its {} tokens is {}; at most {limit} ids are supported",
                vocabulary.len(),
                size.saturating_sub(1)
            )));
        }
        let added = tokenizer.get_added_tokens_decoder();
        let byte_of = byte_level_alphabet();
        let mut tokens: Vec<Option<Token>> = std::iter::repeat_with(|| None).take(size).collect();
        for (text, id) in vocabulary {
            let added = added.get(&id);
            let bytes = match added {
                // Runs of spaces are among the added tokens of some vocabularies, such as Gemma's.
                Some(added) if spelling == Spelling::Metaspace && !added.special => {
                    added.content.replace('▁', " ").into_bytes()
                }
                Some(added) => added.content.clone().into_bytes(),
                None => spelling.bytes(&text, &byte_of),
            };
            tokens[id as usize] =
                Some(Token { text, bytes, special: added.is_some_and(|added| added.special) });
        }
        Ok(Tokenizer {
            without_space: sections::WithoutSpace::of(&tokenizer),
            has_normalized_tokens: added.values().any(|added| added.normalized),
            inner: tokenizer,
            tokens,
        })
    }

    /// Returns the token ids of a text. No token is added before or after it.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, ModelError> {
        match special {
            SpecialTokens::Parse => {
                let encoding =
                    self.inner.encode_fast(text, false).map_err(|error| broken(error.to_string()))?;
                Ok(encoding.get_ids().to_vec())
            }
            SpecialTokens::Literal => {
                self.encode_sections(text, std::slice::from_ref(&(0..text.len())), Before::Nothing)
            }
        }
    }

    /// Returns the text of the ids. Invalid UTF-8 becomes U+FFFD, and unknown ids are skipped. The space that
    /// SentencePiece vocabularies put before a text is kept, because a continuation starts with a real space.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the bytes that a token adds to the text, or `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token(id).map(|token| token.bytes.as_slice())
    }

    /// Returns a token as the vocabulary spells it.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.token(id).map(|token| token.text.as_str())
    }

    /// Returns the id of a token that the vocabulary spells exactly so.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Returns whether a token is markup rather than text.
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| token.special)
    }

    /// Returns the largest id plus one.
    pub fn vocabulary_size(&self) -> usize {
        self.tokens.len()
    }

    fn token(&self, id: u32) -> Option<&Token> {
        self.tokens.get(id as usize)?.as_ref()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.tokens.len())
    }
}

impl Spelling {
    /// Derives the spelling from the decoder and the pre-tokenizer, which describe how text was encoded.
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let described = [
            serde_json::to_string(&tokenizer.get_decoder()).unwrap_or_default(),
            serde_json::to_string(&tokenizer.get_pre_tokenizer()).unwrap_or_default(),
        ];
        let mentions = |name: &str| described.iter().any(|text| text.contains(name));
        if mentions("\"ByteLevel\"") {
            Spelling::ByteLevel
        } else if mentions("\"ByteFallback\"") || mentions("\"Metaspace\"") {
            Spelling::Metaspace
        } else {
            Spelling::Plain
        }
    }

    fn bytes(self, text: &str, byte_of: &HashMap<char, u8>) -> Vec<u8> {
        match self {
            Spelling::Plain => text.as_bytes().to_vec(),
            Spelling::Metaspace => match fallback_byte(text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
            Spelling::ByteLevel => {
                let bytes: Option<Vec<u8>> = text.chars().map(|c| byte_of.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| text.as_bytes().to_vec())
            }
        }
    }
}

/// Returns the byte of `<0xNN>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Returns GPT-2's table: printable Latin-1 characters stand for themselves, and characters from U+0100 on stand
/// for the other bytes.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => (char::from(byte), byte),
            _ => {
                next += 1;
                (
                    char::from_u32(next - 1).expect("U+0100 and the 67 code points after it are characters"),
                    byte,
                )
            }
        })
        .collect()
}

/// Returns the characters that stand for the bytes 0 to 255, in that order.
#[cfg(test)]
pub(crate) fn byte_level_characters() -> Vec<char> {
    let mut characters: Vec<(char, u8)> = byte_level_alphabet().into_iter().collect();
    characters.sort_by_key(|(_, byte)| *byte);
    characters.into_iter().map(|(character, _)| character).collect()
}

/// Sets the steps before and after a model. They are described as in tokenizer.json.
fn assemble(
    tokenizer: &mut tokenizers::Tokenizer,
    normalizer: &Json,
    pre_tokenizer: &Json,
    decoder: &Json,
) -> Result<(), ModelError> {
    fn read<T: serde::de::DeserializeOwned>(value: &Json) -> Result<Option<T>, ModelError> {
        serde_json::from_value(value.clone()).map_err(|error| broken(error.to_string()))
    }
    tokenizer.with_normalizer(read::<tokenizers::NormalizerWrapper>(normalizer)?);
    tokenizer.with_pre_tokenizer(read::<tokenizers::PreTokenizerWrapper>(pre_tokenizer)?);
    tokenizer.with_decoder(read::<tokenizers::DecoderWrapper>(decoder)?);
    Ok(())
}

fn bpe(built: tokenizers::Result<BPE>) -> Result<BPE, ModelError> {
    built.map_err(|error| broken(format!("the vocabulary and its merges are inconsistent: {error}")))
}

fn special_token(content: &str, special: bool) -> AddedToken {
    AddedToken::from(content, special).normalized(false)
}

fn broken(problem: String) -> ModelError {
    ModelError::Tokenizer { problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns a tokenizer with one token per byte, some merges and two special tokens.
    pub(super) fn byte_level() -> Tokenizer {
        let alphabet = byte_level_alphabet();
        let mut vocabulary: serde_json::Map<String, serde_json::Value> =
            alphabet.iter().map(|(c, byte)| (c.to_string(), json!(*byte))).collect();
        for (id, merged) in ["he", "ll", "hell", "hello", "Ġh"].iter().enumerate() {
            vocabulary.insert((*merged).to_owned(), json!(256 + id));
        }
        let json = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [
                {"id": 261, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
                {"id": 262, "content": "<|start|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": ["h e", "l l", "he ll", "hell o", "Ġ h"]}});
        Tokenizer::from_json(json.to_string().as_bytes()).expect("a valid tokenizer")
    }

    #[test]
    fn token_bytes_concatenate_to_the_text() {
        let tokenizer = byte_level();
        for text in ["hello hello", "a\u{0}b\n\t", "naïve café ☕ 🐝", "   "] {
            let ids = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            let joined: Vec<u8> =
                ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap().to_vec()).collect();
            assert_eq!(joined, text.as_bytes());
            assert_eq!(tokenizer.decode(&ids, false), text);
        }
        assert_eq!(tokenizer.encode("hello", SpecialTokens::Parse).unwrap(), [259]);
    }

    #[test]
    fn special_text_becomes_a_token_only_when_parsed() {
        let tokenizer = byte_level();
        assert_eq!(tokenizer.encode("<|end|>", SpecialTokens::Parse).unwrap(), [261]);
        let literal = tokenizer.encode("x<|end|>", SpecialTokens::Literal).unwrap();
        assert!(!literal.contains(&261));
        assert_eq!(tokenizer.decode(&literal, true), "x<|end|>");
        assert!(tokenizer.is_special(261) && !tokenizer.is_special(5));
        assert_eq!(tokenizer.decode(&[259, 261], true), "hello");
    }

    #[test]
    fn added_tokens_of_text_spell_spaces_as_the_vocabulary_does() {
        let json = json!({"version": "1.0",
            "added_tokens": [
                {"id": 3, "content": "▁▁", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false},
                {"id": 4, "content": "<▁end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "fuse_unk": false, "byte_fallback": true,
                "vocab": {"a": 0, "b": 1, "▁": 2, "▁▁": 3}, "merges": ["▁ ▁"]}});
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).expect("a valid tokenizer");
        let ids = tokenizer.encode("a  b", SpecialTokens::Parse).unwrap();
        assert_eq!((ids.as_slice(), tokenizer.decode(&ids, false).as_str()), ([0, 3, 1].as_slice(), "a  b"));
        assert_eq!(tokenizer.token_bytes(4), Some("<▁end>".as_bytes()), "markup stays what it is");
    }

    #[test]
    fn ids_outside_the_vocabulary_have_no_token() {
        let tokenizer = byte_level();
        assert_eq!(tokenizer.vocabulary_size(), 263);
        assert_eq!(tokenizer.token_bytes(9999), None);
        assert_eq!(tokenizer.decode(&[9999], false), "");
    }

    #[test]
    fn a_broken_definition_is_an_error() {
        for text in ["", "{}", "[1]", "{\"model\": {\"type\": \"BPE\"}}"] {
            assert!(
                matches!(Tokenizer::from_json(text.as_bytes()), Err(ModelError::Tokenizer { .. })),
                "{text}"
            );
        }
        assert!(Tokenizer::from_json(&[0xff, 0xfe]).is_err());
    }
}
