//! A model that other hosts of the cluster compute.
//!
//! Each request goes to the host that its session prefers (`choice`). Until the first part of an answer has arrived, another host
//! is asked instead of one that cannot answer. An answer that breaks off later is an error after which it may be asked for again.

use super::{
    ModelFacts,
    choice::{self, Asked},
};
use crate::cluster::{
    GenerationEvent, GenerationEvents, Member, Members, PeerError, PeerGeneration, Peers,
    generation::{fault, name},
    members::KnownHost,
};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use skep_engine::{
    Abilities, Attempts, EngineError, ModelDigest, PendingAttempt, RemoteInfo, RemoteModel,
    chat::{ChatEvent, ChatOptions, Input, RemoteStream},
};
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// Parameters of requests that are about the model's tokens, which stay at the host that computes it.
const LOGPROBS: &str = "top_logprobs";
const BIAS: &str = "logit_bias";

pub(super) struct ClusterModel {
    info: RemoteInfo,
    /// `None` until a host has loaded the model.
    digest: Option<ModelDigest>,
    reasoning: Option<bool>,
    own: i64,
    members: Arc<Members>,
    peers: Arc<dyn Peers>,
}

/// A request that no host has begun to answer yet.
struct Asking {
    model: String,
    hosts: Vec<Member>,
    peers: Arc<dyn Peers>,
    input: Input,
    options: ChatOptions,
}

/// An answer of which the first part has arrived.
struct Answering {
    model: String,
    host: i64,
    /// The events that have arrived and were not passed on yet.
    arrived: std::vec::IntoIter<ChatEvent>,
    events: GenerationEvents,
    attempt: Option<PendingAttempt>,
    deadline: Option<Instant>,
}

/// The failure of one host before any part of an answer.
struct Refused {
    error: EngineError,
    may_differ: bool,
}

impl ClusterModel {
    pub(super) fn new(facts: &ModelFacts, own: i64, members: Arc<Members>, peers: Arc<dyn Peers>) -> Self {
        let ModelFacts { name, digest, context_length, reasoning, created_unix_s, .. } = facts.clone();
        // A conversation keeps the digest of its model, so it is the same model wherever its session is. Until a host has loaded the
        // model, nobody knows it.
        let named = digest.clone().unwrap_or_else(|| ModelDigest::remote("cluster", &name));
        let info = RemoteInfo { name, digest: named, context_length, created_unix_s };
        ClusterModel { info, digest, reasoning, own, members, peers }
    }

    fn asked(&self) -> Asked<'_> {
        Asked { model: &self.info.name, digest: self.digest.as_ref() }
    }

    /// Returns whether a host is another one and computes the model.
    fn is_at(&self, host: &KnownHost) -> bool {
        let Asked { model, digest } = self.asked();
        host.row.number != self.own && host.computes(model, digest)
    }
}

impl RemoteModel for ClusterModel {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn hosts(&self) -> Vec<i64> {
        let hosts = self.members.hosts();
        hosts.iter().filter(|host| self.is_at(host)).map(|host| host.row.number).collect()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            tools: true,
            json_schema: true,
            images: false,
            reasoning: self.reasoning,
            tokens: false,
            max_output: None,
        }
    }

    fn check(&self, options: &ChatOptions) -> Result<(), EngineError> {
        let asked =
            [(LOGPROBS, options.top_logprobs.is_some()), (BIAS, !options.sampling.logit_bias.is_empty())];
        match asked.into_iter().find(|(_, is_asked)| *is_asked) {
            None => Ok(()),
            Some((parameter, _)) => Err(EngineError::InvalidRequest {
                parameter: parameter.to_owned(),
                message: format!(
                    "another host of the cluster computes the model {}, and its tokens are not known here; send the request to \
                     that host, or leave the parameter out",
                    self.info.name
                ),
            }),
        }
    }

    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream {
        let model = self.info.name.clone();
        let draw = rand::random::<u64>();
        let hosts = choice::ranked(&self.members.hosts(), self.own, self.asked(), &options.affinity, draw);
        let asking = Asking { model, hosts, peers: self.peers.clone(), input, options };
        Box::pin(stream::once(asking.begin()).map_ok(Answering::into_events).try_flatten())
    }

    fn free_slots(&self) -> usize {
        // The hosts have queues of their own, which work in the background does not fill. One that drains takes no such work.
        let hosts = self.members.hosts();
        let serving = hosts.iter().filter(|host| self.is_at(host) && host.serves());
        let free = serving.filter_map(|host| Some(host.facts.as_ref()?.free_slots()));
        free.fold(0, usize::saturating_add)
    }

    fn problem(&self) -> Option<String> {
        let is_gone = !self.members.hosts().iter().any(|host| self.is_at(host));
        is_gone.then(|| format!("no host of the cluster computes the model {} anymore", self.info.name))
    }
}

