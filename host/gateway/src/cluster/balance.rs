//! A balancer: one address in front of the other hosts, which passes every request on and answers none itself.
//!
//! A request for a session goes to its owner, as at every other host (`proxy`). One with a session affinity goes to the host that the
//! affinity prefers. Any other request goes to the host that should finish it first. That follows from the tokens in flight,
//! those of prompts and those that answers are expected to have, and from the time that the host was measured to take for a
//! token of either kind.
//!
//! Invariant: a request is sent to a second host only if it did not reach the first one, or if it may be repeated.

use super::{
    Cluster, HOST_GONE, RETRY_MS,
    link::LinkError,
    owners::Subject,
    proxy::{self, Passed, Passing},
};
use crate::{ApiError, access::requester, mcp::Mcp};
use axum::{
    body::{Body, HttpBody},
    extract::{MatchedPath, Request},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use skep_runtime::{
    SessionPlace, TokensInFlight, WorkingHost,
    placement::{self, SessionHash},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Assumed bytes of a request for each token of its prompt.
const BYTES_PER_TOKEN: u64 = 4;
/// Assumed times of a token of a prompt and of an answer, until a host was measured. Only their ratio counts.
const ASSUMED_NS: (u64, u64) = (1, 8);
/// Weight of the newest answer in the mean of its route.
const NEWEST: f64 = 0.1;
/// Time for which a host that could not be reached is asked last.
const AVOIDED_FOR: Duration = Duration::from_secs(2);

/// The work that a balancer has passed on.
#[derive(Default)]
pub(super) struct Balancer(Mutex<State>);

#[derive(Default)]
struct State {
    sent: HashMap<i64, Tokens>,
    /// The mean number of tokens of an answer, by route.
    answers: HashMap<String, f64>,
    /// Hosts that could not be reached, and when.
    avoided: HashMap<i64, Instant>,
}

/// Tokens of prompts and of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tokens {
    prefill: u64,
    decode: u64,
}

impl Balancer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns the hosts in the order in which they are asked.
    fn ranked(
        &mut self,
        mut hosts: Vec<WorkingHost>,
        affinity: Option<SessionHash>,
        tokens: Tokens,
    ) -> Vec<WorkingHost> {
        self.avoided.retain(|_, since| since.elapsed() < AVOIDED_FOR);
        let usual = (
            mean_ns(&hosts, |tokens| tokens.prefill_token_ns, ASSUMED_NS.0),
            mean_ns(&hosts, |tokens| tokens.decode_token_ns, ASSUMED_NS.1),
        );
        let preferred =
            affinity.and_then(|hash| placement::chosen(hash, hosts.iter().map(|host| host.member.number)));
        hosts.sort_by_cached_key(|host| {
            let number = host.member.number;
            let sent = self.sent.get(&number).copied().unwrap_or_default();
            let is_avoided = self.avoided.contains_key(&number);
            (is_avoided, preferred != Some(number), cost_ns(&host.tokens, sent, tokens, usual), number)
        });
        hosts
    }

    /// Returns the tokens that a request is expected to take.
    fn expected(&self, route: &str, bytes: u64) -> Tokens {
        let decode = self.answers.get(route).copied().unwrap_or_default();
        Tokens { prefill: bytes / BYTES_PER_TOKEN, decode: decode as u64 }
    }

    fn note_answer(&mut self, route: &str, tokens: u64) {
        let newest = tokens as f64;
        let mean = self.answers.entry(route.to_owned()).or_insert(newest);
        *mean += NEWEST * (newest - *mean);
    }

    fn add(&mut self, host: i64, tokens: Tokens) {
        let sent = self.sent.entry(host).or_default();
        sent.prefill += tokens.prefill;
        sent.decode += tokens.decode;
    }

    fn remove(&mut self, host: i64, tokens: Tokens) {
        let Some(sent) = self.sent.get_mut(&host) else { return };
        sent.prefill = sent.prefill.saturating_sub(tokens.prefill);
        sent.decode = sent.decode.saturating_sub(tokens.decode);
        if *sent == Tokens::default() {
            self.sent.remove(&host);
        }
    }
}

