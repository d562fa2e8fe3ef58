//! Reads the configurations of published models, as they are in their repositories.

use std::path::Path;

use serde_json::Value;

use super::*;

/// Reads every published configuration, in the order of the names.
fn published() -> Vec<(String, Result<ModelConfig, ModelError>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/configs");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &Path| {
        let config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        from_huggingface(&HuggingFaceFiles {
            config: &config,
            generation: None,
            tokenizer_config: None,
            tokenizer: None,
            has_head: false,
        })
    };
    paths.iter().map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), read(path))).collect()
}

#[test]
fn every_published_configuration_is_read_or_refused_for_a_named_part() {
    let refused = [("deepseek-v2-lite", "deepseek_v2"), ("llama-4-scout", "llama4_text")];
    for (name, read) in published() {
        match (read, refused.iter().find(|(refused, _)| *refused == name)) {
            (Ok(config), None) => assert!(config.layer_count > 0, "{name}"),
            (Err(error), Some((_, part))) => assert!(error.to_string().contains(part), "{name}: {error}"),
            (Ok(_), Some((_, part))) => panic!("{name} is read, although it has {part}"),
            (Err(error), None) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn gemma_has_the_sizes_that_its_configuration_leaves_out() {
    let mut all = published().into_iter();
    let gemma = all.find(|(name, _)| name == "gemma-3-4b").unwrap().1.unwrap();
    assert_eq!((gemma.head_count, gemma.kv_head_count, gemma.head_size), (8, 4, 256));
    assert_eq!((gemma.vocabulary_size, gemma.context_length), (262_208, 131_072));
    assert_eq!((gemma.rope.theta, gemma.rope.scaling.clone()), (1e6, RopeScaling::Linear { factor: 8.0 }));
    let local = gemma.style.windowed_rope.as_ref().unwrap();
    assert_eq!((local.theta, local.scaling.clone()), (1e4, RopeScaling::None));
    // Five layers with a window come before each layer without one.
    let windows: Vec<usize> = gemma.windows.iter().take(6).map(|window| window.unwrap_or(0)).collect();
    assert_eq!(windows, [1024, 1024, 1024, 1024, 1024, 0]);
    assert_eq!(gemma.attention_scale(), 1.0 / 16.0);
}

#[test]
fn a_key_that_a_configuration_has_comes_before_the_usual_value() {
    let with = |key: &str, value: Value| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/configs/gemma-3-4b.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        config["text_config"][key] = value;
        let files = HuggingFaceFiles {
            config: &config,
            generation: None,
            tokenizer_config: None,
            tokenizer: None,
            has_head: false,
        };
        from_huggingface(&files).unwrap()
    };
    // The configuration of 27B states its numbers of heads and its own factor of the scores.
    assert_eq!(with("num_attention_heads", 32.into()).head_count, 32);
    assert_eq!(with("num_key_value_heads", 8.into()).kv_head_count, 8);
    assert_eq!(with("query_pre_attn_scalar", 144.into()).attention_scale(), 1.0 / 12.0);
    assert_eq!(with("rope_theta", 5e5.into()).rope.theta, 5e5);
}
