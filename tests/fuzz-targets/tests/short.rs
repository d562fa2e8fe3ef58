//! Runs each target for about a second, with its valid inputs, its regressions, and a fixed sequence of
//! mutations.

use skep_fuzz_targets::{Mutator, Target, run_watched};
use std::path::Path;
use std::time::Duration;

/// No input may keep a host busy for this long, even on a loaded machine.
const TOO_LONG: Duration = Duration::from_secs(30);

fn check(name: &str) {
    let target = Target::named(name).expect("the target exists");
    let (seeds, regressions) = (target.seeds(), target.regressions());
    assert!(!seeds.is_empty(), "{name} has no valid inputs");
    let mut mutator = Mutator::new(20_261_122, seeds.clone(), target.words);
    let changed = (0..target.tries).map(|_| mutator.next_input());
    for (number, input) in seeds.iter().cloned().chain(regressions).chain(changed).enumerate() {
        let outcome = run_watched(target, &input);
        let shown = String::from_utf8_lossy(&input);
        let shown: String = shown.chars().take(2_000).collect();
        assert_eq!(outcome.panic, None, "input {number} of {name}: {shown:?}");
        assert!(outcome.time < TOO_LONG, "input {number} of {name} took {:?}: {shown:?}", outcome.time);
    }
}

/// Runs the targets one after the other, because a panic cannot be attributed to a test.
#[test]
fn no_input_makes_a_target_panic_or_hang() {
    for target in &skep_fuzz_targets::TARGETS {
        let began = std::time::Instant::now();
        check(target.name);
        println!("{}: {:?}", target.name, began.elapsed());
    }
}

/// A seed that is refused at its configuration would leave the readers of weights untested.
#[test]
fn model_files_to_start_from_are_whole_models() {
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut opened = 0;
    for kind in ["gguf", "gguf_split", "safetensors", "safetensors_index"] {
        for entry in std::fs::read_dir(corpus.join(kind)).expect("the corpus exists") {
            let path = entry.expect("the corpus can be listed").path();
            let bytes = std::fs::read(&path).expect("a seed can be read");
            let own = folder.path().join(format!("{kind}-{opened}"));
            std::fs::create_dir(&own).expect("the temporary folder takes folders");
            let files = match kind {
                "gguf" => vec![("model.gguf", &bytes[..])],
                "gguf_split" => {
                    let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    let (first, second) = bytes[4..].split_at(length as usize);
                    vec![("m-00001-of-00002.gguf", first), ("m-00002-of-00002.gguf", second)]
                }
                "safetensors_index" => {
                    let length = |at: usize| {
                        u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
                    };
                    let (config, rest) = bytes[12..].split_at(length(0));
                    let (index, rest) = rest.split_at(length(4));
                    let (first, second) = rest.split_at(length(8));
                    vec![
                        ("config.json", config),
                        ("model.safetensors.index.json", index),
                        ("model-00001-of-00002.safetensors", first),
                        ("model-00002-of-00002.safetensors", second),
                    ]
                }
                _ => {
                    let (config, weights) =
                        bytes[2..].split_at(u16::from_le_bytes([bytes[0], bytes[1]]).into());
                    vec![("config.json", config), ("model.safetensors", weights)]
                }
            };
            for (name, content) in files {
                std::fs::write(own.join(name), content).expect("there is room");
            }
            let checkpoint = skep_model::Checkpoint::open(&own)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for tensor in checkpoint.tensors() {
                tensor.content().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
            opened += 1;
        }
    }
    assert!(opened >= 15, "{opened} seeds");
    for seed in Target::named("tiktoken").expect("the target exists").seeds() {
        let (config, ranks) = seed[2..].split_at(u16::from_le_bytes([seed[0], seed[1]]).into());
        let config = serde_json::from_slice(config).expect("the configuration is JSON");
        skep_model::Tokenizer::from_tiktoken(ranks, &config).expect("the vocabulary is whole");
    }
}
