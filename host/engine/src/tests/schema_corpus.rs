//! Tests with schemas as people write them, of all drafts and with vendors' keys. Each is accepted, or refused
//! for one of the two possible reasons, and output that a mask accepts validates with another implementation or
//! is checked.

use std::path::Path;

use serde_json::{Value, json};

use super::draws::Draws;
use super::fixture::{EOS, byte_tokenizer};
use super::schema_fuzz::walk;
use super::unenforced::rejects;
use crate::constraint::{ConstraintCompiler, Spelling};
use crate::{Constraint, Dialect, EngineError, Invalid, SchemaValidator};

const WALKS: u64 = 4;
const MAX_TOKENS: usize = 400;

fn corpus() -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/schemas");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let lines = files.iter().flat_map(|file| {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file).unwrap();
        let parsed = |(number, line): (usize, &str)| {
            (format!("{name}:{}", number + 1), serde_json::from_str(line).unwrap())
        };
        text.lines().enumerate().map(parsed).collect::<Vec<_>>()
    });
    lines.collect()
}

#[derive(Debug, Default)]
struct Tally {
    schemas: usize,
    taken: usize,
    with_checks: usize,
    remote: usize,
    too_large: usize,
    walks: usize,
    finished: usize,
    valid: usize,
    rejected_by_check: usize,
    refused_when_spoiled: usize,
}

/// Returns the value without one of its members or items, and with one exchanged, for each of them.
fn spoiled(value: &Value) -> Vec<Value> {
    let exchanged = |inner: &Value| if inner.is_string() { json!([null]) } else { json!("another") };
    let mut all = Vec::new();
    match value {
        Value::Object(members) => {
            for (name, inner) in members {
                for changed in spoiled(inner).into_iter().chain([exchanged(inner)]) {
                    let mut copy = members.clone();
                    copy.insert(name.clone(), changed);
                    all.push(copy.into());
                }
                let mut copy = members.clone();
                copy.shift_remove(name);
                all.push(copy.into());
            }
        }
        Value::Array(items) => {
            for index in 0..items.len() {
                for changed in spoiled(&items[index]).into_iter().chain([exchanged(&items[index])]) {
                    let mut copy = items.clone();
                    copy[index] = changed;
                    all.push(copy.into());
                }
            }
        }
        _ => {}
    }
    all
}

#[test]
fn realistic_schemas_are_accepted_and_outputs_validate_or_are_checked() {
    let tokenizer = std::sync::Arc::new(byte_tokenizer());
    let compiler = ConstraintCompiler::new(&tokenizer, 320, &[EOS], "corpus").expect("a compiler");
    let mut tally = Tally::default();
    for (place, schema) in corpus() {
        tally.schemas += 1;
        let constraint = Constraint::JsonSchema(schema.clone());
        let state = match compiler.compile(&constraint) {
            Ok(state) => state,
            Err(EngineError::Constraint { message, .. })
                if message.contains("no other document is fetched") =>
            {
                tally.remote += 1;
                continue;
            }
            Err(EngineError::Constraint { message, .. })
                if message.contains("too ") || message.contains("limit") =>
            {
                tally.too_large += 1;
                continue;
            }
            Err(error) => panic!("{place}: {error}\n{schema}"),
        };
        tally.taken += 1;
        tally.with_checks += usize::from(!state.unenforced().is_empty());
        // Formats are enforced as syntax; validators of the older drafts require more (an email's length, a
        // leap year).
        let validator = jsonschema::options().should_validate_formats(false).build(&schema);
        let ours = SchemaValidator::compile(&schema, Dialect::Backtracking);
        assert_eq!(ours.is_ok(), validator.is_ok(), "{place}: {:?}", ours.err());
        for seed in 0..WALKS {
            let mut draws = Draws::new(seed);
            tally.walks += 1;
            let mut walked = match seed {
                0 => compiler.strict(&constraint, Spelling::Compact),
                1 => compiler.strict(&constraint, Spelling::Spaced),
                _ => compiler.compile(&constraint),
            }
            .unwrap_or_else(|error| panic!("{place}: {error}\n{schema}"));
            let found = walk(&mut walked, &tokenizer, EOS, &mut draws, MAX_TOKENS)
                .unwrap_or_else(|error| panic!("{place}: {error}\n{schema}"));
            let Some((text, tokens)) = found else { continue };
            let mut accepting = compiler.compile(&constraint).unwrap();
            assert!(tokens.iter().all(|token| accepting.try_accept(*token)), "{place}: {text}");
            let value = match serde_json::from_str::<Value>(&text) {
                Ok(value) => value,
                Err(error) if error.to_string().contains("number out of range") => continue,
                Err(error) => panic!("{place}: {error}: {text}\n{schema}"),
            };
            tally.finished += 1;
            // A validator of 2020-12 does not understand the older forms in a schema that names no draft.
            let is_valid = validator.as_ref().map_or(true, |validator| validator.is_valid(&value));
            if let (Ok(ours), Ok(theirs)) = (&ours, &validator) {
                for value in spoiled(&value).into_iter().chain([value.clone()]) {
                    match ours.check_all(&value) {
                        Ok(()) => assert!(theirs.is_valid(&value), "{place}: {value}\nof {schema}"),
                        Err(Invalid::Errors(_)) => {
                            assert!(!theirs.is_valid(&value), "{place}: {value}\nof {schema}");
                            tally.refused_when_spoiled += 1;
                        }
                        Err(why) => panic!("{place}: {why}: {value}\nof {schema}"),
                    }
                }
            }
            if rejects(state.unenforced(), &value) {
                tally.rejected_by_check += 1;
            } else {
                assert!(is_valid, "{place}: {text}\nof {schema}");
                tally.valid += 1;
            }
        }
    }
    println!("{tally:#?}");
    assert!(tally.schemas >= 200 && tally.taken * 100 >= tally.schemas * 97, "{tally:?}");
    assert!(tally.refused_when_spoiled > tally.valid, "{tally:?}");
    assert!(tally.finished * 2 > tally.walks && tally.valid > tally.rejected_by_check, "{tally:?}");
}
