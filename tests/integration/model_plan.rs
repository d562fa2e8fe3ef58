//! `skep model plan`: the printed table, its JSON, and errors that say what is wrong.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::harness::{model_path, repository};

fn plan(arguments: &[&str]) -> Output {
    let arguments = [&["model", "plan"], arguments].concat();
    Command::new(env!("CARGO_BIN_EXE_skep")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn printed(arguments: &[&str]) -> String {
    let output = plan(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = plan(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn configuration(name: &str) -> String {
    let path: PathBuf = repository().join("tests/fixtures/configs").join(format!("{name}.json"));
    path.to_str().unwrap().to_owned()
}

#[test]
fn kimi_on_eight_devices_is_planned_for_every_way_to_divide_it() {
    let text = printed(&[&configuration("kimi-k2.5"), "--devices", "8xH200", "--context", "131072"]);
    println!("{text}");
    for part in [
        "1026.9 billion, 31.7 billion active",
        "595.1 GB",
        "4 bits in groups of 32",
        "70272 B a token in f16",
        "runs here   no: the executors on CUDA devices lack latent attention (MLA); the CPU runs it",
        "Skep runs the text part",
        "it needs latent attention",
        "384 routed experts and shared ones",
        "8 × H200 with 139.8 GiB each",
    ] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let rows: Vec<[u64; 3]> = text
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_digit()))
        .map(|line| {
            let mut cells = line.split_whitespace().map(|cell| cell.parse().unwrap());
            [(); 3].map(|()| cells.next().unwrap())
        })
        .collect();
    assert_eq!(rows.len(), 10, "{text}");
    assert!(rows.iter().all(|[tensor, pipeline, expert]| tensor * pipeline == 8 && tensor % expert == 0));
}

#[test]
fn scout_on_two_h200_has_more_than_56_gib_for_keys_and_values() {
    let source = configuration("llama-4-scout");
    let json: Value = serde_json::from_str(&printed(&[&source, "--devices", "2xH200", "--json"])).unwrap();
    let layouts = json["layouts"].as_array().unwrap();
    assert_eq!(layouts.len(), 3, "{json:#}");
    for layout in layouts {
        assert!(layout["kv_bytes_in_all"].as_u64().unwrap() > 56 << 30, "{layout:#}");
        assert_eq!(layout["missing_bytes"], 0);
    }
    assert_eq!(json["runs_here"], false);
    assert_eq!(json["is_exact"], false);
    // One device does not hold the weights.
    let text = printed(&[&source, "--devices", "H200"]);
    assert!(text.contains("does not fit: needs ") && text.contains(" GiB more"), "{text}");
}

#[test]
fn the_default_model_is_planned_from_its_file() {
    let path = model_path().to_str().unwrap();
    let json: Value = serde_json::from_str(&printed(&[path, "--devices", "cpu:8", "--json"])).unwrap();
    assert_eq!(json["runs_here"], true);
    assert_eq!(json["is_exact"], true);
    // 30 layers of 3 heads with 64 values, for keys and for values, in 16 bits.
    assert_eq!(json["kv_bytes_per_token"], 30 * 3 * 64 * 2 * 2);
    assert_eq!(json["totals"]["parameters"], 134_515_008);
    let [layout] = json["layouts"].as_array().unwrap().as_slice() else { panic!("{json:#}") };
    assert!(layout["sequences"].as_u64().unwrap() > 10, "{json:#}");
    // Without --devices, the plan is for this machine.
    let text = printed(&[path, "--kv", "i8"]);
    assert!(text.contains("runs here   yes") && text.contains("devices     cpu with"), "{text}");
}

#[test]
fn a_folder_of_a_runnable_model_gives_the_plan_of_its_tensors() {
    let folder = repository().join("tests/fixtures/tiny/qwen2-bias");
    let config = folder.join("config.json");
    let plan = |path: &std::path::Path| -> Value {
        serde_json::from_str(&printed(&[path.to_str().unwrap(), "--devices", "2xL4", "--json"])).unwrap()
    };
    let (exact, described) = (plan(&folder), plan(&config));
    assert_eq!(exact["layouts"], described["layouts"]);
    assert_eq!(exact["totals"], described["totals"]);
    assert_eq!(exact["is_exact"], true);
}

#[test]
fn errors_say_what_is_wrong_and_what_would_help() {
    let scout = configuration("llama-4-scout");
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let empty = write("empty.json", "{}");
    let broken = write("broken.json", "{\"model_type\"");
    let mamba = write("mamba.json", "{\"model_type\": \"mamba\"}");
    let lacking = write("lacking.json", "{\"model_type\": \"llama\", \"hidden_size\": 64}");
    for (arguments, expected) in [
        (vec!["no-such-model"], vec!["no model \"no-such-model\"", "hint:"]),
        (vec![&*empty], vec!["`model_type`", "is missing", "hint:"]),
        (vec![&*broken], vec!["is not JSON"]),
        (vec![&*mamba], vec!["\"mamba\"", "deepseek_v3"]),
        (vec![&*lacking], vec!["`num_attention_heads`", "is missing"]),
        (vec![&*scout, "--devices", "8xH9000"], vec!["H9000", "8xH100"]),
        (vec![&*scout, "--devices", "2xmine:-1"], vec!["\"-1\" is not a number of GiB"]),
        (vec![&*scout, "--context", "99999999"], vec!["99999999", "10485760 tokens"]),
        (vec![&*scout, "--sequences", "0"], vec!["sequences"]),
        (vec![&*scout, "--devices", "H200", "--kv", "i8"], vec!["only on the CPU", "f16 or fp8"]),
        (vec![&*scout, "--devices", "cpu:64", "--kv", "fp8"], vec!["only CUDA devices", "i8"]),
        (vec![&*scout, "--kv", "f8"], vec!["f16, f32, i8, fp8"]),
        (vec!["hf:owner/model:file.gguf"], vec!["not in the cache", "hint:", "skep model pull"]),
    ] {
        let error = refused(&arguments);
        for part in expected {
            assert!(error.contains(part), "{arguments:?}: {part:?} is missing in {error}");
        }
    }
}
