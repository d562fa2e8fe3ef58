//! A route: a name for several models, of which the first one that can answer does.
//!
//! Invariant: a model's failure moves a request on only while nothing was told to the caller.

mod choice;
mod conditions;

use std::{fmt, sync::Arc, time::Duration};

use skep_engine::{
    Abilities, EngineError, Model, ModelDigest, Priority, RemoteInfo, RemoteModel, UpstreamFault,
    chat::{ChatEvent, ChatOptions, ChatOutcome, ChatStream, Input, RemoteStream, Routed},
};
use tokio::time::timeout;

use crate::{
    metric,
    options::{OptionsError, check_name},
    telling::{self, Teller},
};
pub use choice::Choice;
pub use conditions::{Conditions, Member};

/// Decides whether a tenant's requests must stay in this process.
pub type LocalOnly = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The options of a route.
#[derive(Clone)]
pub struct RouteOptions {
    /// The name that callers use.
    pub name: String,
    pub choice: Choice,
    /// The models, in the order in which an ordered route tries them.
    pub members: Vec<Member>,
    /// Time in which an engine of this process has to begin its answer. Upstreams have their own.
    pub first_token: Option<Duration>,
    pub local_only: Option<LocalOnly>,
    pub created_unix_s: u64,
}

/// Chooses a model for each request, and another one if that fails. Clones share it.
#[derive(Clone)]
pub struct Route(Arc<Inner>);

struct Inner {
    options: RouteOptions,
    info: RemoteInfo,
}

/// The end of one model's part in an answer.
enum Tried {
    /// The model told nothing, so another model may be tried.
    Untold(EngineError),
    Told(EngineError),
}

impl Route {
    pub fn new(options: RouteOptions) -> Result<Self, OptionsError> {
        check_name("name", &options.name)?;
        if options.members.is_empty() {
            return Err(OptionsError::new("models", "a route must have at least one model"));
        }
        if options.choice == Choice::Weighted && options.members.iter().all(|member| member.weight == 0) {
            return Err(OptionsError::new("weight", "all models have the weight 0"));
        }
        // Known only if no model may have a longer one.
        let lengths: Option<Vec<usize>> =
            options.members.iter().map(|member| member.model.context_length()).collect();
        let info = RemoteInfo {
            name: options.name.clone(),
            digest: ModelDigest::remote("route", &options.name),
            context_length: lengths.and_then(|lengths| lengths.into_iter().max()),
            created_unix_s: options.created_unix_s,
        };
        Ok(Route(Arc::new(Inner { options, info })))
    }

    pub fn options(&self) -> &RouteOptions {
        &self.0.options
    }
}

impl RemoteModel for Route {
    fn info(&self) -> &RemoteInfo {
        &self.0.info
    }

    fn members(&self) -> Vec<String> {
        self.0.options.members.iter().flat_map(|member| member.model.names()).collect()
    }

    fn abilities(&self) -> Abilities {
        let members = self.0.options.members.iter().map(|member| member.model.abilities());
        let either = members.reduce(Abilities::or).expect("a route has members");
        // Log-probabilities and ids of tokens belong to one model, and a route may choose another one.
        Abilities { tokens: false, ..either }
    }

    fn check(&self, options: &ChatOptions) -> Result<(), EngineError> {
        self.0.any_member(|model| model.check(options))
    }

    fn accepts(&self, input: &Input) -> Result<(), EngineError> {
        self.0.any_member(|model| model.accepts(input))
    }

    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream {
        let inner = self.0.clone();
        telling::stream(move |teller| async move { inner.answer(input, options, teller).await })
    }

    fn free_slots(&self) -> usize {
        let members = self.0.options.members.iter();
        members
            .fold(0, |sum: usize, member| sum.saturating_add(member.model.free_slots(Priority::Interactive)))
    }

    fn problem(&self) -> Option<String> {
        let members = self.0.options.members.iter();
        let problems: Option<Vec<String>> = members
            .map(|member| Some(format!("{}: {}", member.model.name(), member.model.problem()?)))
            .collect();
        problems.map(|problems| problems.join("; "))
    }
}

