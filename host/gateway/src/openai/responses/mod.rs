//! OpenAI's Responses API: requests, the items of inputs and outputs, and events.

mod carried;
mod input;
mod item_id;
mod output;
pub(crate) mod request;
pub(crate) mod stored;
mod text_format;
mod tools;
pub(crate) mod writer;

pub(crate) use input::{Input, InputItem};
