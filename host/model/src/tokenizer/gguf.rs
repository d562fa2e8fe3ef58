//! Rebuilds a tokenizer from the metadata of a GGUF file.
//!
//! The file names a kind (`gpt2`: byte-level BPE with merges; `llama`: SentencePiece BPE with scores) and, for
//! `gpt2`, how text is split before merging. An unknown value is an error, because a wrong split would silently
//! produce wrong ids.

use std::collections::HashMap;

use serde_json::{Value as Json, json};
use tokenizers::models::bpe::{BPE, Vocab};

use super::tiktoken::merges_of_ranks;
use super::words::{Words, byte_level};
use super::{Tokenizer, assemble, bpe, byte_level_alphabet, special_token};
use crate::error::ModelError;
use crate::gguf::{GgufFile, Value};

const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Returns the tokenizer of `file`, whose content is `bytes`, or `None` if the file has no tokenizer.
pub(crate) fn from_gguf(file: &GgufFile, bytes: &[u8]) -> Result<Option<Tokenizer>, ModelError> {
    let Some(kind) = file.string("tokenizer.ggml.model")? else { return Ok(None) };
    let tokens = strings(file, bytes, "tokenizer.ggml.tokens")?;
    if tokens.len() > super::MAX_VOCABULARY {
        return Err(ModelError::config(
            "tokenizer.ggml.tokens",
            format!("has {} tokens, which is too many", tokens.len()),
        ));
    }
    let types = integers(file, bytes, "tokenizer.ggml.token_type")?;
    if !types.is_empty() && types.len() != tokens.len() {
        let problem = format!("has {} entries for {} tokens", types.len(), tokens.len());
        return Err(ModelError::config("tokenizer.ggml.token_type", problem));
    }
    let mut tokenizer = match kind {
        "gpt2" => byte_level_bpe(file, bytes, &tokens, &types)?,
        "llama" => sentence_piece(file, bytes, &tokens, &types)?,
        other => return Err(ModelError::unsupported("tokenizer.ggml.model", other, "gpt2, llama")),
    };
    let added: Vec<_> = tokens
        .iter()
        .zip(&types)
        .filter(|(text, kind)| [CONTROL, USER_DEFINED].contains(kind) && !text.is_empty())
        .map(|(text, kind)| special_token(text, *kind == CONTROL))
        .collect();
    tokenizer.add_special_tokens(&added);
    Tokenizer::new(tokenizer).map(Some)
}

fn byte_level_bpe(
    file: &GgufFile,
    bytes: &[u8],
    tokens: &[&str],
    types: &[u64],
) -> Result<tokenizers::Tokenizer, ModelError> {
    let key = "tokenizer.ggml.pre";
    let name = file.string(key)?.unwrap_or_else(|| {
        tracing::warn!(
            "the file does not say how the model splits text ({key}), so it is split as by GPT-2; if that is wrong, answers get \
             worse, and the model should be converted again"
        );
        "default"
    });
    let words = Words::named(key, name)?;
    let merges = match words.ranked {
        true => merges_of_ranks(&text_bytes(tokens, types), tokens),
        false => listed_merges(file, bytes)?,
    };
    let model = bpe(BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges)
        .ignore_merges(words.ignore_merges)
        .build())?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    assemble(&mut tokenizer, &words.normalizer(), &words.pre_tokenizer(), &byte_level(true))?;
    Ok(tokenizer)
}

/// Returns the bytes of the tokens of text, and no bytes for other tokens.
fn text_bytes(tokens: &[&str], types: &[u64]) -> Vec<Vec<u8>> {
    let alphabet = byte_level_alphabet();
    let bytes = |(id, token): (usize, &&str)| match types.get(id).is_none_or(|kind| *kind == NORMAL) {
        true => token.chars().map(|letter| alphabet.get(&letter).copied()).collect::<Option<Vec<u8>>>(),
        false => None,
    };
    tokens.iter().enumerate().map(|token| bytes(token).unwrap_or_default()).collect()
}

