//! The context that all generations of one turn share: the agent and its session, the deadline, and the remaining tokens.

use crate::{
    RuntimeError, TokensUsedUp,
    agent::Agent,
    approvals::{ApprovalDesk, TurnApprovals},
    bindings::types::Error,
    capability::{
        http::budget::FetchBudget,
        tools::{HostTools, TurnTools},
    },
    compute::Compute,
    egress::Egress,
    journal::{Call, Journal},
    models::GrantedModels,
    token_budget::{DayShare, NoTokens, TokenBudgets, TokenSpend},
    tool::Tool,
};
use skep_engine::{Affinity, Cancel, Model, Priority, Usage};
use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Instant,
};
use tokio::sync::OwnedSemaphorePermit;

/// Token limit of a generation that sets none, so that several generations can run concurrently in one turn.
const DEFAULT_MAX_TOKENS: u32 = 1_024;
const MAX_GENERATIONS_AT_ONCE: u32 = 16;
/// Maximum number of generations in a turn. It also bounds the output that a turn can send to its caller.
const MAX_GENERATIONS: u32 = 1_000;

/// Retry delay that a guest is given when the day's remaining tokens are reserved by others.
const RETRY_PROMISED_MS: u32 = 1_000;

/// The parts of the host that host functions use.
pub(crate) struct Reach {
    pub(crate) models: GrantedModels,
    pub(crate) tokens: TokenBudgets,
    pub(crate) egress: Arc<Egress>,
    pub(crate) compute: Arc<Compute>,
    pub(crate) approvals: ApprovalDesk,
    pub(crate) tools: Arc<HostTools>,
}

/// One turn, as the host functions see it.
pub(crate) struct Turn {
    pub(crate) agent: Arc<Agent>,
    models: GrantedModels,
    compute: Arc<Compute>,
    pub(crate) affinity: Affinity,
    pub(crate) deadline: Instant,
    pub(crate) priority: Priority,
    pub(crate) journal: Arc<Journal>,
    /// External tools.
    pub(crate) tools: TurnTools,
    pub(crate) egress: Arc<Egress>,
    pub(super) fetches: FetchBudget,
    pub(crate) approvals: TurnApprovals,
    spent: Mutex<Spent>,
    day: Arc<DayShare>,
    /// The reason why a generation was refused, if the day's tokens are used up.
    used_up: OnceLock<TokensUsedUp>,
    /// The permit of a resumed turn.
    resuming: Mutex<Option<OwnedSemaphorePermit>>,
}

#[derive(Default)]
struct Spent {
    /// Tokens produced, or reserved for a running generation.
    tokens: u32,
    produced: u64,
    running: u32,
    generations: u32,
    usage: Usage,
}

/// Whether a generation starts now, or had started before a restart. In the latter case it gets the day's tokens that were
/// reserved for it then, whatever others have used since, so that a replayed turn repeats what it did.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GenerationStart {
    New,
    Again,
}

impl GenerationStart {
    pub(super) fn of<R>(call: &Call, recorded: &Option<R>) -> Self {
        if recorded.is_some() || !call.tokens().is_empty() {
            GenerationStart::Again
        } else {
            GenerationStart::New
        }
    }
}

/// Tokens reserved for one generation. Dropping it returns the tokens that were not produced.
pub(crate) struct Reservation {
    turn: Arc<Turn>,
    pub(crate) max_tokens: u32,
    /// Number of tokens produced so far.
    produced: u32,
}

impl Turn {
    pub(crate) fn new(
        agent: Arc<Agent>,
        affinity: Affinity,
        deadline: Instant,
        journal: Arc<Journal>,
        tools: TurnTools,
        reach: &Reach,
    ) -> Self {
        let (name, per_day) = (agent.manifest.name.as_str(), agent.limits.tokens_per_day);
        let day = reach.tokens.share(&affinity.tenant, Some((name, per_day)));
        let (desk, turn_id) = (reach.approvals.clone(), tools.turn_id.clone());
        Turn {
            models: reach.models.clone(),
            compute: reach.compute.clone(),
            egress: reach.egress.clone(),
            fetches: FetchBudget::new(&agent.limits),
            approvals: TurnApprovals::new(desk, journal.clone(), turn_id, agent.limits.approval_ms),
            agent,
            affinity,
            deadline,
            priority: Priority::default(),
            journal,
            tools,
            spent: Mutex::default(),
            day: Arc::new(day),
            used_up: OnceLock::new(),
            resuming: Mutex::default(),
        }
    }

