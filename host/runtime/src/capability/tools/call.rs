//! Tools that the host calls for an agent: tools of other agents, of MCP servers, and of the host itself.
//!
//! A call checks the grants of developer and operator (`grant`), finds the tool and its schema, validates the arguments,
//! makes the call within its deadline, validates the result, and writes it to the journal, so that a replayed turn gets the
//! same result and does nothing twice. A call of another agent is a turn with an idempotency key, and is found again by
//! that key. Any other call that must not be made twice is noted in the journal before it is made.

use super::{
    Directory, Invoke,
    agents::{self, CalledTurns},
    catalog::{self, Catalog, Offered},
    client::{self, ClientTools},
    fetch, grant,
};
use crate::{
    Json, Origin, TurnClient,
    agent::Agent,
    bindings::tools::{CallOptions, ToolError, ToolInfo},
    capability::Turn,
    event::turn_events,
    feed::LiveTurns,
    grant::ToolName,
    journal::{Call, Identity, Stopped},
    metric,
    options::Rules,
    tool::{MAX_ARGUMENT_BYTES, Tool},
};
use skep_engine::LiveSetting;
use skep_outbound::{ToolServer, ToolServerError};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};
use tokio::sync::Semaphore;
use tracing::Instrument;

/// Maximum number of a turn's calls that run at the same time; others wait.
const MAX_AT_ONCE: usize = 16;
/// Maximum size of a result. The journal stores it as a string, which takes up to twice as much.
const MAX_RESULT_BYTES: usize = 768 << 10;

/// The external tools that the host can call, shared by all turns.
pub(crate) struct HostTools {
    pub(super) directory: Arc<dyn Directory>,
    /// It is weak because whoever runs turns owns these tools.
    pub(super) invoke: Weak<dyn Invoke>,
    pub(super) live: Arc<LiveTurns>,
    pub(crate) servers: LiveSetting<BTreeMap<String, Arc<dyn ToolServer>>>,
    rules: LiveSetting<Rules>,
    pub(super) catalog: Catalog,
    /// The `http/fetch` tool.
    pub(super) fetch: Arc<Tool>,
    /// The `client/…` tools.
    pub(super) client: ClientTools,
}

/// The external tool calls of one turn.
pub(crate) struct TurnTools {
    pub(super) host: Arc<HostTools>,
    /// The servers, and the operator's rules, with which the turn began.
    pub(super) servers: Arc<BTreeMap<String, Arc<dyn ToolServer>>>,
    pub(crate) rules: Arc<Rules>,
    pub(crate) turn_id: String,
    /// Agents whose calls led to this turn, outermost first.
    pub(crate) callers: Vec<String>,
    /// Number of events in the chain that led to the turn.
    pub(crate) hops: u32,
    pub(crate) called: CalledTurns,
    at_once: Semaphore,
    /// Tools that the model may be offered, by the names that the model sees.
    offered: Mutex<BTreeMap<String, Arc<Offered>>>,
}

/// A tool that was found, and the way to call it.
enum Target {
    Agent { agent: Arc<Agent>, tool: Arc<Tool> },
    Server { server: Arc<dyn ToolServer>, tool: Arc<Tool> },
    Fetch { tool: Arc<Tool> },
    Client { tool: Arc<Tool> },
}

impl HostTools {
    pub(crate) fn new(
        servers: BTreeMap<String, Arc<dyn ToolServer>>,
        rules: LiveSetting<Rules>,
        directory: Arc<dyn Directory>,
        invoke: Weak<dyn Invoke>,
        live: Arc<LiveTurns>,
    ) -> Self {
        let (servers, catalog) = (LiveSetting::new(servers), Catalog::default());
        let (fetch, client) = (Arc::new(fetch::tool()), ClientTools::default());
        HostTools { directory, invoke, live, servers, rules, catalog, fetch, client }
    }
}

impl TurnTools {
    pub(crate) fn new(host: Arc<HostTools>, turn_id: String, origin: &Origin) -> Self {
        let callers = match origin {
            Origin::Tool(origin) => origin.callers.clone(),
            _ => Vec::new(),
        };
        let (hops, at_once) = (turn_events::hops(origin), Semaphore::new(MAX_AT_ONCE));
        let (called, offered) = (CalledTurns::default(), Mutex::default());
        let (servers, rules) = (host.servers.now(), host.rules.now());
        TurnTools { host, servers, rules, turn_id, callers, hops, called, at_once, offered }
    }

    /// Returns the client that waits for the turn, if it can receive notifications and questions.
    pub(crate) fn client(&self) -> Option<Arc<dyn TurnClient>> {
        self.host.live.get(&self.turn_id)?.client()
    }

