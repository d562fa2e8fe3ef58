//! Tests with many kinds of damaged files, each of which is an error or a whole model.

use std::path::Path;

use super::fixtures::fixture;
use super::*;
use crate::executor::{CpuExecutor, ExecutorOptions};
use crate::gguf::writer::tiny_llama;
use crate::tokenizer::SpecialTokens;

/// Opens a possibly damaged file, and uses everything in it that can be used. Returns whether it
/// opened.
fn exercise(folder: &Path, name: &str, file: &[u8]) -> bool {
    let path = folder.join(name);
    std::fs::write(&path, file).unwrap();
    let Ok(checkpoint) = Checkpoint::open(&path) else { return false };
    for tensor in checkpoint.tensors() {
        let values: usize = tensor.shape.iter().product();
        assert!(tensor.dtype.block_len() * tensor.data.len() == tensor.dtype.block_bytes() * values);
    }
    let _ = checkpoint.chat_template();
    if let Ok(Some(tokenizer)) = checkpoint.tokenizer() {
        let ids = tokenizer.encode("hello <|im_end|> 1", SpecialTokens::Parse).unwrap_or_default();
        tokenizer.decode(&ids, false);
    }
    let options = ExecutorOptions {
        threads: Some(1),
        kv_tokens: Some(64),
        max_batch_tokens: 8,
        ..ExecutorOptions::default()
    };
    let _ = CpuExecutor::load(&checkpoint, options);
    true
}

fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize
}

/// Replaces one to four of the first `head` bytes with values that are likely to cause trouble.
fn mutate(file: &mut [u8], head: usize, state: &mut u64) {
    for _ in 0..1 + random(state) % 4 {
        let at = random(state) % head.min(file.len());
        file[at] = match random(state) % 5 {
            0 => 0,
            1 => 0xff,
            2 => file[at] ^ (1 << (random(state) % 8)),
            3 => file[at].wrapping_add(1),
            _ => random(state) as u8,
        };
    }
}

#[test]
fn damaged_gguf_files_are_errors_or_whole_models() {
    let folder = tempfile::tempdir().unwrap();
    let file = tiny_llama().build();
    assert!(exercise(folder.path(), "x.gguf", &file));
    for length in (0..file.len()).step_by(11) {
        assert!(!exercise(folder.path(), "x.gguf", &file[..length]), "truncated to {length} bytes");
    }
    let mut state = 1;
    let opened = (0..4000).filter(|_| {
        let mut damaged = file.clone();
        mutate(&mut damaged, 8192, &mut state);
        exercise(folder.path(), "x.gguf", &damaged)
    });
    assert!((1..4000).contains(&opened.count()), "some damage must be harmless and some must not");
}

#[test]
fn damaged_safetensors_files_are_errors_or_whole_models() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("llama-gqa");
    std::fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
    let file = std::fs::read(source.join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize + 8;
    for length in [0, 1, 7, 8, 9, header - 1, header, header + 1, file.len() - 1] {
        assert!(
            !exercise(folder.path(), "model.safetensors", &file[..length]),
            "truncated to {length} bytes"
        );
    }
    for claimed in [0, 1, header as u64, 100_000_000, u64::MAX] {
        let mut lying = file.clone();
        lying[..8].copy_from_slice(&claimed.to_le_bytes());
        assert!(!exercise(folder.path(), "model.safetensors", &lying), "a header of {claimed} bytes");
    }
    let mut state = 2;
    let opened = (0..300).filter(|_| {
        let mut damaged = file.clone();
        mutate(&mut damaged, header, &mut state);
        exercise(folder.path(), "model.safetensors", &damaged)
    });
    assert!(opened.count() < 300, "damage to a header must be detected");
}

#[test]
fn damaged_config_files_are_errors_or_whole_models() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("mistral-window");
    let weights = std::fs::read(source.join("model.safetensors")).unwrap();
    let config = std::fs::read(source.join("config.json")).unwrap();
    let mut state = 3;
    for _ in 0..300 {
        let mut damaged = config.clone();
        mutate(&mut damaged, config.len(), &mut state);
        std::fs::write(folder.path().join("config.json"), &damaged).unwrap();
        exercise(folder.path(), "model.safetensors", &weights);
    }
}
