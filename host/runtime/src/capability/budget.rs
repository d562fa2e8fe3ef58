//! What all generations of one turn share: who asks, by when, and how many tokens are left.

use super::fetch_budget::FetchBudget;
use crate::{
    RuntimeError, TokensUsedUp,
    approvals::TurnApprovals,
    bindings::types::Error,
    component::Deployed,
    egress::Egress,
    host_tools::TurnTools,
    journal::{Call, Journal},
    model_grant::GrantedModels,
    token_budget::{DayShare, NoTokens, Spend},
    tools::Tool,
};
use skep_engine::{Affinity, Cancel, Engine, Priority, Usage};
use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Instant,
};
use tokio::sync::OwnedSemaphorePermit;

/// A generation that names no bound gets this many, so that generations can run side by side in one turn.
const DEFAULT_MAX_TOKENS: u32 = 1_024;
const MAX_GENERATIONS_AT_ONCE: u32 = 16;
/// Also bounds what a turn can tell its caller.
const MAX_GENERATIONS: u32 = 1_000;

/// What a guest is told to wait when others have been promised what is left of the day.
const RETRY_PROMISED_MS: u32 = 1_000;

/// One turn, as the host's side of it sees it.
pub(crate) struct Turn {
    pub(crate) agent: Arc<Deployed>,
    models: GrantedModels,
    pub(crate) affinity: Affinity,
    pub(crate) deadline: Instant,
    pub(crate) priority: Priority,
    pub(crate) journal: Arc<Journal>,
    /// Of others.
    pub(crate) tools: TurnTools,
    pub(crate) egress: Arc<Egress>,
    pub(super) fetches: FetchBudget,
    pub(crate) approvals: TurnApprovals,
    spent: Mutex<Spent>,
    day: Arc<DayShare>,
    /// Why a generation was refused because of the day's tokens.
    used_up: OnceLock<TokensUsedUp>,
    /// Of a turn that was taken up again.
    resuming: Mutex<Option<OwnedSemaphorePermit>>,
}

#[derive(Default)]
struct Spent {
    /// Produced, or promised to a generation that runs.
    tokens: u32,
    produced: u64,
    running: u32,
    generations: u32,
    usage: Usage,
}

/// Whether a generation begins now, or had begun before a restart. Then it was promised its tokens of the day, and gets
/// them whatever others have used since: a turn that is run again does again what it did.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    New,
    Again,
}

impl Beginning {
    pub(super) fn of<R>(call: &Call, recorded: &Option<R>) -> Self {
        if recorded.is_some() || !call.tokens().is_empty() { Beginning::Again } else { Beginning::New }
    }
}

/// Tokens promised to one generation. Dropped without being settled, it gives back what was not produced.
pub(crate) struct Reservation {
    turn: Arc<Turn>,
    pub(crate) max_tokens: u32,
    /// As far as was seen.
    produced: u32,
}

impl Turn {
    pub(crate) fn new(
        agent: Arc<Deployed>,
        models: GrantedModels,
        affinity: Affinity,
        deadline: Instant,
        journal: Arc<Journal>,
        tools: TurnTools,
        egress: Arc<Egress>,
    ) -> Self {
        let (name, per_day) = (agent.manifest.name.as_str(), agent.limits.tokens_per_day);
        let day = tools.services.tokens.share(&affinity.tenant, Some((name, per_day)));
        let fetches = FetchBudget::new(&agent.limits);
        Turn {
            agent,
            models,
            affinity,
            deadline,
            priority: Priority::default(),
            journal,
            tools,
            approvals: TurnApprovals::new(),
            egress,
            fetches,
            spent: Mutex::default(),
            day: Arc::new(day),
            used_up: OnceLock::new(),
            resuming: Mutex::default(),
        }
    }

    /// Keeps its place among those that are resumed, for as long as it does not wait for others.
    pub(crate) fn resumed_in(self, place: Option<OwnedSemaphorePermit>) -> Self {
        Turn { resuming: Mutex::new(place), ..self }
    }

