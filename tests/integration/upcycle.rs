//! `skep model upcycle`: the default model as a mixture of experts, beside the dense one.

use crate::harness::{MODEL, model_path};
use serde_json::{Value, json};
use skep_model::{
    Batch, BatchSequence, Checkpoint, ExecutorOptions, KvDtype, LogitsWanted, ModelWeights, PAGE_TOKENS,
    PageId, SpecialTokens,
};
use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Number of tokens of an answer.
const ANSWER: usize = 12;
/// The largest difference of a logit, relative to the largest one. Without rounded weights and activations, only sums have another
/// order.
const TOLERANCE: f32 = 1e-4;

fn upcycle(arguments: &[&str]) -> Output {
    let arguments = [&["model", "upcycle", MODEL], arguments].concat();
    Command::new(env!("CARGO_BIN_EXE_skep")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Returns the most likely answer to a prompt and the logits of its first token, computed in F32.
fn answered(checkpoint: &Checkpoint, prompt: &[u32]) -> (Vec<u32>, Vec<f32>) {
    let options = ExecutorOptions {
        kv: KvDtype::F32,
        exact_weights: true,
        kv_tokens: Some(128),
        max_batch_tokens: 64,
        max_logit_rows: 1,
        max_sequences: 1,
        ..ExecutorOptions::default()
    };
    let mut executor = ModelWeights::load(checkpoint, &options).unwrap().executor(options).unwrap();
    let (mut tokens, mut computed, mut first) = (prompt.to_vec(), 0, Vec::new());
    for _ in 0..ANSWER {
        let sequence = BatchSequence {
            tokens: tokens[computed..].to_vec(),
            start: computed,
            pages: (0..tokens.len().div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
            logits: LogitsWanted::Last,
        };
        executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        let logits = executor.logits(0).unwrap();
        let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        if first.is_empty() {
            first = logits.to_vec();
        }
        computed = tokens.len();
        tokens.push(likeliest as u32);
    }
    (tokens.split_off(prompt.len()), first)
}

#[test]
fn the_default_model_answers_the_same_as_a_mixture_of_experts() {
    let dense = Checkpoint::open(model_path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moe.gguf");
    let out = path.to_str().unwrap();
    let output = upcycle(&["--experts", "4", "--format", "gguf", "--out", out, "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = json!({
        "path": out, "source": MODEL, "architecture": "Mixtral", "format": "gguf", "experts": 4, "top_k": 4,
        "expert_width": 384, "bytes": fs::metadata(&path).unwrap().len(),
    });
    assert_eq!(report, expected);
    let mixture = Checkpoint::open(&path).unwrap();
    assert_eq!(mixture.weight_format(), dense.weight_format());
    let messages = [json!({"role": "user", "content": "What is gravity?"})];
    let [prompt, wanted] = [&mixture, &dense].map(|model| {
        let text = model.chat_template().unwrap().unwrap().render(&messages, None, true).unwrap();
        model.tokenizer().unwrap().unwrap().encode(&text, SpecialTokens::Parse).unwrap()
    });
    assert_eq!(prompt, wanted);
    let (found, found_logits) = answered(&mixture, &prompt);
    let (wanted, logits) = answered(&dense, &prompt);
    let text = |ids: &[u32]| dense.tokenizer().unwrap().unwrap().decode(ids, false);
    println!("{:?}", text(&found));
    assert_eq!(text(&found), text(&wanted));
    let largest = logits.iter().fold(0f32, |all, logit| all.max(logit.abs()));
    let difference = logits.iter().zip(&found_logits).fold(0f32, |all, (a, b)| all.max((a - b).abs()));
    println!("largest difference of a logit: {:.1e} of the largest one", difference / largest);
    assert!(difference <= TOLERANCE * largest, "{difference} of {largest}");
}

#[test]
fn wrong_cuts_are_refused_before_anything_is_written() {
    model_path();
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    fs::write(&taken, "mine").unwrap();
    let (taken, new) = (taken.to_str().unwrap(), folder.path().join("new"));
    let new = new.to_str().unwrap();
    for (arguments, code, words) in [
        (vec!["--out", new, "--experts", "5"], 1, "possible numbers: 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64"),
        (
            vec!["--out", new, "--experts", "5", "--format", "gguf"],
            1,
            "possible numbers: 2, 3, 4, 6, 8, 12, 16, 24, 48",
        ),
        (vec!["--out", new, "--experts", "64", "--format", "int4"], 1, "in units of 32, which int4"),
        (vec!["--out", new, "--top-k", "2"], 1, "a random router can choose fewer"),
        (vec!["--out", new, "--seed", "2"], 1, "add --router random"),
        (vec!["--out", taken, "--experts", "4"], 1, "exists and is not overwritten"),
        (vec!["--out", new, "--format", "q4_k"], 2, "expected one of bf16, f32, int4, fp8, gguf"),
        (vec!["--experts", "4"], 2, "--out"),
    ] {
        let output = upcycle(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [Path::new(taken)]);
    assert_eq!(fs::read(taken).unwrap(), b"mine");
}
