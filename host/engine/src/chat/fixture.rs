//! A model that produces the text a test scripted for it, behind the real engine, tokenizer and template.

use skep_model::{ChatTemplate, SpecialTokens, Tokenizer};

use crate::{Engine, EngineOptions};

#[path = "../../../../tests/fixtures/scripted_model.rs"]
mod scripted_model;

pub(crate) use scripted_model::{EOS, tokenizer as tokenizer_with};

pub(crate) fn tokenizer() -> Tokenizer {
    tokenizer_with(&[])
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
