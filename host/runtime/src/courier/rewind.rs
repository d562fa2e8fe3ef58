//! What waits for a time that a clock which was set back moved away: it goes by the new time.
//!
//! Invariant: a schedule that repeats is due after no more than its interval, or at the next time that its calendar says.
//! One that is due once keeps its time of day. What is tried again waits no longer than it would have, and people have no
//! more time to decide about a call than its agent gives them.

use super::turn::TURN_BACKOFF;
use crate::{agent_host::Services, schedule::ScheduleTiming};
use skep_store::{ScheduleRow, StoreError};

/// Schedules that are read at once.
const PAGE: u32 = 256;
/// No try is put off for longer, unless its receiver asks for it.
const LONGEST_PAUSE_MS: u64 = 4_500_000;

pub(super) async fn rewind(services: &Services) -> Result<(), StoreError> {
    let (store, now_ms) = (&services.store, services.clock.now_ms());
    let mut after = String::new();
    loop {
        let page = store.later_schedules(now_ms, &after, PAGE).await?;
        let Some(last) = page.last() else { break };
        after.clone_from(&last.schedule.id);
        for row in &page {
            if let Some((due_ms, wake_ms)) = earlier(row, now_ms) {
                store.move_schedule(row, due_ms, wake_ms).await?;
            }
        }
    }
    store.bring_approvals_back(now_ms).await?;
    store.bring_tries_back(now_ms + LONGEST_PAUSE_MS, now_ms).await
}

/// When a schedule is due and is looked at, if that is sooner than it is stored.
fn earlier(row: &ScheduleRow, now_ms: u64) -> Option<(u64, u64)> {
    let due_ms = row.schedule.due_ms;
    if row.attempt > 0 || due_ms <= now_ms {
        let is_late = row.wake_ms > now_ms + TURN_BACKOFF.longest_ms();
        return is_late.then_some((due_ms, now_ms));
    }
    let timing = ScheduleTiming::decode(&row.schedule.timing).ok().filter(ScheduleTiming::repeats)?;
    let first_ms = timing.first(now_ms).ok()?;
    (first_ms < due_ms).then_some((first_ms, first_ms))
}
