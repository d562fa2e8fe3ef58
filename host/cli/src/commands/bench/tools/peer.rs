//! The column `peer`: the same messages, tools and schemas, sent to any server with OpenAI's routes.

use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use super::answer::{ModelAnswer, WrittenCall};
use super::cases::Case;
use super::ours::MAX_TOKENS;
use crate::client::ChatClient;

/// A server; its address may be given with or without `/v1`.
pub struct Peer {
    client: ChatClient,
    pub url: String,
}

#[derive(Debug, Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Message {
    content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Debug, Deserialize)]
struct ToolCall {
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    arguments: Arguments,
}

/// Text in OpenAI's protocol; some servers send the object itself.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Arguments {
    Text(String),
    Object(Value),
}

#[derive(Debug, Deserialize)]
struct Usage {
    #[serde(default)]
    completion_tokens: u64,
}

impl Peer {
    /// Creates a client of the peer. A URL without a path gets `/v1`.
    pub fn new(url: &str) -> Result<Self> {
        let url = url.trim_end_matches('/');
        let has_path = url.split_once("://").map_or(url, |(_, rest)| rest).contains('/');
        let url = if has_path { url.to_owned() } else { format!("{url}/v1") };
        Ok(Self { client: ChatClient::new(&url)?, url })
    }

    /// Answers a case, after its prompt was computed once.
    pub async fn answer(&self, case: &Case) -> Result<ModelAnswer> {
        self.complete(case, 1).await?;
        let started = Instant::now();
        let completion = self.complete(case, MAX_TOKENS).await?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        let tokens = completion.usage.map_or(0, |usage| usage.completion_tokens);
        let choice = completion.choices.into_iter().next().context("the answer has no choice")?;
        let calls = choice.message.tool_calls.into_iter().flatten().map(|call| WrittenCall {
            name: call.function.name,
            arguments: match call.function.arguments {
                Arguments::Text(text) => text,
                Arguments::Object(value) => value.to_string(),
            },
        });
        Ok(ModelAnswer {
            text: choice.message.content.unwrap_or_default(),
            calls: calls.collect(),
            ended: choice.finish_reason.as_deref() != Some("length"),
            ms,
            tokens,
        })
    }

    async fn complete(&self, case: &Case, max_tokens: usize) -> Result<Completion> {
        let answer = self.client.complete(&case.request("default", max_tokens)).await;
        let answer = answer.with_context(|| format!("{} did not answer {}", self.url, case.id))?;
        serde_json::from_value(answer).with_context(|| format!("{}: not a chat completion", case.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_path_gets_v1() {
        for (given, expected) in [
            ("http://127.0.0.1:8081", "http://127.0.0.1:8081/v1"),
            ("http://127.0.0.1:8081/", "http://127.0.0.1:8081/v1"),
            ("https://host/openai/v1/", "https://host/openai/v1"),
        ] {
            assert_eq!(Peer::new(given).expect("an address").url, expected);
        }
    }
}
