//! An alarm: a schedule that is due, delivered as a turn of its session.

use super::{
    count,
    permits::Permit,
    turn::{self, TURN_BACKOFF, Verdict},
};
use crate::{
    AlarmOrigin, Invocation, Origin, courier::Context, dispatch::Dispatch, invocation::OWN_KEY,
    schedule::ScheduleTiming,
};
use skep_engine::Priority;
use skep_store::{ScheduleRow, StoreError};
use std::sync::{Arc, Weak};

pub(super) struct Alarm {
    pub(super) context: Arc<Context>,
    pub(super) dispatch: Weak<Dispatch>,
    pub(super) row: ScheduleRow,
}

/// Starts an attempt. Times that passed since the schedule was due are combined into the latest
/// one. Returns `None` if the schedule was cancelled, cannot be read, or is not as it was read anymore.
pub(super) async fn begin(
    context: &Context,
    mut row: ScheduleRow,
) -> Result<Option<ScheduleRow>, StoreError> {
    let now_ms = context.clock.now_ms();
    if row.attempt == 0
        && let Ok(timing) = ScheduleTiming::decode(&row.schedule.timing)
    {
        let (latest_ms, missed) = timing.latest(row.schedule.due_ms, now_ms);
        row.schedule.due_ms = latest_ms;
        row.missed += missed;
        let late_ms = now_ms.saturating_sub(latest_ms);
        metrics::histogram!(crate::metric::ALARM_DELAY).record(late_ms as f64 / 1000.0);
    }
    row.attempt += 1;
    let ScheduleRow { schedule, missed, attempt, wake_ms, .. } = &row;
    let begun =
        context.store.begin_schedule(&schedule.id, schedule.due_ms, *missed, *attempt, *wake_ms).await?;
    Ok(begun.then_some(row))
}

/// Sets the next time of a repeating schedule after one has been handled.
pub(super) async fn advance(
    context: &Context,
    row: &ScheduleRow,
    error: Option<&str>,
) -> Result<(), StoreError> {
    let id = &row.schedule.id;
    let (due_ms, now_ms) = (row.schedule.due_ms, context.clock.now_ms());
    // The handled time was due, so a time in the future means that the clock was set back
    // meanwhile.
    let next = ScheduleTiming::decode(&row.schedule.timing).map(|timing| timing.next(due_ms.min(now_ms)));
    match next {
        Ok(Some(next_ms)) => context.store.advance_schedule(id, next_ms, 0, error).await,
        Ok(None) => context.store.fail_schedule(id, "the schedule is never due again").await,
        Err(unreadable) => context.store.fail_schedule(id, &unreadable).await,
    }
}

impl Alarm {
    pub(super) async fn ring(self, permit: Permit) {
        let verdict = match self.invocation() {
            Ok(invocation) => turn::take(&self.dispatch, invocation, permit).await,
            Err(error) => Verdict::Failed(crate::RuntimeError::Internal { message: error }),
        };
        self.note(verdict).await;
    }

    fn invocation(&self) -> Result<Invocation, String> {
        let ScheduleRow { agent, schedule, attempt, missed, .. } = &self.row;
        let data = schedule.data.as_deref().map(serde_json::from_slice).transpose();
        let data = data.map_err(|error| format!("the data of the schedule is unreadable: {error}"))?;
        Ok(Invocation {
            principal: schedule.principal.clone(),
            key: None,
            agent: agent.clone(),
            session: schedule.target.clone(),
            text: String::new(),
            data,
            origin: Origin::Alarm(AlarmOrigin {
                id: schedule.id.clone(),
                name: schedule.name.clone(),
                due_at_ms: schedule.due_ms,
                attempt: *attempt,
                missed: *missed,
            }),
            priority: Priority::Interactive,
            deadline: None,
            // No client can send a key with a control character.
            idempotency_key: Some(format!("{OWN_KEY}alarm {} {}", schedule.id, schedule.due_ms)),
            detached: true,
        })
    }

    async fn note(&self, verdict: Verdict) {
        let (store, row) = (&self.context.store, &self.row);
        let (id, now_ms) = (&row.schedule.id, self.context.clock.now_ms());
        match verdict {
            Verdict::HostEnds => {}
            // A schedule that does not repeat was removed by the turn's commit.
            Verdict::Done => {
                count("alarm", "ok");
                if row.schedule.repeats {
                    self.advance(None).await;
                }
            }
            Verdict::NotNow { error, wait_ms } => {
                let (attempt, wake_ms, error) = (row.attempt - 1, now_ms + wait_ms, error.to_string());
                let reschedule = || store.retry_schedule(id, attempt, wake_ms, &error);
                self.context.shutdown.stored("the next attempt of an alarm", reschedule).await;
            }
            Verdict::Failed(error) if row.attempt < row.schedule.tries => {
                count("alarm", "retried");
                let wake_ms = now_ms + TURN_BACKOFF.delay_ms(row.attempt);
                let error = error.to_string();
                let reschedule = || store.retry_schedule(id, row.attempt, wake_ms, &error);
                self.context.shutdown.stored("the next attempt of an alarm", reschedule).await;
            }
            Verdict::Failed(error) => {
                count("alarm", "failed");
                let (agent, session, name) = (&row.agent, &row.schedule.target, &row.schedule.name);
                tracing::warn!(
                    agent,
                    session,
                    name,
                    tries = row.attempt,
                    "an alarm failed permanently: {error}"
                );
                let error = error.to_string();
                if row.schedule.repeats {
                    self.advance(Some(&error)).await;
                } else {
                    let fail = || store.fail_schedule(id, &error);
                    self.context.shutdown.stored("the failure of an alarm", fail).await;
                }
            }
        }
    }

    async fn advance(&self, error: Option<&str>) {
        let next = || advance(&self.context, &self.row, error);
        self.context.shutdown.stored("the next time of a schedule", next).await;
    }
}
