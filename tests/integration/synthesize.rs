//! `skep model synthesize`: mixtures with random weights and the vocabulary of the default model, here and in llama.cpp.

use crate::harness::{model_path, skipped_without};
use serde_json::{Value, json};
use skep_model::Checkpoint;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const SHAPES: [(&str, &str, u64); 2] = [("tiny-qwen3-moe", "qwen3moe", 2), ("tiny-deepseek", "deepseek2", 3)];

fn skep(arguments: &[&str]) -> Output {
    model_path();
    Command::new(env!("CARGO_BIN_EXE_skep")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn succeeded(output: Output) -> Vec<u8> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Writes a file, and returns its path and the report.
fn synthesized(folder: &Path, like: &str) -> (PathBuf, Value) {
    let path = folder.join(format!("{like}.gguf"));
    let arguments = ["model", "synthesize", "--like", like, path.to_str().unwrap(), "--json"];
    let report = serde_json::from_slice(&succeeded(skep(&arguments))).unwrap();
    (path, report)
}

#[test]
fn mixtures_have_the_vocabulary_and_the_template_of_the_default_model() {
    let folder = tempfile::tempdir().unwrap();
    let source = Checkpoint::open(model_path()).unwrap();
    let messages = [json!({"role": "user", "content": "What is gravity?"})];
    let rendered =
        |model: &Checkpoint| model.chat_template().unwrap().unwrap().render(&messages, None, true).unwrap();
    for (like, family, layers) in SHAPES {
        let (path, report) = synthesized(folder.path(), like);
        let model = Checkpoint::open(&path).unwrap();
        let parameters: usize = model.tensors().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        let expected = json!({
            "path": path, "like": like, "architecture": family, "layers": layers, "weights": "Q4_0",
            "tokenizer": crate::harness::MODEL, "parameters": parameters, "bytes": fs::metadata(&path).unwrap().len(),
        });
        assert_eq!(report, expected);
        assert_eq!(model.config().vocabulary_size, source.config().vocabulary_size);
        assert_eq!(model.config().eos, source.config().eos);
        assert_eq!(rendered(&model), rendered(&source));
        let bench = ["--prompt", "32", "--generate", "4", "--repeat", "1", "--json"];
        let bench = [&["bench", "engine", "--model", path.to_str().unwrap()], &bench[..]].concat();
        let report: Value = serde_json::from_slice(&succeeded(skep(&bench))).unwrap();
        assert!(report["decode"]["tok_per_s"].as_f64().unwrap() > 0.0, "{report}");
    }
}

/// llama-bench is beside the server that `SKEP_LLAMA_SERVER` names.
#[test]
fn llama_bench_runs_the_same_files() {
    let server = std::env::var_os("SKEP_LLAMA_SERVER").map(PathBuf::from);
    let bench = server.map(|server| server.with_file_name("llama-bench")).filter(|bench| bench.is_file());
    let Some(bench) = bench else { return skipped_without("llama-server") };
    let folder = tempfile::tempdir().unwrap();
    for (like, ..) in SHAPES {
        let (path, _) = synthesized(folder.path(), like);
        let (path, bench) = (path.to_str().unwrap(), bench.to_str().unwrap());
        let arguments = ["--prompt", "32", "--generate", "4", "--repeat", "1", "--against", bench, "--json"];
        let arguments = [&["bench", "engine", "--model", path], &arguments[..]].concat();
        let report: Value = serde_json::from_slice(&succeeded(skep(&arguments))).unwrap();
        let rates = &report["models"][0]["peer"];
        assert!(
            rates["prefill"].as_f64().unwrap() > 0.0 && rates["decode"].as_f64().unwrap() > 0.0,
            "{report}"
        );
        assert!(report["models"][0]["read_share"].as_f64().unwrap() > 0.0, "{report}");
    }
}

#[test]
fn wrong_options_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    fs::write(&taken, "mine").unwrap();
    let (taken, new) = (taken.to_str().unwrap(), folder.path().join("new"));
    let new = new.to_str().unwrap();
    for (arguments, code, words) in [
        (vec!["--like", "qwen4", new], 2, "deepseek-v2-lite"),
        (vec!["--like", "tiny-deepseek", "--weights", "int4", new], 2, "expected one of f32, f16, q4_0"),
        (vec!["--like", "tiny-deepseek", "--layers", "1", new], 1, "layers: 1 is outside 2..=3"),
        (vec!["--like", "tiny-deepseek", taken], 1, "exists and is not overwritten"),
        (vec!["--like", "tiny-deepseek"], 2, "<PATH>"),
    ] {
        let output = skep(&[&["model", "synthesize"], &arguments[..]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [Path::new(taken)]);
    assert_eq!(fs::read(taken).unwrap(), b"mine");
}
