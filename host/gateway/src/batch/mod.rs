//! Batches of requests in files, as OpenAI's API has them: `request` reads a file, in which `line` reads a request for an
//! `endpoint`, `answer` writes the results, and `shown` is what clients see of a batch.

pub(crate) mod answer;
pub(crate) mod endpoint;
pub(crate) mod line;
pub(crate) mod request;
pub(crate) mod shown;
