//! OpenAI's `/chat/completions`, which most servers of models have.

mod request;
mod response;
mod strict;

pub(crate) use request::{body, call, tools};
pub(crate) use response::{OpenAiDecoder, chunk, failure, usage};
