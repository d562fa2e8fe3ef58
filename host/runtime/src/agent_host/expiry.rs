//! Periodically deletes expired sessions, a few at a time, and everything else that would otherwise
//! grow forever: sessions created by batch items, ended turns and batches, responses, results of idempotency
//! keys, events and dead letters.
//!
//! Time skipped by a clock that was set forward does not count, and of the time during which no
//! host ran at most one day counts per gap (see [`crate::Clock`]). When the clock is set back,
//! sessions whose last use lies in the future restart their lifetime.
//!
//! Invariant: a session with a waiting or running turn is not deleted. Its own actor deletes it
//! after the turns in its mailbox, and only if nothing was committed meanwhile.

use super::AgentHost;
use crate::{
    RuntimeError, RuntimeOptions, UsageDay,
    batch::batch_session_pattern,
    cluster::Claimed,
    name::SessionKey,
    session::{Command, Sessions, TurnHost},
};
use skep_store::{ClockRow, StoreError};
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{MissedTickBehavior, interval},
};

/// Lifetimes are given in hours.
const INTERVAL: Duration = Duration::from_secs(600);
const DAY: Duration = Duration::from_secs(24 * 3_600);
/// Number of days for which the tokens are kept that daily budgets count.
const TOKEN_USE_DAYS: u32 = 31;
/// Number of sessions read at once.
const BATCH: u32 = 256;

#[derive(Clone)]
pub(super) struct Expiry {
    host: Arc<TurnHost>,
    sessions: Weak<Sessions>,
    /// The operator's limit.
    ceiling: Option<Duration>,
    /// Retention of sessions created by batch items.
    batch_sessions: Duration,
    outcomes: Duration,
    responses: Duration,
    /// Days for which usage is kept by session.
    usage_session_days: u32,
    /// Value of the clock's set-back counter at the last pass.
    set_back: Arc<AtomicU64>,
}

impl AgentHost {
    /// Deletes the sessions that are expired at `now_ms`, as the host does every ten minutes.
    /// Returns the number of deleted sessions.
    pub async fn expire_sessions(&self, now_ms: u64) -> Result<u64, RuntimeError> {
        self.inner.expiry.pass(now_ms).await
    }
}

impl Expiry {
    pub(super) fn new(host: &Arc<TurnHost>, sessions: &Arc<Sessions>, options: &RuntimeOptions) -> Self {
        Expiry {
            host: host.clone(),
            sessions: Arc::downgrade(sessions),
            ceiling: options.session_ttl,
            batch_sessions: options.batch.retention,
            outcomes: options.outcome_retention,
            responses: options.responses.retention,
            usage_session_days: options.usage_session_days,
            set_back: Arc::default(),
        }
    }

    /// Restores the clock's history from the previous host.
    pub(super) async fn resume_clock(&self) -> Result<(), StoreError> {
        let TurnHost { store, clock, .. } = &*self.host;
        if let Some(ClockRow { seen_ms, skips }) = store.clock().await? {
            clock.resume(seen_ms, skips);
        }
        self.note_clock().await
    }

    /// Stores the clock's history for the next host.
    async fn note_clock(&self) -> Result<(), StoreError> {
        let TurnHost { store, clock, .. } = &*self.host;
        store.put_clock(ClockRow { skips: clock.skips(), seen_ms: clock.now_ms() }).await
    }

