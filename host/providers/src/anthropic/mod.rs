//! Anthropic's `/v1/messages`.

mod request;
mod response;

pub(crate) use request::body;
pub(crate) use response::{AnthropicDecoder, failure};
