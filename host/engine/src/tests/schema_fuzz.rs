//! Random schemas and random sampling: output that finishes by itself validates with another implementation,
//! and output that does not reports that it was cut off.
//!
//! Each case is identified by its seed, which a failure prints. To repeat a case, let the loop run over that
//! seed only. For a longer run, raise `WALKS` and `GENERATIONS`, or move `FIRST_SEED`.

use futures::StreamExt;
use serde_json::Value;
use skep_model::{Sampling, Tokenizer};

use super::draws::Draws;
use super::fixture::{EOS, byte_tokenizer, engine_with_short_prompts, generate, greedy};
use super::random_schemas;
use super::unenforced::rejects;
use crate::chat::{ChatFinish, ChatMessage, ChatOptions, ToolChoice, ToolSpec, chat};
use crate::constraint::{ConstraintCompiler, OutputConstraint, Spelling, UnenforcedValue};
use crate::{Constraint, Engine, EngineError, FinishReason};

const FIRST_SEED: u64 = 0;
/// Number of cases without a model, in which any allowed token may come next.
const WALKS: u64 = 400;
/// Number of cases through the engine, half of them tool calls.
const GENERATIONS: u64 = 120;
const MAX_TOKENS: usize = 160;

/// Panics with the seed if the text does not satisfy the schema.
fn validate(seed: u64, schema: &Value, text: &str) {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        // JSON has no largest number, but this parser has one.
        Err(error) if error.to_string().contains("number out of range") => return,
        Err(error) => panic!("seed {seed}: {error}: {text}\nof {schema}"),
    };
    let validator =
        jsonschema::options().build(schema).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{schema}"));
    if let Err(error) = validator.validate(&value) {
        panic!("seed {seed}: {error} at {}: {text}\nof {schema}", error.instance_path());
    }
}

/// Panics with the seed if the text neither satisfies the schema nor is refused by a named check.
fn validate_or_reject(seed: u64, schema: &Value, text: &str, unenforced: &[UnenforcedValue]) -> bool {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) if error.to_string().contains("number out of range") => return true,
        Err(error) => panic!("seed {seed}: {error}: {text}\nof {schema}"),
    };
    let rejected = rejects(unenforced, &value);
    if !rejected {
        validate(seed, schema, text);
    }
    !rejected
}

