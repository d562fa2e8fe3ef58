//! The columns `free` and `constrained`: the same prompt, token by token, once without a mask and once with it.

use std::fmt;
use std::time::Instant;

use anyhow::{Result, ensure};
use skep_engine::chat::{ChatFinish, ChatOptions, ChatOutcome, chat};
use skep_engine::{Constraint, Engine, EngineError};
use skep_model::Sampling;

use super::answer::{ModelAnswer, WrittenCall};
use super::cases::Case;

/// Maximum number of tokens of an answer: the longest right one fits twice.
pub const MAX_TOKENS: usize = 256;

/// An answer of the engine, with the text and the tokens that it was made of.
#[derive(Debug, Clone)]
pub struct Produced {
    pub answer: ModelAnswer,
    /// The text, including the markup of calls.
    pub raw: String,
    /// The bytes of each token of `raw`.
    pub pieces: Vec<Vec<u8>>,
    pub prompt_tokens: usize,
}

/// One case, free and constrained.
#[derive(Debug, Clone)]
pub struct Pair {
    pub free: Produced,
    pub constrained: Produced,
}

/// Returns greedy sampling: the most likely token of those that are allowed.
pub fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

/// How tokens are drawn.
#[derive(Debug, Clone)]
pub struct Draws {
    pub sampling: Sampling,
    pub seed: Option<u64>,
}

impl fmt::Display for Draws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Draws { sampling: Sampling { temperature, top_p, .. }, seed } = self;
        match seed {
            None => f.write_str("greedy"),
            Some(seed) => write!(f, "temperature {temperature}, top-p {top_p}, seed {seed}"),
        }
    }
}

/// Answers a case both ways, after its prompt was computed once for both.
pub async fn answer(engine: &Engine, case: &Case, draws: &Draws) -> Result<Pair> {
    let options = ChatOptions {
        tools: case.family.tools.clone(),
        tool_choice: case.tool_choice(),
        output: case.family.schema.clone().map(Constraint::JsonSchema),
        sampling: draws.sampling.clone(),
        seed: draws.seed,
        max_tokens: Some(MAX_TOKENS),
        ..ChatOptions::default()
    };
    let free = ChatOptions { unconstrained: true, ..options.clone() };
    outcome(engine, case, ChatOptions { max_tokens: Some(1), ..free.clone() }).await?;
    let (free, free_prompt) = produce(engine, case, free).await?;
    let (constrained, constrained_prompt) = produce(engine, case, options).await?;
    ensure!(free_prompt == constrained_prompt, "{}: the prompts of both answers differ", case.id);
    Ok(Pair { free, constrained })
}

async fn produce(engine: &Engine, case: &Case, options: ChatOptions) -> Result<(Produced, Vec<u32>)> {
    let started = Instant::now();
    let outcome = outcome(engine, case, options).await?;
    let ms = started.elapsed().as_secs_f64() * 1e3;
    let calls = outcome.tool_calls.into_iter();
    let answer = ModelAnswer {
        text: outcome.text,
        calls: calls.map(|call| WrittenCall { name: call.name, arguments: call.arguments }).collect(),
        ended: outcome.finish != ChatFinish::Length,
        ms,
        tokens: outcome.usage.completion_tokens.into(),
    };
    let piece = |&id: &u32| engine.tokenizer().token_bytes(id).unwrap_or_default().to_vec();
    let produced = Produced {
        answer,
        raw: outcome.raw,
        pieces: outcome.tokens.iter().map(piece).collect(),
        prompt_tokens: outcome.prompt.len(),
    };
    Ok((produced, outcome.prompt))
}

async fn outcome(engine: &Engine, case: &Case, options: ChatOptions) -> Result<ChatOutcome, EngineError> {
    chat(engine, &case.messages(), options)?.outcome().await
}
