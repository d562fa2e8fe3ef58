//! Mixed load on a host in a separate process, with effects that are counted outside of it. `skep bench
//! crash` kills the host under this load; `skep bench soak` watches what the host holds.

mod books;
mod life;
mod options;
mod orders;
mod outside;
mod sessions;
mod versions;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::build_agent;
use crate::embedded::STORM;
use books::Books;
pub use books::{Account, COLUMNS};
pub use life::{Life, Startup};
pub use options::Options;
pub use outside::Outside;

const AGENT: &str = "storm";
/// A second agent with the same component, whose tools the first one calls.
const CALLEE: &str = "storm-callee";
/// `turn_ms` of the first version of an agent; each later version has a different value.
const TURN_MS: u64 = 600_000;
/// An answer that takes longer than this is assumed never to come.
const ANSWER: Duration = Duration::from_secs(180);
/// Delay before a client retries a host that is down or busy.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum time for everything that was accepted to finish, once nothing more is ordered.
const SETTLE: Duration = Duration::from_secs(180);

/// Parameters of the load.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub workers: usize,
    /// Whether clients delete all sessions that they leave; otherwise some stay.
    pub deletes_all: bool,
}

/// The load, the host under it, and the world outside.
pub struct Storm {
    pub outside: Arc<Outside>,
    pub books: Books,
    plan: Plan,
    folder: PathBuf,
    model: String,
    component: Vec<u8>,
    http: reqwest::Client,
    /// Address of the host, while there is one.
    url: watch::Sender<Option<String>>,
    ends: AtomicBool,
    /// Answers that no client should ever get.
    trouble: Mutex<Vec<String>>,
}

/// An answer, no matter how often the request was sent.
pub struct Response {
    pub status: u16,
    pub body: Value,
    /// Whether an earlier answer was lost with the host, or with the connection.
    pub is_repeated: bool,
}

impl Response {
    fn code(&self) -> String {
        self.body["error"]["code"].as_str().map_or_else(|| self.status.to_string(), str::to_owned)
    }
}

impl Storm {
    /// Prepares a folder with the configuration of a host that lets its agents reach the server outside.
    pub async fn prepare(folder: &Path, model: &str, plan: Plan) -> Result<Arc<Self>> {
        let component = build_agent(&STORM)?;
        let outside = Outside::start().await?;
        let url = &outside.url;
        let settings = format!(
            "[grants]\nhosts = [\"{url}\"]\ntools = [\"agent:{CALLEE}/*\", \"mcp:outside/*\"]\n\
             [outbound]\nallow_private = [\"127.0.0.0/8\"]\n\
             [mcp.outside]\nurl = \"{url}/mcp\"\n"
        );
        std::fs::write(folder.join("skep.toml"), settings).context("cannot write the configuration")?;
        skep_outbound::tls::install_provider();
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .timeout(ANSWER)
            .no_proxy()
            .build()
            .context("cannot set up the HTTP client")?;
        Ok(Arc::new(Self {
            outside,
            books: Books::default(),
            plan,
            folder: folder.to_owned(),
            model: model.to_owned(),
            component,
            http,
            url: watch::Sender::new(None),
            ends: AtomicBool::new(false),
            trouble: Mutex::default(),
        }))
    }

    /// Starts a process, which does not listen yet.
    pub fn begin(&self) -> Result<Startup> {
        Startup::begin(&self.folder, &self.model, &self.log())
    }

    /// Sends a host its first message and lets clients find the host. Returns how long the message took.
    pub async fn welcome(&self, life: &Life) -> Result<Duration> {
        let began = Instant::now();
        let message = self.http.post(format!("{}/v1/agents/{CALLEE}/sessions/probe/messages", life.url));
        let answered = message.json(&json!({"text": "entries"})).send().await;
        let first_turn = began.elapsed();
        self.url.send_replace(Some(life.url.clone()));
        match answered {
            // The agents are not deployed before the first message.
            Ok(answer) if answer.status().is_success() || answer.status().as_u16() == 404 => Ok(first_turn),
            Ok(answer) => bail!("a new host answered a message with {}", answer.status()),
            Err(error) => bail!("a new host did not answer a message: {error}"),
        }
    }

    /// Makes clients wait for the next host.
    pub fn farewell(&self) {
        self.url.send_replace(None);
    }

    /// Deploys the agents and adds the webhook.
    pub async fn set_up(&self) -> Result<()> {
        for (name, more) in [(CALLEE, String::new()), (AGENT, self.grants())] {
            let manifest = self.manifest(name, TURN_MS, &more);
            let answer = self.deploy(&manifest).await;
            if answer.status != 201 {
                bail!("deploying {name}: {} {}", answer.status, answer.body);
            }
        }
        let hook = json!({"url": format!("{}/hook", self.outside.url), "topics": ["storm.*"]});
        let answer = self.ask(|http, url| http.post(format!("{url}/v1/webhooks")).json(&hook)).await;
        match answer.status {
            200 | 201 => Ok(()),
            status => bail!("adding a webhook: {status} {}", answer.body),
        }
    }

    fn manifest(&self, name: &str, turn_ms: u64, more: &str) -> String {
        let url = &self.outside.url;
        format!(
            "name = \"{name}\"\n[limits]\nturn_ms = {turn_ms}\n[grants]\nrandom = true\nhosts = [\"{url}\"]\n{more}"
        )
    }

    fn grants(&self) -> String {
        format!(
            "tools = [\"agent:{CALLEE}/*\", \"mcp:outside/*\"]\nevents = [\"storm.*\"]\n\
             [tools.\"agent:{CALLEE}/pay\"]\napproval = true\n\
             [[trigger.event]]\ntopic = \"storm.*\"\nsession = \"{{data.session}}\"\n"
        )
    }

