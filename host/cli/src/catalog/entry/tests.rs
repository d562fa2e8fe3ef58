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
        ("source = \"pip:", "source = \"gopher:"),
    ] {
        assert!(sound.contains(old), "{old}");
        assert!(parse(&sound.replacen(old, new, 1)).is_err(), "{new}");
    }
}

#[test]
fn support_follows_from_the_architectures_that_the_model_crate_reads() {
    assert_eq!(entry(DEFAULT_MODEL).support(), Support::Runs);
    assert_eq!(entry("qwen3-8b").support(), Support::Runs);
    for entry in entries() {
        let Support::Lacks(lacks) = entry.support() else { continue };
        assert!(!lacks.is_empty() && lacks.iter().all(|lack| !lack.is_empty()), "{}", entry.name);
    }
    let Support::Lacks(lacks) = entry("qwen3-embedding-0.6b").support() else { panic!("no route") };
    assert_eq!(lacks, ["a route for embeddings"], "its architecture is read");
    let parts = ["mixture of experts".to_owned()];
    let expected = match Architecture::is_read("qwen3moe") {
        true => Support::Runs,
        false => Support::Lacks(parts.to_vec()),
    };
    assert_eq!(entry("qwen3-30b-a3b").support(), expected);
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
