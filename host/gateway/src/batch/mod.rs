//! Batches of requests in files, as OpenAI's API has them: `request` reads a file, `answer` writes the results, and `shown` is
//! what clients see of a batch.

pub(crate) mod answer;
pub(crate) mod request;
pub(crate) mod shown;
