//! The cheap handle through which everyone else uses an engine. It checks and compiles what a caller sends on the
//! caller's own thread, and puts it into the loop's bounded queue; it never touches the scheduler. Dropping the last
//! handle stops the loop: what still runs ends with `ShuttingDown`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use skep_model::{ChatTemplate, LoadedModel, MemoryPlan, PAGE_TOKENS, Tokenizer};
use tokio::sync::oneshot;

use crate::constraint::ConstraintCompiler;
use crate::engine_loop::{Command, EngineLoop, Submission};
use crate::scheduler::StepLimits;
use crate::stream::TokenStream;
use crate::telemetry::Telemetry;
use crate::{Constraint, EngineError, GenerateRequest};

/// Stands for defaults too far away to be a point in time.
const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Requests that may wait; more get `Busy`.
    pub max_queue: usize,
    /// Sequences that run at the same time.
    pub max_sequences: usize,
    /// Token budget of one step: decodes first, prefill chunks in what is left. A smaller budget keeps the time
    /// between tokens short while long prompts arrive.
    pub step_tokens: usize,
    /// For requests that set none.
    pub default_deadline: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            max_queue: 256,
            max_sequences: 32,
            step_tokens: 256,
            default_deadline: Duration::from_secs(600),
        }
    }
}

/// What callers need to know of the model.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    pub name: String,
    pub context_length: usize,
    pub vocabulary_size: usize,
    pub eos: Vec<u32>,
    pub bos: Option<u32>,
    pub add_bos: bool,
    pub memory: MemoryPlan,
    pub created_unix_s: u64,
}

/// Totals since the start, and the load now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    pub pages_total: usize,
    /// Free, or cached and evictable.
    pub pages_free: usize,
    pub pages_cached: usize,
    pub steps: u64,
    /// Prompt tokens of admitted requests, cached ones included.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Sampled and forced tokens.
    pub generated_tokens: u64,
    pub forced_tokens: u64,
    /// Sequences that gave up their pages to older ones and went on later.
    pub preemptions: u64,
}

/// A running engine. Clones share it.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    options: EngineOptions,
    /// The longest sequence that can ever run.
    sequence_limit: usize,
    constraints: ConstraintCompiler,
    telemetry: Arc<Telemetry>,
    draining: AtomicBool,
    /// `None` only while dropping: closing the channel is what stops the thread.
    commands: Option<mpsc::SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    pub fn start(model: LoadedModel, options: EngineOptions) -> Result<Engine, EngineError> {
        let limits = *model.executor.limits();
        let step = StepLimits::new(&options, &limits)?;
        let info = ModelInfo {
            name: model.name.clone(),
            context_length: limits.context_length,
            vocabulary_size: limits.vocabulary_size,
            eos: model.config.eos.clone(),
            bos: model.config.bos,
            add_bos: model.config.add_bos,
            memory: *model.executor.plan(),
            created_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        };
        let constraints = ConstraintCompiler::new(&model.tokenizer, info.vocabulary_size, &info.eos)?;
        let telemetry = Telemetry::new(&info.name, limits.page_count);
        let (commands, queue) = mpsc::sync_channel(options.max_queue.saturating_add(64));
        let engine_loop = EngineLoop::new(model.executor, step, &info, &model.tokenizer, telemetry.clone());
        let thread = std::thread::Builder::new()
            .name(format!("engine-{}", info.name))
            .spawn(move || engine_loop.run(queue))
            .map_err(|error| {
                EngineError::Failed(format!("the engine's thread cannot be started: {error}"))
            })?;
        let shared = Shared {
            sequence_limit: limits.context_length.min(limits.page_count.saturating_mul(PAGE_TOKENS)),
            info,
            tokenizer: model.tokenizer,
            template: model.template,
            options,
            constraints,
            telemetry,
            draining: AtomicBool::new(false),
            commands: Some(commands),
            thread: Some(thread),
        };
        Ok(Engine { shared: Arc::new(shared) })
    }

    /// Queues a generation. Compiling a new constraint happens here, on the caller's thread, and takes milliseconds
    /// (it is bounded); everything else is quick.
    pub fn generate(&self, request: GenerateRequest) -> Result<TokenStream, EngineError> {
        let shared = &self.shared;
        if shared.draining.load(Ordering::Acquire) {
            return Err(EngineError::ShuttingDown);
        }
        let max_tokens = request.validate(&shared.info, shared.sequence_limit)?;
        let place = shared.telemetry.enter_queue(shared.options.max_queue).map_err(busy)?;
        let matcher = match &request.constraint {
            Some(constraint) => Some(shared.constraints.compile(constraint)?),
            None => None,
        };
        let submitted = Instant::now();
        let deadline = request.deadline.unwrap_or_else(|| {
            submitted.checked_add(shared.options.default_deadline).unwrap_or(submitted + LONGEST_DEADLINE)
        });
        let (events, stream) = TokenStream::channel(max_tokens);
        let submission = Submission { request, max_tokens, matcher, events, submitted, deadline, place };
        self.send(Command::Submit(Box::new(submission)))?;
        Ok(stream)
    }

    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    pub fn template(&self) -> &Arc<ChatTemplate> {
        &self.shared.template
    }

    pub fn stats(&self) -> EngineStats {
        self.shared.telemetry.stats()
    }

    /// Compiles a constraint without generating, so that a bad one is found before it is needed.
    pub fn validate_constraint(&self, constraint: &Constraint) -> Result<(), EngineError> {
        self.shared.constraints.compile(constraint).map(|_| ())
    }

    /// Refuses new requests and waits until the running ones have ended; past the deadline they end with
    /// `ShuttingDown`.
    pub async fn drain(&self, deadline: Duration) {
        self.shared.draining.store(true, Ordering::Release);
        let (done, drained) = oneshot::channel();
        // A closed channel means that the loop is gone, and with it everything that ran.
        if self.send(Command::Drain { done }).is_err()
            || tokio::time::timeout(deadline, drained).await.is_ok()
        {
            return;
        }
        let (done, aborted) = oneshot::channel();
        if self.send(Command::Abort { done }).is_ok() {
            let _ = aborted.await;
        }
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let commands = self.shared.commands.as_ref().expect("the channel is closed only while dropping");
        commands.try_send(command).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => busy(Duration::from_millis(50)),
            mpsc::TrySendError::Disconnected(_) => EngineError::ShuttingDown,
        })
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.shared.info.name).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // The loop catches panics of a step itself; one outside a step has ended all streams already.
            let _ = thread.join();
        }
    }
}

fn busy(wait: Duration) -> EngineError {
    EngineError::Busy { retry_after_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX) }
}
