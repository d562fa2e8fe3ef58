//! Closing: the guest has exited, and its reply and its changes are checked before they are committed.

use super::{Run, State, committing::Committing, ended::Ended, failing::Failing, opened::Opened};
use crate::{Json, RuntimeError, capability::TurnContext, feed::Hold};

/// A turn whose guest is not running anymore.
///
/// Durable: the running row and the journal, which is complete once it is closed. The reply and
/// everything that the guest changed are only in memory.
pub(super) struct Closing {
    pub(super) opened: Opened,
    pub(super) answer: Result<Replied, FailedReply>,
}

/// The guest's reply, with what the guest changed.
pub(super) struct Replied {
    pub(super) text: String,
    pub(super) data: Option<Json>,
    pub(super) context: Box<TurnContext>,
}

/// The reason why a turn has no reply that can be committed.
pub(super) struct FailedReply {
    pub(super) error: RuntimeError,
    /// The guest's log and changes. `None` if the turn was suspended.
    pub(super) context: Option<Box<TurnContext>>,
}

impl Closing {
    /// Goes to `Committing` if there is a reply and the guest repeated its journal. Otherwise the
    /// turn is `Failing`, or left open if the next host can finish it.
    pub(super) async fn close(self, run: &Run<'_>) -> State {
        let Closing { opened, answer } = self;
        let answer = answer.and_then(|replied| {
            let check = match opened.assignment.tool() {
                Some(tool) => opened.agent.check_result(tool, replied.data.as_ref()),
                None => Ok(()),
            };
            replied.when(check).map(|((), replied)| replied)
        });
        let answer = match (opened.journal.close().await, answer) {
            (closed, Ok(replied)) => {
                let check = closed.and_then(|last_id| opened.journal.check_replayed().map(|()| last_id));
                replied.when(check)
            }
            (Ok(_), Err(no_reply)) => Err(no_reply),
            // If the journal stopped, its error is the reason why the guest was stopped.
            (Err(error), Err(no_reply)) => Err(FailedReply { error, ..no_reply }),
        };
        let called = &opened.turn.tools.called;
        match answer {
            Ok((last_id, replied)) => {
                called.cancel(&run.actor.host.live);
                State::Committing(Committing { opened, replied, last_id })
            }
            Err(FailedReply { error, .. }) if continues_later(run, &opened, &error) => {
                // The turn is resumed when the host starts again.
                Ended::LeftOpen(run.actor.host.shutdown.admit().err().unwrap_or(error)).into()
            }
            Err(FailedReply { error, mut context }) => {
                called.cancel(&run.actor.host.live);
                let logs = context.as_mut().map(|context| context.log.take()).unwrap_or_default();
                State::Failing(Failing::opened(opened, logs, error))
            }
        }
    }
}

impl Replied {
    /// Returns the reply with the result of a check, or no reply if the check failed.
    fn when<T>(self, check: Result<T, RuntimeError>) -> Result<(T, Self), FailedReply> {
        match check {
            Ok(checked) => Ok((checked, self)),
            Err(error) => Err(FailedReply { error, context: Some(self.context) }),
        }
    }
}

/// Returns whether the turn was only interrupted, because the host shuts down or nobody wants the
/// session anymore. A turn that depends on its caller's connection
/// never continues, since the connection ends with the host.
fn continues_later(run: &Run<'_>, opened: &Opened, error: &RuntimeError) -> bool {
    opened.assignment.hold == Hold::Watches
        && (matches!(error, RuntimeError::ShuttingDown) || run.actor.is_gone())
}
