//! A tokenizer rebuilt from the metadata of a GGUF file.
//!
//! The file names a kind (`gpt2`: byte-level BPE with merges; `llama`: SentencePiece BPE with scores) and, for the
//! first, how text is cut before merging. An unknown one is an error: a wrong cut gives wrong ids without a word.

use std::collections::HashMap;

use serde_json::{Value as Json, json};
use tokenizers::models::bpe::{BPE, Vocab};

use super::{Tokenizer, broken, special_token};
use crate::error::ModelError;
use crate::gguf::{GgufFile, Value};

const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Llama 3's cut; Qwen's differs in the length of runs of digits only.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The tokenizer of `file`, whose bytes are `bytes`; `None` if it carries none.
pub(crate) fn from_gguf(file: &GgufFile, bytes: &[u8]) -> Result<Option<Tokenizer>, ModelError> {
    let Some(kind) = file.string("tokenizer.ggml.model")? else { return Ok(None) };
    let tokens = strings(file, bytes, "tokenizer.ggml.tokens")?;
    if tokens.len() > super::MAX_VOCABULARY {
        return Err(ModelError::config("tokenizer.ggml.tokens", format!("has {} tokens", tokens.len())));
    }
    let mut tokenizer = match kind {
        "gpt2" => byte_level(file, bytes, &tokens)?,
        "llama" => sentence_piece(file, bytes, &tokens)?,
        other => return Err(ModelError::unsupported("tokenizer.ggml.model", other, "gpt2, llama")),
    };
    let types = integers(file, bytes, "tokenizer.ggml.token_type")?;
    let added: Vec<_> = tokens
        .iter()
        .zip(&types)
        .filter(|(text, kind)| [CONTROL, USER_DEFINED].contains(kind) && !text.is_empty())
        .map(|(text, kind)| special_token(text, *kind == CONTROL))
        .collect();
    tokenizer.add_special_tokens(&added);
    Tokenizer::new(tokenizer).map(Some)
}

fn byte_level(file: &GgufFile, bytes: &[u8], tokens: &[&str]) -> Result<tokenizers::Tokenizer, ModelError> {
    let key = "tokenizer.ggml.pre";
    let byte_level = |regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex})
    };
    let split = |digits: &str| {
        let pattern = WORDS.replace("{DIGITS}", digits);
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    };
    let sequence = |first: Json, regex: bool| json!({"type": "Sequence", "pretokenizers": [first, byte_level(regex)]});
    let (cut, normalizer, ignore_merges) = match file.string(key)?.unwrap_or("default") {
        "default" | "gpt-2" => (byte_level(true), Json::Null, false),
        "smollm" => (sequence(json!({"type": "Digits", "individual_digits": true}), true), Json::Null, false),
        "llama-bpe" | "llama3" | "llama-v3" => (sequence(split("{1,3}"), false), Json::Null, true),
        "qwen2" => (sequence(split(""), false), json!({"type": "NFC"}), false),
        other => return Err(ModelError::unsupported(key, other, "default, gpt-2, smollm, llama-bpe, qwen2")),
    };
    let mut merges = Vec::new();
    for merge in strings(file, bytes, "tokenizer.ggml.merges")? {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            ModelError::config("tokenizer.ggml.merges", format!("{merge:?} is not two tokens with a space between them"))
        })?;
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = bpe(BPE::builder().vocab_and_merges(vocabulary(tokens), merges).ignore_merges(ignore_merges).build())?;
    assemble(model, &normalizer, &cut, &byte_level(true))
}

fn sentence_piece(file: &GgufFile, bytes: &[u8], tokens: &[&str]) -> Result<tokenizers::Tokenizer, ModelError> {
    let scores = file.array("tokenizer.ggml.scores")?.and_then(|array| array.scalars(bytes));
    let scores: Vec<f64> = scores.into_iter().flatten().filter_map(|value| value.as_f64()).collect();
    if scores.len() != tokens.len() {
        let problem = format!("has {} scores for {} tokens", scores.len(), tokens.len());
        return Err(ModelError::config("tokenizer.ggml.scores", problem));
    }
    let unknown = file.unsigned("tokenizer.ggml.unknown_token_id")?.unwrap_or(0) as usize;
    let mut builder = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges_of_scores(tokens, &scores))
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = tokens.get(unknown) {
        builder = builder.unk_token((*unknown).to_owned());
    }
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizers = match file.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        true => json!([{"type": "Prepend", "prepend": "▁"}, replace]),
        false => json!([replace]),
    };
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]});
    let normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    assemble(bpe(builder.build())?, &normalizer, &Json::Null, &decoder)
}

/// SentencePiece merges the pair whose union scores highest: every way to cut a token in two is a merge, in the order
/// of the tokens' scores.
fn merges_of_scores(tokens: &[&str], scores: &[f64]) -> Vec<(String, String)> {
    let score_of: HashMap<&str, f64> = tokens.iter().copied().zip(scores.iter().copied()).collect();
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        // Longer tokens are markup, and the cuts of one are quadratic in its length.
        if token.len() > 256 {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(first), Some(second)) = (score_of.get(left), score_of.get(right)) {
                merges.push((*score, first.max(*second), left.to_owned(), right.to_owned()));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
    merges.into_iter().map(|(_, _, left, right)| (left, right)).collect()
}

fn assemble(
    model: BPE,
    normalizer: &Json,
    pre_tokenizer: &Json,
    decoder: &Json,
) -> Result<tokenizers::Tokenizer, ModelError> {
    fn read<T: serde::de::DeserializeOwned>(value: &Json) -> Result<Option<T>, ModelError> {
        serde_json::from_value(value.clone()).map_err(|error| broken(error.to_string()))
    }
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_normalizer(read::<tokenizers::NormalizerWrapper>(normalizer)?);
    tokenizer.with_pre_tokenizer(read::<tokenizers::PreTokenizerWrapper>(pre_tokenizer)?);
    tokenizer.with_decoder(read::<tokenizers::DecoderWrapper>(decoder)?);
    Ok(tokenizer)
}

fn bpe(built: tokenizers::Result<BPE>) -> Result<BPE, ModelError> {
    built.map_err(|error| broken(format!("the vocabulary and its merges do not fit together: {error}")))
}

fn vocabulary(tokens: &[&str]) -> Vocab {
    tokens.iter().enumerate().map(|(id, text)| ((*text).to_owned(), id as u32)).collect()
}

fn strings<'a>(file: &GgufFile, bytes: &'a [u8], key: &str) -> Result<Vec<&'a str>, ModelError> {
    let array = file.array(key)?.ok_or_else(|| ModelError::config(key, "is missing"))?;
    let strings = array.strings(bytes).ok_or_else(|| ModelError::config(key, "is not an array of strings"))?;
    Ok(strings.collect())
}

/// An empty list if the key is missing.
fn integers(file: &GgufFile, bytes: &[u8], key: &str) -> Result<Vec<u64>, ModelError> {
    let Some(array) = file.array(key)? else { return Ok(Vec::new()) };
    let values = array.scalars(bytes).ok_or_else(|| ModelError::config(key, "is not an array of numbers"))?;
    Ok(values.map(|value: Value| value.as_u64().unwrap_or(0)).collect())
}
