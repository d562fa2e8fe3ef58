//! The cheap handle through which everyone else uses a model. It checks and compiles a request on the caller's
//! own thread, and puts it into the bounded queue of the replica that the router chooses; it never touches a
//! scheduler. Dropping the last handle stops the replicas: requests that still run end with `ShuttingDown`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use serde_json::Value;
use skep_cache::{Digest, PageNamer};
use skep_model::{ChatTemplate, LoadedModel, MemoryPlan, PAGE_TOKENS, PageForm, SectionCache, Tokenizer};

use crate::constraint::{CompileShares, ConstraintCompiler, SchemaNotes};
use crate::draft::GrammarDrafter;
use crate::generation_span::GenerationSpan;
use crate::keyed_hash::KeyedHash;
use crate::observation::{Attempts, Observed, Observer, PromptMessage};
use crate::replica::{Replica, SendError};
use crate::rollback::ChecksCache;
use crate::router::{ReplicaSlot, Router};
use crate::stream::{self, EventReceiver, SpentTokens, TokenStream};
use crate::submission::Submission;
use crate::{
    Affinity, Constraint, EngineError, EngineOptions, EngineStats, EngineTimes, EraseScope, GenerateRequest,
    LayerLoad, ModelInfo, PageOwner, PageSink, Priority, RankTime, ReplicaMemory, Warmed,
};

/// Replaces default deadlines that are too far away to be a point in time.
const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Interval between checks whether an engine that is being retired is still in use.
const RETIRE_INTERVAL: Duration = Duration::from_millis(20);
/// Retry delay when a loop's channel is full. A loop empties its channel before each step.
const FULL_CHANNEL_MS: u32 = 50;

/// A running model: its replicas and the router in front of them. Clones share it.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    sections: SectionCache,
    template: Arc<ChatTemplate>,
    /// The form of pages outside of the executors; `None` if they cannot leave them.
    page_form: Option<PageForm>,
    options: EngineOptions,
    /// The length of the longest sequence that can ever run.
    sequence_limit: usize,
    constraints: ConstraintCompiler,
    compiling: CompileShares,
    checks: ChecksCache,
    router: Router,
    replicas: Vec<Replica>,
    draining: AtomicBool,
}

/// The caller's end of a queued request.
struct Queued {
    events: EventReceiver,
    spent: SpentTokens,
    warnings: Arc<[String]>,
}

impl Engine {
    /// Starts a model with one replica.
    pub fn start(model: LoadedModel, options: EngineOptions) -> Result<Engine, EngineError> {
        Engine::start_replicas(vec![model], options)
    }

    /// Starts the replicas of one model, as returned by `LoadedModel::open_replicas`.
    pub fn start_replicas(models: Vec<LoadedModel>, options: EngineOptions) -> Result<Engine, EngineError> {
        let Some(first) = models.first() else {
            return Err(EngineError::invalid(
                "replicas",
                "the list is empty; a model needs at least one replica",
            ));
        };
        let limits = *first.executor.limits();
        if let Some(other) = models.iter().find(|other| !is_same_model(first, other)) {
            let message = format!(
                "{} with {:?} is not a replica of {} with {limits:?}",
                other.name,
                other.executor.limits(),
                first.name
            );
            return Err(EngineError::invalid("replicas", message));
        }
        let context_length = options.context.unwrap_or(usize::MAX).min(limits.context_length);
        // A sequence is never longer than the KV cache.
        let sequence_limit = context_length.min(limits.page_count.saturating_mul(PAGE_TOKENS));
        let info = ModelInfo {
            name: first.name.clone(),
            digest: first.digest.clone(),
            context_length: sequence_limit,
            full_context_length: limits.context_length,
            vocabulary_size: limits.vocabulary_size,
            eos: first.config.eos.clone(),
            bos: first.config.bos,
            add_bos: first.config.add_bos,
            replicas: models.len(),
            device: devices(&models),
            memory: MemoryPlan::of_replicas(
                models.iter().map(|model| (model.device.as_str(), model.executor.plan())),
            ),
            replica_memory: models.iter().map(replica_memory).collect(),
            sampling: first.sampling.clone().unwrap_or_default(),
            markup: options.markup,
            weights: first.weights.clone(),
            created_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        };
        let (tokenizer, template) = (first.tokenizer.clone(), first.template.clone());
        let page_form = first.executor.page_form().cloned();
        let constraints = ConstraintCompiler::new(&tokenizer, info.vocabulary_size, &info.eos, &info.name)?;
        let hash = KeyedHash::default();
        let replicas = models.into_iter().enumerate().map(|(index, model)| {
            Replica::start(index, (model.executor, model.restart), (&info, &tokenizer), &hash, &options)
        });
        let replicas: Vec<Replica> = replicas.collect::<Result<_, _>>()?;
        let views = replicas.iter().map(|replica| replica.view().clone()).collect();
        let shared = Shared {
            sequence_limit,
            info,
            tokenizer,
            sections: SectionCache::default(),
            template,
            page_form,
            constraints,
            compiling: CompileShares::default(),
            checks: ChecksCache::default(),
            router: Router::new(options.routing, hash, options.max_queue, views),
            replicas,
            options,
            draining: AtomicBool::new(false),
        };
        Ok(Engine { shared: Arc::new(shared) })
    }