/// Walks at random through the text that a constraint allows. Returns the text and its tokens; `None` if it was
/// not complete after `limit` tokens.
pub fn walk(
    state: &mut OutputConstraint,
    tokenizer: &Tokenizer,
    eos: u32,
    draws: &mut Draws,
    limit: usize,
) -> Result<Option<(String, Vec<u32>)>, EngineError> {
    let (mut text, mut tokens) = (Vec::new(), Vec::new());
    for _ in 0..limit {
        let forced = if draws.one_in(2) { state.forced() } else { Vec::new() };
        for id in forced {
            state.accept(id)?;
            tokens.push(id);
            text.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        }
        if state.is_done() || draws.one_in(2) && state.is_complete() {
            return Ok(Some((String::from_utf8(text).expect("whole characters"), tokens)));
        }
        let mask = state.mask()?;
        let allowed: Vec<u32> =
            (0..320).filter(|id| mask.words()[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        // Closing characters are taken more often, or strings and lists would rarely end; blanks are taken less
        // often.
        let is = |id: u32, bytes: &[u8]| {
            tokenizer.token_bytes(id).is_some_and(|of| of.iter().all(|b| bytes.contains(b)))
        };
        let closing = allowed.iter().copied().find(|id| is(*id, b"\"}]"));
        let mut id = closing.filter(|_| draws.one_in(4)).unwrap_or_else(|| *draws.pick(&allowed));
        if is(id, b" \t\r\n") && !draws.one_in(4) {
            id = *draws.pick(&allowed);
        }
        if id == eos {
            return Ok(Some((String::from_utf8(text).expect("whole characters"), tokens)));
        }
        state.accept(id)?;
        tokens.push(id);
        text.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
    }
    Ok(None)
}

#[test]
fn every_walk_through_a_random_schema_validates_or_is_checked() {
    let bytes = std::sync::Arc::new(byte_tokenizer());
    let merged = std::sync::Arc::new(crate::chat::fixture::tokenizer());
    let compilers = [(bytes, EOS), (merged, crate::chat::fixture::EOS)].map(|(tokenizer, eos)| {
        let compiler = ConstraintCompiler::new(&tokenizer, 320, &[eos], "fuzz").expect("a compiler");
        (compiler, tokenizer, eos)
    });
    let (mut finished, mut refused, mut rejected) = (0, 0, 0);
    for seed in FIRST_SEED..FIRST_SEED + WALKS {
        let mut draws = Draws::new(seed);
        let mut schema = random_schemas::schema(&mut draws);
        if draws.one_in(2) {
            random_schemas::loosen(&mut draws, &mut schema);
        }
        let constraint = Constraint::JsonSchema(schema.clone());
        let (compiler, tokenizer, eos) = &compilers[draws.below(2)];
        for turn in 0..3 {
            let mut state = match compiler.compile(&constraint) {
                Ok(state) => state,
                Err(EngineError::Constraint { message, .. }) => {
                    assert!(!message.contains("the compiler panicked"), "seed {seed}: {message}\n{schema}");
                    refused += 1;
                    if turn == 0 {
                        println!("seed {seed} is refused: {message}");
                    }
                    continue;
                }
                Err(error) => panic!("seed {seed}: {error}\n{schema}"),
            };
            let mut walked = match turn {
                0 => {
                    compiler.strict(&constraint, *draws.pick(&[Spelling::Compact, Spelling::Spaced])).unwrap()
                }
                _ => compiler.compile(&constraint).unwrap(),
            };
            let found = walk(&mut walked, tokenizer, *eos, &mut draws, MAX_TOKENS);
            let found = found.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{schema}"));
            let Some((text, tokens)) = found else { continue };
            finished += 1;
            if !validate_or_reject(seed, &schema, &text, state.unenforced()) {
                rejected += 1;
            }
            if turn == 0 {
                let accepted = tokens.iter().all(|token| state.try_accept(*token));
                assert!(accepted, "seed {seed}: one spelling is not accepted: {text}\n{schema}");
            }
        }
    }
    println!("{finished} walks finished, {rejected} of them refused by a check, {refused} were refused");
    assert!(finished > WALKS && refused < WALKS, "{finished} walks finished and {refused} were refused");
    assert!(rejected > 0, "no walk was refused by a check");
}

#[tokio::test]
async fn every_generation_of_a_random_schema_validates_or_reports_length() {
    let engine = engine_with_short_prompts();
    let tokenizer = std::sync::Arc::new(byte_tokenizer());
    let compiler = ConstraintCompiler::new(&tokenizer, 320, &[EOS], "fuzz").expect("a compiler");
    let seeds = futures::stream::iter(FIRST_SEED..FIRST_SEED + GENERATIONS);
    let finished: Vec<bool> =
        seeds.map(|seed| one_generation(&engine, &compiler, seed)).buffer_unordered(16).collect().await;
    let finished = finished.into_iter().filter(|finished| *finished).count();
    assert!(finished as u64 > GENERATIONS / 4, "only {finished} generations finished");
}

async fn one_generation(engine: &Engine, compiler: &ConstraintCompiler, seed: u64) -> bool {
    let mut draws = Draws::new(seed ^ 0x5EED);
    let sampling = Sampling {
        temperature: 1.0 + draws.below(101) as f32 / 100.0,
        logit_bias: vec![(u32::from(b'"'), 3.0), (u32::from(b'}'), 3.0), (u32::from(b']'), 3.0), (EOS, 2.0)],
        ..Sampling::default()
    };
    if draws.one_in(2) {
        return one_call(engine, compiler, seed, sampling, &mut draws).await;
    }
    let schema = random_schemas::schema(&mut draws);
    let mut request = greedy("json: ", MAX_TOKENS);
    (request.sampling, request.seed, request.ignore_eos) = (sampling, Some(seed), draws.one_in(3));
    request.constraint = Some(Constraint::JsonSchema(schema.clone()));
    let unenforced = unenforced(compiler, &schema);
    match generate(engine, request).await {
        Ok(run) if *run.reason() == FinishReason::Length => {
            assert_eq!(run.ids.len(), MAX_TOKENS, "seed {seed}");
            false
        }
        Ok(run) => {
            assert!(!run.reason().cuts_off(), "seed {seed}: {:?}", run.reason());
            validate_or_reject(seed, &schema, &run.text, &unenforced);
            true
        }
        Err(EngineError::Constraint { .. }) => false,
        Err(error) => panic!("seed {seed}: {error}\n{schema}"),
    }
}

async fn one_call(
    engine: &Engine,
    compiler: &ConstraintCompiler,
    seed: u64,
    sampling: Sampling,
    draws: &mut Draws,
) -> bool {
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
    let unenforced = unenforced(compiler, &parameters);
    outcome.tool_calls.iter().for_each(|call| {
        validate_or_reject(seed, &parameters, &call.arguments, &unenforced);
    });
    match outcome.finish {
        ChatFinish::ToolCalls => assert!(!outcome.cut_off && !outcome.tool_calls.is_empty(), "seed {seed}"),
        ChatFinish::Length => assert!(outcome.cut_off, "seed {seed}"),
        ChatFinish::Stop => panic!("seed {seed}: a call was required: {}", outcome.raw),
    }
    outcome.finish == ChatFinish::ToolCalls
}

fn unenforced(compiler: &ConstraintCompiler, schema: &Value) -> Vec<UnenforcedValue> {
    let compiled = compiler.compile(&Constraint::JsonSchema(schema.clone()));
    compiled.map_or_else(|_| Vec::new(), |state| state.unenforced().to_vec())
}
