//! Delivers what is due: alarms of schedules and events to sessions, and events to webhooks.
//!
//! One task sleeps until something is due, or until it is notified that something may be; apart
//! from a search for lost rows every [`LOOK_INTERVAL`], it does not poll. Every alarm and delivery
//! is a row that is first marked as started, with everything that the turn will receive. A turn of
//! a session has an idempotency key derived from the row, and its commit settles the row in the
//! same transaction. So whatever a crash interrupts happens again, and what was committed does not.
//!
//! Rows that are marked as started but that nobody runs, because the database failed or a task
//! panicked, are resumed. Results are written to the store until that succeeds.
//!
//! In a cluster, each host looks for what is due, and one of them starts it. It is then this host's until the host is gone: the
//! others look for what it has left.
//!
//! A session or a webhook receives one delivery at a time. Alarms, events and webhooks have
//! separate permits, and each tenant has a share of them.

mod alarm;
mod backoff;
mod delivery;
mod hints;
mod permits;
mod rewind;
mod turn;
mod webhook;

use crate::{
    Clock, cluster::Cluster, dispatch::Dispatch, egress::Egress, event::Outbox, shutdown::Shutdown,
    webhook::Webhooks,
};
use alarm::Alarm;
use delivery::SessionDelivery;
use hints::Hints;
use permits::{Permit, Permits};
use skep_store::{Delivery, DeliveryKey, ScheduleRow, ScheduleState, Store, StoreError, Target};
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    task::{self, AbortHandle, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval_at},
};
use webhook::WebhookDelivery;

/// Number of rows of each kind that are read at once.
const PAGE: u32 = 128;
/// Interval between searches for rows whose writer was interrupted before it could notify the
/// courier.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// A row whose task panicked this many times is left for the next host process.
const MAX_PANICS: u32 = 3;
/// Pause after a database error.
const STORE_PAUSE_MS: u64 = 1_000;

/// The parts of the host that deliveries use.
pub(crate) struct Context {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) shutdown: Shutdown,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) webhooks: Arc<Webhooks>,
    pub(crate) egress: Arc<Egress>,
    /// Time before an alarm is due at which the pages of its session are read; zero reads none.
    pub(crate) warm_ahead: Duration,
    pub(crate) cluster: Cluster,
    /// Whether another host is gone, which may have left started rows.
    pub(crate) has_lost_host: AtomicBool,
}

/// The courier's task. Dropping this stops it and leaves started rows for the next courier.
pub(crate) struct Courier {
    task: AbortHandle,
    context: Arc<Context>,
}

struct Round {
    context: Arc<Context>,
    dispatch: Weak<Dispatch>,
    running: JoinSet<()>,
    /// The row of each running task.
    rows: HashMap<task::Id, RowKey>,
    /// Number of panics of each row's task. Panics are bugs, and rare.
    panics: HashMap<RowKey, u32>,
    /// Whether there may be started rows that nobody runs.
    needs_repair: bool,
    /// Value of the clock's set-back counter when rows that wait for a later time were last
    /// checked.
    set_back: u64,
    /// Rows that were read but not started yet.
    ready: VecDeque<Due>,
    alarms: Permits,
    events: Permits,
    webhooks: Permits,
    hints: Hints,
}

/// A row that has been started.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum RowKey {
    Schedule(String),
    Delivery(DeliveryKey),
}

enum Due {
    Alarm(Box<ScheduleRow>),
    Delivery(Box<Delivery>),
}

impl Due {
    fn tenant(&self) -> &str {
        match self {
            Due::Alarm(row) => &row.schedule.principal,
            Due::Delivery(row) => &row.principal,
        }
    }
}

impl Courier {
    pub(crate) fn start(context: Arc<Context>, dispatch: Weak<Dispatch>) -> Self {
        let round = Round {
            hints: Hints::new(context.warm_ahead),
            context: context.clone(),
            dispatch,
            running: JoinSet::new(),
            rows: HashMap::new(),
            panics: HashMap::new(),
            // The previous host may have left started rows.
            needs_repair: true,
            set_back: 0,
            ready: VecDeque::new(),
            alarms: Permits::default(),
            events: Permits::default(),
            webhooks: Permits::default(),
        };
        Courier { task: tokio::spawn(round.run()).abort_handle(), context }
    }

    pub(crate) fn stop(&self) {
        self.task.abort();
    }