    /// Returns a tool that this turn listed, by either of its names.
    pub(crate) fn offered(&self, name: &str) -> Option<Arc<Offered>> {
        let offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        offered.get(name).or_else(|| offered.values().find(|tool| tool.name == name)).cloned()
    }

    fn offer(&self, tools: impl IntoIterator<Item = Arc<Offered>>) {
        let tools = tools.into_iter().map(|offered| (offered.tool.definition.name.clone(), offered));
        self.offered.lock().unwrap_or_else(PoisonError::into_inner).extend(tools);
    }
}

impl Target {
    fn tool(&self) -> &Arc<Tool> {
        match self {
            Target::Agent { tool, .. }
            | Target::Server { tool, .. }
            | Target::Fetch { tool }
            | Target::Client { tool } => tool,
        }
    }
}

/// Calls a tool, or returns the recorded result of a replayed call.
pub(crate) async fn call(
    turn: &Arc<Turn>,
    name: &str,
    arguments: &str,
    options: &CallOptions,
) -> Result<Result<String, ToolError>, Stopped> {
    let mut call = turn.journal.begin(Identity::new("tools.call", &(name, arguments, options))).await?;
    if let Some((result, position)) = turn.journal.recorded(&mut call)? {
        position.reached().await;
        if let Ok(ToolName::Host { .. }) = resolve(turn, name) {
            fetch::count_replayed_fetch(turn, arguments, &result);
        }
        return Ok(result);
    }
    let (agent, source) =
        (turn.agent.manifest.name.to_string(), resolve(turn, name).map_or("unknown", |name| name.source()));
    let span = tracing::info_span!(
        "tool",
        otel.name = %format_args!("execute_tool {}", crate::text::cut(name, 80)),
        otel.status_code = tracing::field::Empty,
        gen_ai.operation.name = "execute_tool",
        gen_ai.tool.name = crate::text::cut(name, 80),
        error.type = tracing::field::Empty,
    );
    turn.journal.label(&call, name);
    turn.journal.caught_up().await;
    let started = Instant::now();
    let result = make(turn, &call, name, arguments, options).instrument(span.clone()).await?;
    let outcome = result.as_ref().map_or_else(code, |_| "ok");
    if result.is_err() {
        span.record("error.type", outcome);
        span.record("otel.status_code", "ERROR");
    }
    metrics::counter!(metric::TOOL_CALLS, "agent" => agent, "source" => source, "outcome" => outcome)
        .increment(1);
    metrics::histogram!(metric::TOOL_TIME, "source" => source).record(started.elapsed());
    // A call that only the end of the turn stopped is repeated when the turn is replayed.
    if !matches!(result, Err(ToolError::Cancelled)) {
        turn.journal.ended(&call, &result, Vec::new());
    }
    Ok(result)
}

/// Makes the call: everything between the guest's request and the journal.
async fn make(
    turn: &Arc<Turn>,
    call: &Call,
    name: &str,
    arguments: &str,
    options: &CallOptions,
) -> Result<Result<String, ToolError>, Stopped> {
    let (name, target, arguments) = match prepare(turn, name, arguments).await {
        Ok(prepared) => prepared,
        Err(error) => return Ok(Err(error)),
    };
    let tool = target.tool().clone();
    if needs_approval(turn, &name, &target)
        && let Err(why) = turn.approvals.ask(call, &name.to_string(), arguments.get()).await?
    {
        return Ok(Err(ToolError::Refused(why)));
    }
    let hints = tool.definition.hints;
    if let Target::Server { .. } = &target
        && !hints.may_repeat()
    {
        if call.was_dispatched() {
            let message =
                format!("the host restarted while {name} was running; check whether the tool did its work");
            return Ok(Err(ToolError::Interrupted(message)));
        }
        turn.journal.dispatched(call).await?;
    }
    let Ok(_one) = turn.tools.at_once.acquire().await else { return Ok(Err(ToolError::Cancelled)) };
    let asked = options.timeout_ms.map(|ms| Duration::from_millis(ms.into()));
    let timeout = asked.into_iter().chain(tool.timeout()).min();
    let mut attempt = 0;
    loop {
        let result = attempt_once(turn, call, attempt, &target, arguments.clone(), timeout).await?;
        let retries = tool.definition.retries;
        match result {
            Err(ToolError::Failed(_) | ToolError::TimedOut(_) | ToolError::Unavailable(_))
                if attempt < retries =>
            {
                tokio::time::sleep(backoff(attempt, turn.journal.seed_for(call))).await;
                attempt += 1;
            }
            result => return Ok(result.and_then(|value| checked_result(&tool, &value))),
        }
    }
}

