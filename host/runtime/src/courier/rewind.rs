//! Adjusts waiting work after the clock was set back, so that it follows the new time.
//!
//! Invariant: a repeating schedule is due within its interval, or at the next time of its calendar.
//! A schedule that is due once keeps its time of day. A retry waits no longer than it would have
//! otherwise, and people have no more time to decide on a call than its agent grants.

use super::{turn::TURN_BACKOFF, webhook::WEBHOOK_BACKOFF};
use crate::{courier::Context, schedule::ScheduleTiming};
use skep_store::{ScheduleRow, StoreError};

/// Number of schedules that are read at once.
const PAGE: u32 = 256;

pub(super) async fn rewind(context: &Context) -> Result<(), StoreError> {
    let (store, now_ms) = (&context.store, context.clock.now_ms());
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
    store.clamp_approval_times(now_ms).await?;
    let longest_ms = WEBHOOK_BACKOFF.longest_ms().max(TURN_BACKOFF.longest_ms());
    store.clamp_retry_times(now_ms + longest_ms, now_ms).await
}

/// Returns when a schedule is due and when it is checked, if that is earlier than the stored times.
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
