//! Everything that clients and faults share: the addresses of the hosts, the server outside, and the notebook in which
//! clients write what they see.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

use super::super::storm::{Outside, metric};
use super::history::{
    Batch, Decision, Effect, History, Line, Message, Moment, Outcome, Read, Wanted, wanted_after,
};
use super::hosts::{Address, Addresses};
use super::takeovers::Takeovers;

/// The agent that all clients call.
pub const AGENT: &str = "storm";
/// A second agent with the same component, whose tool the first one calls.
pub const CALLEE: &str = "storm-callee";
/// Time after which a client gives up a request, and asks another host.
const ATTEMPT: Duration = Duration::from_secs(20);
/// Time in which some host has to answer, however often the request is sent. The owner of a session may be stopped and killed several
/// times, and each take-over may take some leases (see `faults`). The report has the times that answers took.
pub const ANSWER: Duration = Duration::from_secs(300);
/// Delay before a client asks another host.
pub const PAUSE: Duration = Duration::from_millis(20);
/// Maximum time until everything that was accepted has happened, once no client sends anything more. A webhook that has missed an event
/// four times gets it within this time.
const SETTLE: Duration = Duration::from_secs(300);
/// Reads of sessions at the same time at the end.
const READERS: usize = 8;
const TROUBLES_SHOWN: usize = 10;

/// The work of an agent for a message, beside recording it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Generate,
    /// Emits an event for another session and for the webhook.
    Emit,
    /// Calls the tool of another agent.
    Call,
    /// Sets an alarm for its own session.
    Alarm,
    /// Calls a tool of another agent that waits for an approval.
    Pay,
}

impl Op {
    /// Returns the name by which the agent knows the operation.
    pub fn as_str(self) -> &'static str {
        match self {
            Op::Generate => "generate",
            Op::Emit => "emit",
            Op::Call => "call",
            Op::Alarm => "alarm",
            Op::Pay => "pay",
        }
    }
}

/// A message with what it ordered.
pub struct Order {
    pub message: Message,
    pub op: Op,
    /// The agent's word about the effect, such as "done".
    pub said: Option<String>,
}

#[derive(Default)]
struct Notebook {
    orders: Vec<Order>,
    reads: Vec<Read>,
    batches: Vec<Batch>,
    decisions: Vec<Decision>,
    /// Sessions in which alarms ring.
    with_alarms: BTreeSet<String>,
    troubles: Vec<String>,
}

/// Everything that clients share: the addresses of the hosts, and what was seen.
pub struct World {
    pub outside: Arc<Outside>,
    pub addresses: Arc<Addresses>,
    pub takeovers: Takeovers,
    pub http: reqwest::Client,
    /// Part of the name of each session, so that several runs can use one database.
    pub run: String,
    began: Instant,
    notebook: Mutex<Notebook>,
    acknowledged: AtomicU64,
    ends: AtomicBool,
}