fn listed_merges(file: &GgufFile, bytes: &[u8]) -> Result<Vec<(String, String)>, ModelError> {
    let mut merges = Vec::new();
    for merge in strings(file, bytes, "tokenizer.ggml.merges")? {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            ModelError::config(
                "tokenizer.ggml.merges",
                format!("{merge:?} is not two tokens separated by a space"),
            )
        })?;
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

fn sentence_piece(
    file: &GgufFile,
    bytes: &[u8],
    tokens: &[&str],
    types: &[u64],
) -> Result<tokenizers::Tokenizer, ModelError> {
    let scores = file.array("tokenizer.ggml.scores")?.and_then(|array| array.scalars(bytes));
    let scores: Vec<f64> = scores.into_iter().flatten().filter_map(|value| value.as_f64()).collect();
    if scores.len() != tokens.len() {
        let problem = format!("has {} scores for {} tokens", scores.len(), tokens.len());
        return Err(ModelError::config("tokenizer.ggml.scores", problem));
    }
    let unknown = file.unsigned("tokenizer.ggml.unknown_token_id")?.unwrap_or(0) as usize;
    let mut builder = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges_of_scores(tokens, &scores, types))
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
    let mut tokenizer = tokenizers::Tokenizer::new(bpe(builder.build())?);
    assemble(&mut tokenizer, &normalizer, &Json::Null, &decoder)?;
    Ok(tokenizer)
}

