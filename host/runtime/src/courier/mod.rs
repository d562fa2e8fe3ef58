//! Brings what is due to where it goes: alarms of schedules and events to sessions, events to webhooks.
//!
//! One task sleeps until something is due, or until it is told that something may be; there are no ticks. Everything is a
//! row that is first marked as begun, with all that the turn will be given. A turn of a session has an idempotency key of
//! the row, and its commit settles the row in the same transaction. So whatever a crash cuts off happens again, and what
//! was committed does not.
//!
//! What has begun and nobody runs, because the database failed when it began or a task ended badly, is taken up again; what
//! something came to is stored however often that fails.
//!
//! A session, and a webhook, gets one at a time. Alarms, events and webhooks have places of their own, and each tenant has
//! its share of them.

mod alarm;
mod backoff;
mod delivery;
mod places;
mod rewind;
mod turn;
mod webhook;

use crate::agent_host::{Services, WeakHost};
use alarm::Alarm;
use delivery::SessionDelivery;
use places::{Place, Places};
use skep_store::{Delivery, DeliveryKey, ScheduleRow, ScheduleState, StoreError, Target};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use tokio::task::{self, AbortHandle, JoinError, JoinSet};
use webhook::WebhookDelivery;

/// Rows of each kind that are read at once.
const PAGE: u32 = 128;
/// How soon it looks for what was stored without a word, because whoever stored it was cut off.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// A row whose task panicked so often is left for the next host.
const MAX_PANICS: u32 = 3;
/// How long the courier leaves a database alone that failed.
const STORE_PAUSE_MS: u64 = 1_000;

/// The task. Dropping this ends it, and leaves what it had begun for the next one.
pub(crate) struct Courier(AbortHandle);

struct Round {
    services: Arc<Services>,
    host: WeakHost,
    running: JoinSet<()>,
    /// What the tasks are about.
    rows: HashMap<task::Id, RowKey>,
    /// Rows whose tasks panicked, how often. That is a fault, and rare.
    panics: HashMap<RowKey, u32>,
    /// There may be rows that have begun and that nobody runs.
    has_strays: bool,
    /// As often as the clock was set back, and rows that waited for a later time were looked at.
    set_back: u64,
    /// Read, and not begun yet.
    ready: VecDeque<Due>,
    alarms: Places,
    events: Places,
    webhooks: Places,
}