    /// Queues a generation. A new constraint is compiled here, on the caller's thread, which takes milliseconds
    /// (it is bounded); everything else is quick.
    pub fn generate(&self, request: GenerateRequest) -> Result<TokenStream, EngineError> {
        self.start_request(request, None)
    }

    /// Computes the prompt of a request for another host, which gets its whole pages as they are computed. Nothing is drawn. That
    /// host counts the tokens, so the token meter of this engine does not.
    pub fn prefill(
        &self,
        request: GenerateRequest,
        pages: Arc<dyn PageSink>,
    ) -> Result<TokenStream, EngineError> {
        self.start_request(GenerateRequest { max_tokens: Some(0), ..request }, Some(pages))
    }

    fn start_request(
        &self,
        mut request: GenerateRequest,
        pages: Option<Arc<dyn PageSink>>,
    ) -> Result<TokenStream, EngineError> {
        let mut span = GenerationSpan::new(&self.shared.info.name, &request);
        let mut observed = request.observer.take().map(|observer| self.observed(&*observer, &request.prompt));
        match self.queue(request, pages) {
            Ok(Queued { events, spent, warnings }) => {
                Ok(TokenStream::new(events, (span, observed), spent, warnings))
            }
            Err(error) => {
                span.fail(&error);
                observed.iter_mut().for_each(|observed| observed.fail(&error));
                Err(error)
            }
        }
    }

    /// Tells an observer of a request. The prompt becomes text only if the observer reads it.
    fn observed(&self, observer: &dyn Observer, prompt: &[u32]) -> Observed {
        let said = || PromptMessage::prompt(self.tokenizer().decode(prompt, false).into());
        let mut said = std::iter::once_with(said);
        Observed::begin(observer, &self.shared.info.name, &mut said, Attempts::default())
    }

    fn queue(
        &self,
        request: GenerateRequest,
        pages: Option<Arc<dyn PageSink>>,
    ) -> Result<Queued, EngineError> {
        let shared = &self.shared;
        if shared.draining.load(Ordering::Acquire) {
            return Err(EngineError::ShuttingDown);
        }
        let max_tokens = request.validate(&shared.info, shared.sequence_limit)?;
        let placement = shared.router.assign(&request)?;
        let (mut matcher, mut drafter, mut checks) = (None, None, None);
        let mut warnings = Arc::default();
        if let Some(constraint) = &request.constraint {
            let tenant = &request.affinity.tenant;
            let _slot = shared.compiling.enter(tenant)?;
            let compiled = shared.constraints.compile_for(tenant, constraint)?;
            if constraint.writes_json() {
                checks = Some(shared.checks.of(compiled.unenforced())?);
            }
            warnings = compiled.warnings().clone();
            matcher = Some(compiled);
            let (constraints, tokenizer) = (&shared.constraints, &shared.tokenizer);
            drafter = Some(GrammarDrafter::new(constraints, constraint, &request.prompt, tokenizer));
        }
        let submitted = Instant::now();
        let deadline = request.deadline.unwrap_or_else(|| {
            submitted.checked_add(shared.options.default_deadline).unwrap_or(submitted + LONGEST_DEADLINE)
        });
        let (events, received) = stream::channel(max_tokens);
        let spent = SpentTokens::default();
        let ReplicaSlot { mut replica, queue, load } = placement;
        let submission = Submission {
            request,
            max_tokens,
            matcher,
            drafter,
            checks,
            pages,
            events,
            spent: spent.clone(),
            submitted,
            deadline,
            slot: queue,
            load,
        };
        let mut submission = Box::new(submission);
        loop {
            submission = match shared.replicas[replica].submit(submission) {
                Ok(()) => return Ok(Queued { events: received, spent, warnings }),
                Err(SendError::Full) => return Err(EngineError::Busy { retry_after_ms: FULL_CHANNEL_MS }),
                Err(SendError::Gone(returned)) => returned,
            };
            shared.router.forget(replica);
            let placement = shared.router.assign(&submission.request)?;
            replica = placement.replica;
            (submission.slot, submission.load) = (placement.queue, placement.load);
        }
    }

