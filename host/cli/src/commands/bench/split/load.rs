//! The load: agents that decode without a pause, while long prompts arrive at fixed times.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::{ChatAnswer, ChatClient, ChatReader};

/// Pieces that each agent gets before the measurement starts.
const WARM_PIECES: usize = 8;
/// Tokens of an answer of an agent, and of one to a long prompt.
const AGENT_TOKENS: u32 = 256;
const ANSWER_TOKENS: u32 = 8;
/// Pause before a request is sent again that was refused because the host is full.
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// The load to send.
#[derive(Debug, Clone)]
pub struct Load {
    pub agents: u16,
    pub prompts: u16,
    /// Words of each prompt, of about a token each.
    pub words: u32,
    pub interval: Duration,
}

/// The times and the tokens that clients saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Times between two pieces of an agent's answer, from the first prompt to the last answer, in ms.
    pub gaps_ms: Vec<f64>,
    /// Times from a prompt to the first piece of its answer, in ms.
    pub first_ms: Vec<f64>,
    /// Tokens of all prompts, and of all answers that were given meanwhile.
    pub tokens: u64,
    pub wall: Duration,
}

/// Sends the load to a host.
pub async fn send(url: &str, load: &Load) -> Result<Seen> {
    let client = ChatClient::new(&format!("{url}/v1"))?;
    let stop = Arc::new(AtomicBool::new(false));
    let (warm, mut warmed) = tokio::sync::mpsc::channel(usize::from(load.agents).max(1));
    let mut agents = JoinSet::new();
    for number in 0..load.agents {
        agents.spawn(agent(client.clone(), number, stop.clone(), warm.clone()));
    }
    drop(warm);
    for _ in 0..load.agents {
        if warmed.recv().await.is_none() {
            let ended = agents.join_next().await.context("the agents have ended")?;
            ended.context("an agent panicked")??;
            bail!("an agent ended before the measurement");
        }
    }
    let began = Instant::now();
    let mut prompts = JoinSet::new();
    for number in 0..load.prompts {
        let (client, words, at) = (client.clone(), load.words, began + load.interval * u32::from(number));
        prompts.spawn(async move {
            tokio::time::sleep_until(at.into()).await;
            prompt(&client, words).await
        });
    }
    let mut seen = Seen::default();
    while let Some(ended) = prompts.join_next().await {
        let (first, tokens) = ended.context("a prompt panicked")??;
        seen.first_ms.push(first.as_secs_f64() * 1e3);
        seen.tokens += tokens;
    }
    let ended_at = Instant::now();
    seen.wall = ended_at - began;
    stop.store(true, Relaxed);
    while let Some(ended) = agents.join_next().await {
        for answer in ended.context("an agent panicked")?? {
            let within = |at: Instant| at >= began && at <= ended_at;
            seen.tokens += answer.iter().filter(|at| within(**at)).count() as u64;
            let pairs = answer.windows(2).filter(|pair| within(pair[0]) && within(pair[1]));
            seen.gaps_ms.extend(pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3));
        }
    }
    Ok(seen)
}

/// Answers until it is stopped. Returns the times of the pieces of each answer.
async fn agent(
    client: ChatClient,
    number: u16,
    stop: Arc<AtomicBool>,
    warm: tokio::sync::mpsc::Sender<()>,
) -> Result<Vec<Vec<Instant>>> {
    let (mut answers, mut pieces) = (Vec::new(), 0);
    while !stop.load(Relaxed) {
        let ask = format!("Agent {number}, tell me about the number {}.", answers.len());
        let mut reader = start(&client, &ask, AGENT_TOKENS).await?;
        let mut times = Vec::new();
        while !stop.load(Relaxed) && reader.next().await?.is_some() {
            times.push(Instant::now());
            pieces += 1;
            if pieces == WARM_PIECES {
                // Nobody waits anymore if another agent has failed.
                let _ = warm.send(()).await;
            }
        }
        answers.push(times);
    }
    Ok(answers)
}

/// Sends a long prompt that no other one begins like. Returns the time to the first piece of its answer, and the tokens of both.
async fn prompt(client: &ChatClient, words: u32) -> Result<(Duration, u64)> {
    let began = Instant::now();
    let mut text = format!("{:08x}", rand::rng().random::<u32>());
    (0..words).for_each(|word| text += [" the", " of", " and", " to", " in"][word as usize % 5]);
    let mut reader = start(client, &text, ANSWER_TOKENS).await?;
    let mut first = None;
    while reader.next().await?.is_some() {
        first.get_or_insert_with(|| began.elapsed());
    }
    let usage = reader.usage().context("the host did not report its usage")?;
    let first = first.unwrap_or_else(|| began.elapsed());
    Ok((first, usage.prompt_tokens + usage.completion_tokens))
}

/// Sends a question until it is not refused, and returns the answer.
async fn start(client: &ChatClient, ask: &str, tokens: u32) -> Result<Box<ChatReader>> {
    let body: Value = json!({"messages": [{"role": "user", "content": ask}], "max_tokens": tokens,
        "temperature": 1, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}});
    loop {
        match client.start(&body, None).await? {
            ChatAnswer::Stream(reader) => return Ok(reader),
            ChatAnswer::Busy { .. } => tokio::time::sleep(BUSY_PAUSE).await,
        }
    }
}