impl Inner {
    /// Returns the first member's error if all have one.
    fn any_member(&self, check: impl Fn(&Model) -> Result<(), EngineError>) -> Result<(), EngineError> {
        let mut results = self.options.members.iter().map(|member| check(&member.model));
        let first = results.next().unwrap_or(Ok(()));
        if results.any(|result| result.is_ok()) { Ok(()) } else { first }
    }

    async fn answer(
        &self,
        input: Input,
        options: ChatOptions,
        mut teller: Teller,
    ) -> Result<ChatOutcome, EngineError> {
        let mut failed: Vec<(&str, EngineError)> = Vec::new();
        for member in self.candidates(&input, &options)? {
            if failed.last().is_some_and(|(_, error)| !may_differ(error, member)) {
                continue;
            }
            options.cancel.check()?;
            let attempts = u32::try_from(failed.len() + 1).unwrap_or(u32::MAX);
            let name = member.model.name();
            match self.try_member(member, &input, &options, attempts, &mut teller).await {
                Ok(outcome) => {
                    metrics::counter!(metric::ROUTE_ANSWERS, &self.labels(name)).increment(1);
                    tracing::debug!(route = self.options.name, model = name, attempts, "the model answered");
                    return Ok(outcome);
                }
                Err(Tried::Untold(error)) if moves_on(&error) => {
                    let [route, model] = self.labels(name);
                    let labels = [route, model, ("reason", error.code().to_owned())];
                    metrics::counter!(metric::FAIL_OVERS, &labels).increment(1);
                    tracing::warn!(route = self.options.name, model = name, attempts, "fails over: {error}");
                    failed.push((name, error));
                }
                Err(Tried::Untold(error) | Tried::Told(error)) => return Err(error),
            }
        }
        Err(self.exhausted(failed))
    }

    /// Passes on the answer of one model.
    async fn try_member(
        &self,
        member: &Member,
        input: &Input,
        options: &ChatOptions,
        attempts: u32,
        teller: &mut Teller,
    ) -> Result<ChatOutcome, Tried> {
        let mut answer = start(&member.model, input.clone(), options.clone()).await.map_err(Tried::Untold)?;
        let mut routed = Routed { model: member.model.name().to_owned(), attempts };
        let mut started = None;
        let mut told = false;
        let patience = self.options.first_token.filter(|_| member.is_local());
        loop {
            let next = match patience.filter(|_| !told) {
                Some(patience) => timeout(patience, answer.next()).await.map_err(|_| slow(member, patience)),
                None => Ok(answer.next().await),
            };
            let event = match next.map_err(Tried::Untold)? {
                Some(Ok(event)) => event,
                Some(Err(error)) if told => return Err(Tried::Told(error)),
                Some(Err(error)) => return Err(Tried::Untold(error)),
                None => {
                    let error = EngineError::Failed("the answer ended without a result".to_owned());
                    return Err(if told { Tried::Told(error) } else { Tried::Untold(error) });
                }
            };
            match event {
                // The model is a route, too.
                ChatEvent::Routed(inner) => {
                    routed = Routed { attempts: attempts.saturating_add(inner.attempts - 1), ..inner };
                    continue;
                }
                // It is told with the first part of the answer, because the model may still fail.
                started_event @ ChatEvent::Started { .. } => {
                    started = Some(started_event);
                    continue;
                }
                _ if told => {}
                _ => {
                    told = true;
                    teller.tell(ChatEvent::Routed(routed.clone())).await;
                    if let Some(started) = started.take() {
                        teller.tell(started).await;
                    }
                }
            }
            match event {
                ChatEvent::Finished(outcome) => return Ok(without_tokens(outcome)),
                event => teller.tell(event).await,
            }
        }
    }