    /// Frees the cached pages that only these clients have, and forgets those that wait to be copied to the disk. Requests
    /// of these clients that run leave no pages behind. The tokens of texts are forgotten as well, of others of the tenant
    /// or of all tenants, too.
    pub async fn forget_pages(&self, pages: &EraseScope) {
        let tenant = if let EraseScope::Tenant(tenant) = pages { Some(tenant.as_str()) } else { None };
        self.shared.sections.forget(tenant);
        join_all(self.shared.replicas.iter().map(|replica| replica.forget(pages))).await;
    }

    /// Reads the pages of a conversation from the disk into memory, before a request that begins with these tokens needs
    /// them. It takes only room that running requests leave, computes nothing, and ends when the future is dropped.
    pub async fn warm(&self, affinity: &Affinity, mut tokens: Vec<u32>) -> Warmed {
        let shared = &self.shared;
        tokens.truncate(shared.sequence_limit);
        let nothing = Warmed { pages: tokens.len() / PAGE_TOKENS, ..Warmed::default() };
        if shared.draining.load(Ordering::Acquire) {
            return nothing;
        }
        let Some(replica) = shared.router.expect(affinity, &tokens) else { return nothing };
        shared.replicas[replica].warm(affinity.clone(), tokens).await.unwrap_or(nothing)
    }

    /// Returns the number of tokens that prompt and output may have together: the model's context, or the
    /// capacity of the KV pages if that is less.
    pub fn sequence_limit(&self) -> usize {
        self.shared.sequence_limit
    }

    /// Returns the description of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Returns the tokenizer of the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    /// Returns the tokens of texts that tenants sent lately, by tenant.
    pub(crate) fn sections(&self) -> &SectionCache {
        &self.shared.sections
    }

    /// Returns the chat template of the model.
    pub fn template(&self) -> &Arc<ChatTemplate> {
        &self.shared.template
    }

    /// Returns the number of requests that may wait at all replicas together.
    pub fn queue_limit(&self) -> usize {
        self.shared.options.max_queue * self.shared.replicas.len()
    }

    /// Returns the number of sequences that all replicas together run at once.
    pub fn max_sequences(&self) -> usize {
        self.shared.replicas.iter().map(|replica| replica.view().max_sequences).sum()
    }

    /// Sets the gauges of the load again, before metrics are read.
    pub fn set_gauges(&self) {
        self.shared.replicas.iter().for_each(Replica::set_gauges);
    }

    /// Returns the statistics of all replicas together.
    pub fn stats(&self) -> EngineStats {
        self.replica_stats().into_iter().fold(EngineStats::default(), EngineStats::plus)
    }

    /// Returns the number of tokens that each expert of each layer has computed on all replicas together. It is empty for a
    /// model without experts.
    pub fn expert_load(&self) -> Vec<LayerLoad> {
        let mut loads = self.shared.replicas.iter().map(Replica::expert_load);
        let first = loads.next().unwrap_or_default();
        // All replicas have the same layers and experts, in the same order.
        loads.fold(first, |mut sum, more| {
            for (sum, more) in sum.iter_mut().zip(more) {
                sum.tokens.iter_mut().zip(more.tokens).for_each(|(sum, more)| *sum += more);
            }
            sum
        })
    }

    /// Returns the time of each rank of each replica. The ranks are empty for a model that is not divided.
    pub fn rank_times(&self) -> Vec<Vec<RankTime>> {
        self.shared.replicas.iter().map(Replica::rank_times).collect()
    }

    /// Returns the number of tokens in a page of the KV cache.
    pub fn page_tokens(&self) -> usize {
        PAGE_TOKENS
    }

    /// Returns the name of the layout of this model's pages, and the bytes of a page; `None` if pages cannot leave the
    /// executors. Pages of engines with the same layout may be exchanged.
    pub fn page_layout(&self, names: &PageNamer) -> Option<(Digest, usize)> {
        let form = self.shared.page_form.as_ref()?;
        Some((names.layout(&self.shared.info.digest.weights, &form.description), form.bytes))
    }

    /// Returns the number of prompt tokens that are still to be computed, those of waiting requests included.
    pub fn prefill_tokens(&self) -> usize {
        self.shared.replicas.iter().map(|replica| replica.view().load.prefill_tokens()).sum()
    }

