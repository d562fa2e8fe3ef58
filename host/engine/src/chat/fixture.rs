//! A model that produces the text a test scripted for it, behind the real engine, tokenizer and template.

use serde_json::{Value, json};
use skep_model::{ChatTemplate, SpecialTokens, Tokenizer};

use crate::{Engine, EngineOptions};

#[path = "../../../../tests/fixtures/scripted_model.rs"]
mod scripted_model;

pub(crate) use scripted_model::{EOS, tokenizer as tokenizer_with};

pub(crate) fn tokenizer() -> Tokenizer {
    tokenizer_with(&[])
}

/// Returns a tokenizer of letters that puts a space before a text as this pre-tokenizer or normalizer does, with these special
/// tokens.
pub(crate) fn spaced_tokenizer(space: &Value, specials: &[&str]) -> Tokenizer {
    let letters = (' '..='~').chain(['\n', '▁']).map(String::from);
    let merges = ["▁ t", "▁t he", "h e", "< /", "s >", "▁ <", "▁ h"];
    let merged = merges.map(|merge| merge.replace(' ', ""));
    let names = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain(letters).chain(merged);
    let vocabulary: serde_json::Map<String, Value> =
        names.zip(0..).map(|(text, id)| (text, json!(id))).collect();
    let added = |content: &&str| {
        json!({"id": vocabulary[*content], "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let added: Vec<Value> = specials.iter().map(added).collect();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let (normalizers, pre_tokenizer) = match space["type"] == "Prepend" {
        true => (json!([space, replace]), &Value::Null),
        false => (json!([replace]), space),
    };
    let json = json!({"version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": merges}});
    Tokenizer::from_json(json.to_string().as_bytes()).expect("a valid tokenizer")
}

/// Returns the steps by which vocabularies put a space before a text.
pub(crate) fn spaces() -> [Value; 3] {
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    [json!({"type": "Prepend", "prepend": "▁"}), metaspace("always"), metaspace("first")]
}

/// Starts an engine whose model produces `scripts`, one for each generation.
pub(super) fn engine(template: ChatTemplate, scripts: &[&str]) -> Engine {
    engine_with(template, scripts, EngineOptions::default())
}

pub(super) fn engine_with(template: ChatTemplate, scripts: &[&str], options: EngineOptions) -> Engine {
    engine_of(tokenizer(), SpecialTokens::Literal, template, scripts, options)
}

/// Starts an engine with another tokenizer. `special` says whether scripts contain special tokens.
pub(super) fn engine_of(
    tokenizer: Tokenizer,
    special: SpecialTokens,
    template: ChatTemplate,
    scripts: &[&str],
    options: EngineOptions,
) -> Engine {
    let model = scripted_model::model(tokenizer, special, template, scripts);
    Engine::start(model, options).expect("the engine starts")
}
