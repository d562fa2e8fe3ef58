//! The task that stores the log: takes secrets out of what was recorded, writes it in batches, and removes what is too
//! old or too much.

use super::{
    Askers, Command, Reason, RequestLog, RequestLogOptions, count_dropped, recording::Finished, redaction,
};
use crate::{RuntimeError, vault::Vault};
use skep_outbound::Redactor;
use skep_store::{RequestBody, RequestRow};
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, timeout_at},
};

/// Time for which records are collected before they are written. A turn's commit waits at most for one such write.
const GATHER: Duration = Duration::from_millis(200);
const MAX_BATCH: usize = 256;
/// Interval of searches for records that are too old or too many.
const SWEEP: Duration = Duration::from_secs(60);
/// Number of deleted sessions that are remembered. Requests of a deleted session end when its last turn does.
const MAX_FORGOTTEN: usize = 1_024;
/// The least that is removed of a tenant at once.
const LEAST_REMOVED: u64 = 64 << 10;

pub(super) struct Writer {
    log: RequestLog,
    vault: Arc<Vault>,
    commands: mpsc::Receiver<Command>,
    forgotten: VecDeque<Forgotten>,
}

/// A session, an agent or a tenant that is being deleted.
struct Forgotten {
    askers: Askers,
    at: Instant,
}

impl Writer {
    pub(super) fn new(log: &RequestLog, vault: Arc<Vault>, commands: mpsc::Receiver<Command>) -> Self {
        Writer { log: log.clone(), vault, commands, forgotten: VecDeque::new() }
    }

