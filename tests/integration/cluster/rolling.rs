//! A rolling restart: each host of a cluster is stopped in order and replaced, under load, and no request fails.

use super::{
    balancer::Balancer,
    deploy,
    nodes::{Node, Site},
};
use crate::harness::{client, parse_events};
use serde_json::{Value, json};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::task::JoinSet;

const CLIENTS: usize = 6;
/// Messages after which a client begins another session.
const MESSAGES: u64 = 20;

/// The load, which stops at the first request that fails.
struct Load {
    balancer: Arc<Balancer>,
    http: reqwest::Client,
    ends: AtomicBool,
    answered: AtomicU64,
}

impl Load {
    async fn work(self: Arc<Self>, number: usize) {
        for round in 0.. {
            let session = format!("c{number}-{round}");
            for turn in 1..=MESSAGES {
                if self.ends.load(Ordering::Relaxed) {
                    return;
                }
                let url = self.balancer.pick().await;
                let answer = match turn % 2 {
                    0 => self.whole(&url, &session).await,
                    _ => self.streamed(&url, &session).await,
                };
                let answer = answer.unwrap_or_else(|why| panic!("turn {turn} of {session} at {url}: {why}"));
                assert_eq!((&answer["turn"], &answer["text"]), (&json!(turn), &json!(turn.to_string())));
                self.answered.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    fn message(&self, url: &str, session: &str) -> reqwest::RequestBuilder {
        let url = format!("{url}/v1/agents/state/sessions/{session}/messages");
        self.http.post(url).json(&json!({"text": "increment n"}))
    }

    /// Sends a message without a key, and returns the answer.
    async fn whole(&self, url: &str, session: &str) -> Result<Value, String> {
        let response = self.message(url, session).send().await.map_err(|error| format!("{error:?}"))?;
        let status = response.status();
        let answer: Value = response.json().await.map_err(|error| format!("{error:?}"))?;
        if status == 200 { Ok(answer) } else { Err(format!("{status} {answer}")) }
    }

    /// Sends a message without a key, and returns the data of the last event.
    async fn streamed(&self, url: &str, session: &str) -> Result<Value, String> {
        let request = self.message(url, session).header("accept", "text/event-stream");
        let response = request.send().await.map_err(|error| format!("{error:?}"))?;
        let status = response.status();
        let body = response.text().await.map_err(|error| format!("{error:?}"))?;
        match parse_events(&body).pop() {
            Some((name, data)) if status == 200 && name == "done" => Ok(serde_json::from_str(&data).unwrap()),
            _ => Err(format!("{status} {body}")),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_under_load_fails_no_request() {
    let Some(site) = Site::start(false).await else { return };
    let nodes = site.nodes().await;
    deploy(&nodes).await;
    let balancer = Balancer::start(&nodes.each_ref().map(|node| node.url.as_str()));
    balancer.has(3).await;
    let load = Arc::new(Load {
        balancer: Arc::clone(&balancer),
        http: client(),
        ends: AtomicBool::new(false),
        answered: AtomicU64::new(0),
    });
    let mut clients: JoinSet<()> = (0..CLIENTS).map(|number| Arc::clone(&load).work(number)).collect();
    let restarting = async {
        let mut replaced: Vec<Node> = Vec::new();
        for node in nodes {
            let (url, before) = (node.url.clone(), load.answered.load(Ordering::Relaxed));
            node.signal("-TERM");
            let (status, log) = node.exited().await;
            assert_eq!(status, Some(0), "{log}");
            balancer.remove(&url);
            let next = site.node().await;
            balancer.add(&next.url);
            balancer.has(3).await;
            replaced.push(next);
            let answered = load.answered.load(Ordering::Relaxed) - before;
            assert!(answered > CLIENTS as u64, "only {answered} messages were answered meanwhile");
        }
        replaced
    };
    let replaced = tokio::select! {
        replaced = restarting => replaced,
        Some(ended) = clients.join_next() => panic!("a client has ended: {ended:?}"),
    };
    load.ends.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.expect("no request failed");
    }
    // The sessions have exactly what was answered.
    let mut turns = 0;
    let mut after = String::new();
    loop {
        let page = replaced[0].get(&format!("/v1/agents/state/sessions?limit=1000{after}")).await.1;
        let sessions = page["data"].as_array().unwrap();
        turns += sessions.iter().map(|session| session["turns"].as_u64().unwrap()).sum::<u64>();
        match sessions.last() {
            Some(last) if page["has_more"] == true => {
                after = format!("&after={}", last["id"].as_str().unwrap())
            }
            _ => break,
        }
    }
    assert_eq!(turns, load.answered.load(Ordering::Relaxed));
}