impl Asking {
    /// Asks one host after the other until one of them has begun to answer.
    async fn begin(self) -> Result<Answering, EngineError> {
        let deadline = self.options.deadline.map(Instant::from_std);
        let mut failed = None;
        for host in &self.hosts {
            let attempts: &Attempts = &self.options.attempts;
            let attempt = attempts.begin(Some(&name(host.number)), &self.model);
            match self.first(host, deadline).await {
                Ok((arrived, events)) => {
                    let (model, host, arrived) = (self.model.clone(), host.number, arrived.into_iter());
                    return Ok(Answering { model, host, arrived, events, attempt: Some(attempt), deadline });
                }
                Err(Refused { error, may_differ }) => {
                    attempt.ended(error.code(), None);
                    if !may_differ {
                        return Err(error);
                    }
                    tracing::warn!(host = host.number, model = self.model, "a host did not answer: {error}");
                    failed = Some(rather(failed, error));
                }
            }
        }
        Err(failed
            .unwrap_or_else(|| EngineError::ModelUnknown { name: self.model.clone(), known: Vec::new() }))
    }

    /// Asks a host, and waits for the first part of its answer. Returns the events so far.
    async fn first(
        &self,
        host: &Member,
        deadline: Option<Instant>,
    ) -> Result<(Vec<ChatEvent>, GenerationEvents), Refused> {
        let lost = |why: String| Refused { error: fault(host.number, false, why), may_differ: true };
        let too_late = |error| Refused { error, may_differ: false };
        let question = PeerGeneration::new(&self.model, &self.input, &self.options);
        let asked = within(deadline, self.peers.generate(host.clone(), question)).await.map_err(too_late)?;
        let mut events = asked.map_err(|error| lost(reason(error)))?;
        let mut arrived = Vec::new();
        loop {
            match within(deadline, events.next()).await.map_err(too_late)? {
                Some(Ok(GenerationEvent::Event(event))) => {
                    // The generation may still fail after its start.
                    let is_start = matches!(*event, ChatEvent::Started { .. });
                    arrived.push(*event);
                    if !is_start {
                        return Ok((arrived, events));
                    }
                }
                Some(Ok(GenerationEvent::Failed(failure))) => {
                    let may_differ = failure.may_differ();
                    let error = failure.into_error(&self.model, host.number, false);
                    return Err(Refused { error, may_differ });
                }
                Some(Err(error)) => return Err(lost(reason(error))),
                None => return Err(lost("its answer ended before it began".to_owned())),
            }
        }
    }
}

impl Answering {
    /// Returns the events, the last of which is `Finished` or an error.
    fn into_events(self) -> impl Stream<Item = Result<ChatEvent, EngineError>> + Send {
        stream::unfold(Some(self), |answering| async move {
            let mut answering = answering?;
            let event = answering.next().await;
            let outcome = match &event {
                Ok(ChatEvent::Finished(_)) => "ok",
                Ok(_) => return Some((event, Some(answering))),
                Err(error) => error.code(),
            };
            if let Some(attempt) = answering.attempt.take() {
                attempt.ended(outcome, None);
            }
            Some((event, None))
        })
    }

