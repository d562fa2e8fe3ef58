//! Connects a running turn with the client that called it: log lines, progress, and questions to the client.
//!
//! Messages of a turn wait in a bounded queue, which the task of the call empties. The protocol crate sends a question on the
//! stream of the request that it belongs to only from that task.

// The protocol's next revision deprecates log messages and sampling, without a successor for the revisions in use.
#![allow(deprecated)]

use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use rmcp::{
    Peer, RoleServer, ServiceError,
    model::{
        ClientResult, CreateMessageRequestParams, ElicitRequestParams, LoggingLevel,
        LoggingMessageNotificationParam, ProgressNotificationParam, ProgressToken, Request, ServerRequest,
    },
    service::{PeerRequestOptions, RequestHandle},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use skep_runtime::{Asked, ClientError, ClientQuestion, TurnClient, TurnProgress};
use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::Duration,
};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of messages of a turn that wait to be sent. Log lines and progress beyond it are lost.
const WAITING: usize = 256;
/// Timeout of sending a notification.
pub(super) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(10);

/// The least severe level of the log lines that a client wants, which it may change at any time.
#[derive(Clone, Debug)]
pub(super) struct LeastLevel(Arc<AtomicU8>);

impl Default for LeastLevel {
    fn default() -> Self {
        LeastLevel(Arc::new(AtomicU8::new(LoggingLevel::Info as u8)))
    }
}

impl LeastLevel {
    pub(super) fn set(&self, level: LoggingLevel) {
        self.0.store(level as u8, Ordering::Relaxed);
    }

    fn includes(&self, level: LoggingLevel) -> bool {
        level as u8 >= self.0.load(Ordering::Relaxed)
    }
}

/// The turn's end of the connection.
#[derive(Debug)]
pub(super) struct Link {
    outgoing: mpsc::Sender<Outgoing>,
    least_level: LeastLevel,
    can_elicit: bool,
    can_sample: bool,
    /// Is true while text is sent as progress, because the client asked for progress and the agent does not report its own.
    sends_text: AtomicBool,
}

/// The client's end of the connection.
pub(super) struct ClientChannel {
    outgoing: mpsc::Receiver<Outgoing>,
    peer: Peer<RoleServer>,
    token: Option<ProgressToken>,
    logger: String,
    progress: SentProgress,
}

/// The progress that was sent to the client. The protocol demands that it grows, whoever counts it.
#[derive(Default)]
struct SentProgress {
    last: Option<f64>,
    /// Number of characters of the text that was sent. The agent's own progress counts on from there.
    characters: f64,
}

enum Outgoing {
    Log {
        level: LoggingLevel,
        message: String,
    },
    /// Text that is sent as progress. The sender is dropped once that is done.
    Text {
        text: String,
        unsent: oneshot::Sender<()>,
    },
    /// Progress that the agent counts itself.
    Progress(TurnProgress),
    Question {
        question: ClientQuestion,
        answer: oneshot::Sender<Result<Value, ClientError>>,
    },
}

/// Opens the connection between a client and the turn that it calls. `logger` is the name under which log lines are sent.
pub(super) fn open(
    peer: &Peer<RoleServer>,
    token: Option<ProgressToken>,
    least_level: LeastLevel,
    logger: &str,
) -> (Arc<Link>, ClientChannel) {
    let (sender, outgoing) = mpsc::channel(WAITING);
    let client = peer.peer_info();
    let can = client.as_ref().map(|client| &client.capabilities);
    let link = Link {
        outgoing: sender,
        least_level,
        can_elicit: can.is_some_and(|can| can.elicitation.is_some()),
        can_sample: can.is_some_and(|can| can.sampling.is_some()),
        sends_text: AtomicBool::new(token.is_some()),
    };
    let (peer, logger, progress) = (peer.clone(), logger.to_owned(), SentProgress::default());
    (Arc::new(link), ClientChannel { outgoing, peer, token, logger, progress })
}

impl Link {
    pub(super) fn can_elicit(&self) -> bool {
        self.can_elicit
    }

