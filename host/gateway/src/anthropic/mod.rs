//! Anthropic's request and response shapes.

mod content;
pub(crate) mod error;
pub(crate) mod request;
pub(crate) mod response;