/// Derives merges from scores. SentencePiece merges the pair whose union has the highest score, so every way to split
/// a token in two is a merge, in the order of the tokens' scores.
fn merges_of_scores(tokens: &[&str], scores: &[f64], types: &[u64]) -> Vec<(String, String)> {
    let score_of: HashMap<&str, f64> = tokens.iter().copied().zip(scores.iter().copied()).collect();
    let mut merges = Vec::new();
    for (id, (token, score)) in tokens.iter().zip(scores).enumerate() {
        // Text never merges into a control token. The cost of splitting a token in every way is quadratic in its
        // length, so the length is bounded; longer tokens are markup.
        if types.get(id) == Some(&CONTROL) || token.len() > 256 {
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

fn vocabulary(tokens: &[&str]) -> Vocab {
    tokens.iter().enumerate().map(|(id, text)| ((*text).to_owned(), id as u32)).collect()
}

fn strings<'a>(file: &GgufFile, bytes: &'a [u8], key: &str) -> Result<Vec<&'a str>, ModelError> {
    let array = file.array(key)?.ok_or_else(|| ModelError::config(key, "is missing"))?;
    let strings =
        array.strings(bytes).ok_or_else(|| ModelError::config(key, "is not an array of strings"))?;
    Ok(strings.collect())
}

/// Returns an empty list if the key is missing.
fn integers(file: &GgufFile, bytes: &[u8], key: &str) -> Result<Vec<u64>, ModelError> {
    let Some(array) = file.array(key)? else { return Ok(Vec::new()) };
    let values = array.scalars(bytes).ok_or_else(|| ModelError::config(key, "is not an array of numbers"))?;
    Ok(values.map(|value: Value| value.as_u64().unwrap_or(0)).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::gguf::writer::GgufWriter;
    use crate::tokenizer::Before;
    use crate::tokenizer::SpecialTokens::{Literal, Parse};

    fn rebuilt(writer: &GgufWriter) -> Result<Option<Tokenizer>, ModelError> {
        let bytes = writer.build();
        from_gguf(&GgufFile::parse(Path::new("test.gguf"), &bytes)?, &bytes)
    }

    /// Returns `<unk>`, `<s>`, `</s>`, the 256 bytes, then sentence pieces; a later piece merges later.
    fn sentence_piece() -> GgufWriter {
        let pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "</", "s>"];
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        tokens.extend(["<", "/", "s", ">"].map(str::to_owned));
        let (first, mut types) = (tokens.len(), vec![2, 3, 3]);
        types.extend([6; 256]);
        tokens.extend(pieces.map(str::to_owned));
        types.resize(tokens.len(), 1);
        let scores: Vec<f32> = (0..tokens.len()).map(|id| first as f32 - id.max(first) as f32).collect();
        GgufWriter::default()
            .string("tokenizer.ggml.model", "llama")
            .strings("tokenizer.ggml.tokens", &tokens)
            .floats("tokenizer.ggml.scores", &scores)
            .integers("tokenizer.ggml.token_type", &types)
    }

    #[test]
    fn sentence_pieces_merge_by_score_and_fall_back_to_bytes() {
        let tokenizer = rebuilt(&sentence_piece()).unwrap().unwrap();
        let id = |text: &str| tokenizer.token_id(text).unwrap();
        assert_eq!(tokenizer.encode("hello", Parse).unwrap(), [id("▁hello")]);
        assert_eq!(tokenizer.encode("hello é", Parse).unwrap(), [id("▁hello"), id("▁"), 3 + 0xc3, 3 + 0xa9]);
        assert_eq!(tokenizer.token_bytes(id("▁hello")), Some(b" hello".as_slice()));
        assert_eq!(tokenizer.token_bytes(3 + 0xa9), Some([0xa9].as_slice()));
        let ids = tokenizer.encode("hello é", Parse).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), " hello é");
        let bare =
            rebuilt(&sentence_piece().boolean("tokenizer.ggml.add_space_prefix", false)).unwrap().unwrap();
        assert_eq!(bare.encode("lo", Parse).unwrap(), [id("lo")]);
    }

    #[test]
    fn text_never_merges_into_a_control_token() {
        let tokenizer = rebuilt(&sentence_piece()).unwrap().unwrap();
        assert_eq!(tokenizer.encode("</s>", Parse).unwrap(), [2]);
        let literal = tokenizer.encode("</s>", Literal).unwrap();
        assert_eq!(literal, ["▁", "</", "s>"].map(|text| tokenizer.token_id(text).unwrap()));
    }

    #[test]
    fn only_the_beginning_of_a_section_gets_a_space() {
        let (spaced, bare) = (
            rebuilt(&sentence_piece()).unwrap().unwrap(),
            rebuilt(&sentence_piece().boolean("tokenizer.ggml.add_space_prefix", false)).unwrap().unwrap(),
        );
        let ids = |pieces: &[&str]| -> Vec<u32> {
            pieces.iter().map(|piece| spaced.token_id(piece).unwrap()).collect()
        };
        let text = "hello</s>lo<s>lo<s> lo";
        let encode = |tokenizer: &Tokenizer| {
            tokenizer.encode_sections(text, std::slice::from_ref(&(5..9)), Before::Nothing).unwrap()
        };
        // llama.cpp, too, puts the space before text that begins with one.
        let tokens = ["▁hello", "</", "s>", "lo", "<s>", "▁", "lo", "<s>", "▁", "▁", "lo"];
        assert_eq!(encode(&spaced), ids(&tokens));
        let tokens = ["h", "el", "lo", "</", "s>", "lo", "<s>", "lo", "<s>", "▁", "lo"];
        assert_eq!(encode(&bare), ids(&tokens));
        for tokenizer in [&spaced, &bare] {
            assert_eq!(tokenizer.encode_inside("hello").unwrap(), ids(&["h", "el", "lo"]));
            assert_eq!(tokenizer.encode_inside(" hello").unwrap(), ids(&["▁hello"]));
        }
    }

    #[test]
    fn rejects_inconsistent_arrays_and_names_the_key() {
        for (writer, key) in [
            (sentence_piece().floats("tokenizer.ggml.scores", &[1.0]), "tokenizer.ggml.scores"),
            (sentence_piece().integers("tokenizer.ggml.token_type", &[1]), "tokenizer.ggml.token_type"),
            (sentence_piece().without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
            (sentence_piece().string("tokenizer.ggml.model", "gpt2"), "tokenizer.ggml.merges"),
        ] {
            let message = rebuilt(&writer).expect_err(key).to_string();
            assert!(message.contains(key), "{message}");
        }
        assert!(rebuilt(&GgufWriter::default()).unwrap().is_none());
    }
}