    /// Holds the turn's permit to be resumed, until the turn waits for others.
    pub(crate) fn resumed_in(self, permit: Option<OwnedSemaphorePermit>) -> Self {
        Turn { resuming: Mutex::new(permit), ..self }
    }

    /// Releases the permit of a resumed turn. It is called when the turn waits for other turns, which may need the permit.
    pub(crate) fn lets_others_resume(&self) {
        self.resuming.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Sets the priority of the turn's generations.
    pub(crate) fn with_priority(self, priority: Priority) -> Self {
        Turn { priority, ..self }
    }

    /// Whether calls of one of the agent's own tools need a person's approval.
    pub(crate) fn needs_approval(&self, tool: &str) -> bool {
        self.agent.tools.get(tool).is_some_and(|own| own.definition.needs_approval)
    }

    /// Runs long CPU-bound work on another thread, and quick work at once. Dropping the future cancels the work.
    pub(super) async fn compute<T: Send + 'static>(
        &self,
        is_quick: bool,
        work: impl FnOnce(&Cancel) -> T + Send + 'static,
    ) -> T {
        self.compute.run_unless(is_quick, &self.affinity.tenant, work).await
    }

    /// Returns a model that the agent may use; without a name, the agent's own model.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<Model, Error> {
        self.models.get(&self.agent, &self.affinity.tenant, name)
    }

    /// Returns all models that the agent may use.
    pub(super) fn usable_models(&self) -> impl Iterator<Item = &Model> {
        self.models.of(&self.agent, &self.affinity.tenant)
    }

    /// Returns a tool that the model may be offered: one of the agent's own, or an external one that this turn listed.
    pub(crate) fn tool(&self, name: &str) -> Option<Arc<Tool>> {
        let own = self.agent.tools.get(name).cloned();
        own.or_else(|| self.tools.offered(name).map(|offered| offered.tool.clone()))
    }

    /// Returns the tokens that the turn has used so far.
    pub(crate) fn spend(&self) -> TokenSpend {
        TokenSpend::new(&self.day, self.lock().produced)
    }

    /// Refines the error of a failed agent: if the agent only passed on the reason why it was denied a generation, that reason
    /// becomes the error.
    pub(crate) fn explain(&self, error: RuntimeError) -> RuntimeError {
        match (&error, self.used_up.get()) {
            (RuntimeError::AgentFailed { message }, Some(why)) if *message == why.to_string() => {
                why.clone().into()
            }
            _ => error,
        }
    }

    /// Returns the sum over the turn's generations.
    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// Reserves at most `asked` tokens for a generation, or the remaining tokens if those are fewer.
    pub(super) fn reserve(
        self: &Arc<Self>,
        asked: Option<u32>,
        beginning: GenerationStart,
    ) -> Result<Reservation, Error> {
        let limit = self.agent.limits.tokens_per_turn;
        let mut spent = self.lock();
        if spent.running >= MAX_GENERATIONS_AT_ONCE {
            return Err(Error::Busy(50));
        }
        if spent.generations >= MAX_GENERATIONS {
            let message = format!("a turn may generate at most {MAX_GENERATIONS} times");
            return Err(Error::InvalidArgument(message));
        }
        let max_tokens = asked.unwrap_or(DEFAULT_MAX_TOKENS).min(limit.saturating_sub(spent.tokens));
        if max_tokens == 0 {
            return Err(Error::ContextOverflow(limit));
        }
        let max_tokens = self.reserve_for_today(max_tokens, beginning)?;
        spent.tokens += max_tokens;
        spent.running += 1;
        spent.generations += 1;
        drop(spent);
        Ok(Reservation { turn: self.clone(), max_tokens, produced: 0 })
    }

    fn reserve_for_today(&self, asked: u32, beginning: GenerationStart) -> Result<u32, Error> {
        match beginning {
            GenerationStart::New => self.day.promise(asked).map_err(|none| match none {
                NoTokens::Promised => Error::Busy(RETRY_PROMISED_MS),
                NoTokens::UsedUp(why) => Error::Denied(self.used_up.get_or_init(|| why).to_string()),
            }),
            GenerationStart::Again => {
                self.day.reserve_again(asked);
                Ok(asked)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Records that `tokens` tokens were produced so far. Taken-back tokens count, so this may exceed the requested number.
    pub(crate) fn produced(&mut self, tokens: usize) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let mut spent = self.turn.lock();
        spent.produced = spent.produced - u64::from(self.produced) + u64::from(tokens);
        drop(spent);
        self.produced = tokens;
    }

    /// Records the final usage of a finished generation.
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