/// A row that has begun.
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
    pub(crate) fn start(services: Arc<Services>, host: WeakHost) -> Self {
        let round = Round {
            services,
            host,
            running: JoinSet::new(),
            rows: HashMap::new(),
            panics: HashMap::new(),
            // Those of the host before.
            has_strays: true,
            set_back: 0,
            ready: VecDeque::new(),
            alarms: Places::default(),
            events: Places::default(),
            webhooks: Places::default(),
        };
        Courier(tokio::spawn(round.run()).abort_handle())
    }

    pub(crate) fn stop(&self) {
        self.0.abort();
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Round {
    async fn run(mut self) {
        while self.services.admit().is_ok() {
            let wake_ms = match self.fill().await {
                Ok(wake_ms) => wake_ms,
                Err(error) => {
                    // What was to begin may have begun.
                    self.has_strays = true;
                    self.pause(&error).await;
                    continue;
                }
            };
            tokio::select! {
                () = self.services.courier_bell.notified() => {}
                Some(ended) = self.running.join_next_with_id() => self.ended(ended),
                () = self.services.clock.sleep_until(wake_ms) => {}
                () = tokio::time::sleep(LOOK_INTERVAL) => self.has_strays = true,
            }
        }
    }

    /// Goes on with what has begun and nobody runs.
    async fn take_up(&mut self) -> Result<(), StoreError> {
        let schedules = self.services.store.begun_schedules().await?;
        let deliveries = self.services.store.begun_deliveries().await?;
        for row in schedules {
            if self.runs(&RowKey::Schedule(row.schedule.id.clone())) {
                continue;
            }
            if row.state == ScheduleState::Settled {
                alarm::advance(&self.services, &row, None).await?;
            } else {
                self.begin_again(Due::Alarm(Box::new(row)));
            }
        }
        for row in deliveries {
            if !self.runs(&RowKey::Delivery(row.key)) {
                self.begin_again(Due::Delivery(Box::new(row)));
            }
        }
        self.has_strays = false;
        Ok(())
    }

    /// Whether a row is under way, or was so badly so often that the next host may try.
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
                tracing::error!("{row:?} ended badly, for the {panics}. time: {error}");
                self.has_strays = true;
            }
        }
    }

    /// Begins with what is due, as far as there is room. Gives the time at which something else is.
    async fn fill(&mut self) -> Result<u64, StoreError> {
        if self.has_strays {
            self.take_up().await?;
        }
        let set_back = self.services.clock.times_set_back();
        if set_back != self.set_back {
            rewind::rewind(&self.services).await?;
            self.set_back = set_back;
        }
        loop {
            while let Some(ended) = self.running.try_join_next_with_id() {
                self.ended(ended);
            }
            let mut has_begun = false;
            let mut must_wait = false;
            while let Some(due) = self.ready.pop_front() {
                match self.places_of(&due).take(due.tenant(), &self.services) {
                    Some(place) => {
                        self.begin(due, place).await?;
                        has_begun = true;
                    }
                    // It is read again, so that it does not hide what others have.
                    None => must_wait = true,
                }
            }
            let (store, now_ms) = (&self.services.store, self.services.clock.now_ms());
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

    fn places_of(&self, due: &Due) -> &Places {
        match due {
            Due::Alarm(_) => &self.alarms,
            Due::Delivery(row) => match row.target {
                Target::Session { .. } => &self.events,
                Target::Webhook(_) => &self.webhooks,
            },
        }
    }

    async fn begin(&mut self, due: Due, place: Place) -> Result<(), StoreError> {
        match due {
            Due::Alarm(row) => {
                if let Some(row) = alarm::begin(&self.services, *row).await? {
                    self.spawn_alarm(row, place);
                }
            }
            Due::Delivery(mut row) => {
                row.attempt += 1;
                if self.services.store.begin_delivery(row.key, row.attempt).await? {
                    self.spawn_delivery(*row, place);
                }
            }
        }
        Ok(())
    }

    /// What had begun before.
    fn begin_again(&mut self, due: Due) {
        let place = self.places_of(&due).take_again(due.tenant(), &self.services);
        match due {
            Due::Alarm(row) => self.spawn_alarm(*row, place),
            Due::Delivery(row) => self.spawn_delivery(*row, place),
        }
    }

    fn spawn_alarm(&mut self, row: ScheduleRow, place: Place) {
        let key = RowKey::Schedule(row.schedule.id.clone());
        let alarm = Alarm { services: self.services.clone(), host: self.host.clone(), row };
        let task = self.running.spawn(alarm.ring(place));
        self.rows.insert(task.id(), key);
    }

    fn spawn_delivery(&mut self, row: Delivery, place: Place) {
        let (services, key) = (self.services.clone(), RowKey::Delivery(row.key));
        let task = match row.target {
            Target::Session { .. } => {
                let delivery = SessionDelivery { services, host: self.host.clone(), row };
                self.running.spawn(delivery.deliver(place))
            }
            Target::Webhook(_) => self.running.spawn(WebhookDelivery { services, row }.deliver(place)),
        };
        self.rows.insert(task.id(), key);
    }

    async fn pause(&self, error: &StoreError) {
        tracing::error!("schedules and events wait: {error}");
        self.services.clock.sleep_until(self.services.clock.now_ms() + STORE_PAUSE_MS).await;
    }
}

/// What was begun came to this, as a metric.
fn count(kind: &'static str, outcome: &'static str) {
    metrics::counter!(crate::metric::DELIVERIES, "kind" => kind, "outcome" => outcome).increment(1);
}
