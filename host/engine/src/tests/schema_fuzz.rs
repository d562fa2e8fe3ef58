//! Random schemas and random sampling: what ends by itself validates, by another implementation; what does not, says
//! that it was cut off.
//!
//! Each case is its seed, which a failure prints: to repeat one, let the loop run over that seed only. For a longer
//! run raise `WALKS` and `GENERATIONS`, or move `FIRST_SEED`.

use futures::StreamExt;
use serde_json::Value;
use skep_model::{Sampling, Tokenizer};

use super::draws::Draws;
use super::fixture::{EOS, byte_tokenizer, engine_with_short_prompts, generate, greedy};
use super::random_schemas;
use crate::chat::{ChatFinish, ChatMessage, ChatOptions, ToolChoice, ToolSpec, chat};
use crate::constraint::ConstraintCompiler;
use crate::{Constraint, Engine, EngineError, FinishReason};

const FIRST_SEED: u64 = 0;
/// Cases without a model: any allowed token may come next.
const WALKS: u64 = 400;
/// Cases through the engine, half of them tool calls.
const GENERATIONS: u64 = 120;
const MAX_TOKENS: usize = 160;

/// Panics with the seed if the text is not what the schema asks for.
fn validate(seed: u64, schema: &Value, text: &str) {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        // JSON has no largest number; this reader has.
        Err(error) if error.to_string().contains("number out of range") => return,
        Err(error) => panic!("seed {seed}: {error}: {text}\nof {schema}"),
    };
    let validator =
        jsonschema::options().build(schema).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{schema}"));
    if let Err(error) = validator.validate(&value) {
        panic!("seed {seed}: {error} at {}: {text}\nof {schema}", error.instance_path());
    }
}

