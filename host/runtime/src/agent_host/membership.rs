//! Keeps this host among the hosts of its cluster: reports it, looks for hosts that are gone, and continues their work.

use super::Inner;
use crate::{
    HostRole, RuntimeError, TokensInFlight,
    cluster::{Facts, ModelFacts},
    placement::Load,
};
use skep_engine::Counts;
use std::{
    sync::{Arc, PoisonError, Weak},
    time::Duration,
};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Interval at which a host reports itself and looks for the others.
const INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which the use of all hosts is read again. Budgets may be exceeded by what other hosts use in this time.
const BUDGET_INTERVAL: Duration = Duration::from_millis(1_500);

/// Runs until the host is gone.
pub(super) async fn run(inner: Weak<Inner>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut refreshed = Instant::now();
    loop {
        ticks.tick().await;
        let Some(inner) = inner.upgrade() else { return };
        let met = inner.meet().await;
        let host = &inner.dispatch.host;
        match met {
            Ok(()) => {}
            Err(RuntimeError::Store(error)) if error.is_fenced() => {
                if host.shutdown.admit().is_ok() {
                    tracing::error!("this host no longer belongs to the cluster: {error}");
                }
                return;
            }
            Err(error) => {
                tracing::error!("cannot exchange reports with the other hosts of the cluster: {error}")
            }
        }
        inner.look_at_models();
        if refreshed.elapsed() >= BUDGET_INTERVAL {
            refreshed = Instant::now();
            if let Err(error) = host.reach.tokens.refresh(&host.store).await {
                tracing::warn!("cannot read what other hosts have used of the budgets: {error}");
            }
        }
    }
}

impl Inner {
    /// Returns what this host reports about itself.
    pub(super) fn facts(&self) -> Facts {
        let host = &self.dispatch.host;
        let (models, cluster) = (host.reach.models.set(), &host.cluster);
        Facts {
            models: models.own().iter().map(|model| model.name().to_owned()).collect(),
            running_turns: self.dispatch.admission.open_turns() as u64,
            counts: cluster.own_counts(),
            agents: host.deployments.stored_version(),
            role: cluster.role(),
            catalog: match cluster.is_clustered() && cluster.role() != HostRole::Prefill {
                true => ModelFacts::of_own(models),
                // Nobody asks it for generations.
                false => Vec::new(),
            },
            load: self.load(),
            warm: cluster.warm_agents(),
            computing: Some(self.computing()),
            pages: cluster.gives_pages(),
            tokens: self.tokens_in_flight(),
        }
    }

    /// Returns the number of sequences that the models of this host compute, for this host and for others.
    fn computing(&self) -> u32 {
        let engines = self.dispatch.host.reach.models.set().engines();
        u32::try_from(engines.map(|engine| engine.stats().running).sum::<usize>()).unwrap_or(u32::MAX)
    }

    /// Returns the tokens that the models of this host have to compute. As many are expected of each answer as answers had on
    /// average until now.
    fn tokens_in_flight(&self) -> TokensInFlight {
        let mut sum = TokensInFlight::default();
        for engine in self.dispatch.host.reach.models.set().engines() {
            let (stats, times) = (engine.stats(), engine.times());
            let answers = times.first_token.count().max(1);
            sum.prefill += engine.prefill_tokens() as u64;
            sum.decode += (stats.running + stats.waiting) as u64 * stats.generated_tokens / answers;
            let median_ns = |counts: &Counts| {
                let median = counts.quantile(0.5).unwrap_or_default();
                u64::try_from(median.as_nanos()).unwrap_or(u64::MAX)
            };
            let prompt_ns = median_ns(&times.first_token).saturating_sub(median_ns(&times.queue));
            let computed = stats.prompt_tokens.saturating_sub(stats.cached_tokens) / answers;
            // The slowest model counts.
            sum.prefill_token_ns = sum.prefill_token_ns.max(prompt_ns / computed.max(1));
            sum.decode_token_ns = sum.decode_token_ns.max(median_ns(&times.inter_token));
        }
        sum
    }

    /// Returns the load of this host.
    fn load(&self) -> Load {
        let host = &self.dispatch.host;
        // Turns that wait for people, or behind others, have no instance.
        let (running, slots) = host.instances.taken();
        let (mut waiting, mut capacity, mut pages, mut free) = (0, 0, 0, 0);
        for engine in host.reach.models.set().engines() {
            let stats = engine.stats();
            waiting += stats.waiting;
            capacity += engine.max_sequences();
            pages += stats.pages_total;
            free += stats.pages_free.min(stats.pages_total);
        }
        if capacity == 0 {
            // It computes no model at the moment, so its turns are bounded by the instances.
            capacity = slots;
        }
        let bounded = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let kv_percent = (pages - free) * 100 / pages.max(1);
        Load {
            running_turns: bounded(running),
            waiting: bounded(waiting),
            capacity: bounded(capacity),
            kv_percent: u8::try_from(kv_percent).unwrap_or(100),
        }
    }

    /// Takes over which models the other hosts have, and restarts agents in the background that waited for one of them.
    fn look_at_models(self: &Arc<Self>) {
        let host = &self.dispatch.host;
        let models = host.reach.models.set();
        if let Some(others) = host.cluster.other_models(models) {
            models.set_others(others);
        }
        // A restart that is not over yet, or a deployment, does not have to be waited for.
        if !host.deployments.lacked_what_is_served(models) || self.deploying.try_lock().is_err() {
            return;
        }
        let inner = self.clone();
        let mut tasks = self.cluster_tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            if let Err(error) = inner.restart_waiting_agents().await {
                // The next meeting tries again.
                tracing::warn!("cannot restart agents whose model another host has: {error}");
            }
        });
    }

    /// Reports this host, gives back what it should not remember, and continues the work of hosts that are gone.
    pub(super) async fn meet(&self) -> Result<(), RuntimeError> {
        let cluster = &self.dispatch.host.cluster;
        cluster.meet(&self.facts()).await?;
        let excess = cluster.ownership.excess();
        if excess > 0 {
            self.dispatch.release(excess).await;
        }
        if cluster.take_loss()
            && let Err(error) = self.take_over().await
        {
            // The next meeting tries again.
            cluster.note_loss();
            return Err(error);
        }
        Ok(())
    }

    /// Continues the work of hosts that are gone.
    async fn take_over(&self) -> Result<(), RuntimeError> {
        self.dispatch.take_over().await?;
        self.dispatch.adopt_turns(None).await?;
        self.courier.take_over();
        self.batches.look();
        if self.dispatch.host.cluster.is_first() {
            self.following.take_over(&self.dispatch).await?;
            self.tidy();
        }
        Ok(())
    }

    /// Removes in the background what hosts that are gone have left unfinished.
    fn tidy(&self) {
        let store = self.dispatch.host.store.clone();
        let mut tasks = self.cluster_tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            if let Err(error) = store.tidy().await {
                // The leftovers are invisible, and the next start of a host tries again.
                tracing::warn!("cannot remove yet what a host that is gone has left: {error}");
            }
        });
    }
}
