//! From rendered text to tokens.
//!
//! Invariant: the template's text is encoded with its special tokens, what people and tools said never becomes one.
//! Where nothing said contains a special token's text, the tokens are those of the whole text in one piece.

use skep_model::{SpecialTokens, Tokenizer};

use super::message::{ChatMessage, ToolSpec};
use super::render::{self, Rendering};
use crate::{Engine, EngineError};

#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
}

/// The prompt of a whole conversation, up to where the assistant is to go on.
pub(super) fn render_and_encode(
    engine: &Engine,
    messages: &[ChatMessage],
    tools: &[ToolSpec],
) -> Result<Prompt, EngineError> {
    let rendering = render::render(engine.template(), engine.tokenizer(), messages, tools)?;
    let tokens = encode_whole(engine, &rendering)?;
    Ok(Prompt { text: rendering.text, tokens })
}

pub(super) fn encode_whole(engine: &Engine, rendering: &Rendering) -> Result<Vec<u32>, EngineError> {
    let info = engine.info();
    let mut tokens = encode_from(engine.tokenizer(), rendering, 0)?;
    if let Some(bos) = info.bos.filter(|bos| info.add_bos && tokens.first() != Some(bos)) {
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// The tokens of the text from the byte `start` on.
pub(super) fn encode_from(
    tokenizer: &Tokenizer,
    rendering: &Rendering,
    start: usize,
) -> Result<Vec<u32>, EngineError> {
    let mut tokens = Vec::new();
    let mut at = start;
    for literal in rendering.literals.iter().filter(|literal| literal.end > start) {
        let begin = literal.start.max(start);
        if at < begin {
            tokens.extend(tokenizer.encode(&rendering.text[at..begin], SpecialTokens::Parse)?);
        }
        tokens.extend(tokenizer.encode(&rendering.text[begin..literal.end], SpecialTokens::Literal)?);
        at = literal.end;
    }
    if at < rendering.text.len() {
        tokens.extend(tokenizer.encode(&rendering.text[at..], SpecialTokens::Parse)?);
    }
    Ok(tokens)
}
