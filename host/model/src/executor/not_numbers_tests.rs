//! Sequences whose hidden rows are not numbers: a typed error of their rows, and nothing for anybody else, not even for a
//! sequence that gets their pages.

use serde_json::json;

use super::fixture::{options, sequence, supported};
use super::{CpuExecutor, Executor as _, ExecutorOptions, KvDtype};
use crate::batch::{Batch, LogitsWanted};
use crate::checkpoint::{Checkpoint, fixtures};
use crate::error::ModelError;
use crate::sampling::{LogitRow, SampleRow, Sampling};

/// The token whose vector holds no numbers.
const BROKEN: u32 = 300;

fn checkpoint(name: &str) -> (tempfile::TempDir, Checkpoint) {
    let mut tensors = fixtures::tensors(name);
    let (_, shape, data) = tensors.get_mut("model.embed_tokens.weight").unwrap();
    let row = 4 * shape[1];
    data[BROKEN as usize * row..][..row].copy_from_slice(&f32::NAN.to_le_bytes().repeat(shape[1]));
    let folder = fixtures::write(name, json!({}), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

#[test]
fn rows_that_are_not_numbers_fail_alone_and_leave_their_pages_usable() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let row = |row: usize| LogitRow::Sample(SampleRow::plain(row, &greedy));
    for name in ["llama-gqa", "deepseek-v3", "gpt-oss"] {
        let (_folder, checkpoint) = checkpoint(name);
        for isa in supported() {
            for kv in [KvDtype::F32, KvDtype::F16, KvDtype::I8] {
                let load = || CpuExecutor::load(&checkpoint, ExecutorOptions { kv, ..options(isa) }).unwrap();
                let healthy = |executor: &mut CpuExecutor, page: u32| {
                    let sequences = vec![sequence(&[8, 9, 10], 0, page, LogitsWanted::Last)];
                    executor.forward(&Batch { sequences }).unwrap();
                    executor.logits(0).unwrap().to_vec()
                };
                let expected = healthy(&mut load(), 8);
                assert!(expected.iter().all(|logit| logit.is_finite()));
                let mut executor = load();
                // The stored keys and values are finite, so only the token itself has a row without numbers.
                let broken = [5, 7, 11, 12, 13, 14, BROKEN];
                let sequences = vec![
                    sequence(&broken, 0, 9, LogitsWanted::Last),
                    sequence(&[8, 9, 10], 0, 8, LogitsWanted::Last),
                ];
                executor.forward(&Batch { sequences }).unwrap();
                let what = format!("{name} {isa} {kv:?}");
                assert_eq!(executor.logits(1).unwrap(), expected, "{what}: the neighbor");
                let drawn = executor.sample(&[row(0), row(1)]);
                let error = drawn.expect_err(&what);
                assert!(matches!(error, ModelError::NotNumbers { row: 0, .. }), "{what}: {error}");
                assert!(executor.sample(&[row(1)]).is_ok(), "{what}");
                assert_eq!(healthy(&mut executor, 9), expected, "{what}: a sequence in the same page");
            }
        }
    }
}