    /// Returns the distributions of the durations of all replicas together.
    pub fn times(&self) -> EngineTimes {
        self.replica_times().into_iter().fold(EngineTimes::default(), EngineTimes::plus)
    }

    /// Returns the owners of the KV pages of each replica. The answer comes between two steps.
    pub async fn page_owners(&self) -> Vec<Vec<PageOwner>> {
        join_all(self.shared.replicas.iter().map(Replica::page_owners)).await
    }

    /// Returns the reason that no replica is ready to compute, if none is.
    pub fn problem(&self) -> Option<String> {
        let problems = self.shared.replicas.iter().map(|replica| replica.view().health.problem());
        problems.collect::<Option<Vec<_>>>()?.pop()
    }

    /// Returns why no replica has a working executor, if none has one.
    pub(crate) fn fault(&self) -> Option<String> {
        let faults = self.shared.replicas.iter().map(|replica| replica.view().health.fault());
        faults.collect::<Option<Vec<_>>>()?.pop()
    }

    /// Returns the number of sequences of this class that could start now without waiting for others. It is for
    /// callers that would rather come back later than wait. An engine that drains has none.
    pub fn free_slots(&self, priority: Priority) -> usize {
        if self.shared.draining.load(Ordering::Acquire) {
            return 0;
        }
        self.shared.replicas.iter().map(|replica| replica.free_slots(priority)).sum()
    }

    /// Returns the statistics of each replica.
    pub fn replica_stats(&self) -> Vec<EngineStats> {
        self.shared.replicas.iter().map(Replica::stats).collect()
    }

    /// Returns the distributions of the durations of each replica.
    pub fn replica_times(&self) -> Vec<EngineTimes> {
        self.shared.replicas.iter().map(Replica::times).collect()
    }

    /// Compiles a constraint without generating, so that an invalid one is found before it is needed.
    pub fn validate_constraint(&self, constraint: &Constraint) -> Result<(), EngineError> {
        self.shared.constraints.compile(constraint).map(|_| ())
    }

    /// Returns likely mistakes in a valid constraint, such as a keyword that is one letter away from a known
    /// one.
    pub fn constraint_warnings(&self, constraint: &Constraint) -> Result<Vec<String>, EngineError> {
        self.shared.constraints.compile(constraint).map(|compiled| compiled.warnings().to_vec())
    }

    /// Compiles a JSON schema on behalf of a tenant, and returns what its author may want to know.
    pub fn check_schema(&self, tenant: &str, schema: Value) -> Result<SchemaNotes, EngineError> {
        let compiled = self.shared.constraints.compile_for(tenant, &Constraint::JsonSchema(schema))?;
        Ok(SchemaNotes::of(&compiled))
    }

    /// Refuses new requests and waits until the running ones have finished; past the deadline they end with
    /// `ShuttingDown`.
    pub async fn drain(&self, deadline: Duration) {
        self.shared.draining.store(true, Ordering::Release);
        join_all(self.shared.replicas.iter().map(|replica| replica.drain(deadline))).await;
    }

    /// Returns whether anyone else has this engine, or it has requests.
    pub(crate) fn is_in_use(&self) -> bool {
        let stats = self.stats();
        Arc::strong_count(&self.shared) > 1 || stats.running + stats.waiting > 0
    }

    /// Ends this engine: waits until nobody else has it and no request runs, and past the deadline ends the
    /// requests that do, with `ShuttingDown`. Afterwards its threads are gone and its weights and pages are
    /// freed, whoever still has a handle.
    pub(crate) async fn retire(self, deadline: Duration) {
        let ends = tokio::time::Instant::now() + deadline;
        while self.is_in_use() && tokio::time::Instant::now() < ends {
            tokio::time::sleep(RETIRE_INTERVAL).await;
        }
        self.drain(ends.saturating_duration_since(tokio::time::Instant::now())).await;
        join_all(self.shared.replicas.iter().map(Replica::stop)).await;
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.shared.info.name).finish_non_exhaustive()
    }
}

fn replica_memory(model: &LoadedModel) -> ReplicaMemory {
    ReplicaMemory {
        device: model.device.clone(),
        memory: *model.executor.plan(),
        ranks: model.executor.ranks().to_vec(),
    }
}

/// Returns the names of the devices that the replicas run on, each once.
fn devices(models: &[LoadedModel]) -> String {
    let mut devices: Vec<&str> = models.iter().map(|model| model.device.as_str()).collect();
    devices.dedup();
    devices.join(", ")
}

fn is_same_model(one: &LoadedModel, other: &LoadedModel) -> bool {
    one.name == other.name && one.digest == other.digest && one.executor.limits() == other.executor.limits()
}
