//! OpenAI's `/chat/completions`, which most servers of models have, and its `/completions`.

mod request;
mod response;
mod strict;

pub(crate) use request::{body, call, content, text_body, tools};
pub(crate) use response::{OpenAiDecoder, chunk, failure, usage};
