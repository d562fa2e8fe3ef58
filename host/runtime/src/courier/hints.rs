//! Hints from schedules: the KV pages of a session are read from the disk shortly before its alarm is due.
//!
//! A hint changes no result, only how long the turn waits for its first token. So it is bounded, and its failure has no
//! consequences.

use super::Context;
use crate::{dispatch::Dispatch, warming};
use skep_store::StoreError;
use std::{collections::HashMap, sync::Weak, time::Duration};
use tokio::task::JoinSet;

/// Number of schedules that are looked at.
const LOOKED_AT: u32 = 16;
/// Number of sessions whose pages are read at once. More alarms at one moment find their pages as usual.
const AT_ONCE: usize = 4;
/// Maximum time of a hint.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Hints {
    /// Time before an alarm is due; 0 gives no hints.
    ahead_ms: u64,
    /// The schedules that got a hint, with the time for which they got it.
    given: HashMap<String, u64>,
    running: JoinSet<()>,
}

impl Hints {
    pub(super) fn new(ahead: Duration) -> Self {
        let ahead_ms = u64::try_from(ahead.as_millis()).unwrap_or(u64::MAX);
        Hints { ahead_ms, given: HashMap::new(), running: JoinSet::new() }
    }

    /// Starts to read the pages of the sessions whose alarms are due soon. Returns the time at which to look again.
    pub(super) async fn give(
        &mut self,
        context: &Context,
        dispatch: &Weak<Dispatch>,
    ) -> Result<u64, StoreError> {
        if self.ahead_ms == 0 {
            return Ok(u64::MAX);
        }
        while self.running.try_join_next().is_some() {}
        let now_ms = context.clock.now_ms();
        self.given.retain(|_, wake_ms| *wake_ms > now_ms);
        for row in context.store.upcoming_schedules(now_ms, LOOKED_AT).await? {
            if row.wake_ms.saturating_sub(now_ms) > self.ahead_ms {
                return Ok(row.wake_ms - self.ahead_ms);
            }
            let is_new = self.given.insert(row.schedule.id, row.wake_ms) != Some(row.wake_ms);
            if is_new && self.running.len() < AT_ONCE {
                self.running.spawn(hint(dispatch.clone(), row.agent, row.schedule.target));
            }
        }
        // When the first of them is due, the others are looked at again.
        Ok(u64::MAX)
    }
}

async fn hint(dispatch: Weak<Dispatch>, agent: String, session: String) {
    let Some(dispatch) = dispatch.upgrade() else { return };
    let warming = warming::warm(&dispatch.host, &agent, &session);
    match tokio::time::timeout(PATIENCE, warming).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(agent, session, %error, "pages are not read before an alarm"),
        Err(_) => tracing::debug!(agent, session, "reading pages before an alarm took too long"),
    }
}
