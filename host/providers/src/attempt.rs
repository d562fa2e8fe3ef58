//! One attempt: sends a request, and reads its answer as it arrives, within bounds on time and size.

use std::time::Duration;

use reqwest::{Response, header::CONTENT_TYPE};
use tokio::time::{Instant, timeout, timeout_at};

use crate::{
    assembly::Assembly,
    breaker::Admission,
    delta::{Decoder, Delta},
    failure::Failure,
    http::{self, Http},
    key::Key,
    metric,
    options::{AnswerBounds, Timeouts, UpstreamKind},
    retry::retry_after,
    sse::EventReader,
    wire,
};

/// Time in which the body of an error has to arrive.
const ERROR_BODY: Duration = Duration::from_secs(5);
/// Time in which the counts have to arrive after the model has ended its answer.
const COUNTS: Duration = Duration::from_secs(5);
/// Maximum time of an answer that is not streamed.
const NOT_STREAMED: Duration = Duration::from_secs(24 * 3600);
/// Time in which the end of the body has to arrive after the answer's, so that the connection can be used again.
const BODY_END: Duration = Duration::from_millis(20);

/// One request as it is sent.
pub(crate) struct Attempt<'a> {
    pub http: &'a Http,
    pub kind: UpstreamKind,
    pub upstream: &'a str,
    pub model: &'a str,
    pub url: reqwest::Url,
    pub key: Option<&'a Key>,
    pub body: Vec<u8>,
    pub streams: bool,
    pub max_tokens: Option<u64>,
    pub timeouts: Timeouts,
    pub bounds: AnswerBounds,
    /// The status of the response, once there is one.
    pub status: Option<u16>,
}

/// The answer that an attempt brought.
pub(crate) struct Arrived {
    pub assembly: Assembly,
    pub first_token: Instant,
}

/// Gets the parts of an answer as they arrive.
pub(crate) trait Listener: Send {
    fn hear(&mut self, delta: Delta, assembly: &Assembly) -> impl Future<Output = ()> + Send;
}

impl Attempt<'_> {
    /// Sends the request, and returns the status of the response too, if there was one. A failure counts against the
    /// upstream's breaker if the upstream is at fault.
    pub(crate) async fn run<L: Listener>(
        mut self,
        mut admission: Admission,
        listener: &mut L,
    ) -> (Result<Arrived, Failure>, Option<u16>) {
        let key = self.key;
        let result = self.exchange(&mut admission, listener).await.map_err(|failure| failure.cleaned(key));
        match &result {
            Ok(_) => admission.succeeded(),
            Err(failure) if failure.is_unhealthy() => admission.failed(Instant::now(), &failure.message()),
            // A server that refuses a request, or is busy, works.
            Err(_) => admission.succeeded(),
        }
        (result, self.status)
    }

    async fn exchange<L: Listener>(
        &mut self,
        admission: &mut Admission,
        listener: &mut L,
    ) -> Result<Arrived, Failure> {
        let sent = Instant::now();
        // An answer that is not streamed has its first part when it is complete: only the request's deadline,
        // which the caller enforces, bounds it.
        let first_token = if self.streams { self.timeouts.first_token } else { NOT_STREAMED };
        let due = sent + first_token;
        let headers = wire::headers(self.kind, self.key);
        let post = self.http.post(self.url.clone(), headers, std::mem::take(&mut self.body));
        let response = timeout_at(due, post).await.map_err(|_| self.slow(sent))??;
        let status = response.status();
        self.status = Some(status.as_u16());
        if !status.is_success() {
            let wait = retry_after(response.headers());
            let body = timeout(ERROR_BODY, http::error_text(response)).await.unwrap_or_default();
            return Err(wire::failure(self.kind, status.as_u16(), &body, wait));
        }
        let mut reading = Reading {
            attempt: self,
            decoder: wire::decoder(self.kind, self.max_tokens),
            assembly: Assembly::default(),
            sent,
            first_token: None,
            admission,
            listener,
        };
        match content_type(&response).as_str() {
            "text/event-stream" => reading.stream(response, due).await?,
            "application/json" => {
                let text = timeout_at(due, http::text(response, self.bounds.answer));
                let text = text.await.map_err(|_| self.slow(sent))??;
                let deltas = reading.decoder.whole(&text)?;
                reading.take(deltas).await?;
            }
            other => {
                let message =
                    format!("the response has the content type {other:?} instead of text/event-stream");
                return Err(Failure::malformed(message));
            }
        }
        let Reading { assembly, first_token, .. } = reading;
        Ok(Arrived { assembly, first_token: first_token.unwrap_or_else(Instant::now) })
    }

    fn slow(&self, since: Instant) -> Failure {
        let message = format!("no part of the answer came within {:.1} s", since.elapsed().as_secs_f64());
        Failure::Slow { message }
    }
}