    /// It waits for others, who may be waiting for a place.
    pub(crate) fn lets_others_resume(&self) {
        self.resuming.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The turn with the priority of its generations.
    pub(crate) fn with_priority(self, priority: Priority) -> Self {
        Turn { priority, ..self }
    }

    /// Whether a person decides about calls of one of the agent's own tools.
    pub(crate) fn needs_approval(&self, tool: &str) -> bool {
        self.agent.tools.get(tool).is_some_and(|own| own.definition.needs_approval)
    }

    /// Computes what may take long apart from everyone else's work; at once if it is quick. Dropping this gives it up.
    pub(super) async fn compute<T: Send + 'static>(
        &self,
        is_quick: bool,
        work: impl FnOnce(&Cancel) -> T + Send + 'static,
    ) -> T {
        self.tools.services.compute.run_unless(is_quick, &self.affinity.tenant, work).await
    }

    /// The engine of a model that the agent may use; without a name, of its own.
    pub(crate) fn engine(&self, model: Option<&str>) -> Result<Engine, Error> {
        self.models.engine(&self.agent, model)
    }

    /// Of all models that the agent may use.
    pub(super) fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.models.of(&self.agent)
    }

    /// A tool that the model may be offered: one of the agent's own, or one of others that this turn listed.
    pub(crate) fn tool(&self, name: &str) -> Option<Arc<Tool>> {
        let own = self.agent.tools.get(name).cloned();
        own.or_else(|| self.tools.offered(name).map(|offered| offered.tool.clone()))
    }

    /// What all of it used so far.
    pub(crate) fn spend(&self) -> Spend {
        Spend::new(&self.day, self.lock().produced)
    }

    /// What it means that the agent failed so: it may pass on why it was denied a generation.
    pub(crate) fn explain(&self, error: RuntimeError) -> RuntimeError {
        match (&error, self.used_up.get()) {
            (RuntimeError::AgentFailed { message }, Some(why)) if *message == why.to_string() => {
                why.clone().into()
            }
            _ => error,
        }
    }

    /// Sum of the turn's generations.
    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// Room for a generation of at most `asked` tokens, or of what is left if that is less.
    pub(super) fn reserve(
        self: &Arc<Self>,
        asked: Option<u32>,
        beginning: Beginning,
    ) -> Result<Reservation, Error> {
        let limit = self.agent.limits.tokens_per_turn;
        let mut spent = self.lock();
        if spent.running >= MAX_GENERATIONS_AT_ONCE {
            return Err(Error::Busy(50));
        }
        if spent.generations >= MAX_GENERATIONS {
            let message = format!("a turn may generate {MAX_GENERATIONS} times");
            return Err(Error::InvalidArgument(message));
        }
        let max_tokens = asked.unwrap_or(DEFAULT_MAX_TOKENS).min(limit.saturating_sub(spent.tokens));
        if max_tokens == 0 {
            return Err(Error::ContextOverflow(limit));
        }
        let max_tokens = self.of_the_day(max_tokens, beginning)?;
        spent.tokens += max_tokens;
        spent.running += 1;
        spent.generations += 1;
        drop(spent);
        Ok(Reservation { turn: self.clone(), max_tokens, produced: 0 })
    }

    fn of_the_day(&self, asked: u32, beginning: Beginning) -> Result<u32, Error> {
        match beginning {
            Beginning::New => self.day.promise(asked).map_err(|none| match none {
                NoTokens::Promised => Error::Busy(RETRY_PROMISED_MS),
                NoTokens::UsedUp(why) => Error::Denied(self.used_up.get_or_init(|| why).to_string()),
            }),
            Beginning::Again => {
                self.day.promise_again(asked);
                Ok(asked)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// So many tokens were produced so far. Those that are taken back may make them more than were asked for.
    pub(crate) fn produced(&mut self, tokens: usize) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let mut spent = self.turn.lock();
        spent.produced = spent.produced - u64::from(self.produced) + u64::from(tokens);
        drop(spent);
        self.produced = tokens;
    }

    /// The generation has ended, and this is what it used.
    pub(crate) fn settle(mut self, usage: &Usage) {
        self.produced(usage.produced_tokens());
        self.turn.lock().usage.add(usage);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut spent = self.turn.lock();
        spent.tokens = (spent.tokens - self.max_tokens).saturating_add(self.produced);
        spent.running -= 1;
        drop(spent);
        self.turn.day.settle(self.max_tokens, self.produced);
    }
}
