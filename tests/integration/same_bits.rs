//! The default model gives the same tokens and log-probabilities, in bits, with every setting of the processor.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::harness::model_path;

#[test]
fn answers_are_the_same_bits_with_every_setting() {
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
        // The settings did what they are there for.
        for what in ["preemptions", "accepted_drafts"] {
            let most = settings.iter().filter_map(|setting| setting[what].as_u64()).max();
            assert!(most > Some(0), "{what}: {report:#}");
        }
    }
}