/// Returns the mean of a time over the hosts that were measured, or the assumed one.
fn mean_ns(hosts: &[WorkingHost], time: impl Fn(&TokensInFlight) -> u64, assumed: u64) -> u64 {
    let known: Vec<u64> = hosts.iter().map(|host| time(&host.tokens)).filter(|ns| *ns > 0).collect();
    known.iter().sum::<u64>().checked_div(known.len() as u64).unwrap_or(assumed)
}

/// Returns the time after which a host would be done with a request. What was sent there is a part of what it reports, once it
/// has reported again. `usual` are the times of a token of hosts that were not measured.
fn cost_ns(host: &TokensInFlight, sent: Tokens, request: Tokens, usual: (u64, u64)) -> u64 {
    let or_usual = |ns: u64, usual: u64| if ns > 0 { ns } else { usual };
    let prefill = host.prefill.max(sent.prefill).saturating_add(request.prefill);
    let decode = host.decode.max(sent.decode).saturating_add(request.decode);
    let prefill_ns = prefill.saturating_mul(or_usual(host.prefill_token_ns, usual.0));
    prefill_ns.saturating_add(decode.saturating_mul(or_usual(host.decode_token_ns, usual.1)))
}

/// The tokens of a request among those that were sent to a host.
struct Sent {
    cluster: Arc<Cluster>,
    host: i64,
    route: String,
    tokens: Tokens,
    answered: u64,
}

impl Sent {
    /// Counts a part of the answer. The prompt was computed before the first one.
    fn answer(&mut self, bytes: usize, is_events: bool) {
        if self.tokens.prefill > 0 {
            let prefill = std::mem::take(&mut self.tokens.prefill);
            self.change(|state, host| state.remove(host, Tokens { prefill, decode: 0 }));
        }
        self.answered += if is_events { 1 } else { bytes as u64 / BYTES_PER_TOKEN };
    }