/// A walk through what a constraint allows; `None` where it was not complete after `MAX_TOKENS`.
fn walk(
    compiler: &ConstraintCompiler,
    tokenizer: &Tokenizer,
    eos: u32,
    schema: &Value,
    draws: &mut Draws,
) -> Result<Option<String>, EngineError> {
    let mut state = compiler.compile(&Constraint::JsonSchema(schema.clone()))?;
    let mut text = Vec::new();
    for _ in 0..MAX_TOKENS {
        let forced = if draws.one_in(2) { state.forced() } else { Vec::new() };
        for id in forced {
            state.accept(id)?;
            text.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        }
        if state.is_done() {
            break;
        }
        let mask = state.mask()?;
        let allowed: Vec<u32> =
            (0..320).filter(|id| mask.words()[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        // Closing characters are taken more often, or strings and lists would rarely end.
        let closing = allowed
            .iter()
            .copied()
            .find(|id| matches!(tokenizer.token_bytes(*id), Some(b"\"" | b"}" | b"]")));
        let id = closing.filter(|_| draws.one_in(5)).unwrap_or_else(|| *draws.pick(&allowed));
        if id == eos {
            return Ok(Some(String::from_utf8(text).expect("whole characters")));
        }
        state.accept(id)?;
        text.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
    }
    Ok(state.is_done().then(|| String::from_utf8(text).expect("whole characters")))
}

#[test]
fn every_walk_through_a_random_schema_validates() {
    let bytes = std::sync::Arc::new(byte_tokenizer());
    let merged = std::sync::Arc::new(crate::chat::fixture::tokenizer());
    let compilers = [(bytes, EOS), (merged, crate::chat::fixture::EOS)].map(|(tokenizer, eos)| {
        let compiler = ConstraintCompiler::new(&tokenizer, 320, &[eos], "fuzz").expect("a compiler");
        (compiler, tokenizer, eos)
    });
    let (mut finished, mut refused) = (0, 0);
    for seed in FIRST_SEED..FIRST_SEED + WALKS {
        let mut draws = Draws::new(seed);
        let schema = random_schemas::schema(&mut draws);
        let (compiler, tokenizer, eos) = &compilers[draws.below(2)];
        for _ in 0..3 {
            match walk(compiler, tokenizer, *eos, &schema, &mut draws) {
                Ok(None) => {}
                Ok(Some(text)) => {
                    finished += 1;
                    validate(seed, &schema, &text);
                }
                Err(EngineError::Constraint { message, .. }) => {
                    assert!(!message.contains("the compiler failed"), "seed {seed}: {message}\n{schema}");
                    refused += 1;
                }
                Err(error) => panic!("seed {seed}: {error}\n{schema}"),
            }
        }
    }
    assert!(finished > WALKS && refused < WALKS, "{finished} walks finished and {refused} were refused");
}

#[tokio::test]
async fn every_generation_of_a_random_schema_validates_or_says_length() {
    let engine = engine_with_short_prompts();
    let seeds = futures::stream::iter(FIRST_SEED..FIRST_SEED + GENERATIONS);
    let finished: Vec<bool> =
        seeds.map(|seed| one_generation(&engine, seed)).buffer_unordered(16).collect().await;
    let finished = finished.into_iter().filter(|finished| *finished).count();
    assert!(finished as u64 > GENERATIONS / 4, "only {finished} generations finished");
}

async fn one_generation(engine: &Engine, seed: u64) -> bool {
    let mut draws = Draws::new(seed ^ 0x5EED);
    let sampling = Sampling {
        temperature: 1.0 + draws.below(101) as f32 / 100.0,
        logit_bias: vec![(u32::from(b'"'), 3.0), (u32::from(b'}'), 3.0), (u32::from(b']'), 3.0), (EOS, 2.0)],
        ..Sampling::default()
    };
    if draws.one_in(2) {
        return one_call(engine, seed, sampling, &mut draws).await;
    }
    let schema = random_schemas::schema(&mut draws);
    let mut request = greedy("json: ", MAX_TOKENS);
    (request.sampling, request.seed, request.ignore_eos) = (sampling, Some(seed), draws.one_in(3));
    request.constraint = Some(Constraint::JsonSchema(schema.clone()));
    match generate(engine, request).await {
        Ok(run) if *run.reason() == FinishReason::Length => {
            assert_eq!(run.ids.len(), MAX_TOKENS, "seed {seed}");
            false
        }
        Ok(run) => {
            assert!(!run.reason().cuts_off(), "seed {seed}: {:?}", run.reason());
            validate(seed, &schema, &run.text);
            true
        }
        Err(EngineError::Constraint { .. }) => false,
        Err(error) => panic!("seed {seed}: {error}\n{schema}"),
    }
}

async fn one_call(engine: &Engine, seed: u64, sampling: Sampling, draws: &mut Draws) -> bool {
    let parameters = random_schemas::object_schema(draws);
    let tool = ToolSpec { name: "f".into(), description: String::new(), parameters: parameters.clone() };
    let options = ChatOptions {
        tools: vec![tool],
        tool_choice: ToolChoice::Required,
        parallel_tool_calls: draws.one_in(2),
        sampling,
        seed: Some(seed),
        max_tokens: Some(MAX_TOKENS),
        ..ChatOptions::default()
    };
    let outcome = match chat(engine, &[ChatMessage::user("x")], options) {
        Ok(stream) => {
            stream.outcome().await.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{parameters}"))
        }
        Err(EngineError::Constraint { .. }) => return false,
        Err(error) => panic!("seed {seed}: {error}\n{parameters}"),
    };
    outcome.tool_calls.iter().for_each(|call| validate(seed, &parameters, &call.arguments));
    match outcome.finish {
        ChatFinish::ToolCalls => assert!(!outcome.cut_off && !outcome.tool_calls.is_empty(), "seed {seed}"),
        ChatFinish::Length => assert!(outcome.cut_off, "seed {seed}"),
        ChatFinish::Stop => panic!("seed {seed}: a call was required: {}", outcome.raw),
    }
    outcome.finish == ChatFinish::ToolCalls
}
