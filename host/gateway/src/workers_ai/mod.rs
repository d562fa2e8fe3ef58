//! The request and response shapes of Workers AI: an envelope around every response, a native chat schema beside
//! OpenAI's, and numeric error codes.
//!
//! The module `openai` reads the requests; this module only translates names that differ.

pub(crate) mod batch;
pub(crate) mod failure;
pub(crate) mod native;
pub(crate) mod request;