    fn change(&self, change: impl FnOnce(&mut State, i64)) {
        if let Some(balancer) = &self.cluster.balancer {
            change(&mut balancer.state(), self.host);
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.change(|state, host| {
            state.remove(host, self.tokens);
            if self.answered > 0 {
                state.note_answer(&self.route, self.answered);
            }
        });
    }
}

/// Returns whether a balancer answers a request itself, which is only about the balancer.
pub(super) fn is_about_balancer(path: &str) -> bool {
    matches!(path, "/healthz" | "/readyz" | "/metrics" | "/v1/cluster") || path.starts_with("/v1/cluster/")
}

/// Passes a request on.
pub(super) async fn relay(
    cluster: &Arc<Cluster>,
    mcp: &Mcp,
    balancer: &Balancer,
    request: Request,
) -> Response {
    // The tenant is part of the name of a session. Any host refuses a caller that is not known.
    let is_known = requester(request.extensions()).0.is_some();
    let (subject, mut request) = proxy::subject_of(mcp, request).await;
    let affinity = affinity_of(subject.as_ref(), request.headers());
    if let Some(subject) = subject.filter(|_| is_known && request.method() != Method::OPTIONS)
        && let Ok(SessionPlace::There(owner)) = cluster.owners.place(&subject).await
    {
        let is_stream_of_news = proxy::is_stream_of_news(&subject, &request);
        request = match proxy::pass(cluster, &subject, owner, request).await {
            Passed::Answered(response) if is_stream_of_news => return mcp.until_closed(response),
            Passed::Answered(response) => return response,
            // Its host is gone, and a balancer takes no session.
            Passed::Here(request) => request,
        };
    }
    match balanced(cluster, balancer, request, affinity).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn balanced(
    cluster: &Arc<Cluster>,
    balancer: &Balancer,
    request: Request,
    affinity: Option<SessionHash>,
) -> Result<Response, ApiError> {
    let route = request.extensions().get::<MatchedPath>().map_or("", |route| route.as_str()).to_owned();
    // A route that an agent declares may begin a turn with any method.
    let is_of_agent = route.is_empty();
    let mut passing = Passing::of(request).await?;
    let tokens = balancer.state().expected(&route, passing.body_bytes());
    let mut tried = HashSet::new();
    loop {
        let hosts = cluster.owners.working();
        let ranked = balancer.state().ranked(hosts, affinity, tokens);
        let host = ranked.into_iter().find(|host| !tried.contains(&host.member.number));
        let Some(WorkingHost { member, .. }) = host else { return Err(nobody()) };
        balancer.state().add(member.number, tokens);
        let (cluster_of_sent, route) = (cluster.clone(), route.clone());
        let sent = Sent { cluster: cluster_of_sent, host: member.number, route, tokens, answered: 0 };
        let error = match passing.send(cluster, &member).await {
            Ok(response) => return Ok(counted(proxy::passed_back(cluster, member.number, response), sent)),
            Err(error) => error,
        };
        let is_unknown = matches!(error, LinkError::Broken(_));
        let may_repeat = passing.is_kept() && (!is_unknown || (!is_of_agent && passing.is_repeatable()));
        tracing::debug!(error = error.message(), may_repeat, "a host cannot be reached");
        balancer.state().avoided.insert(member.number, Instant::now());
        if !may_repeat {
            return Err(lost(member.number, is_unknown));
        }
        tried.insert(member.number);
    }
}

/// Returns what keeps a request at one host.
fn affinity_of(subject: Option<&Subject>, headers: &HeaderMap) -> Option<SessionHash> {
    // The host of this session is gone, and one host continues it for all requests.
    if let Some(Subject::McpSession(session)) = subject {
        return Some(SessionHash::of("mcp", session));
    }
    let names = ["x-session-affinity", "x-session-id"];
    let session = names.iter().find_map(|name| headers.get(*name)?.to_str().ok())?;
    Some(SessionHash::of("", session))
}

/// Returns an answer whose parts are counted as they pass.
fn counted(response: Response, sent: Sent) -> Response {
    if response.body().is_end_stream() {
        return response;
    }
    let content_type = response.headers().get(header::CONTENT_TYPE);
    let is_events = content_type.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let (parts, body) = response.into_parts();
    let state = (body.into_data_stream(), sent);
    let body = stream::unfold(state, move |(mut body, mut sent)| async move {
        let part = body.next().await?;
        if let Ok(bytes) = &part {
            sent.answer(bytes.len(), is_events);
        }
        Some((part, (body, sent)))
    });
    Response::from_parts(parts, Body::from_stream(body))
}

fn nobody() -> ApiError {
    let message = "no host of the cluster that answers requests can be reached; try again in a moment";
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_GONE, message);
    ApiError { retry_after_ms: Some(RETRY_MS), ..error }
}

fn lost(host: i64, is_unknown: bool) -> ApiError {
    let message = match is_unknown {
        true => format!(
            "the connection to host {host} broke before it answered, so it is not known what was done; a request with an \
             idempotency key may be sent again safely"
        ),
        false => format!(
            "host {host} cannot be reached, and the body of the request is too large to be sent again"
        ),
    };
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_GONE, message);
    ApiError { retry_after_ms: Some(RETRY_MS), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::Member;

    fn host(number: i64, tokens: TokensInFlight) -> WorkingHost {
        WorkingHost { member: Member { number, url: format!("http://10.0.0.{number}") }, tokens }
    }

    fn busy(prefill: u64, decode: u64) -> TokensInFlight {
        TokensInFlight { prefill, decode, ..TokensInFlight::default() }
    }

    fn first(state: &mut State, hosts: &[WorkingHost], affinity: Option<SessionHash>) -> i64 {
        state.ranked(hosts.to_vec(), affinity, Tokens { prefill: 100, decode: 10 })[0].member.number
    }

    #[test]
    fn requests_go_where_the_fewest_tokens_are_in_flight_of_both_stages() {
        let mut state = State::default();
        assert_eq!(first(&mut state, &[host(1, busy(500, 0)), host(2, busy(0, 0))], None), 2);
        let hosts = [host(1, busy(500, 0)), host(2, busy(0, 100))];
        assert_eq!(first(&mut state, &hosts, None), 1, "a token of an answer takes longer");
        state.add(1, Tokens { prefill: 5_000, decode: 0 });
        assert_eq!(first(&mut state, &hosts, None), 2, "what was sent counts before it is reported");
        state.remove(1, Tokens { prefill: 5_000, decode: 0 });
        assert!(state.sent.is_empty());
        let measured = |ns| TokensInFlight { prefill_token_ns: ns, decode_token_ns: 8 * ns, ..busy(100, 0) };
        let unequal = [host(1, measured(1_000)), host(2, measured(3_000))];
        assert_eq!(first(&mut state, &unequal, None), 1);
        let busier =
            [host(1, TokensInFlight { prefill: 1_000, ..measured(1_000) }), host(2, measured(3_000))];
        assert_eq!(first(&mut state, &busier, None), 2, "the faster one has too much");
    }

    #[test]
    fn an_affinity_keeps_its_host_unless_that_cannot_be_reached() {
        let mut state = State::default();
        let hosts = [host(1, busy(9_000, 9_000)), host(2, busy(9_000, 9_000)), host(3, busy(0, 0))];
        let sessions: Vec<SessionHash> =
            (0..40).map(|number| SessionHash::of("", &number.to_string())).collect();
        let of = |state: &mut State| -> Vec<i64> {
            sessions.iter().map(|session| first(state, &hosts, Some(*session))).collect()
        };
        let before = of(&mut state);
        assert!([1, 2, 3].iter().all(|host| before.contains(host)), "{before:?}");
        state.avoided.insert(1, Instant::now());
        let after = of(&mut state);
        assert!(before.iter().zip(&after).all(|(before, after)| before == after || *before == 1));
        assert!(!after.contains(&1));
    }

    #[test]
    fn requests_for_one_session_stay_together() {
        let mut headers = HeaderMap::new();
        assert_eq!(affinity_of(None, &headers), None);
        headers.insert("x-session-id", "a".parse().unwrap());
        assert_eq!(affinity_of(None, &headers), Some(SessionHash::of("", "a")));
        let of_client = Subject::McpSession("s".to_owned());
        assert_eq!(affinity_of(Some(&of_client), &headers), Some(SessionHash::of("mcp", "s")));
    }

    #[test]
    fn answers_are_expected_to_be_as_long_as_earlier_ones_of_their_route() {
        let mut state = State::default();
        assert_eq!(state.expected("/v1/chat/completions", 400), Tokens { prefill: 100, decode: 0 });
        state.note_answer("/v1/chat/completions", 50);
        (0..200).for_each(|_| state.note_answer("/v1/chat/completions", 150));
        let expected = state.expected("/v1/chat/completions", 0).decode;
        assert!((149..=150).contains(&expected), "{expected}");
        assert_eq!(state.expected("/v1/models", 0).decode, 0);
    }

    #[test]
    fn a_balancer_answers_only_what_is_about_itself() {
        for own in ["/healthz", "/readyz", "/metrics", "/v1/cluster", "/v1/cluster/hosts/3/drain"] {
            assert!(is_about_balancer(own), "{own}");
        }
        for other in ["/v1/chat/completions", "/v1/clusters", "/v1/status", "/ui", "/", "/healthz/x"] {
            assert!(!is_about_balancer(other), "{other}");
        }
    }
}