/// Returns whether a person must approve the call, because either the tool's owner or the caller's manifest requires it.
fn needs_approval(turn: &Turn, name: &ToolName, target: &Target) -> bool {
    let asked_by_owner = match target {
        Target::Agent { tool, .. } => tool.definition.needs_approval,
        Target::Server { .. } | Target::Fetch { .. } | Target::Client { .. } => false,
    };
    asked_by_owner || turn.agent.manifest.asks_approval(&name.to_string())
}

async fn attempt_once(
    turn: &Arc<Turn>,
    call: &Call,
    attempt: u32,
    target: &Target,
    arguments: Json,
    timeout: Option<Duration>,
) -> Result<Result<Json, ToolError>, Stopped> {
    match target {
        Target::Agent { agent, tool } => {
            agents::call(turn, call, attempt, agent, tool, arguments, timeout).await
        }
        Target::Server { server, tool } => {
            let called = server.call(&tool.definition.name, arguments.value());
            let called = async {
                let _permit = turn.egress.tool_call_permit(&turn.affinity.tenant).await;
                turn.egress.until_certain().await;
                called.await.map(Json::from).map_err(|error| server_error(error, tool))
            };
            Ok(match timeout {
                None => called.await,
                Some(timeout) => {
                    tokio::time::timeout(timeout, called).await.unwrap_or(Err(timed_out(timeout)))
                }
            })
        }
        Target::Fetch { .. } => {
            fetch::call(turn, call, arguments.value(), timeout).await.map(|called| called.map(Json::from))
        }
        Target::Client { tool } => {
            let name = tool.definition.name.as_str();
            Ok(client::call(turn, name, arguments.value(), timeout).await.map(Json::from))
        }
    }
}

pub(super) fn timed_out(after: Duration) -> ToolError {
    ToolError::TimedOut(u32::try_from(after.as_millis()).unwrap_or(u32::MAX))
}

/// Checks everything that can be checked before the call: that it is granted, that the tool exists, and that the arguments
/// are valid.
async fn prepare(
    turn: &Arc<Turn>,
    name: &str,
    arguments: &str,
) -> Result<(ToolName, Target, Json), ToolError> {
    let name = resolve(turn, name).map_err(ToolError::Unknown)?;
    grant::check(&turn.agent.manifest, &turn.tools.rules.granted_tools, &name).map_err(ToolError::Denied)?;
    if arguments.len() > MAX_ARGUMENT_BYTES {
        let message =
            format!("the arguments have {} bytes; at most {MAX_ARGUMENT_BYTES} are allowed", arguments.len());
        return Err(ToolError::InvalidArguments(message));
    }
    let target = find(turn, &name).await?;
    let arguments = target.tool().arguments(arguments).map_err(ToolError::InvalidArguments)?;
    Ok((name, target, arguments))
}

/// Parses the name of a tool. The name that the model sees is accepted too.
fn resolve(turn: &Turn, name: &str) -> Result<ToolName, String> {
    let offered = turn.tools.offered(name);
    offered.as_ref().map_or(name, |offered| &offered.name).parse()
}

async fn find(turn: &Arc<Turn>, name: &ToolName) -> Result<Target, ToolError> {
    match name {
        ToolName::Agent { agent, tool } => {
            let agent = agents::callable(&turn.tools.host, agent).map_err(ToolError::Unknown)?;
            let Some(tool) = agent.tools.get(tool).cloned() else {
                let known = agent.tools.names();
                return Err(unknown(name, known.iter().map(String::as_str)));
            };
            Ok(Target::Agent { agent, tool })
        }
        ToolName::Server { server: server_name, tool } => {
            let TurnTools { host, servers, .. } = &turn.tools;
            let Some(server) = servers.get(server_name) else {
                let known: Vec<&str> = servers.keys().map(String::as_str).collect();
                let message = format!(
                    "skep.toml does not list an MCP server {server_name:?}; it lists: {}",
                    known.join(", ")
                );
                return Err(ToolError::Unknown(message));
            };
            let served = server.tools().await.map_err(|error| ToolError::Unavailable(error.to_string()))?;
            let Some(found) = served.iter().find(|served| served.name == *tool) else {
                return Err(unknown(name, served.iter().map(|served| served.name.as_str())));
            };
            let tool = host
                .catalog
                .compiled(&found.name, found)
                .map_err(|why| ToolError::Failed(format!("{name} cannot be called: {why}")))?;
            Ok(Target::Server { server: server.clone(), tool })
        }
        // `http/fetch` is the only tool of this kind.
        ToolName::Host { .. } => Ok(Target::Fetch { tool: turn.tools.host.fetch.clone() }),
        ToolName::Client { tool } => Ok(Target::Client { tool: turn.tools.host.client.get(tool) }),
    }
}

