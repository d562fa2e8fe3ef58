//! The events of a turn for a follower on another host.

use super::{IdleWatch, RunHandle, Suspension};
use crate::{RunEvent, cluster::RemoteEvent};

impl RunHandle {
    /// Returns the next event with its number, a change of the suspension, or the end. `None` after the end.
    ///
    /// A suspension of the turn ahead counts as one of this turn, because a follower elsewhere knows no other turn of the session.
    pub async fn next_remote(&mut self) -> Option<RemoteEvent> {
        let (mut idle, reported) = (self.idle_watch(), self.reported.clone());
        tokio::select! {
            // A suspension follows the events that led to it.
            biased;
            event = self.next() => Some(match event? {
                Ok(RunEvent::Done(outcome)) => RemoteEvent::Ended { id: self.last_id.unwrap_or_default(), outcome },
                Ok(event) => RemoteEvent::Event { id: self.last_id.unwrap_or_default(), event },
                Err(error) => RemoteEvent::Failed {
                    code: error.code().to_owned(),
                    message: error.to_string(),
                    retry_after_ms: error.retry_after_ms(),
                },
            }),
            suspension = changed(&mut idle, reported) => {
                self.reported = suspension.clone();
                Some(match suspension {
                    Some(Suspension { approval }) => RemoteEvent::Suspended { approval },
                    None => RemoteEvent::Resumed,
                })
            }
        }
    }
}

/// Resolves once the suspension of a turn, or of the one that it waits behind, differs from the reported one.
async fn changed(idle: &mut IdleWatch, reported: Option<Suspension>) -> Option<Suspension> {
    loop {
        let suspension = idle.current();
        if suspension != reported {
            return suspension;
        }
        idle.changes().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Outcome, RuntimeError,
        feed::{Feed, Hold, SuspensionWatch},
    };
    use tokio::sync::watch;

    fn suspended(approval: &str) -> RemoteEvent {
        RemoteEvent::Suspended { approval: approval.into() }
    }

    #[tokio::test]
    async fn events_suspensions_and_the_end_arrive_in_their_order() {
        let feed = Feed::new("t".into());
        let mut handle = feed.follow(Hold::Watches);
        let started = RunEvent::Started { turn: 1 };
        feed.publish([(0, started.clone())]);
        feed.set_suspension(Some(Suspension { approval: "t-1".into() }));
        assert_eq!(handle.next_remote().await, Some(RemoteEvent::Event { id: 0, event: started }));
        assert_eq!(handle.next_remote().await, Some(suspended("t-1")));
        feed.set_suspension(None);
        assert_eq!(handle.next_remote().await, Some(RemoteEvent::Resumed));
        let outcome =
            Outcome { text: "hi".into(), data: None, turn: 1, usage: Default::default(), elapsed_us: 1 };
        feed.end(3, Ok(outcome.clone()));
        assert_eq!(handle.next_remote().await, Some(RemoteEvent::Ended { id: 3, outcome }));
        assert_eq!(handle.next_remote().await, None);
    }

    #[tokio::test]
    async fn a_suspension_of_the_turn_ahead_is_reported_and_an_error_is_the_end() {
        let feed = Feed::new("t".into());
        let (suspensions, session) = watch::channel(None);
        feed.queued_in(SuspensionWatch::new(session));
        let mut handle = feed.follow(Hold::Watches);
        let next = tokio::spawn(async move { (handle.next_remote().await, handle) });
        suspensions.send_replace(Some(Suspension { approval: "u-1".into() }));
        let (event, mut handle) = next.await.expect("the task does not panic");
        assert_eq!(event, Some(suspended("u-1")));
        let full = RuntimeError::MailboxFull { message: "full".into(), retry_after_ms: 5 };
        feed.end(0, Err(full));
        let failed = handle.next_remote().await.expect("an end");
        let RemoteEvent::Failed { code, retry_after_ms, .. } = failed else { panic!("{failed:?}") };
        assert_eq!((code.as_str(), retry_after_ms), ("mailbox_full", Some(5)));
        assert_eq!(handle.next_remote().await, None);
    }
}
