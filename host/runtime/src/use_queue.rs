//! The use of models without an agent that waits to be recorded, because nobody waits for the database there.
//!
//! One task writes it, and only while something waits. What waits is summed up, so the memory that a long outage of the database
//! takes does not grow with the number of requests.
//!
//! Invariant: whatever was used is written once, or an error in the log says how much may not be recorded.

use crate::shutdown::Shutdown;
use skep_store::{Store, StoreError, TokenUse, UsageCounts, UsageRow};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch, time::timeout};

/// Time that a host that ends waits for the database.
const FLUSH_TIME: Duration = Duration::from_secs(30);

/// The use that waits. Clones share it.
#[derive(Clone)]
pub(crate) struct UseQueue(Arc<Inner>);

struct Inner {
    store: Store,
    shutdown: Shutdown,
    waiting: Mutex<Waiting>,
    /// Whether a task is writing. The value changes only while `waiting` is locked.
    is_writing: watch::Sender<bool>,
}

/// Sums of uses.
#[derive(Default)]
struct Waiting {
    requests: u64,
    /// The tokens by day and tenant.
    tokens: BTreeMap<(u32, String), TokenUse>,
    /// The usage by day, tenant, key and model.
    usage: BTreeMap<(u32, String, Option<String>, String), UsageRow>,
}

impl UseQueue {
    pub(crate) fn new(store: Store, shutdown: Shutdown) -> Self {
        let (waiting, is_writing) = Default::default();
        UseQueue(Arc::new(Inner { store, shutdown, waiting, is_writing }))
    }

    /// Has the use of a request recorded. It does not wait.
    pub(crate) fn record(&self, tokens: Option<TokenUse>, usage: Vec<UsageRow>) {
        let mut waiting = self.waiting();
        waiting.add(1, tokens, usage);
        if *self.0.is_writing.borrow() {
            return;
        }
        match Handle::try_current() {
            Ok(runtime) => {
                self.0.is_writing.send_replace(true);
                drop(runtime.spawn(self.clone().write()));
            }
            Err(_) => std::mem::take(&mut *waiting).report_lost(&"the host has stopped"),
        }
    }

    /// Waits until nothing waits anymore, for a bounded time.
    pub(crate) async fn flush(&self) {
        let mut is_writing = self.0.is_writing.subscribe();
        if timeout(FLUSH_TIME, is_writing.wait_for(|is_writing| !is_writing)).await.is_err() {
            tracing::error!("the database has not recorded the last use of models without an agent in time");
        }
    }

    /// Writes until nothing waits, or until the host ends.
    async fn write(self) {
        let queue = &self;
        loop {
            let write = || queue.write_waiting();
            let written = self.0.shutdown.stored("the use of models without an agent", write).await;
            // The host ends, or another one has taken over.
            let failed = if written.is_none() { self.write_waiting().await.err() } else { None };
            let mut waiting = self.waiting();
            if let Some(error) = failed {
                std::mem::take(&mut *waiting).report_lost(&error);
            }
            if waiting.requests == 0 {
                self.0.is_writing.send_replace(false);
                return;
            }
        }
    }

