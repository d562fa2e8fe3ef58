//! The default model gives bit-identical tokens and log-probabilities with every CPU setting.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::harness::model_path;

#[test]
fn answers_are_bit_identical_with_every_setting() {
    for kv in ["f16", "i8"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(["bench", "determinism", "--json", "--kv", kv, "--model"]).arg(model_path());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        assert!(output.status.success(), "{}\n{report:#}", String::from_utf8_lossy(&output.stderr));
        let settings = report["settings"].as_array().unwrap();
        assert!(settings.len() >= 7, "{report:#}");
        for setting in settings {
            assert_eq!(setting["same_bits"], 16, "{setting}");
        }
        // The settings had the intended effects.
        for what in ["preemptions", "accepted_drafts"] {
            let most = settings.iter().filter_map(|setting| setting[what].as_u64()).max();
            assert!(most > Some(0), "{what}: {report:#}");
        }
    }
}
