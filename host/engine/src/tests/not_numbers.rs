//! Tests that a request whose logits are not numbers fails alone.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use skep_model::{Checkpoint, CpuExecutor, ModelError};

use super::fixture::{executor_options, generate, greedy, loaded, together};
use crate::{Engine, EngineError, EngineOptions};

/// Writes the test model with a token, `~`, whose vector holds no numbers.
fn broken_model(folder: &Path) -> Checkpoint {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let embedding = &tensors["model.embed_tokens.weight"];
    assert_eq!(embedding["dtype"], "F32");
    let width = embedding["shape"][1].as_u64().unwrap() as usize;
    let start = 8 + header + embedding["data_offsets"][0].as_u64().unwrap() as usize;
    let row = start + usize::from(b'~') * width * 4;
    bytes[row..row + 4 * width].copy_from_slice(&f32::NAN.to_le_bytes().repeat(width));
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(folder).unwrap()
}

#[tokio::test]
async fn a_request_whose_logits_are_not_numbers_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = broken_model(folder.path());
    let executor = CpuExecutor::load(&checkpoint, executor_options(4096)).unwrap();
    let engine = Engine::start(loaded(&checkpoint, Box::new(executor)), EngineOptions::default()).unwrap();
    let healthy = [greedy("the first of them", 12), greedy("another", 12)];
    let expected = together(&engine, &healthy).await;
    for _ in 0..4 {
        let (broken, beside) =
            tokio::join!(generate(&engine, greedy("the first of them ~", 12)), together(&engine, &healthy));
        let error = broken.expect_err("its logits are not numbers");
        assert!(matches!(error, EngineError::Model(ModelError::NotNumbers { .. })), "{error:?}");
        assert!(error.to_string().contains("is not a number"), "{error}");
        for (got, expected) in beside.iter().zip(&expected) {
            assert_eq!(got.ids, expected.ids);
        }
    }
    assert_eq!(engine.problem(), None, "the engine works");
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
}
