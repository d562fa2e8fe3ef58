//! A route: a name for several models, of which the first one that can answer does.
//!
//! Invariant: a request falls back to another model only until the first part of an answer has reached the caller.

mod choice;
mod conditions;

use std::{fmt, sync::Arc, time::Duration};

use skep_engine::{
    Abilities, EngineError, Model, ModelDigest, Priority, RemoteInfo, RemoteModel, UpstreamFault,
    chat::{ChatEvent, ChatOptions, ChatOutcome, ChatStream, Input, RemoteStream, Routed},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    event_sink::{self, EventSink},
    metric,
    options::{OptionsError, check_name},
};
pub use choice::Choice;
pub use conditions::{Conditions, CostEstimate, Member};

/// The options of a route.
#[derive(Debug, Clone)]
pub struct RouteOptions {
    /// The name that callers use.
    pub name: String,
    pub choice: Choice,
    /// The models, in the order in which an ordered route tries them.
    pub members: Vec<Member>,
    /// Time in which a model of this host has to begin its answer, once it is loaded. Upstreams have their own.
    pub first_token: Option<Duration>,
    pub created_unix_s: u64,
}

/// Chooses a model for each request, and another one if that fails. Clones share it.
#[derive(Clone)]
pub struct Route(Arc<Inner>);

struct Inner {
    options: RouteOptions,
    info: RemoteInfo,
}

/// The outcome of trying one model.
enum Attempted {
    /// The model failed before it sent anything, so another model may be tried.
    BeforeOutput(EngineError),
    AfterOutput(EngineError),
}

impl Route {
    /// Creates a route. Fails without models, for an invalid name, or if a weighted choice has only weights of 0.
    pub fn new(options: RouteOptions) -> Result<Self, OptionsError> {
        check_name("name", &options.name)?;
        if options.members.is_empty() {
            return Err(OptionsError::new("models", "a route must have at least one model"));
        }
        if options.choice == Choice::Weighted && options.members.iter().all(|member| member.weight == 0) {
            return Err(OptionsError::new("weight", "all models have the weight 0"));
        }
        let info = RemoteInfo {
            name: options.name.clone(),
            digest: ModelDigest::remote("route", &options.name),
            context_length: None,
            created_unix_s: options.created_unix_s,
        };
        Ok(Route(Arc::new(Inner { options, info })))
    }

    /// Returns the options that the route was created with.
    pub fn options(&self) -> &RouteOptions {
        &self.0.options
    }
}

impl RemoteModel for Route {
    fn info(&self) -> &RemoteInfo {
        &self.0.info
    }

    fn context_length(&self) -> Option<usize> {
        // Known only if no model may have a longer one.
        let lengths: Option<Vec<usize>> =
            self.0.options.members.iter().map(|member| member.model.context_length()).collect();
        lengths?.into_iter().max()
    }

    fn members(&self) -> Vec<String> {
        self.0.options.members.iter().flat_map(|member| member.model.names()).collect()
    }

    fn most_asks(&self, options: &ChatOptions) -> u32 {
        let members = self.0.options.members.iter().map(|member| member.model.most_asks(options));
        members.max().unwrap_or(1)
    }

    fn ignores_reasoning(&self, options: &ChatOptions) -> bool {
        self.0.options.members.iter().all(|member| member.model.ignores_reasoning(options))
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
        event_sink::stream(move |sink| async move { inner.answer(input, options, sink).await })
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
        mut sink: EventSink,
    ) -> Result<ChatOutcome, EngineError> {
        let mut failed: Vec<(&str, EngineError)> = Vec::new();
        for member in self.candidates(&input, &options)? {
            if failed.last().is_some_and(|(_, error)| !may_differ(error, member)) {
                continue;
            }
            options.cancel.check()?;
            let attempts = u32::try_from(failed.len() + 1).unwrap_or(u32::MAX);
            let name = member.model.name();
            match self.try_member(member, &input, &options, attempts, &mut sink).await {
                Ok(outcome) => {
                    metrics::counter!(metric::ROUTE_ANSWERS, &self.labels(name)).increment(1);
                    tracing::debug!(route = self.options.name, model = name, attempts, "the model answered");
                    return Ok(outcome);
                }
                Err(Attempted::BeforeOutput(error)) if moves_on(&error) => {
                    let [route, model] = self.labels(name);
                    let labels = [route, model, ("reason", error.code().to_owned())];
                    metrics::counter!(metric::FAIL_OVERS, &labels).increment(1);
                    tracing::warn!(
                        route = self.options.name,
                        model = name,
                        attempts,
                        "the route falls back from this model: {error}"
                    );
                    failed.push((name, error));
                }
                Err(Attempted::BeforeOutput(error) | Attempted::AfterOutput(error)) => return Err(error),
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
        sink: &mut EventSink,
    ) -> Result<ChatOutcome, Attempted> {
        if let Err(error) = member.model.ready().await {
            options.attempts.begin(None, member.model.name()).ended(error.code(), None);
            return Err(Attempted::BeforeOutput(error));
        }
        let patience = self.options.first_token.filter(|_| member.model.is_local());
        let due = patience.map(|patience| (patience, Instant::now() + patience));
        let started = start(&member.model, input.clone(), options.clone());
        let mut answer =
            before(due, member, started).await.and_then(|answer| answer).map_err(Attempted::BeforeOutput)?;
        let mut routed = Routed { model: member.model.name().to_owned(), attempts };
        let mut started = None;
        let mut has_output = false;
        loop {
            let next = before(due.filter(|_| !has_output), member, answer.next()).await;
            let event = match next.map_err(Attempted::BeforeOutput)? {
                Some(Ok(event)) => event,
                Some(Err(error)) if has_output => return Err(Attempted::AfterOutput(error)),
                Some(Err(error)) => return Err(Attempted::BeforeOutput(error)),
                None => {
                    let error = EngineError::Failed("the answer ended without a result".to_owned());
                    return Err(if has_output {
                        Attempted::AfterOutput(error)
                    } else {
                        Attempted::BeforeOutput(error)
                    });
                }
            };
            match event {
                // The model is a route, too.
                ChatEvent::Routed(inner) => {
                    routed = Routed { attempts: attempts.saturating_add(inner.attempts - 1), ..inner };
                    continue;
                }
                // It is sent with the first part of the answer, because the model may still fail.
                started_event @ ChatEvent::Started { .. } => {
                    started = Some(started_event);
                    continue;
                }
                _ if has_output => {}
                _ => {
                    has_output = true;
                    sink.send(ChatEvent::Routed(routed.clone())).await;
                    if let Some(started) = started.take() {
                        sink.send(started).await;
                    }
                }
            }
            match event {
                ChatEvent::Finished(outcome) => return Ok(without_tokens(outcome)),
                event => sink.send(event).await,
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

/// Waits for a part of a member's answer, at most until it is due.
async fn before<T>(
    due: Option<(Duration, Instant)>,
    member: &Member,
    part: impl Future<Output = T>,
) -> Result<T, EngineError> {
    match due {
        Some((patience, due)) => timeout_at(due, part).await.map_err(|_| slow(member, patience)),
        None => Ok(part.await),
    }
}

fn slow(member: &Member, patience: Duration) -> EngineError {
    let message = format!("no part of the answer came within {:.1} s", patience.as_secs_f64());
    let upstream = member.model.name().to_owned();
    EngineError::Upstream { upstream, fault: UpstreamFault::Unavailable, message }
}

/// Returns whether another model may answer where one failed with this error before any output.
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

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Route").field(&self.0.options.name).finish()
    }
}