    /// Writes what waits. It waits again after an error, unless it may have been written.
    async fn write_waiting(&self) -> Result<(), StoreError> {
        let taken = std::mem::take(&mut *self.waiting());
        let tokens: Vec<TokenUse> = taken.tokens.values().cloned().collect();
        let usage = taken.usage.values().cloned().collect();
        match self.0.store.count_use(tokens, usage).await {
            // A further write might count it twice.
            Err(error @ StoreError::Unconfirmed { .. }) => {
                taken.report_lost(&error);
                Ok(())
            }
            Err(error) => {
                let Waiting { requests, tokens, usage } = taken;
                self.waiting().add(requests, tokens.into_values(), usage.into_values());
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Adds the use of some requests.
    fn add(
        &mut self,
        requests: u64,
        tokens: impl IntoIterator<Item = TokenUse>,
        usage: impl IntoIterator<Item = UsageRow>,
    ) {
        self.requests += requests;
        for used in tokens {
            let key = (used.day, used.tenant.clone());
            self.tokens.entry(key).and_modify(|sum| sum.tokens += used.tokens).or_insert(used);
        }
        for row in usage {
            let key = (row.day, row.tenant.clone(), row.key.clone(), row.model.clone());
            self.usage.entry(key).and_modify(|sum| sum.counts.add(&row.counts)).or_insert(row);
        }
    }

    fn report_lost(self, error: &dyn std::fmt::Display) {
        let mut counts = UsageCounts::default();
        self.usage.values().for_each(|row| counts.add(&row.counts));
        let UsageCounts { input_tokens, output_tokens, .. } = counts;
        tracing::error!(
            requests = self.requests,
            input_tokens,
            output_tokens,
            "the use of models without an agent may not be recorded: {error}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_store::{Fault, Moment, UsageBy, UsageFilter};

    const DAY: u32 = 7;

    /// Records the use of a request to a model.
    fn record(queue: &UseQueue, tenant: &str, model: &str) {
        let (tenant, counts) = (tenant.to_owned(), UsageCounts { requests: 1, ..UsageCounts::default() });
        let row =
            UsageRow { day: DAY, tenant: tenant.clone(), model: model.into(), counts, ..UsageRow::default() };
        queue.record(Some(TokenUse { day: DAY, tenant, agent: None, tokens: 3 }), vec![row]);
    }

    /// Returns the tenants with the recorded tokens, and the number of recorded requests of each.
    async fn recorded(store: &Store) -> Vec<(String, u64, u64)> {
        let filter = UsageFilter { tenant: None, first_day: DAY, last_day: DAY };
        let sums = store.usage(&filter, UsageBy::Tenant, 100).await.expect("readable");
        let requests = |tenant: &str| {
            let of_tenant = sums.iter().filter(|sum| sum.group.as_deref() == Some(tenant));
            of_tenant.map(|sum| sum.counts.requests).sum::<u64>()
        };
        let used = store.token_use(DAY).await.expect("readable");
        used.into_iter().map(|used| (used.tenant.clone(), used.tokens, requests(&used.tenant))).collect()
    }

    fn fail(moment: Moment) -> Option<Fault> {
        (moment == Moment::Begin).then_some(Fault::Fails(10))
    }

    #[tokio::test]
    async fn what_waits_during_an_outage_is_summed_up_and_written_once() {
        let store = Store::for_tests().await.expect("a database in memory");
        let queue = UseQueue::new(store.clone(), Shutdown::default());
        store.faults().choose(fail);
        for _ in 0..100 {
            for (tenant, model) in [("a", "m"), ("a", "n"), ("b", "m")] {
                record(&queue, tenant, model);
            }
            // Attempts fail between the requests.
            tokio::task::yield_now().await;
        }
        {
            let waiting = queue.waiting();
            assert!(waiting.tokens.len() <= 2 && waiting.usage.len() <= 3, "they are summed up");
        }
        assert!(recorded(&store).await.is_empty());
        store.faults().end();
        queue.flush().await;
        assert_eq!(recorded(&store).await, [("a".to_owned(), 600, 200), ("b".to_owned(), 300, 100)]);
    }

    #[tokio::test]
    async fn a_host_that_ends_does_not_wait_for_the_end_of_an_outage() {
        let store = Store::for_tests().await.expect("a database in memory");
        let shutdown = Shutdown::default();
        let queue = UseQueue::new(store.clone(), shutdown.clone());
        store.faults().choose(fail);
        shutdown.begin();
        record(&queue, "a", "m");
        queue.flush().await;
        store.faults().end();
        record(&queue, "b", "m");
        queue.flush().await;
        assert_eq!(recorded(&store).await, [("b".to_owned(), 3, 1)], "the first one is in the log");
    }
}