    /// Runs until the host stops.
    pub(super) async fn run(self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.pass(self.host.clock.now_ms()).await {
                Ok(0) => {}
                Ok(expired) => tracing::info!(expired, "deleted expired sessions"),
                Err(RuntimeError::ShuttingDown) => return,
                Err(error) => tracing::error!("cannot delete expired sessions: {error}"),
            }
        }
    }

    async fn pass(&self, now_ms: u64) -> Result<u64, RuntimeError> {
        let mut expired = 0;
        let times = self.host.clock.times_set_back();
        let was_set_back = self.set_back.swap(times, Ordering::AcqRel) != times;
        self.note_clock().await?;
        for (agent, ttl) in self.host.deployments.session_ttls(self.ceiling) {
            let before_ms = self.before(now_ms, ttl);
            if was_set_back {
                self.host.store.clamp_session_times(&agent, now_ms).await?;
            }
            expired += self.expire_all(&agent, before_ms, None).await?;
        }
        let pattern = batch_session_pattern();
        for agent in self.host.deployments.names() {
            expired +=
                self.expire_all(&agent, self.before(now_ms, self.batch_sessions), Some(&pattern)).await?;
        }
        self.forget(now_ms).await?;
        Ok(expired)
    }

    /// Deletes old rows of everything that grows with every turn, response, event and batch.
    async fn forget(&self, now_ms: u64) -> Result<(), RuntimeError> {
        let store = &self.host.store;
        let outcomes = store.forget_outcomes(self.before(now_ms, self.outcomes), now_ms).await?;
        let turns = store.forget_turns(self.before(now_ms, DAY)).await?;
        store.forget_page_erasures().await?;
        store.forget_mcp_sessions().await?;
        let events = store.forget_events(|ms| self.host.clock.elapsed_before(now_ms, ms)).await?;
        let responses = store.forget_responses(self.before(now_ms, self.responses)).await?;
        let mut batches = 0;
        loop {
            match store.forget_batches(self.before(now_ms, self.batch_sessions), now_ms).await? {
                0 => break,
                some => batches += some,
            }
        }
        let mut files = 0;
        loop {
            match store.forget_files(now_ms).await? {
                0 => break,
                some => files += some,
            }
        }
        let before = |days: u32| UsageDay::of_ms(self.before(now_ms, DAY * days)).number();
        store.forget_token_use(before(TOKEN_USE_DAYS)).await?;
        let of_sessions = self.usage_session_days.min(RuntimeOptions::USAGE_DAYS);
        let usage = store.merge_usage_of_sessions(before(of_sessions)).await?
            + store.forget_usage(before(RuntimeOptions::USAGE_DAYS)).await?;
        if outcomes + turns + responses + events + batches + files + usage > 0 {
            tracing::debug!(
                outcomes,
                turns,
                responses,
                events,
                batches,
                files,
                usage,
                "deleted old outcomes, turns, responses, events, batches, files and usage"
            );
        }
        Ok(())
    }

    fn before(&self, now_ms: u64, time: Duration) -> u64 {
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.host.clock.elapsed_before(now_ms, time_ms)
    }

    async fn expire_all(
        &self,
        agent: &str,
        before_ms: u64,
        pattern: Option<&str>,
    ) -> Result<u64, RuntimeError> {
        let (mut expired, mut after) = (0, None::<String>);
        loop {
            self.host.shutdown.admit()?;
            let store = &self.host.store;
            let batch = store.expired_sessions(agent, before_ms, pattern, after.as_deref(), BATCH).await?;
            for session in &batch {
                expired += u64::from(self.expire(agent, session, before_ms).await?);
            }
            match batch.into_iter().next_back() {
                Some(last) => after = Some(last),
                None => return Ok(expired),
            }
        }
    }

    async fn expire(&self, agent: &str, session: &str, before_ms: u64) -> Result<bool, RuntimeError> {
        let sessions = self.sessions.upgrade().ok_or(RuntimeError::ShuttingDown)?;
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        let cluster = &self.host.cluster;
        if cluster.hands_over() {
            return Ok(false);
        }
        // The owner looks for expired sessions itself.
        let Claimed::Here(owned) = cluster.ownership.claim(&key).await? else { return Ok(false) };
        let (responder, expired) = oneshot::channel();
        match sessions.send(&self.host, key, Command::Expire { before_ms, responder }, owned) {
            Ok(_) => expired.await.map_err(|_ended| RuntimeError::ShuttingDown)?,
            // The session waits for people or is busy, or all sessions in memory are; the next pass
            // finds it again.
            Err(RuntimeError::WaitingForApproval { .. } | RuntimeError::MailboxFull { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
