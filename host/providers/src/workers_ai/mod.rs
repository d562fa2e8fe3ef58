//! `/ai/run/MODEL` of Cloudflare Workers AI. Its larger models answer in OpenAI's schema, the others in one of their
//! own; both are read.

mod request;
mod response;

pub(crate) use request::body;
pub(crate) use response::{WorkersAiDecoder, failure};