fn unknown<'a>(name: &ToolName, known: impl Iterator<Item = &'a str>) -> ToolError {
    let known: Vec<&str> = known.take(20).collect();
    ToolError::Unknown(format!("there is no tool {name}; available tools: {}", known.join(", ")))
}

fn server_error(error: ToolServerError, tool: &Tool) -> ToolError {
    match error {
        ToolServerError::Failed(message) => ToolError::Failed(message),
        ToolServerError::Unavailable(message) => {
            tracing::debug!(tool = tool.definition.name, "a tool's server is unavailable: {message}");
            ToolError::Unavailable(message)
        }
        ToolServerError::TimedOut(after) => timed_out(after),
        ToolServerError::Interrupted(message) => {
            tracing::debug!(tool = tool.definition.name, "a tool's server was lost during a call: {message}");
            ToolError::Interrupted(format!("{message}; check whether the tool did its work"))
        }
    }
}

fn checked_result(tool: &Tool, result: &Json) -> Result<String, ToolError> {
    let text = result.get();
    if text.len() > MAX_RESULT_BYTES {
        let message = format!("the result has {} bytes; at most {MAX_RESULT_BYTES} are allowed", text.len());
        return Err(ToolError::Failed(message));
    }
    tool.check_result(result).map_err(ToolError::Failed)?;
    Ok(text.to_owned())
}

/// Returns the delay before a retry. It doubles after each failure, and varies between calls, so that calls that failed
/// together are not retried together.
fn backoff(attempt: u32, seed: u64) -> Duration {
    const FIRST_MS: u64 = 100;
    const LONGEST_MS: u64 = 10_000;
    let longest = (FIRST_MS << attempt.min(16)).min(LONGEST_MS);
    let draw = seed.rotate_left(attempt * 7) % (longest / 2 + 1);
    Duration::from_millis(longest / 2 + draw)
}

/// Returns the name of an error for metrics and traces.
fn code(error: &ToolError) -> &'static str {
    match error {
        ToolError::Unknown(_) => "unknown",
        ToolError::Denied(_) => "denied",
        ToolError::InvalidArguments(_) => "invalid_arguments",
        ToolError::Failed(_) => "failed",
        ToolError::TimedOut(_) => "timed_out",
        ToolError::Unavailable(_) => "unavailable",
        ToolError::Interrupted(_) => "interrupted",
        ToolError::Refused(_) => "refused",
        ToolError::Cancelled => "cancelled",
    }
}

/// Lists the tools that the agent may call now, or returns the recorded list of a replayed call.
pub(crate) async fn list(turn: &Arc<Turn>) -> Result<Vec<ToolInfo>, Stopped> {
    let mut call = turn.journal.begin(Identity::new("tools.list", &())).await?;
    let listed = match turn.journal.recorded(&mut call)? {
        Some((listed, position)) => {
            position.reached().await;
            listed
        }
        None => {
            let listed = catalog::list(turn).await;
            turn.journal.caught_up().await;
            turn.journal.ended(&call, &listed, Vec::new());
            listed
        }
    };
    let catalog = &turn.tools.host.catalog;
    turn.tools.offer(listed.iter().filter_map(|info| catalog.offered(info)));
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delays_grow_up_to_a_bound() {
        for seed in [0, 1, 0x9e37_79b9_7f4a_7c15, u64::MAX] {
            for attempt in 0..40 {
                let longest = Duration::from_millis((100u64 << attempt.min(16)).min(10_000));
                let wait = backoff(attempt, seed);
                assert!((longest / 2..=longest).contains(&wait), "attempt {attempt} of {seed}: {wait:?}");
            }
        }
        let waits: Vec<Duration> = (0..64).map(|seed| backoff(3, seed)).collect();
        assert!(waits.iter().any(|wait| *wait != waits[0]), "delays vary between calls");
    }

    #[test]
    fn a_call_that_may_have_done_its_work_is_not_reported_as_unavailable() {
        let error = |error| server_error(error, &fetch::tool());
        let late = error(ToolServerError::TimedOut(Duration::from_millis(300)));
        assert!(matches!(late, ToolError::TimedOut(300)), "{late:?}");
        let lost = error(ToolServerError::Interrupted("the line is cut".into()));
        assert!(matches!(&lost, ToolError::Interrupted(why) if why.contains("the line is cut")), "{lost:?}");
        let away = error(ToolServerError::Unavailable("nobody is there".into()));
        assert!(matches!(away, ToolError::Unavailable(_)), "{away:?}");
    }
}
