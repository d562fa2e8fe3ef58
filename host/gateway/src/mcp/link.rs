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
    /// Whether the agent counts its progress itself.
    has_reported: AtomicBool,
}

/// The client's end of the connection.
pub(super) struct ClientChannel {
    outgoing: mpsc::Receiver<Outgoing>,
    peer: Peer<RoleServer>,
    token: Option<ProgressToken>,
    logger: String,
    /// The progress that was last reported to the client.
    reported: Option<f64>,
}

enum Outgoing {
    Log { level: LoggingLevel, message: String },
    Progress(TurnProgress),
    Question { question: ClientQuestion, answer: oneshot::Sender<Result<Value, ClientError>> },
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
        has_reported: AtomicBool::new(false),
    };
    (
        Arc::new(link),
        ClientChannel { outgoing, peer: peer.clone(), token, logger: logger.to_owned(), reported: None },
    )
}

impl Link {
    pub(super) fn can_elicit(&self) -> bool {
        self.can_elicit
    }

    /// Returns whether the agent counts its progress itself, so that other counts would contradict it.
    pub(super) fn has_reported(&self) -> bool {
        self.has_reported.load(Ordering::Relaxed)
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
        self.has_reported.store(true, Ordering::Relaxed);
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
        let sent = match outgoing {
            Outgoing::Log { level, message } => {
                let line = LoggingMessageNotificationParam::new(level, Value::from(message));
                let sent = self.peer.notify_logging_message(line.with_logger(&self.logger));
                tokio::time::timeout(NOTIFY_TIMEOUT, sent).await
            }
            Outgoing::Progress(TurnProgress { progress, total, message }) => {
                // The protocol demands that progress grows.
                let grows = self.reported.is_none_or(|reported| progress > reported);
                let Some(token) = self.token.clone().filter(|_| grows) else { return };
                self.reported = Some(progress);
                let mut notice = ProgressNotificationParam::new(token, progress);
                notice.total = total;
                notice.message = message;
                tokio::time::timeout(NOTIFY_TIMEOUT, self.peer.notify_progress(notice)).await
            }
            Outgoing::Question { .. } => return,
        };
        if !matches!(sent, Ok(Ok(()))) {
            tracing::debug!("a message for a client was not sent");
        }
    }
}

/// Asks the client.
pub(super) async fn ask(peer: &Peer<RoleServer>, question: ClientQuestion) -> Result<Value, ClientError> {
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
    match peer.send_request(request).await {
        Ok(ClientResult::ElicitResult(answer)) => Ok(json(&answer)),
        Ok(ClientResult::CreateMessageResult(answer)) => Ok(json(&answer)),
        Ok(_) => Err(ClientError::Failed("the client's answer does not fit the question".to_owned())),
        Err(ServiceError::McpError(error)) => Err(ClientError::Failed(error.message.into_owned())),
        Err(error) => Err(ClientError::Unavailable(format!("the client cannot be asked: {error}"))),
    }
}

fn parameters<T: DeserializeOwned>(asked: Value) -> Result<T, ClientError> {
    serde_path_to_error::deserialize(asked)
        .map_err(|error| ClientError::Invalid(format!("at `{}`: {}", error.path(), error.inner())))
}

fn json(answer: &impl Serialize) -> Value {
    serde_json::to_value(answer).expect("strings, numbers and JSON are always JSON")
}