/// Returns the media type without its parameters.
fn content_type(response: &Response) -> String {
    let value =
        response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// The reading of one answer.
struct Reading<'a, L> {
    attempt: &'a Attempt<'a>,
    decoder: Box<dyn Decoder>,
    assembly: Assembly,
    sent: Instant,
    first_token: Option<Instant>,
    admission: &'a mut Admission,
    listener: &'a mut L,
}

impl<L: Listener> Reading<'_, L> {
    async fn stream(&mut self, mut response: Response, mut due: Instant) -> Result<(), Failure> {
        let bounds = self.attempt.bounds;
        let mut reader = EventReader::new(bounds.event);
        let mut bytes_read = 0;
        loop {
            let chunk = match timeout_at(due, response.chunk()).await {
                // The whole answer has arrived, without its counts.
                Err(_) | Ok(Err(_)) if self.assembly.is_whole() => return Ok(()),
                Err(_) => return Err(self.stalled()),
                Ok(Err(error)) => return Err(http::broken(&error)),
                Ok(Ok(chunk)) => chunk,
            };
            let Some(chunk) = chunk else {
                let cut = reader.finish();
                self.take_events(&mut reader).await?;
                return match self.assembly.is_whole() {
                    true => Ok(()),
                    false if cut => {
                        Err(Failure::unavailable("the connection ended in the middle of an event"))
                    }
                    false => Err(Failure::unavailable("the connection ended in the middle of the answer")),
                };
            };
            bytes_read += chunk.len();
            let pushed = reader.push(&chunk);
            // The events before an error count, however the bytes were split.
            let has_events = self.take_events(&mut reader).await?;
            if self.assembly.is_done() {
                let _ = timeout(BODY_END, response.chunk()).await;
                return Ok(());
            }
            pushed?;
            if bytes_read > bounds.answer {
                return Err(http::too_large(bounds.answer));
            }
            if has_events && self.first_token.is_some() {
                let idle = self.attempt.timeouts.idle;
                due = Instant::now() + if self.assembly.is_whole() { idle.min(COUNTS) } else { idle };
            }
        }
    }

    /// Takes the complete events, and returns whether there were any.
    async fn take_events(&mut self, reader: &mut EventReader) -> Result<bool, Failure> {
        let mut has_events = false;
        while let Some(data) = reader.next() {
            if self.assembly.is_done() || data.is_empty() {
                continue;
            }
            has_events = true;
            let deltas = self.decoder.event(&data)?;
            self.take(deltas).await?;
        }
        Ok(has_events)
    }

    async fn take(&mut self, deltas: Vec<Delta>) -> Result<(), Failure> {
        for delta in deltas {
            self.assembly.add(&delta)?;
            if self.first_token.is_none() && !matches!(delta, Delta::Count(_)) {
                self.begin();
            }
            self.listener.hear(delta, &self.assembly).await;
        }
        Ok(())
    }

    fn begin(&mut self) {
        let now = Instant::now();
        self.first_token = Some(now);
        self.admission.begun();
        let Attempt { upstream, model, .. } = self.attempt;
        let labels = [("upstream", (*upstream).to_owned()), ("model", (*model).to_owned())];
        metrics::histogram!(metric::FIRST_TOKEN, &labels).record((now - self.sent).as_secs_f64());
    }

    fn stalled(&self) -> Failure {
        match self.first_token {
            None => self.attempt.slow(self.sent),
            Some(_) => {
                let idle = self.attempt.timeouts.idle.as_secs_f64();
                Failure::unavailable(format!("the answer stalled: nothing came for {idle:.1} s"))
            }
        }
    }
}