    /// Sends text as progress, unless the agent counts its progress itself, which the text would contradict. Returns once the
    /// text is sent, so that text that arrives in the meantime becomes one notification.
    pub(super) async fn text(&self, text: String) {
        if text.is_empty() || !self.sends_text.load(Ordering::Relaxed) {
            return;
        }
        let (unsent, sent) = oneshot::channel();
        if self.outgoing.send(Outgoing::Text { text, unsent }).await.is_ok() {
            // The channel carries nothing, it closes.
            let _ = sent.await;
        }
    }

    fn send(&self, outgoing: Outgoing) {
        if self.outgoing.try_send(outgoing).is_err() {
            tracing::debug!("a message for a client is lost: the client reads too slowly, or is gone");
        }
    }

    async fn question(&self, question: ClientQuestion) -> Result<Value, ClientError> {
        let (able, what) = match &question {
            ClientQuestion::Elicit(_) => (self.can_elicit, "fill in forms (the capability elicitation)"),
            ClientQuestion::Sample(_) => (self.can_sample, "make completions (the capability sampling)"),
        };
        if !able {
            return Err(ClientError::Unavailable(format!(
                "the client that waits for this turn does not {what}"
            )));
        }
        let gone = || ClientError::Unavailable("the client no longer waits for this turn".to_owned());
        let (answer, answered) = oneshot::channel();
        self.outgoing.send(Outgoing::Question { question, answer }).await.map_err(|_closed| gone())?;
        answered.await.unwrap_or_else(|_dropped| Err(gone()))
    }
}

impl TurnClient for Link {
    fn log(&self, level: &'static str, message: &str) {
        let level = match level {
            "debug" => LoggingLevel::Debug,
            "warn" => LoggingLevel::Warning,
            "error" => LoggingLevel::Error,
            _ => LoggingLevel::Info,
        };
        if self.least_level.includes(level) {
            self.send(Outgoing::Log { level, message: message.to_owned() });
        }
    }

    fn progress(&self, progress: TurnProgress) {
        self.sends_text.store(false, Ordering::Relaxed);
        self.send(Outgoing::Progress(progress));
    }

    fn ask(&self, question: ClientQuestion) -> Asked<'_> {
        self.question(question).boxed()
    }
}

impl ClientChannel {
    /// Passes on what the turn says while `work` follows it, and what is left at the end.
    pub(super) async fn carry<T>(mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let mut questions = FuturesUnordered::new();
        let done = loop {
            tokio::select! {
                biased;
                Some(outgoing) = self.outgoing.recv() => match outgoing {
                    Outgoing::Question { question, answer } => {
                        let peer = self.peer.clone();
                        questions.push(async move {
                            // A turn that has ended does not wait for the answer.
                            let _ = answer.send(ask(&peer, question).await);
                        });
                    }
                    outgoing => self.notify(outgoing).await,
                },
                done = &mut work => break done,
                Some(()) = questions.next() => {}
            }
        };
        while let Ok(outgoing) = self.outgoing.try_recv() {
            self.notify(outgoing).await;
        }
        done
    }

    /// Sends a log line or progress.
    async fn notify(&mut self, outgoing: Outgoing) {
        let is_sent = match outgoing {
            Outgoing::Log { level, message } => {
                let line = LoggingMessageNotificationParam::new(level, Value::from(message));
                let sent = self.peer.notify_logging_message(line.with_logger(&self.logger));
                matches!(tokio::time::timeout(NOTIFY_TIMEOUT, sent).await, Ok(Ok(())))
            }
            Outgoing::Text { text, unsent: _unsent } => match self.progress.text(&text) {
                Some(progress) => self.notify_progress(progress, None, Some(text)).await,
                None => return,
            },
            Outgoing::Progress(TurnProgress { progress, total, message }) => {
                match self.progress.report(progress, total) {
                    Some((progress, total)) => self.notify_progress(progress, total, message).await,
                    None => return,
                }
            }
            Outgoing::Question { .. } => return,
        };
        if !is_sent {
            tracing::debug!("a message for a client was not sent");
        }
    }

    /// Sends progress to a client that asked for it. One that does not read it gets no more of it.
    async fn notify_progress(&mut self, progress: f64, total: Option<f64>, message: Option<String>) -> bool {
        let Some(token) = self.token.clone() else { return true };
        let mut notice = ProgressNotificationParam::new(token, progress);
        notice.total = total;
        notice.message = message;
        let sent = tokio::time::timeout(NOTIFY_TIMEOUT, self.peer.notify_progress(notice)).await;
        let is_sent = matches!(sent, Ok(Ok(())));
        if !is_sent {
            self.token = None;
        }
        is_sent
    }
}

