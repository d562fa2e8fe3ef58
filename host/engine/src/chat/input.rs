//! The input of a request: messages, or a text to continue.

use serde::{Deserialize, Serialize};

use super::image::Image;
use super::message::ChatMessage;
use super::options::Opening;
use super::remote_answer::TOKEN_BYTES;
use crate::EngineError;

/// Estimated tokens of markup around each message and tool.
const MARKUP_TOKENS: usize = 8;
/// Estimated tokens of an image. Servers count from less than a hundred to several thousand, by its size.
const IMAGE_TOKENS: usize = 1_000;

/// The input of a request to a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Messages(Vec<ChatMessage>),
    /// A text that the model continues as it is, without a template.
    Text(String),
}

impl Input {
    /// Returns the messages, of which a text has none.
    pub fn messages(&self) -> &[ChatMessage] {
        match self {
            Input::Messages(messages) => messages,
            Input::Text(_) => &[],
        }
    }

    /// Returns the images, each with the index of its message.
    pub fn images(&self) -> impl Iterator<Item = (usize, &Image)> {
        images(self.messages())
    }

    /// Estimates the tokens of the prompt from its text.
    pub fn estimated_tokens(&self, opening: Opening<'_>) -> usize {
        match self {
            Input::Messages(messages) => estimated_tokens(messages, opening),
            Input::Text(text) => text.len().div_ceil(TOKEN_BYTES),
        }
    }

    /// Estimates the tokens of the prompt without earlier reasoning, which most servers do not get back.
    pub fn estimated_tokens_without_reasoning(&self, opening: Opening<'_>) -> usize {
        match self {
            Input::Messages(messages) => estimate(messages, opening, ChatMessage::content_bytes),
            Input::Text(_) => self.estimated_tokens(opening),
        }
    }
}

impl From<Vec<ChatMessage>> for Input {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Input::Messages(messages)
    }
}

/// Refuses messages with images, for a model that sees none.
pub fn refuse_images(messages: &[ChatMessage], model: &str) -> Result<(), EngineError> {
    match images(messages).next() {
        None => Ok(()),
        Some((message, image)) => {
            Err(refusal(message, image, &format!("the model {model} accepts only text")))
        }
    }
}

/// Returns the error of an image that a model does not accept.
pub fn refusal(message: usize, image: &Image, reason: &str) -> EngineError {
    let parameter = format!("messages[{message}].content[{}]", image.part);
    EngineError::InvalidRequest { parameter, message: format!("an image is not accepted: {reason}") }
}

/// Estimates the tokens of a prompt from its text, for models whose tokenizer is elsewhere.
pub fn estimated_tokens(messages: &[ChatMessage], opening: Opening<'_>) -> usize {
    estimate(messages, opening, ChatMessage::text_bytes)
}

fn estimate(messages: &[ChatMessage], opening: Opening<'_>, bytes: fn(&ChatMessage) -> usize) -> usize {
    let said = messages.iter().chain(opening.examples).map(bytes);
    let described = opening
        .tools
        .iter()
        .map(|tool| tool.name.len() + tool.description.len() + tool.parameters.to_string().len());
    let texts: usize = said.chain(described).map(|bytes| bytes.div_ceil(TOKEN_BYTES) + MARKUP_TOKENS).sum();
    texts + images(messages).count() * IMAGE_TOKENS
}

fn images(messages: &[ChatMessage]) -> impl Iterator<Item = (usize, &Image)> {
    let numbered = messages.iter().enumerate();
    numbered.flat_map(|(index, message)| message.images.iter().map(move |image| (index, image)))
}