impl World {
    /// Creates the world of one run, with a server that receives what the agents send.
    pub async fn new(run: String) -> Result<Arc<Self>> {
        skep_outbound::tls::install_provider();
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(2))
            .timeout(ATTEMPT)
            .no_proxy()
            .build()
            .context("cannot set up the HTTP client")?;
        Ok(Arc::new(Self {
            outside: Outside::start().await?,
            addresses: Arc::default(),
            takeovers: Takeovers::default(),
            http,
            run,
            began: Instant::now(),
            notebook: Mutex::default(),
            acknowledged: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        }))
    }

    /// Deploys the agents and adds the webhook at the only host so far.
    pub async fn set_up(&self, component: Vec<u8>) -> Result<()> {
        let url = self.addresses.pick(0).context("no host runs")?.url.clone();
        let client = crate::client::Client::new(Some(&url))?;
        let outside = &self.outside.url;
        let limits =
            format!("[limits]\nturn_ms = 600000\n[grants]\nrandom = true\nhosts = [\"{outside}\"]\n");
        client.deploy(&format!("name = \"{CALLEE}\"\n{limits}"), component.clone()).await?;
        let manifest = format!(
            "name = \"{AGENT}\"\n{limits}tools = [\"agent:{CALLEE}/*\"]\nevents = [\"storm.*\"]\n\
             [tools.\"agent:{CALLEE}/pay\"]\napproval = true\n\
             [[trigger.event]]\ntopic = \"storm.*\"\nsession = \"{{data.session}}\"\n"
        );
        client.deploy(&manifest, component).await?;
        client.add_webhook(&format!("{outside}/hook"), &["storm.*".to_owned()], None).await?;
        Ok(())
    }

    /// Returns the time of the run, which is that of all moments.
    pub fn now(&self) -> Moment {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Makes all clients stop after their current request.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Returns whether the clients have to stop.
    pub fn has_ended(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    /// Returns how many messages were acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Adds a message to the history.
    pub fn enter(&self, order: Order) {
        if matches!(order.message.outcome, Outcome::Acknowledged { .. }) {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
        }
        self.notebook().orders.push(order);
    }

    /// Adds a batch to the history.
    pub fn enter_batch(&self, batch: Batch) {
        self.notebook().batches.push(batch);
    }

    /// Adds a decision about a call to the history.
    pub fn enter_decision(&self, decision: Decision) {
        self.notebook().decisions.push(decision);
    }

    /// Returns how many messages were acknowledged, by what their agents did.
    pub fn acknowledged_by_op(&self) -> BTreeMap<&'static str, usize> {
        let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
        for Order { message, op, .. } in &self.notebook().orders {
            if matches!(message.outcome, Outcome::Acknowledged { .. }) {
                *counts.entry(op.as_str()).or_default() += 1;
            }
        }
        counts
    }

    /// Records that alarms ring in a session.
    pub fn ring_in(&self, session: &str) {
        self.notebook().with_alarms.insert(session.to_owned());
    }

    /// Records an answer that no client should get.
    pub fn trouble(&self, what: String) {
        self.notebook().troubles.push(what);
    }

    /// Returns the number of answers that no client should get, and the first of them.
    pub fn troubles(&self) -> (usize, Vec<String>) {
        let notebook = self.notebook();
        let shown = notebook.troubles.iter().take(TROUBLES_SHOWN).cloned().collect();
        (notebook.troubles.len(), shown)
    }

    fn notebook(&self) -> MutexGuard<'_, Notebook> {
        self.notebook.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the URL of the host that answered, which need not be the one that was asked.
    pub fn answering(&self, response: &Response, asked: &Address) -> String {
        let name = response.headers().get("x-skep-host").and_then(|name| name.to_str().ok());
        name.and_then(|name| self.addresses.url_of(name)).unwrap_or_else(|| asked.url.clone())
    }

    /// Returns the state of a session, as one host shows it. `None` if it gave no answer.
    pub async fn entries(&self, address: &Address, session: &str) -> Option<Vec<String>> {
        let path = format!("{}/v1/agents/{AGENT}/sessions/{session}/state?limit=100", address.url);
        let response = self.http.get(path).send().await.ok()?;
        let (status, body) = (response.status().as_u16(), response.json::<Value>().await.ok()?);
        match status {
            200 => {
                let values = body["data"].as_array().map(Vec::as_slice).unwrap_or_default();
                let Some(entries) = values.iter().find(|value| value["key"] == "entries") else {
                    return Some(Vec::new());
                };
                serde_json::from_value(entries["value"].clone()).ok()
            }
            404 if body["error"]["code"] == "session_not_found" => Some(Vec::new()),
            _ => None,
        }
    }

    /// Reads a session through a host, and records what it shows. A read without an answer shows nothing.
    pub async fn read(&self, address: &Address, session: &str) {
        let began = self.now();
        if let Some(entries) = self.entries(address, session).await {
            let (session, ended) = (session.to_owned(), self.now());
            self.notebook().reads.push(Read { session, began, ended, entries });
        }
    }

    /// Returns the history once nothing runs anymore, and all effects have happened or are late.
    pub async fn history(&self) -> Result<History> {
        if !self.until_quiet().await {
            let seconds = SETTLE.as_secs();
            self.trouble(format!(
                "turns were still open {seconds} s after the last message; violations may be what they changed later"
            ));
        }
        let sessions: BTreeSet<String> = {
            let notebook = self.notebook();
            notebook.orders.iter().map(|order| order.message.session.clone()).collect()
        };
        let lines = stream::iter(sessions).map(|session| self.line(session)).buffer_unordered(READERS);
        let lines: BTreeMap<String, Line> = lines.try_collect().await?;
        let mut history = {
            let notebook = self.notebook();
            let is_refused = |order: &&Order| order.said.as_deref() == Some("refused");
            let refused = notebook.orders.iter().filter(is_refused);
            History {
                messages: notebook.orders.iter().map(|order| order.message.clone()).collect(),
                reads: notebook.reads.clone(),
                lines,
                effects: Vec::new(),
                batches: notebook.batches.clone(),
                decisions: notebook.decisions.clone(),
                refused: refused.map(|order| order.message.id.clone()).collect(),
            }
        };
        let until = Instant::now() + SETTLE;
        loop {
            history.effects = self.effects();
            if !history.awaits_effects() || Instant::now() > until {
                break;
            }
            tokio::time::sleep(10 * PAUSE).await;
        }
        // An effect that happens twice may need a moment.
        tokio::time::sleep(Duration::from_secs(1)).await;
        history.effects = self.effects();
        Ok(history)
    }

    /// Waits until no turn is open at any host. Returns whether that happened in time.
    async fn until_quiet(&self) -> bool {
        let until = Instant::now() + SETTLE;
        let mut quiet = 0;
        while quiet < 3 {
            if Instant::now() > until {
                return false;
            }
            tokio::time::sleep(5 * PAUSE).await;
            let mut open = 0.0;
            for address in self.addresses.all() {
                let metrics = self.http.get(format!("{}/metrics", address.url)).send().await;
                let text = match metrics {
                    Ok(response) => response.text().await.ok(),
                    Err(_) => None,
                };
                open += text.map_or(1.0, |text| metric(&text, "skep_open_turns").unwrap_or(0.0));
            }
            quiet = if open == 0.0 { quiet + 1 } else { 0 };
        }
        true
    }

    /// Returns a session with its turns, asking until a host answers.
    async fn line(&self, session: String) -> Result<(String, Line)> {
        let until = Instant::now() + ANSWER;
        for draw in 0.. {
            if let Some(address) = self.addresses.pick(draw)
                && let Some(entries) = self.entries(&address, &session).await
                && let Some(turns) = self.turns(&address, &session).await
            {
                let has_other_turns = self.notebook().with_alarms.contains(&session);
                return Ok((session, Line { entries, turns, has_other_turns }));
            }
            if Instant::now() > until {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        bail!("no host shows the session {session}")
    }

    async fn turns(&self, address: &Address, session: &str) -> Option<u64> {
        let path = format!("{}/v1/agents/{AGENT}/sessions/{session}", address.url);
        let response = self.http.get(path).send().await.ok()?;
        let status = response.status().as_u16();
        let body: Value = response.json().await.ok()?;
        match status {
            200 => body["turns"].as_u64(),
            404 if body["error"]["code"] == "session_not_found" => Some(0),
            _ => None,
        }
    }

    /// Returns how often the effects of all messages were counted so far.
    fn effects(&self) -> Vec<Effect> {
        let notebook = self.notebook();
        let mut decisions: HashMap<&str, Vec<&Decision>> = HashMap::new();
        for decision in &notebook.decisions {
            decisions.entry(&decision.about).or_default().push(decision);
        }
        let mut effects = Vec::new();
        for Order { message: Message { session, id, .. }, op, said } in &notebook.orders {
            let mut add = |kind: &'static str, wanted: Wanted, seen: usize| {
                effects.push(Effect { kind, session: session.clone(), id: id.clone(), wanted, seen });
            };
            match op {
                Op::Generate => {}
                Op::Emit => {
                    add("webhook", Wanted::WithCommit, self.outside.hooks(id));
                    add("event", Wanted::WithCommit, self.outside.effects("event", id));
                }
                Op::Alarm => add("alarm", Wanted::WithCommit, self.outside.effects("alarm", id)),
                Op::Call => {
                    let is_done = said.as_deref() == Some("done");
                    let wanted = if is_done { Wanted::Once } else { Wanted::AtMostOnce };
                    add("call", wanted, self.outside.effects("call", id));
                }
                Op::Pay => {
                    let about = decisions.get(id.as_str()).map(Vec::as_slice).unwrap_or_default();
                    let wanted = wanted_after(about, said.as_deref());
                    add("pay", wanted, self.outside.effects("pay", id));
                }
            }
        }
        for batch in &notebook.batches {
            for item in &batch.items {
                let (kind, session, id) = ("batch", batch.id.clone(), item.clone());
                let (wanted, seen) = (batch.wanted(item), self.outside.effects(kind, item));
                effects.push(Effect { kind, session, id, wanted, seen });
            }
        }
        effects
    }

    /// Returns the data of a message.
    pub fn data(&self, session: &str, id: &str, op: Op) -> Value {
        let others = format!("e-{session}");
        json!({"data": {"op": op.as_str(), "id": id, "url": self.outside.url, "session": others}})
    }

    /// Returns a request to send a message to a session through a host.
    pub fn message(&self, address: &Address, session: &str, id: &str, op: Op) -> RequestBuilder {
        let url = format!("{}/v1/agents/{AGENT}/sessions/{session}/messages", address.url);
        self.http.post(url).json(&self.data(session, id, op))
    }
}