impl SentProgress {
    /// Returns the progress that counts this text, too, if it grows.
    fn text(&mut self, text: &str) -> Option<f64> {
        let characters = self.characters + text.chars().count() as f64;
        self.grows_to(characters)?;
        self.characters = characters;
        Some(characters)
    }

    /// Returns the progress and the total for those that the agent reports, if the progress grows.
    fn report(&mut self, progress: f64, total: Option<f64>) -> Option<(f64, Option<f64>)> {
        let progress = self.characters + progress;
        self.grows_to(progress)?;
        Some((progress, total.map(|total| self.characters + total)))
    }

    fn grows_to(&mut self, progress: f64) -> Option<()> {
        let grows = self.last.is_none_or(|last| progress > last);
        grows.then(|| self.last = Some(progress))
    }
}

/// Asks the client, and waits for the answer.
async fn ask(peer: &Peer<RoleServer>, question: ClientQuestion) -> Result<Value, ClientError> {
    answer(send(peer, question).await?.await_response().await)
}

/// Sends the client a question. The task of a request has to call it, so that the question belongs to the request.
pub(super) async fn send(
    peer: &Peer<RoleServer>,
    question: ClientQuestion,
) -> Result<RequestHandle<RoleServer>, ClientError> {
    let request = match question {
        ClientQuestion::Elicit(asked) => {
            ServerRequest::ElicitRequest(Request::new(parameters::<ElicitRequestParams>(asked)?))
        }
        ClientQuestion::Sample(asked) => {
            let asked: CreateMessageRequestParams = parameters(asked)?;
            asked.validate().map_err(ClientError::Invalid)?;
            ServerRequest::CreateMessageRequest(Request::new(asked))
        }
    };
    peer.send_cancellable_request(request, PeerRequestOptions::no_options()).await.map_err(not_asked)
}

/// Reads the client's answer to a question.
pub(super) fn answer(answered: Result<ClientResult, ServiceError>) -> Result<Value, ClientError> {
    match answered {
        Ok(ClientResult::ElicitResult(answer)) => Ok(json(&answer)),
        Ok(ClientResult::CreateMessageResult(answer)) => Ok(json(&answer)),
        Ok(_) => Err(ClientError::Failed("the client's answer does not fit the question".to_owned())),
        Err(ServiceError::McpError(error)) => Err(ClientError::Failed(error.message.into_owned())),
        Err(error) => Err(not_asked(error)),
    }
}

fn not_asked(error: ServiceError) -> ClientError {
    ClientError::Unavailable(format!("the client cannot be asked: {error}"))
}

fn parameters<T: DeserializeOwned>(asked: Value) -> Result<T, ClientError> {
    serde_path_to_error::deserialize(asked)
        .map_err(|error| ClientError::Invalid(format!("at `{}`: {}", error.path(), error.inner())))
}

fn json(answer: &impl Serialize) -> Value {
    serde_json::to_value(answer).expect("strings, numbers and JSON are always JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_grows_when_the_agent_counts_after_text_was_sent() {
        let mut sent = SentProgress::default();
        assert_eq!((sent.text("four"), sent.text("zwölf")), (Some(4.0), Some(9.0)));
        assert_eq!(sent.report(1.0, Some(3.0)), Some((10.0, Some(12.0))));
        assert_eq!(sent.report(1.0, Some(3.0)), None, "it is the same");
        assert_eq!(sent.report(0.5, None), None, "it is less");
        assert_eq!(sent.report(3.0, Some(3.0)), Some((12.0, Some(12.0))));
        assert_eq!(sent.text("so"), None, "text that was on its way when the agent reported is less");
    }

    #[test]
    fn progress_that_only_the_agent_counts_stays_as_it_is() {
        let mut sent = SentProgress::default();
        assert_eq!(sent.report(0.0, Some(1.0)), Some((0.0, Some(1.0))));
        assert_eq!(sent.report(0.5, Some(1.0)), Some((0.5, Some(1.0))));
    }
}
