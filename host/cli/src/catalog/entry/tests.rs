//! The embedded data, and what is derived from it.

use std::collections::BTreeSet;

use super::*;
use crate::catalog::DEFAULT_MODEL;

fn entry(name: &str) -> &'static CatalogEntry {
    entries().iter().find(|entry| entry.name == name).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn the_catalog_is_sound_and_covers_the_families() {
    let entries = parse(DATA).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(entries.len() >= 15, "{}", entries.len());
    assert_eq!(entries[0].name, DEFAULT_MODEL);
    let families: BTreeSet<_> = entries.iter().map(|entry| entry.family.as_str()).collect();
    for family in ["SmolLM2", "Qwen3", "Llama 3.2", "Gemma 3", "Mistral", "gpt-oss", "GLM", "Kimi K2"] {
        assert!(families.contains(family), "{family}");
    }
    let embeddings = entries.iter().filter(|entry| entry.kind == Kind::Embedding).count();
    assert!(embeddings >= 2, "{embeddings}");
    let mut names = BTreeSet::new();
    for entry in &entries {
        assert!(std::iter::once(&entry.name).chain(&entry.aliases).all(|name| names.insert(name.clone())));
        // A digest is that of one file, in a revision that stays what it is.
        let is_fixed =
            !matches!(&entry.source, Reference::Hub(hub) if hub.file.is_none() || hub.revision.is_none());
        assert_eq!(is_fixed, entry.file.sha256.is_some(), "{}", entry.name);
        let bits = entry.bits_per_parameter();
        assert!((3.0..34.0).contains(&bits), "{}: {bits} bits per parameter", entry.name);
        assert!(entry.kind == Kind::Embedding || entry.kv.is_some(), "{}", entry.name);
        assert!(!entry.good_for.ends_with('.'), "{}", entry.name);
    }
}

#[test]
fn mistakes_in_the_data_are_found() {
    let sound = DATA
        .find("[[model]]")
        .and_then(|first| DATA[first + 9..].find("[[model]]").map(|len| &DATA[..first + 9 + len]));
    let sound = sound.expect("two entries");
    assert_eq!(parse(sound).expect("one entry").len(), 1);
    let twice = format!("{sound}\n{}", &sound[sound.find("[[model]]").expect("an entry")..]);
    assert!(parse(&twice).expect_err("the same name").to_string().contains("two entries"));
    for (old, new) in [
        ("bytes = 98_362_432", "approximate_bytes = 1, bytes = 98_362_432"),
        ("sha256 = \"b179", "sha256 = \"x179"),
        ("active = 135", "active = 136"),
        ("license = \"Apache-2.0\"", "license = \" \""),
        ("license =", "licence ="),
        ("temperature = 0.2", "temperature = -0.2"),
        ("source = \"pip:", "source = \"gopher:"),
    ] {
        assert!(sound.contains(old), "{old}");
        assert!(parse(&sound.replacen(old, new, 1)).is_err(), "{new}");
    }
}

#[test]
fn support_compares_what_a_file_needs_with_what_this_version_reads() {
    for name in [DEFAULT_MODEL, "qwen3-8b", "gemma-3-1b", "gemma-3-4b"] {
        assert_eq!(entry(name).support(), Support::Runs, "{name}");
    }
    let kimi = |vocabulary: &str| {
        let needs = "architecture = \"kimi_k2\", vocabulary = \"tiktoken.model\"";
        let with = format!("architecture = \"kimi_k2\", vocabulary = \"{vocabulary}\"");
        assert!(DATA.contains(needs));
        let all = parse(&DATA.replace(needs, &with)).expect("sound");
        all.iter().find(|entry| entry.name == "kimi-k2.5").expect("an entry").support()
    };
    assert_eq!(kimi("tokenizer.json"), Support::Runs);
    assert_eq!(kimi("words.bin"), Support::Lacks(vec!["vocabularies in words.bin".to_owned()]));
    let changed = |old: &str, new: &str| {
        assert!(DATA.contains(old), "{old}");
        let mut entries = parse(&DATA.replacen(old, new, 1)).expect("sound");
        entries.remove(0).support()
    };
    for (old, new, lacks) in [
        ("weights = [\"Q4_1\"]", "weights = [\"Q4_1\", \"Q9_9\"]", "Q9_9 weights"),
        ("pre_tokenizer = \"smollm\"", "pre_tokenizer = \"klingon\"", "the pre-tokenizer klingon"),
        ("architecture = \"llama\"", "architecture = \"mamba\"", "the architecture mamba"),
    ] {
        assert_eq!(changed(old, new), Support::Lacks(vec![lacks.to_owned()]), "{new}");
    }
}

#[test]
fn entries_say_what_their_files_contain() {
    for entry in entries() {
        let Requirements { architecture, parts, weights, vocabulary, .. } = &entry.requires;
        // The parts of an architecture that is read are no obstacle, and naming them would become untrue unnoticed.
        assert!(parts.is_empty() || !Architecture::is_read(architecture), "{}", entry.name);
        let source = entry.source.to_string();
        let of_name = [("q4_k_m", "Q4_K"), ("q8_0", "Q8_0"), ("q4_1", "Q4_1"), ("mxfp4", "MXFP4")];
        let named = of_name.into_iter().find(|(part, _)| source.to_lowercase().contains(part));
        match named {
            Some((_, format)) => assert!(weights.iter().any(|known| known == format), "{}", entry.name),
            None => assert!(weights.is_empty() && !source.ends_with(".gguf"), "{}", entry.name),
        }
        assert!(vocabulary.is_none() || !source.ends_with(".gguf"), "{}", entry.name);
    }
}

#[test]
fn support_follows_from_the_architectures_that_the_model_crate_reads() {
    for entry in entries() {
        let Support::Lacks(lacks) = entry.support() else { continue };
        assert!(!lacks.is_empty() && lacks.iter().all(|lack| !lack.is_empty()), "{}", entry.name);
    }
    let Support::Lacks(lacks) = entry("qwen3-embedding-0.6b").support() else { panic!("no route") };
    assert_eq!(lacks, ["a route for embeddings"], "its architecture is read");
    assert_eq!(entry("qwen3-30b-a3b").support(), Support::Runs);
}

#[test]
fn bytes_per_token_count_active_parameters_and_the_cache() {
    let small = entry(DEFAULT_MODEL);
    assert_eq!(small.weight_bytes_per_token(), 98_362_432.0);
    assert_eq!(small.kv_bytes(1), 2 * 30 * 3 * 64 * 2);
    let experts = entry("qwen3-30b-a3b");
    let share = experts.weight_bytes_per_token() / experts.bytes() as f64;
    assert!((share - 3300.0 / 30530.0).abs() < 1e-12, "{share}");
    assert_eq!(entry("kimi-k2.5").kv_bytes(1), 70_272);
    assert_eq!(entry("kimi-k2.5").weight_bytes_per_token(), 32.65e9);
}

#[test]
fn rounded_sizes_are_marked() {
    assert_eq!(entry("qwen3-4b").size_text(), "2.50 GB");
    assert_eq!(entry("qwen3-14b").size_text(), "~9.00 GB");
}
