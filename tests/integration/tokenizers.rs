//! Published vocabularies: the tokens of 100,000 texts are those of `tiktoken`, `tokenizers` and `sentencepiece`.
//! `tests/fixtures/tokenizer/make.py` made the digests of the expected tokens, and fetches the vocabularies.

use crate::harness::{repository, skipped};
use serde_json::Value;
use sha2::{Digest, Sha256};
use skep_model::{Checkpoint, SpecialTokens, Tokenizer};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const SEED: u64 = 20_260_115;
const COUNT: usize = 100_000;
const BLOCK: usize = 1_000;

#[test]
fn published_vocabularies_give_the_tokens_of_their_libraries() {
    let fixtures = repository().join("tests/fixtures/tokenizer");
    let Some(folder) = vocabularies(&fixtures.join("make.py")) else { return };
    let json = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(fixtures.join(name)).unwrap()).unwrap()
    };
    let (expected, source) = (json("digests.json"), json("texts.json"));
    let texts = texts(&source);
    let published = expected["published"].as_object().unwrap();
    assert!(published.len() >= 7, "{} vocabularies", published.len());
    for (name, blocks) in published {
        let tokenizer = Checkpoint::tokenizer_of(&folder.join(name)).unwrap().unwrap();
        let different = differing_blocks(&tokenizer, &texts, blocks.as_array().unwrap());
        eprintln!("{name}: {} texts compared", texts.len());
        assert!(different.is_empty(), "{name}: other tokens in the blocks {different:?} of {BLOCK} texts");
    }
}

fn differing_blocks(tokenizer: &Tokenizer, texts: &[String], blocks: &[Value]) -> Vec<usize> {
    assert_eq!(blocks.len(), texts.len() / BLOCK);
    let digest = |texts: &[String]| {
        let mut hasher = Sha256::new();
        for text in texts {
            let ids = tokenizer.encode(text, SpecialTokens::Literal).unwrap();
            hasher.update((ids.len() as u32).to_le_bytes());
            ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
        }
        hasher.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let numbered = texts.chunks(BLOCK).zip(blocks).enumerate();
    numbered.filter(|(_, (texts, expected))| digest(texts) != **expected).map(|(block, _)| block).collect()
}

/// Makes the texts of `texts.py`.
fn texts(source: &Value) -> Vec<String> {
    let strings = |key: &str| -> Vec<String> { serde_json::from_value(source[key].clone()).unwrap() };
    let (pieces, lines) = (strings("pieces"), strings("lines"));
    let ranges: Vec<[u32; 2]> = serde_json::from_value(source["ranges"].clone()).unwrap();
    let mut state = SEED;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % limit
    };
    let mut text = |index: usize| {
        if index.is_multiple_of(16) {
            return lines[below(lines.len())].clone();
        }
        let count = 1 + below(10);
        let mut text = String::new();
        for _ in 0..count {
            match below(8) {
                0 => {
                    let [first, last] = ranges[below(ranges.len())];
                    text.push(char::from_u32(first + below((last - first + 1) as usize) as u32).unwrap());
                }
                1 => {
                    let piece = &pieces[below(pieces.len())];
                    text.push_str(&piece.repeat(2 + below(4)));
                }
                _ => text.push_str(&pieces[below(pieces.len())]),
            }
        }
        text
    };
    (0..COUNT).map(&mut text).collect()
}

/// Returns the folder of the vocabularies, which are fetched once; `None` if they cannot be had.
fn vocabularies(script: &Path) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vocabularies");
    // The script writes this file last.
    if folder.join("llama.gguf").exists() {
        return Some(folder);
    }
    let made = Command::new("python3").arg("-B").arg(script).arg(&folder).output();
    let why = match made {
        Ok(made) if made.status.success() => return Some(folder),
        Ok(made) => String::from_utf8_lossy(&made.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    skipped(&format!("the vocabularies cannot be fetched: {why}"));
    None
}