    pub(super) async fn run(mut self) {
        let mut sweeps = interval(SWEEP);
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.gather(command).await,
                    None => return,
                },
                _ = sweeps.tick() => self.sweep().await,
            }
        }
    }

    /// Collects records for a moment and stores them together.
    async fn gather(&mut self, first: Command) {
        let until = tokio::time::Instant::now() + GATHER;
        let (mut records, mut next) = (Vec::new(), Some(first));
        loop {
            match next {
                Some(Command::Record(record)) => records.push(*record),
                Some(Command::Flush(done)) => return self.finish(records, done).await,
                Some(Command::Forget(askers, done)) => {
                    self.forgotten.truncate(MAX_FORGOTTEN - 1);
                    self.forgotten.push_front(Forgotten { askers, at: Instant::now() });
                    return self.finish(records, done).await;
                }
                None => break,
            }
            if records.len() >= MAX_BATCH {
                break;
            }
            next = timeout_at(until, self.commands.recv()).await.ok().flatten();
        }
        self.store(records).await;
    }

    async fn finish(&mut self, records: Vec<Finished>, done: oneshot::Sender<()>) {
        self.store(records).await;
        // The caller may have stopped waiting.
        let _ = done.send(());
    }

    async fn store(&mut self, records: Vec<Finished>) {
        let bytes: usize = records.iter().map(Finished::bytes).sum();
        let is_wanted = |record: &Finished| !self.forgotten.iter().any(|forgotten| forgotten.covers(record));
        let records: Vec<Finished> = records.into_iter().filter(is_wanted).collect();
        let count = records.len() as u64;
        if count > 0 {
            // A log that drops nothing says so.
            [Reason::Full, Reason::Store].into_iter().for_each(|reason| count_dropped(reason, 0));
            match self.write(records).await {
                Ok(bytes) => {
                    self.log.inner.stored_bytes.fetch_add(bytes, Relaxed);
                }
                Err(error) => {
                    count_dropped(Reason::Store, count);
                    tracing::warn!(count, "records of requests were lost: {error}");
                }
            }
            self.log.inner.grown.send_replace(());
        }
        self.log.inner.waiting_bytes.fetch_sub(bytes, Relaxed);
        let (stored, most) = self.log.kept_bytes();
        if stored > most {
            self.sweep().await;
        }
    }

    /// Stores records, and returns the number of bytes that they count for.
    async fn write(&self, records: Vec<Finished>) -> Result<u64, RuntimeError> {
        let redactor = match records.iter().any(|record| record.body.is_some()) {
            true => self.redactor().await,
            false => Some(Redactor::new([])),
        };
        let encode = move || records.into_iter().map(|record| row(record, redactor.as_ref())).collect();
        let rows: Vec<RequestRow> = tokio::task::spawn_blocking(encode).await.map_err(|error| {
            RuntimeError::Internal { message: format!("encoding them panicked: {error}") }
        })?;
        let bytes = rows.iter().map(|row| row.bytes() as u64).sum();
        self.log.inner.store.append_requests(rows).await?;
        Ok(bytes)
    }

    /// Returns a redactor of all secrets, or `None` if they cannot be read. Then no text may be stored.
    async fn redactor(&self) -> Option<Redactor> {
        let secrets = match self.vault.open_all().await {
            Ok(secrets) => secrets,
            Err(error) => {
                tracing::warn!(
                    "the texts of requests are not logged, because the secrets cannot be read: {error}"
                );
                return None;
            }
        };
        let secrets: Vec<(String, String)> =
            secrets.into_iter().map(|(name, value)| (value, format!("[secret {name}]"))).collect();
        Some(Redactor::new(secrets.iter().map(|(value, instead)| (&**value, &**instead))))
    }

    async fn sweep(&mut self) {
        self.forgotten.retain(|forgotten| forgotten.at.elapsed() < SWEEP);
        match self.remove_surplus().await {
            Ok(bytes) => self.log.inner.stored_bytes.store(bytes, Relaxed),
            Err(error) => tracing::warn!("cannot remove old records of requests: {error}"),
        }
    }

    /// Removes what is too old or too much, and returns the size of the rest.
    async fn remove_surplus(&self) -> Result<u64, RuntimeError> {
        let RequestLogOptions { retention, max_bytes, .. } = &*self.log.options();
        let (store, clock) = (&self.log.inner.store, &self.log.inner.clock);
        let retention_ms = u64::try_from(retention.as_millis()).unwrap_or(u64::MAX);
        store.forget_requests(clock.elapsed_before(clock.now_ms(), retention_ms)).await?;
        let mut tenants = store.request_bytes().await?;
        let mut stored: u64 = tenants.iter().map(|(_, bytes)| bytes).sum();
        if stored <= *max_bytes {
            return Ok(stored);
        }
        // A tenth more is removed, so that not every write has to remove something.
        let enough = max_bytes - max_bytes / 10;
        while stored > enough {
            tenants.sort_unstable_by_key(|(_, bytes)| *bytes);
            let next = tenants.iter().rev().nth(1).map_or(0, |(_, bytes)| *bytes);
            let Some((tenant, bytes)) = tenants.last_mut() else { break };
            // Just enough that this tenant no longer has the most.
            let surplus = (stored - enough).min((*bytes - next).max(LEAST_REMOVED));
            match store.shrink_requests(tenant, surplus).await? {
                0 => break,
                removed => {
                    *bytes = bytes.saturating_sub(removed);
                    stored = stored.saturating_sub(removed);
                }
            }
        }
        Ok(stored)
    }
}

impl Forgotten {
    fn covers(&self, record: &Finished) -> bool {
        let row = &record.row;
        record.began <= self.at
            && match &self.askers {
                Askers::Session { agent, session } => {
                    row.agent.as_ref() == Some(agent) && row.session.as_ref() == Some(session)
                }
                Askers::Agent(agent) => row.agent.as_ref() == Some(agent),
                Askers::Tenant(tenant) => row.tenant == *tenant,
            }
    }
}

/// Encodes a record for the store. Without a redactor, its texts are left out.
fn row(record: Finished, redactor: Option<&Redactor>) -> RequestRow {
    let Finished { row, details, body, .. } = record;
    let body = match body.zip(redactor) {
        Some((raw, redactor)) => RequestBody::Text(json(&redaction::redacted(raw, redactor))),
        None => RequestBody::None,
    };
    RequestRow { details: json(&details), body, ..row }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("texts and numbers always serialize")
}