    /// Returns the error after every model has failed.
    fn exhausted(&self, mut failed: Vec<(&str, EngineError)>) -> EngineError {
        if failed.len() == 1 {
            return failed.remove(0).1;
        }
        let waits = failed.iter().filter_map(|(_, error)| busy_for(error));
        let fault = match waits.min() {
            Some(retry_after_ms) => UpstreamFault::Busy { retry_after_ms },
            None => UpstreamFault::Unavailable,
        };
        let reasons: Vec<String> = failed.iter().map(|(name, error)| format!("{name}: {error}")).collect();
        let message = format!("all its models failed: {}", reasons.join("; "));
        EngineError::Upstream { upstream: self.options.name.clone(), fault, message }
    }

    fn labels(&self, model: &str) -> [(&'static str, String); 2] {
        [("route", self.options.name.clone()), ("model", model.to_owned())]
    }
}

/// Starts an answer. An engine renders and encodes the prompt first, which takes a while.
async fn start(model: &Model, input: Input, options: ChatOptions) -> Result<ChatStream, EngineError> {
    match model {
        Model::Remote(_) => ask(model, &input, options),
        Model::Local(_) => {
            let model = model.clone();
            let started = tokio::task::spawn_blocking(move || ask(&model, &input, options)).await;
            started.map_err(|error| EngineError::Failed(error.to_string()))?
        }
    }
}

fn ask(model: &Model, input: &Input, options: ChatOptions) -> Result<ChatStream, EngineError> {
    match input {
        Input::Messages(messages) => model.chat(messages, options),
        Input::Text(text) => model.complete(text, options),
    }
}

fn slow(member: &Member, patience: Duration) -> EngineError {
    let message = format!("no part of the answer came within {:.1} s", patience.as_secs_f64());
    let upstream = member.model.name().to_owned();
    EngineError::Upstream { upstream, fault: UpstreamFault::Unavailable, message }
}

/// Returns whether another model may answer where one failed with this error before anything was told.
fn moves_on(error: &EngineError) -> bool {
    match error {
        EngineError::Upstream { fault, .. } => {
            !matches!(fault, UpstreamFault::Refused | UpstreamFault::CutOff)
        }
        EngineError::Busy { .. }
        | EngineError::ContextOverflow { .. }
        | EngineError::ModelLoading { .. }
        | EngineError::ModelUnloaded { .. }
        | EngineError::ShuttingDown
        | EngineError::Model(_)
        | EngineError::Failed(_) => true,
        EngineError::InvalidRequest { .. }
        | EngineError::Constraint { .. }
        | EngineError::ModelUnknown { .. }
        | EngineError::SchemaUnsatisfied { .. }
        | EngineError::Truncated
        | EngineError::Cancelled
        | EngineError::DeadlineExceeded => false,
    }
}

/// Returns whether a model may do better than one that failed with this error: a prompt that was too long needs a
/// longer context.
fn may_differ(error: &EngineError, next: &Member) -> bool {
    match error {
        EngineError::ContextOverflow { limit, .. } => {
            next.model.context_length().is_none_or(|length| length > *limit)
        }
        _ => true,
    }
}

fn busy_for(error: &EngineError) -> Option<u32> {
    match error {
        EngineError::Busy { retry_after_ms }
        | EngineError::Upstream { fault: UpstreamFault::Busy { retry_after_ms }, .. } => {
            Some(*retry_after_ms)
        }
        _ => None,
    }
}

/// Removes the tokens of an engine: the next answer may be another model's.
fn without_tokens(outcome: ChatOutcome) -> ChatOutcome {
    ChatOutcome {
        prompt: Vec::new(),
        tokens: Vec::new(),
        raw: String::new(),
        rendered: String::new(),
        ..outcome
    }
}

/// Leaves out the function that decides about tenants.
impl fmt::Debug for RouteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouteOptions")
            .field("name", &self.name)
            .field("choice", &self.choice)
            .field("members", &self.members)
            .field("first_token", &self.first_token)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Route").field(&self.0.options.name).finish()
    }
}
