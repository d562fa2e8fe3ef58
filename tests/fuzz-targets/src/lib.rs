//! Untrusted inputs, as functions that accept any bytes and must neither panic nor hang. There is one target
//! per kind of input.
//!
//! `cargo test` runs these functions for a second each, the example of this crate runs them for any length of
//! time, and `cargo fuzz` runs them too (`tests/fuzz`). Inputs that once caused a panic are kept under
//! `regressions/TARGET`.
#![forbid(unsafe_code)]

mod arguments;
mod guest;
mod host;
mod http;
mod model_files;
mod mutator;
mod schemas;
mod toml_files;
mod tool_calls;
mod upstreams;
mod watched;

pub use mutator::Mutator;
pub use watched::{Outcome, run_watched};

use std::path::{Path, PathBuf};

/// A kind of untrusted input.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    /// Returns valid inputs.
    seeds: fn() -> Vec<Vec<u8>>,
    /// Tokens that occur in the inputs.
    pub words: &'static [&'static str],
    /// Number of inputs that the test tries.
    pub tries: usize,
}

pub const TARGETS: [Target; 15] = [
    Target {
        name: "gguf",
        run: model_files::gguf,
        seeds: Vec::new,
        words: model_files::GGUF_WORDS,
        tries: 1_500,
    },
    Target {
        name: "gguf_split",
        run: model_files::gguf_split,
        seeds: Vec::new,
        words: model_files::GGUF_WORDS,
        tries: 800,
    },
    Target {
        name: "safetensors",
        run: model_files::safetensors,
        seeds: Vec::new,
        words: model_files::SAFETENSORS_WORDS,
        tries: 1_500,
    },
    Target {
        name: "safetensors_index",
        run: model_files::safetensors_index,
        seeds: Vec::new,
        words: model_files::INDEX_WORDS,
        tries: 800,
    },
    Target {
        name: "tiktoken",
        run: model_files::tiktoken,
        seeds: model_files::tiktoken_seeds,
        words: model_files::TIKTOKEN_WORDS,
        tries: 800,
    },
    Target {
        name: "model_configs",
        run: model_files::configuration,
        seeds: model_files::configuration_seeds,
        words: model_files::SAFETENSORS_WORDS,
        tries: 1_000,
    },
    Target {
        name: "agent_toml",
        run: toml_files::agent,
        seeds: toml_files::agent_seeds,
        words: toml_files::WORDS,
        tries: 2_000,
    },
    Target {
        name: "skep_toml",
        run: toml_files::skep,
        seeds: toml_files::skep_seeds,
        words: toml_files::WORDS,
        tries: 2_000,
    },
    Target {
        name: "chat_bodies",
        run: http::chat_body,
        seeds: http::chat_seeds,
        words: http::CHAT_WORDS,
        tries: 600,
    },
    Target {
        name: "schemas",
        run: schemas::schema,
        seeds: schemas::seeds,
        words: schemas::WORDS,
        tries: 150,
    },
    Target {
        name: "tool_calls",
        run: tool_calls::text,
        seeds: tool_calls::seeds,
        words: tool_calls::WORDS,
        tries: 4_000,
    },
    Target {
        name: "upstream_answers",
        run: upstreams::answer,
        seeds: upstreams::seeds,
        words: upstreams::WORDS,
        tries: 4_000,
    },
    Target { name: "guest_arguments", run: arguments::call, seeds: guest::seeds, words: &[], tries: 60 },
    Target {
        name: "resume_ids",
        run: http::resume_id,
        seeds: http::resume_seeds,
        words: http::RESUME_WORDS,
        tries: 600,
    },
    Target {
        name: "imported_sessions",
        run: http::imported_session,
        seeds: http::session_seeds,
        words: http::SESSION_WORDS,
        tries: 400,
    },
];

/// Runs a target by its name, for `cargo fuzz`.
pub fn run(target: &str, input: &[u8]) {
    let target = Target::named(target).expect("there is a target of this name");
    (target.run)(input);
}

impl Target {
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Returns valid inputs, including those stored in files.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        let mut seeds = (self.seeds)();
        seeds.extend(files(&folder("corpus").join(self.name)));
        seeds
    }

    /// Returns inputs that once caused a panic.
    pub fn regressions(&self) -> Vec<Vec<u8>> {
        files(&self.regression_folder())
    }

    pub fn regression_folder(&self) -> PathBuf {
        folder("regressions").join(self.name)
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Reads the files of a folder, ordered by name.
fn files(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}
