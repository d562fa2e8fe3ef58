//! The context that all generations of one turn share: the agent and its session, the deadline, and the remaining tokens.

mod reservation;

pub(crate) use reservation::Reservation;

use crate::{
    BudgetUsedUp, PriceUnknown, RequestLog, RequestOrigin, RuntimeError, Surface, TurnClient, WorstCase,
    agent::Agent,
    approvals::{ApprovalDesk, TurnApprovals},
    bindings::types::Error,
    capability::{
        http::budget::FetchBudget,
        tools::{HostTools, TurnTools},
    },
    compute::Compute,
    deadline::Deadline,
    disk_pages::DiskPages,
    egress::Egress,
    journal::{Attempt, Call, Journal},
    models::GrantedModels,
    token_budget::{DayShare, NoTokens, TokenBudgets, TokenSpend},
    tool::Tool,
    usage::{Amount, ModelUse, RequestUse, ReservedCost, Source, billed_models, most_prompt_tokens},
};
use skep_engine::{Affinity, Cancel, Model, Observer, Priority, ServedModel, UnreportedUse, Usage};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::OwnedSemaphorePermit;

/// Token limit of a generation that sets none, so that several generations can run concurrently in one turn.
const DEFAULT_MAX_TOKENS: u32 = 1_024;
const MAX_GENERATIONS_AT_ONCE: u32 = 16;
/// Maximum number of generations in a turn. It also bounds the output that a turn can send to its caller.
const MAX_GENERATIONS: u32 = 1_000;

/// Retry delay that a guest is given when the day's remaining tokens are reserved by others.
const RETRY_RESERVED_MS: u32 = 1_000;

/// The parts of the host that host functions use.
pub(crate) struct Reach {
    pub(crate) models: GrantedModels,
    pub(crate) tokens: TokenBudgets,
    pub(crate) egress: Arc<Egress>,
    pub(crate) compute: Arc<Compute>,
    pub(crate) approvals: ApprovalDesk,
    pub(crate) tools: Arc<HostTools>,
    pub(crate) requests: RequestLog,
    pub(crate) disk: DiskPages,
}

/// One turn, as the host functions see it.
pub(crate) struct Turn {
    pub(crate) agent: Arc<Agent>,
    models: GrantedModels,
    compute: Arc<Compute>,
    pub(crate) affinity: Affinity,
    pub(crate) deadline: Deadline,
    pub(crate) priority: Priority,
    pub(crate) journal: Arc<Journal>,
    /// External tools.
    pub(crate) tools: TurnTools,
    pub(crate) egress: Arc<Egress>,
    pub(super) fetches: FetchBudget,
    pub(crate) approvals: TurnApprovals,
    spent: Mutex<Spent>,
    day: Arc<DayShare>,
    /// The origin of the turn's usage.
    pub(crate) source: Source,
    /// The observer of the turn's requests to models.
    pub(super) observer: Option<Arc<dyn Observer>>,
    /// The permit of a resumed turn.
    resuming: Mutex<Option<OwnedSemaphorePermit>>,
}

/// The reason why a budget of the day refused a generation.
#[derive(Clone)]
enum Refusal {
    UsedUp(BudgetUsedUp),
    NoPrice(PriceUnknown),
}

#[derive(Default)]
struct Spent {
    /// Tokens produced, or reserved for a running generation.
    tokens: u32,
    produced: u64,
    running: u32,
    generations: u32,
    usage: Usage,
    models: ModelUse,
    /// Estimated use of generations that were cut off, by call, until it is recorded.
    cut: BTreeMap<u32, Usage>,
    /// The use of remote models that no event reported, by call, until it is recorded.
    unreported: BTreeMap<u32, Vec<UnreportedUse>>,
    /// The reason why a generation was refused first, if a budget of the day did not allow it.
    refused: Option<Refusal>,
}

