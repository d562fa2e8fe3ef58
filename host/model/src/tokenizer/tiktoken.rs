//! Builds a tokenizer from `tiktoken.model`, the vocabulary file of Kimi.
//!
//! The file lists tokens as base64, each with its rank, which is its id. Merges follow from the ranks: tiktoken
//! merges the neighbors whose union has the lowest rank, so every way to split a token into two tokens is a merge, in the
//! order of the tokens' ranks. The ids after the ranks are added tokens, whose texts are in tokenizer_config.json.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value as Json;
use tokenizers::models::bpe::{BPE, Vocab};

use super::words::{KIMI, Words, byte_level};
use super::{Tokenizer, assemble, bpe, broken, byte_level_alphabet, special_token};
use crate::error::ModelError;

/// Number of ids after the ranks. Those without a text of their own are reserved.
const ADDED: u32 = 256;
/// The longest token that merging can make. Longer tokens are only whole words.
const MAX_MERGED_BYTES: usize = 512;
/// The class of the only tokenizer whose vocabulary is in such a file.
const CLASS: &str = "TikTokenTokenizer";

/// Returns the tokenizer of a `tiktoken.model` with the tokenizer_config.json beside it.
pub(super) fn from_ranks(file: &[u8], config: &Json) -> Result<Tokenizer, ModelError> {
    match config.get("tokenizer_class").and_then(Json::as_str) {
        Some(CLASS) => {}
        // The pattern that splits text is not in the file. Other classes have other patterns.
        other => {
            let found = other.unwrap_or("missing").to_owned();
            return Err(ModelError::unsupported("tokenizer_class of tiktoken.model", found, CLASS));
        }
    }
    let tokens = ranked_tokens(file)?;
    let added = added_tokens(config, tokens.len() as u32)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model(&tokens, &KIMI)?);
    assemble(&mut tokenizer, &KIMI.normalizer(), &KIMI.pre_tokenizer(), &byte_level(true))?;
    let listed: Vec<_> = added.values().map(|(text, special)| special_token(text, *special)).collect();
    tokenizer.add_special_tokens(&listed);
    for (id, (text, _)) in &added {
        if tokenizer.token_to_id(text) != Some(*id) {
            return Err(broken(format!("the added token {text:?} has the id {id}, and another token too")));
        }
    }
    Tokenizer::new(tokenizer)
}

/// Returns the model whose tokens have these bytes, in the order of their ranks.
fn model(tokens: &[Vec<u8>], words: &Words) -> Result<BPE, ModelError> {
    let mut letters = ['\0'; 256];
    for (letter, byte) in byte_level_alphabet() {
        letters[usize::from(byte)] = letter;
    }
    let spelled: Vec<String> =
        tokens.iter().map(|token| token.iter().map(|byte| letters[usize::from(*byte)]).collect()).collect();
    let merges = merges_of_ranks(tokens, &spelled);
    let vocabulary: Vocab = spelled.into_iter().zip(0..).collect();
    let builder = BPE::builder().vocab_and_merges(vocabulary, merges);
    bpe(builder.ignore_merges(words.ignore_merges).build())
}

/// Returns the merges of tokens that are in the order of their ranks, as `spelled` spells the tokens. An empty token is
/// no token of text.
pub(super) fn merges_of_ranks<S: AsRef<str>>(tokens: &[Vec<u8>], spelled: &[S]) -> Vec<(String, String)> {
    let ids: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    let mut merges = Vec::new();
    for token in tokens.iter().filter(|token| token.len() <= MAX_MERGED_BYTES) {
        let first = merges.len();
        for at in 1..token.len() {
            let (left, right) = token.split_at(at);
            if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                merges.push((*left, *right));
            }
        }
        merges[first..].sort_unstable();
    }
    let text = |id: usize| spelled[id].as_ref().to_owned();
    merges.into_iter().map(|(left, right)| (text(left), text(right))).collect()
}

/// Returns the bytes of the tokens, in the order of their ranks, which are 0, 1, 2 and so on.
pub(super) fn ranked_tokens(file: &[u8]) -> Result<Vec<Vec<u8>>, ModelError> {
    let mut ranked: Vec<(u32, Vec<u8>)> = Vec::new();
    for (line, number) in file.split(|byte| *byte == b'\n').zip(1..) {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let wrong = |problem: &str| broken(format!("line {number} of tiktoken.model {problem}"));
        if ranked.len() >= super::MAX_VOCABULARY {
            return Err(wrong("has more tokens before it than are allowed"));
        }
        let space = line.iter().position(|byte| *byte == b' ').ok_or_else(|| wrong("has no rank"))?;
        let token = STANDARD.decode(&line[..space]).map_err(|_| wrong("has a token that is not base64"))?;
        let rank = std::str::from_utf8(&line[space + 1..]).ok().and_then(|rank| rank.parse().ok());
        let rank = rank.ok_or_else(|| wrong("has a rank that is not a number"))?;
        if token.is_empty() {
            return Err(wrong("has an empty token"));
        }
        ranked.push((rank, token));
    }
    ranked.sort_unstable();
    if let Some(((rank, _), expected)) = ranked.iter().zip(0..).find(|((rank, _), at)| rank != at) {
        return Err(broken(format!("tiktoken.model has the rank {rank} where {expected} is expected")));
    }
    let tokens: Vec<Vec<u8>> = ranked.into_iter().map(|(_, token)| token).collect();
    let known: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    if known.len() != tokens.len() {
        return Err(broken("tiktoken.model lists a token twice".into()));
    }
    match (0..=255u8).find(|byte| !known.contains_key([*byte].as_slice())) {
        Some(byte) => Err(broken(format!("tiktoken.model has no token for the byte {byte:#04x}"))),
        None => Ok(tokens),
    }
}

