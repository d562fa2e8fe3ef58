//! The routes of Workers AI: inference in its envelope, and batches.

use anyhow::{Context as _, Result, bail};
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skep_api::{AiBatchAnswers, AiChunk, AiEnvelope, AiError, BatchStatus, QueuedBatch};

use super::{Client, events::EventParser, send};
use crate::failure::Refused;

/// A streamed answer. Dropping it cancels the generation.
pub struct AiReader {
    response: Response,
    parser: EventParser,
    done: bool,
}

impl Client {
    /// Runs a model and returns the `result` of its answer.
    pub async fn ai_run(&self, model: &str, body: &Value) -> Result<Value> {
        self.envelope(self.request(Method::POST, &run_path(model))?.json(body)).await
    }

    /// Runs a model and streams its answer; `body` has to ask for a stream.
    pub async fn ai_stream(&self, model: &str, body: &Value) -> Result<AiReader> {
        let response = send(&self.base, self.request(Method::POST, &run_path(model))?.json(body)).await?;
        if response.status().is_success() {
            return Ok(AiReader { response, parser: EventParser::default(), done: false });
        }
        let answer = open(&self.base, response).await?;
        bail!("{} answered a request for a stream with {answer}", self.base)
    }

    /// Queues requests as a batch, which the host works on when it has capacity.
    pub async fn ai_queue(&self, model: &str, requests: &[Value]) -> Result<QueuedBatch> {
        let request = self.request(Method::POST, &run_path(model))?.query(&[("queueRequest", "true")]);
        self.envelope(request.json(&json!({ "requests": requests }))).await
    }

    /// Returns the state of a batch.
    pub async fn ai_batch(&self, id: &str) -> Result<BatchStatus> {
        self.envelope(self.request(Method::GET, &["ai", "batches", id])?).await
    }

    /// Cancels a batch.
    pub async fn ai_cancel(&self, id: &str) -> Result<BatchStatus> {
        self.envelope(self.request(Method::DELETE, &["ai", "batches", id])?).await
    }

    /// Returns the answers of a finished batch.
    pub async fn ai_answers(&self, batch: &BatchStatus) -> Result<AiBatchAnswers> {
        let body = json!({"request_id": batch.request_id});
        self.envelope(self.request(Method::POST, &run_path(&batch.model))?.json(&body)).await
    }

    async fn envelope<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let result = open(&self.base, send(&self.base, request).await?).await?;
        serde_json::from_value(result)
            .with_context(|| format!("{} answered in a format that this `skep` does not know", self.base))
    }
}

/// Splits the name of a model at its slashes.
fn run_path(model: &str) -> Vec<&str> {
    ["ai", "run"].into_iter().chain(model.split('/')).collect()
}

/// Returns the result in the envelope, or its error.
async fn open(base: &reqwest::Url, response: Response) -> Result<Value> {
    let status = response.status();
    let body = response.bytes().await.context("the host's answer broke off")?;
    match serde_json::from_slice::<AiEnvelope<Value>>(&body) {
        Ok(AiEnvelope { success: true, result, .. }) => Ok(result),
        Ok(AiEnvelope { errors, .. }) => refuse(errors),
        Err(_) => bail!("{base} answered {status}, but not as a Skep host does"),
    }
}

fn refuse<T>(errors: Vec<AiError>) -> Result<T> {
    let first = errors.into_iter().next().context("the host refused the request and gave no reason")?;
    bail!(Refused { code: first.code.to_string(), message: first.message })
}

impl AiReader {
    /// Returns the next chunk of the answer's text; `None` after the last one.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            while let Some((_, data)) = self.parser.pop() {
                if data == "[DONE]" {
                    self.done = true;
                    continue;
                }
                let chunk: AiChunk = serde_json::from_str(&data)
                    .with_context(|| format!("not a chunk of an answer: {data}"))?;
                if !chunk.errors.is_empty() {
                    return refuse(chunk.errors);
                }
                if let Some(text) = chunk.response.filter(|text| !text.is_empty()) {
                    return Ok(Some(text));
                }
            }
            match self.response.chunk().await.context("the stream broke off")? {
                Some(bytes) => self.parser.push(&bytes)?,
                None if self.done => return Ok(None),
                None => bail!("the host ended the stream before the answer was done"),
            }
        }
    }
}