    async fn next(&mut self) -> Result<ChatEvent, EngineError> {
        if let Some(event) = self.arrived.next() {
            return Ok(event);
        }
        match within(self.deadline, self.events.next()).await? {
            Some(Ok(GenerationEvent::Event(event))) => Ok(*event),
            Some(Ok(GenerationEvent::Failed(failure))) => {
                Err(failure.into_error(&self.model, self.host, true))
            }
            Some(Err(error)) => Err(fault(self.host, true, reason(error))),
            None => Err(fault(self.host, true, "the answer ended before it was complete".to_owned())),
        }
    }
}

/// Returns the error to report after two hosts have failed: one that says when to try again, or else the later one.
fn rather(before: Option<EngineError>, error: EngineError) -> EngineError {
    match before {
        Some(before @ (EngineError::Busy { .. } | EngineError::ModelLoading { .. })) => before,
        _ => error,
    }
}

fn reason(error: PeerError) -> String {
    match error {
        PeerError::Unreached(why) | PeerError::Broken(why) => why,
        refused @ (PeerError::Moved | PeerError::Refused { .. }) => refused.to_string(),
    }
}

/// Waits for a part of an answer, at most until the deadline.
async fn within<T>(deadline: Option<Instant>, part: impl Future<Output = T>) -> Result<T, EngineError> {
    match deadline {
        Some(deadline) => timeout_at(deadline, part).await.map_err(|_| EngineError::DeadlineExceeded),
        None => Ok(part.await),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{facts, model as described, row};
    use super::*;
    use crate::{
        cluster::{Facts, GenerationFailure, PeerInvocation, RemoteRun, TurnAddress},
        placement::Load,
    };
    use futures::future::BoxFuture;
    use skep_engine::{
        Affinity, Model, UpstreamFault,
        chat::{ChatFinish, ChatMessage, ChatOutcome},
    };
    use skep_store::HostState;
    use std::sync::Mutex;
    use std::time::Duration;

    /// The behavior of a host.
    #[derive(Clone, Copy)]
    enum Does {
        Answer,
        /// It says how full it is.
        Refuse,
        /// It finds a mistake in the question.
        Reject,
        /// Its engine fails with the question.
        Fail,
        /// It is gone before a part of the answer has arrived.
        Vanish,
        /// It is gone after a part of the answer.
        BreakOff,
        /// It never answers.
        Hang,
    }

    /// Hosts that do what a test says, by their numbers, and the order in which they were asked.
    struct Hosts(Vec<(i64, Does)>, Mutex<Vec<i64>>);

    impl Peers for Hosts {
        fn invoke(
            &self,
            _member: Member,
            _invocation: PeerInvocation,
        ) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
            unreachable!("a generation is not a turn")
        }

        fn follow(
            &self,
            _member: Member,
            _turn: TurnAddress,
        ) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
            unreachable!("a generation is not a turn")
        }

        fn cancel(&self, _member: Member, _turn: TurnAddress) -> BoxFuture<'static, Result<(), PeerError>> {
            unreachable!("a generation is not a turn")
        }

        fn generate(
            &self,
            member: Member,
            _generation: PeerGeneration,
        ) -> BoxFuture<'static, Result<GenerationEvents, PeerError>> {
            self.1.lock().expect("not poisoned").push(member.number);
            let does = self.0.iter().find(|(number, _)| *number == member.number).map(|(_, does)| *does);
            let event = |event| Ok(GenerationEvent::Event(Box::new(event)));
            let started = ChatEvent::Started { prompt_tokens: 1, cached_tokens: 0, cache_write_tokens: 0 };
            let text = ChatEvent::Text { delta: member.number.to_string(), logprobs: Vec::new() };
            let finished = ChatOutcome::remote(member.number.to_string(), ChatFinish::Stop);
            let events: Vec<Result<GenerationEvent, PeerError>> = match does.expect("a host of the test") {
                Does::Answer => vec![event(started), event(text), event(ChatEvent::Finished(finished))],
                Does::Refuse => {
                    vec![Ok(GenerationEvent::Failed(GenerationFailure::Busy { retry_after_ms: 9 }))]
                }
                Does::Reject => vec![Ok(GenerationEvent::Failed(GenerationFailure::InvalidRequest {
                    parameter: "stop".into(),
                    message: "no".into(),
                }))],
                Does::Fail => {
                    let message = "the step failed".into();
                    vec![event(started), Ok(GenerationEvent::Failed(GenerationFailure::Failed { message }))]
                }
                Does::Vanish => vec![event(started), Err(PeerError::Broken("no answer".into()))],
                Does::BreakOff => vec![event(started), event(text)],
                Does::Hang => return Box::pin(std::future::pending()),
            };
            Box::pin(async move { Ok(Box::pin(stream::iter(events)) as GenerationEvents) })
        }
    }

    impl ClusterModel {
        /// Returns a model that no host computes anymore.
        pub(in crate::cluster::catalog) fn of_nobody(name: &str) -> Self {
            of(name, Arc::new(Hosts(Vec::new(), Mutex::default())))
        }
    }

    fn of(name: &str, hosts: Arc<Hosts>) -> ClusterModel {
        let members = Members::default();
        let rows = hosts.0.iter().map(|(number, _)| row(*number, HostState::Serving, &facts(&[name])));
        members.look().end(rows.collect());
        let info = RemoteInfo {
            name: name.to_owned(),
            digest: ModelDigest::default(),
            context_length: None,
            created_unix_s: 0,
        };
        ClusterModel { info, digest: None, reasoning: None, own: 1, members: Arc::new(members), peers: hosts }
    }

    /// Asks for the session `s`, and returns the answer and the hosts that were asked.
    async fn answer(
        hosts: Vec<(i64, Does)>,
        options: ChatOptions,
    ) -> (Result<String, EngineError>, Vec<i64>) {
        let hosts = Arc::new(Hosts(hosts, Mutex::default()));
        let model = Model::Remote(Arc::new(of("big", hosts.clone())));
        let affinity = Affinity { session: Some("s".into()), ..Affinity::default() };
        let stream = model.chat(&[ChatMessage::user("hi")], ChatOptions { affinity, ..options });
        let outcome = match stream {
            Ok(stream) => stream.outcome().await.map(|outcome| outcome.text),
            Err(error) => Err(error),
        };
        let asked = hosts.1.lock().expect("not poisoned").clone();
        (outcome, asked)
    }

    /// Returns the order in which two hosts are asked for the session `s`.
    async fn order() -> [i64; 2] {
        let refusing = vec![(2, Does::Refuse), (3, Does::Refuse)];
        let (_, asked) = answer(refusing, ChatOptions::default()).await;
        asked.try_into().expect("both are asked")
    }

    #[tokio::test]
    async fn another_host_answers_for_one_that_cannot() {
        let [first, second] = order().await;
        for does in [Does::Refuse, Does::Vanish] {
            let (text, asked) =
                answer(vec![(first, does), (second, Does::Answer)], ChatOptions::default()).await;
            assert_eq!((text.expect("an answer"), asked), (second.to_string(), vec![first, second]));
        }
        let hosts = || vec![(first, Does::Answer), (second, Does::Answer)];
        for _ in 0..5 {
            let (text, asked) = answer(hosts(), ChatOptions::default()).await;
            assert_eq!((text.expect("an answer"), asked), (first.to_string(), vec![first]), "the same host");
        }
    }

    #[tokio::test]
    async fn an_answer_that_breaks_off_is_not_continued_by_another_host() {
        let [first, second] = order().await;
        let hosts = vec![(first, Does::BreakOff), (second, Does::Answer)];
        let (broken, asked) = answer(hosts, ChatOptions::default()).await;
        let error = broken.expect_err("half an answer");
        assert!(matches!(error, EngineError::Upstream { fault: UpstreamFault::CutOff, .. }), "{error}");
        assert_eq!(asked, [first]);
    }

    #[tokio::test]
    async fn errors_say_what_to_do() {
        let failing = |one, other| answer(vec![(2, one), (3, other)], ChatOptions::default());
        let (error, asked) = failing(Does::Reject, Does::Reject).await;
        let error = error.expect_err("a mistake in the request");
        assert_eq!((error.to_string().as_str(), asked.len()), ("`stop`: no", 1), "no host would accept it");
        let (error, asked) = failing(Does::Fail, Does::Fail).await;
        let error = error.expect_err("the engine fails");
        assert_eq!((error.code(), asked.len()), ("engine_failed", 1), "it could fail at each host");
        for (one, other) in [(Does::Refuse, Does::Vanish), (Does::Vanish, Does::Refuse)] {
            let error = failing(one, other).await.0.expect_err("nobody answers");
            assert!(matches!(error, EngineError::Busy { retry_after_ms: 9 }), "{error}");
        }
        let error = failing(Does::Vanish, Does::Vanish).await.0.expect_err("nobody answers").to_string();
        assert!(error.ends_with("is not available: no answer"), "{error}");
        let error = answer(Vec::new(), ChatOptions::default()).await.0.expect_err("no host has it");
        assert!(matches!(error, EngineError::ModelUnknown { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_request_ends_at_its_deadline_although_the_host_says_nothing() {
        let deadline = Some(std::time::Instant::now() + Duration::from_millis(5));
        let hosts = vec![(2, Does::Hang), (3, Does::Hang)];
        let (error, asked) = answer(hosts, ChatOptions { deadline, ..ChatOptions::default() }).await;
        assert!(matches!(error, Err(EngineError::DeadlineExceeded)), "{error:?}");
        assert_eq!(asked.len(), 1);
    }

    #[test]
    fn work_in_the_background_waits_until_a_host_has_room() {
        let model = of("big", Arc::new(Hosts(Vec::new(), Mutex::default())));
        let host = |number, state, waiting, computing| {
            let load = Load { waiting, capacity: 4, ..Load::default() };
            let catalog = vec![described("big")];
            let facts = Facts { load, catalog, computing: Some(computing), ..Facts::default() };
            row(number, state, &facts.encode())
        };
        let serving = HostState::Serving;
        let free = |rows| {
            model.members.look().end(rows);
            model.free_slots()
        };
        assert_eq!(free(vec![host(2, serving.clone(), 1, 0), host(3, serving.clone(), 0, 4)]), 0);
        assert_eq!(free(vec![host(2, serving.clone(), 0, 1), host(3, serving.clone(), 0, 2)]), 5);
        assert_eq!(free(vec![host(1, serving.clone(), 0, 0), host(3, HostState::Draining, 0, 0)]), 0);
        assert_eq!(free(vec![row(2, serving, &facts(&["big"]))]), 1, "an earlier version reports no load");
    }

    #[test]
    fn parameters_about_tokens_are_refused() {
        let model = of("big", Arc::new(Hosts(Vec::new(), Mutex::default())));
        let options = ChatOptions { top_logprobs: Some(1), ..ChatOptions::default() };
        let error = model.check(&options).expect_err("tokens are not known here").to_string();
        assert!(
            error.starts_with("`top_logprobs`: another host of the cluster computes the model big"),
            "{error}"
        );
        model.check(&ChatOptions::default()).expect("nothing about tokens");
        assert!(model.problem().is_some_and(|problem| problem.contains("computes the model big anymore")));
        assert_eq!((model.free_slots(), model.hosts()), (0, Vec::new()));
    }
}