/// Returns the texts of the ids from `first` on, and whether each is markup.
fn added_tokens(config: &Json, first: u32) -> Result<BTreeMap<u32, (String, bool)>, ModelError> {
    let mut added: BTreeMap<u32, (String, bool)> =
        (first..first + ADDED).map(|id| (id, (format!("<|reserved_token_{id}|>"), true))).collect();
    let listed = config.get("added_tokens_decoder").and_then(Json::as_object);
    for (key, token) in listed.into_iter().flatten() {
        let wrong = |problem: &str| ModelError::config("added_tokens_decoder", format!("{key:?} {problem}"));
        let id: u32 = key.parse().map_err(|_| wrong("is not a token id"))?;
        let text = token.get("content").and_then(Json::as_str).filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| wrong("has no content"))?;
        let Some(known) = added.get_mut(&id) else {
            return Err(wrong(&format!("is not one of the {ADDED} ids from {first} on")));
        };
        *known = (text.to_owned(), token.get("special").and_then(Json::as_bool).unwrap_or(true));
    }
    Ok(added)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tokenizer::SpecialTokens::{Literal, Parse};

    /// Returns a file with the 256 bytes and these tokens.
    fn file(tokens: &[&str]) -> String {
        let bytes = (0..=255u8).map(|byte| vec![byte]);
        let tokens = bytes.chain(tokens.iter().map(|token| token.as_bytes().to_vec()));
        tokens.zip(0..).map(|(token, rank)| format!("{} {rank}\n", STANDARD.encode(token))).collect()
    }

    fn config() -> Json {
        json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {
            "260": {"content": "[BOS]", "special": true}, "262": {"content": "<think>", "special": false}}})
    }

    #[test]
    fn neighbors_merge_by_rank_and_whole_words_are_looked_up_first() {
        let tokenizer = from_ranks(file(&["bc", "ab", "abc", "xyz"]).as_bytes(), &config()).unwrap();
        // `bc` has a lower rank than `ab`; no merges lead to `xyz`, but as a word it is that token.
        assert_eq!(tokenizer.encode("abcd", Parse).unwrap(), [258, u32::from(b'd')]);
        assert_eq!(tokenizer.encode("abbc", Parse).unwrap(), [257, 256]);
        assert_eq!(tokenizer.encode("xyz", Parse).unwrap(), [259]);
        assert_eq!(tokenizer.encode("xyzx", Parse).unwrap(), b"xyzx".map(u32::from));
    }

    #[test]
    fn ids_after_the_ranks_are_added_or_reserved_tokens() {
        let tokenizer = from_ranks(file(&["bc", "ab", "abc", "xyz"]).as_bytes(), &config()).unwrap();
        let text = "[BOS]<think><|reserved_token_261|><|reserved_token_515|>";
        assert_eq!(tokenizer.encode(text, Parse).unwrap(), [260, 262, 261, 515]);
        assert!(tokenizer.encode(text, Literal).unwrap().iter().all(|id| *id < 260));
        assert_eq!(tokenizer.vocabulary_size(), 516);
        assert!(tokenizer.is_special(260) && tokenizer.is_special(261) && !tokenizer.is_special(262));
        assert_eq!(tokenizer.token_bytes(262), Some(b"<think>".as_slice()));
    }

    #[test]
    fn damaged_files_are_errors_that_name_the_damage() {
        let valid = file(&["ab"]);
        let listed = |id: &str, token: Json| json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": { id: token }});
        for (text, config, message) in [
            (String::new(), config(), "no token for the byte 0x00"),
            (valid.replace("AA== 0", "AA==0"), config(), "line 1 of tiktoken.model has no rank"),
            (valid.replace("AA== 0", "AA== x"), config(), "not a number"),
            (valid.replace("AA== 0", "A? 0"), config(), "not base64"),
            (valid.replace("AA== 0", " 0"), config(), "has no rank"),
            (valid.replace("AQ== 1\n", "AQ== 999\n"), config(), "the rank 2 where 1 is expected"),
            (valid.replace("AQ== 1\n", "AA== 1\n"), config(), "twice"),
            (valid.clone(), json!({}), "tokenizer_class"),
            (valid.clone(), json!({"tokenizer_class": "QWenTokenizer"}), "QWenTokenizer"),
            (valid.clone(), listed("12", json!({"content": "x"})), "is not one of the 256 ids"),
            (valid.clone(), listed("260", json!({})), "has no content"),
            (valid.clone(), listed("260", json!({"content": "ab"})), "another token too"),
        ] {
            let error = from_ranks(text.as_bytes(), &config).expect_err(message).to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