/// The tokens that a generation asks for.
pub(crate) struct AskedTokens {
    /// Number of the call in the journal.
    call: u32,
    model: String,
    /// The models that the bill may name.
    billed: Vec<String>,
    most_input: usize,
    output: Option<u32>,
    /// See [`WorstCase::asks`].
    asks: u32,
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

impl AskedTokens {
    /// Creates the question for a generation whose prompt has this many bytes of text, in so many messages, and which may
    /// take `asks` requests to a server.
    pub(crate) fn new(
        call: &Call,
        model: &Model,
        text_bytes: usize,
        messages: usize,
        output: Option<u32>,
        asks: u32,
    ) -> Self {
        let most_input = most_prompt_tokens(text_bytes, messages, model.sequence_limit());
        let (model, billed) = (model.name().to_owned(), billed_models(model));
        AskedTokens { call: call.number(), model, billed, most_input, output, asks }
    }
}

impl Turn {
    pub(crate) fn new(
        agent: Arc<Agent>,
        mut affinity: Affinity,
        deadline: Instant,
        journal: Arc<Journal>,
        tools: TurnTools,
        reach: &Reach,
    ) -> Self {
        let (name, per_day) = (agent.manifest.name.as_str(), agent.limits.tokens_per_day);
        let day = reach.tokens.share(&affinity.tenant, Some((name, per_day)));
        let source = Source {
            tenant: affinity.tenant.clone(),
            key: None,
            agent: Some(name.to_owned()),
            session: affinity.session.clone(),
        };
        affinity.public = tools.rules.public_part(name);
        let (desk, turn_id) = (reach.approvals.clone(), tools.turn_id.clone());
        Turn {
            models: reach.models.pinned(tools.rules.clone()),
            compute: reach.compute.clone(),
            egress: reach.egress.clone(),
            fetches: FetchBudget::new(&agent.limits, journal.turn_use().clone()),
            approvals: TurnApprovals::new(desk, journal.clone(), turn_id, agent.limits.approval_ms),
            agent,
            affinity,
            deadline: Deadline::new(deadline),
            priority: Priority::default(),
            journal,
            tools,
            spent: Mutex::default(),
            day: Arc::new(day),
            source,
            observer: None,
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

    /// Sets the key that sent the turn's message.
    pub(crate) fn sent_with(mut self, key: Option<String>) -> Self {
        self.source.key = key;
        self
    }

    /// Lets the log follow the turn's requests to models. It is called once the origin of the turn is complete.
    pub(crate) fn logged_in(self, log: &RequestLog, surface: Surface) -> Self {
        let turn = Some(self.tools.turn_id.clone());
        let origin =
            RequestOrigin { source: self.source.clone(), turn, surface, asked: None, streamed: None };
        Turn { observer: log.observer(origin), ..self }
    }

    /// Sets the priority of the turn's generations.
    pub(crate) fn with_priority(self, priority: Priority) -> Self {
        Turn { priority, ..self }
    }

    /// Returns the client that waits for the turn, if it can receive notifications and questions.
    pub(crate) fn client(&self) -> Option<Arc<dyn TurnClient>> {
        self.tools.client()
    }

    /// Returns whether calls of one of the agent's own tools need a person's approval.
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
    pub(crate) async fn model(&self, name: Option<&str>) -> Result<Model, Error> {
        self.models.ready(&self.agent, &self.affinity.tenant, name).await
    }

    /// Returns the agent's own model if it is loaded.
    pub(super) fn own_loaded_model(&self) -> Option<Model> {
        self.models.set().find(Some(&self.agent.model)).ok()?.loaded()
    }

    /// Returns whether the agent's own model is named by an alias, which may mean another model than it did before.
    pub(super) fn uses_alias(&self) -> bool {
        self.models.set().is_alias(&self.agent.model)
    }

    /// Returns the name of the agent's own model.
    pub(super) fn own_model_name(&self) -> Option<String> {
        self.models.own_name(&self.agent)
    }

    /// Returns all models that the agent may use.
    pub(super) fn usable_models(&self) -> impl Iterator<Item = ServedModel> + '_ {
        self.models.of(&self.agent, &self.affinity.tenant)
    }

    /// Returns a tool that the model may be offered: one of the agent's own, or an external one that this turn listed.
    pub(crate) fn tool(&self, name: &str) -> Option<Arc<Tool>> {
        let own = self.agent.tools.get(name).cloned();
        own.or_else(|| self.tools.offered(name).map(|offered| offered.tool.clone()))
    }

    /// Returns what the turn has used so far.
    pub(crate) fn spend(&self) -> TokenSpend {
        let (produced, models) = {
            let spent = self.lock();
            (spent.produced, spent.models.clone())
        };
        TokenSpend::new(&self.day, produced, &self.source, &models)
    }

    /// Counts the use of an attempt whose answer an earlier run lost. The turn's own limit is not reduced, so that the next
    /// attempt may be as long.
    pub(super) fn count_lost(&self, attempt: &Attempt) {
        let used = attempt.lost_use(0);
        let (counts, produced) = (used.counts(), used.produced_tokens());
        let mut spent = self.lock();
        spent.produced += produced;
        spent.models.add(&attempt.model, &counts);
        drop(spent);
        self.day.settle(0, u32::try_from(produced).unwrap_or(u32::MAX));
        let mut models = ModelUse::default();
        models.add(&attempt.model, &counts);
        self.day.money.settle(Amount::ZERO, &models);
    }

    /// Counts the unreported use that an earlier run recorded for a refused generation.
    pub(super) fn count_unreported(&self, unreported: &[UnreportedUse]) {
        let models = ModelUse::of_request("", &RequestUse::default(), unreported);
        let produced: usize = unreported.iter().map(|hidden| hidden.usage.produced_tokens()).sum();
        let mut spent = self.lock();
        spent.produced += produced as u64;
        spent.models.add_all(&models);
        drop(spent);
        self.day.settle(0, u32::try_from(produced).unwrap_or(u32::MAX));
        self.day.money.settle(Amount::ZERO, &models);
    }

    /// Keeps the unreported use of a generation until it is recorded.
    pub(crate) fn keep_unreported(&self, call: &Call, unreported: Vec<UnreportedUse>) {
        if !unreported.is_empty() {
            self.lock().unreported.insert(call.number(), unreported);
        }
    }

    /// Returns the unreported use of a generation, so that it can be recorded.
    pub(crate) fn take_unreported(&self, call: &Call) -> Vec<UnreportedUse> {
        self.lock().unreported.remove(&call.number()).unwrap_or_default()
    }

    /// Returns the estimated use of a generation that was cut off, so that it can be recorded.
    pub(crate) fn take_cut(&self, call: &Call) -> Option<Usage> {
        self.lock().cut.remove(&call.number())
    }

    /// Refines the error of a failed agent: if the agent only passed on the reason why it was denied a generation, that reason
    /// becomes the error.
    pub(crate) fn explain(&self, error: RuntimeError) -> RuntimeError {
        match (&error, &self.lock().refused) {
            (RuntimeError::AgentFailed { message }, Some(why)) if *message == why.message() => {
                why.clone().into()
            }
            _ => error,
        }
    }

    /// Returns the sum over the turn's generations.
    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// Reserves the tokens that a generation asks for, or the remaining tokens if those are fewer.
    pub(super) fn reserve(
        self: &Arc<Self>,
        asked: AskedTokens,
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
        let max_tokens = asked.output.unwrap_or(DEFAULT_MAX_TOKENS).min(limit.saturating_sub(spent.tokens));
        if max_tokens == 0 {
            return Err(Error::ContextOverflow(limit));
        }
        let reserved = self.reserve_for_today(&asked, max_tokens, beginning, &mut spent.refused)?;
        spent.tokens += reserved.output_tokens;
        spent.running += 1;
        spent.generations += 1;
        drop(spent);
        Ok(Reservation::new(self.clone(), asked, reserved))
    }

    fn reserve_for_today(
        &self,
        asked: &AskedTokens,
        output_tokens: u32,
        beginning: GenerationStart,
        refused: &mut Option<Refusal>,
    ) -> Result<ReservedCost, Error> {
        let AskedTokens { billed: models, most_input, asks, .. } = asked;
        let worst = WorstCase { input_tokens: *most_input, output_tokens, asks: *asks };
        let mut denied = |why| Error::Denied(refused.get_or_insert(why).message());
        match beginning {
            GenerationStart::New => self.day.reserve_request(models, worst).map_err(|none| match none {
                NoTokens::Reserved => Error::Busy(RETRY_RESERVED_MS),
                NoTokens::UsedUp(why) => denied(Refusal::UsedUp(why)),
                NoTokens::NoPrice(why) => denied(Refusal::NoPrice(why)),
            }),
            GenerationStart::Again => Ok(self.day.reserve_again(models, worst)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Refusal {
    fn message(&self) -> String {
        match self {
            Refusal::UsedUp(why) => why.to_string(),
            Refusal::NoPrice(why) => why.to_string(),
        }
    }
}

impl From<Refusal> for RuntimeError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::UsedUp(why) => why.into(),
            Refusal::NoPrice(why) => why.into(),
        }
    }
}