    /// Makes the courier look for the rows that a host has left that is gone.
    pub(crate) fn take_over(&self) {
        self.context.has_lost_host.store(true, Ordering::Release);
        self.context.outbox.ring();
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Round {
    async fn run(mut self) {
        // It continues from one round to the next, however often something else wakes the courier.
        let mut looks = interval_at(Instant::now() + LOOK_INTERVAL, LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.context.shutdown.admit().is_ok() {
            let wake_ms = match self.fill().await {
                Ok(wake_ms) => wake_ms,
                Err(error) => {
                    // The row that was about to be started may have been marked as started.
                    self.needs_repair = true;
                    self.pause(&error).await;
                    continue;
                }
            };
            let hint_ms = self.hints.give(&self.context, &self.dispatch).await.unwrap_or_else(|error| {
                tracing::debug!(%error, "no pages are read before alarms for now");
                u64::MAX
            });
            tokio::select! {
                () = self.context.outbox.rung() => {}
                Some(ended) = self.running.join_next_with_id() => self.ended(ended),
                () = self.context.clock.sleep_until(wake_ms.min(hint_ms)) => {}
                _ = looks.tick() => self.needs_repair = true,
            }
        }
    }

    /// Resumes the started rows that nobody runs.
    async fn take_up(&mut self) -> Result<(), StoreError> {
        let schedules = self.context.store.begun_schedules().await?;
        let deliveries = self.context.store.begun_deliveries().await?;
        for row in schedules {
            if self.runs(&RowKey::Schedule(row.schedule.id.clone())) {
                continue;
            }
            if row.state == ScheduleState::Settled {
                alarm::advance(&self.context, &row, None).await?;
            } else {
                self.begin_again(Due::Alarm(Box::new(row)));
            }
        }
        for row in deliveries {
            if !self.runs(&RowKey::Delivery(row.key)) {
                self.begin_again(Due::Delivery(Box::new(row)));
            }
        }
        self.needs_repair = false;
        Ok(())
    }

    /// Returns whether a row is running, or has panicked so often that it is left for the next host
    /// process.
    fn runs(&self, row: &RowKey) -> bool {
        self.rows.values().any(|running| running == row)
            || self.panics.get(row).is_some_and(|panics| *panics >= MAX_PANICS)
    }

    fn ended(&mut self, ended: Result<(task::Id, ()), JoinError>) {
        match ended {
            Ok((id, ())) => drop(self.rows.remove(&id)),
            Err(error) => {
                let Some(row) = self.rows.remove(&error.id()) else { return };
                let panics = self.panics.entry(row.clone()).or_default();
                *panics += 1;
                tracing::error!("{row:?} ended abnormally ({panics} times so far): {error}");
                self.needs_repair = true;
            }
        }
    }

    /// Starts the rows that are due, as far as permits allow. Returns the time at which the next
    /// one is due.
    async fn fill(&mut self) -> Result<u64, StoreError> {
        // The hosts that continue start what is due. This one finishes what it has started.
        if self.context.cluster.hands_over() {
            return Ok(u64::MAX);
        }
        self.needs_repair |= self.context.has_lost_host.swap(false, Ordering::AcqRel);
        if self.needs_repair {
            self.take_up().await?;
        }
        let set_back = self.context.clock.times_set_back();
        if set_back != self.set_back {
            rewind::rewind(&self.context).await?;
            self.set_back = set_back;
        }
        loop {
            while let Some(ended) = self.running.try_join_next_with_id() {
                self.ended(ended);
            }
            let mut has_begun = false;
            let mut must_wait = false;
            while let Some(due) = self.ready.pop_front() {
                match self.permits_for(&due).take(due.tenant(), &self.context) {
                    Some(permit) => {
                        self.begin(due, permit).await?;
                        has_begun = true;
                    }
                    // The row is read again later, so that it does not hide rows of other tenants.
                    None => must_wait = true,
                }
            }
            let (store, now_ms) = (&self.context.store, self.context.clock.now_ms());
            if has_begun || !must_wait {
                let schedules = store.due_schedules(now_ms, PAGE).await?;
                let deliveries = store.due_deliveries(now_ms, PAGE).await?;
                self.ready.extend(schedules.into_iter().map(|row| Due::Alarm(Box::new(row))));
                self.ready.extend(deliveries.into_iter().map(|row| Due::Delivery(Box::new(row))));
            }
            if self.ready.is_empty() {
                let next = [store.next_schedule_ms(now_ms).await?, store.next_delivery_ms(now_ms).await?];
                return Ok(next.into_iter().flatten().min().unwrap_or(u64::MAX));
            }
        }
    }

    fn permits_for(&self, due: &Due) -> &Permits {
        match due {
            Due::Alarm(_) => &self.alarms,
            Due::Delivery(row) => match row.target {
                Target::Session { .. } => &self.events,
                Target::Webhook(_) => &self.webhooks,
            },
        }
    }

    async fn begin(&mut self, due: Due, permit: Permit) -> Result<(), StoreError> {
        match due {
            Due::Alarm(row) => {
                if let Some(row) = alarm::begin(&self.context, *row).await? {
                    self.spawn_alarm(row, permit);
                }
            }
            Due::Delivery(mut row) => {
                row.attempt += 1;
                let now_ms = self.context.clock.now_ms();
                if self.context.store.begin_delivery(row.key, row.attempt, now_ms).await? {
                    self.spawn_delivery(*row, permit);
                }
            }
        }
        Ok(())
    }

    /// Resumes a row that was started before.
    fn begin_again(&mut self, due: Due) {
        let permit = self.permits_for(&due).take_again(due.tenant(), &self.context);
        match due {
            Due::Alarm(row) => self.spawn_alarm(*row, permit),
            Due::Delivery(row) => self.spawn_delivery(*row, permit),
        }
    }

    fn spawn_alarm(&mut self, row: ScheduleRow, permit: Permit) {
        let key = RowKey::Schedule(row.schedule.id.clone());
        let alarm = Alarm { context: self.context.clone(), dispatch: self.dispatch.clone(), row };
        let task = self.running.spawn(alarm.ring(permit));
        self.rows.insert(task.id(), key);
    }

    fn spawn_delivery(&mut self, row: Delivery, permit: Permit) {
        let (context, key) = (self.context.clone(), RowKey::Delivery(row.key));
        let task = match row.target {
            Target::Session { .. } => {
                let delivery = SessionDelivery { context, dispatch: self.dispatch.clone(), row };
                self.running.spawn(delivery.deliver(permit))
            }
            Target::Webhook(_) => self.running.spawn(WebhookDelivery { context, row }.deliver(permit)),
        };
        self.rows.insert(task.id(), key);
    }

    async fn pause(&self, error: &StoreError) {
        tracing::error!("schedules and events are paused: {error}");
        self.context.clock.sleep_until(self.context.clock.now_ms() + STORE_PAUSE_MS).await;
    }
}

/// Counts the outcome of a started row in the metrics.
fn count(kind: &'static str, outcome: &'static str) {
    metrics::counter!(crate::metric::DELIVERIES, "kind" => kind, "outcome" => outcome).increment(1);
}