    async fn deploy(&self, manifest: &str) -> Response {
        self.ask(|http, url| {
            let component = reqwest::multipart::Part::bytes(self.component.clone()).file_name("agent.wasm");
            let form = reqwest::multipart::Form::new()
                .text("manifest", manifest.to_owned())
                .part("component", component);
            http.post(format!("{url}/v1/agents")).multipart(form)
        })
        .await
    }

    /// Starts the clients. Each one finishes at the end of a session, once [`Storm::end`] was called.
    pub fn load(self: &Arc<Self>) -> JoinSet<()> {
        self.ends.store(false, Ordering::Relaxed);
        let mut clients = JoinSet::new();
        for worker in 0..self.plan.workers {
            clients.spawn(self.clone().work(worker));
        }
        clients.spawn(self.clone().approve());
        clients.spawn(self.clone().change_versions());
        clients
    }

    /// Makes the clients stop after their current request.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    fn has_ended(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    /// Waits until everything that was ordered has happened, nothing is in flight, and the clients have
    /// finished. Approvals are given in the meantime.
    pub async fn settle(self: &Arc<Self>, mut clients: JoinSet<()>) -> Result<()> {
        self.end();
        let gone = async {
            while clients.join_next().await.transpose()?.is_some() {}
            Ok::<_, anyhow::Error>(())
        };
        tokio::time::timeout(2 * ANSWER, gone).await.context("a client got no answer")??;
        let until = Instant::now() + SETTLE;
        while Instant::now() < until {
            if self.books.missing(&self.outside) == 0 && self.is_quiet().await {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // Anything that is still missing is lost.
        Ok(())
    }

    /// Returns whether nothing waits or runs in the host.
    async fn is_quiet(&self) -> bool {
        let Some(metrics) = self.metrics().await else { return false };
        let zero = |name: &str| metric(&metrics, name).is_none_or(|value| value == 0.0);
        let schedules = self.ask(|http, url| http.get(format!("{url}/v1/schedules?limit=1"))).await;
        let no_schedules = schedules.body["data"].as_array().is_some_and(Vec::is_empty);
        zero("skep_open_turns") && zero("skep_batch_waiting") && no_schedules
    }

    /// Returns the text of `/metrics`; `None` if no host answers.
    pub async fn metrics(&self) -> Option<String> {
        let url = self.url.borrow().clone()?;
        self.http.get(format!("{url}/metrics")).send().await.ok()?.text().await.ok()
    }

    /// Sends a request until a host has answered it. A busy host is asked again.
    pub async fn ask(&self, request: impl Fn(&reqwest::Client, &str) -> RequestBuilder) -> Response {
        let mut is_repeated = false;
        let began = Instant::now();
        loop {
            let url = self.host().await;
            let answer = tokio::select! {
                answer = request(&self.http, &url).send() => answer,
                // The host is gone, and another process may have its port by now.
                () = self.gone(&url) => {
                    is_repeated = true;
                    continue;
                }
            };
            let answer = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    // A request that could not connect was not sent.
                    is_repeated |= !error.is_connect();
                    if began.elapsed() > ANSWER {
                        self.trouble(format!("no answer within {} s: {error}", ANSWER.as_secs()));
                        return Response { status: 0, body: json!({}), is_repeated };
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let status = answer.status().as_u16();
            let Ok(text) = answer.text().await else {
                is_repeated = true;
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            self.outside.tick();
            if matches!(status, 429 | 503) && began.elapsed() < ANSWER {
                tokio::time::sleep(10 * PAUSE).await;
                continue;
            }
            let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
            return Response { status, body, is_repeated };
        }
    }

    /// Resolves when the host at `url` is gone.
    async fn gone(&self, url: &str) {
        // The sender is part of `self`.
        let _ = self.url.subscribe().wait_for(|now| now.as_deref() != Some(url)).await;
    }

    /// Returns the address of the host, as soon as there is one.
    async fn host(&self) -> String {
        let mut url = self.url.subscribe();
        loop {
            if let Some(url) = url.borrow_and_update().clone() {
                return url;
            }
            // The sender is part of `self`.
            let _ = url.changed().await;
        }
    }

    fn trouble(&self, what: String) {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// Returns the number of answers that clients should never get and of errors in the host's log, and the
    /// first of them.
    pub fn troubles(&self) -> (usize, Vec<String>) {
        const SHOWN: usize = 10;
        let mut found = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        // A turn that is killed again and again is abandoned, and its client gets an error.
        let is_fault = |line: &&str| {
            (line.contains("panicked at") || line.contains(" ERROR "))
                && !line.contains("turn_lost")
                && !line.contains("failed permanently: the host died")
        };
        let faults = log.lines().filter(is_fault);
        found.extend(faults.map(|line| format!("log: {line}")));
        (found.len(), found.into_iter().take(SHOWN).collect())
    }

    fn log(&self) -> PathBuf {
        self.folder.join("host.log")
    }

    /// Returns the path of the host's database.
    pub fn database(&self) -> PathBuf {
        crate::server::database(&self.folder.join("data"))
    }
}

/// Returns the value of a metric without labels, or the sum over its labels.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        if !rest.starts_with(['{', ' ']) {
            return None;
        }
        rest.rsplit(' ').next()?.parse::<f64>().ok()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_the_sum_over_its_labels() {
        let text = "# TYPE a gauge\na{x=\"1\"} 2\na{x=\"2\"} 3.5\nab 7\nb 1\n";
        assert_eq!(metric(text, "a"), Some(5.5));
        assert_eq!(metric(text, "b"), Some(1.0));
        assert_eq!(metric(text, "c"), None);
    }
}
