//! The tokens of 100,000 texts are those of `tiktoken` and `tokenizers`, for the patterns of all families.
//!
//! `tests/fixtures/tokenizer/make.py` made the digests of the expected tokens with the vocabulary beside it. The texts
//! are made here and there from the same list.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{SpecialTokens, Tokenizer, from_gguf};
use crate::gguf::{GgufFile, writer::GgufWriter};

const SEED: u64 = 20_260_115;
const COUNT: usize = 100_000;
const BLOCK: usize = 1_000;
/// Number of texts for the patterns of GGUF files, so that the test takes seconds. Those of Kimi's own file are all compared,
/// and so are those of the published vocabularies (`tests/integration/tokenizers.rs`).
const COUNT_IN_GGUF: usize = 15_000;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(fixture(name)).unwrap()
}

/// The generator of `texts.py`.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

fn texts() -> Vec<String> {
    let source: Value = serde_json::from_str(&read("texts.json")).unwrap();
    let strings = |key: &str| -> Vec<String> { serde_json::from_value(source[key].clone()).unwrap() };
    let (pieces, lines) = (strings("pieces"), strings("lines"));
    let ranges: Vec<[u32; 2]> = serde_json::from_value(source["ranges"].clone()).unwrap();
    let mut numbers = Numbers(SEED);
    (0..COUNT)
        .map(|index| {
            if index.is_multiple_of(16) {
                return lines[numbers.below(lines.len())].clone();
            }
            let mut text = String::new();
            for _ in 0..1 + numbers.below(10) {
                match numbers.below(8) {
                    0 => {
                        let [first, last] = ranges[numbers.below(ranges.len())];
                        let at = numbers.below((last - first + 1) as usize) as u32;
                        text.push(char::from_u32(first + at).unwrap());
                    }
                    1 => {
                        let piece = &pieces[numbers.below(pieces.len())];
                        text.push_str(&piece.repeat(2 + numbers.below(4)));
                    }
                    _ => text.push_str(&pieces[numbers.below(pieces.len())]),
                }
            }
            text
        })
        .collect()
}

/// Asserts that the tokens of each block of texts have the digest that make.py found.
fn compare(name: &str, tokenizer: &Tokenizer, texts: &[String], expected: &Value) {
    let expected = expected[name].as_array().unwrap();
    assert_eq!(expected.len(), COUNT / BLOCK, "{name}");
    for (block, (texts, expected)) in texts.chunks(BLOCK).zip(expected).enumerate() {
        let mut hasher = Sha256::new();
        for text in texts {
            let ids = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            hasher.update((ids.len() as u32).to_le_bytes());
            ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
        }
        for text in &texts[..BLOCK / 20] {
            let ids = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            assert_eq!(tokenizer.encode(text, SpecialTokens::Literal).unwrap(), ids, "{name}: {text:?}");
        }
        let digest: String = hasher.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(&digest, expected, "{name}: the texts from {} on have other tokens", block * BLOCK);
    }
}

/// Returns a GGUF file with the small vocabulary. The bytes of its tokens are spelled as characters.
fn gguf(pre: &str) -> GgufWriter {
    let characters = super::byte_level_characters();
    let tokens: Vec<String> = ranks()
        .iter()
        .map(|token| token.iter().map(|byte| characters[usize::from(*byte)]).collect())
        .collect();
    let merges: Vec<String> = read("merges.txt").lines().map(str::to_owned).collect();
    GgufWriter::default()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &vec![1; tokens.len()])
        .strings("tokenizer.ggml.merges", &merges)
}

fn ranks() -> Vec<Vec<u8>> {
    super::tiktoken::ranked_tokens(read("tiktoken.model").as_bytes()).unwrap()
}

fn rebuilt(writer: &GgufWriter) -> Tokenizer {
    let bytes = writer.build();
    from_gguf(&GgufFile::parse(Path::new("test.gguf"), &bytes).unwrap(), &bytes).unwrap().unwrap()
}

#[test]
fn a_hundred_thousand_texts_have_the_tokens_of_the_published_libraries() {
    let expected: Value = serde_json::from_str(&read("digests.json")).unwrap();
    let expected = &expected["small"];
    let texts = texts();
    let names: Vec<&String> = expected.as_object().unwrap().keys().collect();
    assert!(names.len() >= 10, "{names:?}");
    std::thread::scope(|scope| {
        for name in names {
            let texts = &texts[..COUNT_IN_GGUF];
            scope.spawn(move || compare(name, &rebuilt(&gguf(name)), texts, expected));
        }
        let config = json!({"tokenizer_class": "TikTokenTokenizer"});
        let ranked = Tokenizer::from_tiktoken(read("tiktoken.model").as_bytes(), &config).unwrap();
        compare("kimi-k2", &ranked, &texts, expected);
    });
}

#[test]
fn kimi_needs_no_merges_in_a_gguf_file() {
    let (with, without) =
        (rebuilt(&gguf("kimi-k2")), rebuilt(&gguf("kimi-k2").without("tokenizer.ggml.merges")));
    for text in texts().iter().take(2_000) {
        let ids = without.encode(text, SpecialTokens::Parse).unwrap();
        assert_eq!(with.encode(text, SpecialTokens::Parse).unwrap(), ids, "{text:?}");
    }
}

#[test]
fn a_word_of_the_vocabulary_that_no_merges_make_is_one_token_where_the_family_says_so() {
    let encoded = |pre: &str| {
        let file = GgufWriter::default()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", pre)
            .strings("tokenizer.ggml.tokens", &["x", "y", "z", "xyz"].map(str::to_owned))
            .integers("tokenizer.ggml.token_type", &[1; 4])
            .strings("tokenizer.ggml.merges", &[]);
        rebuilt(&file).encode("xyz", SpecialTokens::Parse).unwrap()
    };
    for pre in ["glm4", "glm5", "llama-bpe"] {
        assert_eq!(encoded(pre), [3], "{pre}");
    }
    assert_eq!(encoded("chatglm-bpe"), [0, 1, 2]);
}

#[test]
fn other_names_of_a_pattern_give_the_same_tokens() {
    for (name, other) in [
        ("glm4", "glm5"),
        ("gpt-4o", "llama4"),
        ("qwen2", "deepseek-r1-qwen"),
        ("llama-bpe", "llama3"),
        ("llama-bpe", "llama-v3"),
        ("gpt-2", "default"),
    ] {
        let (first, second) = (rebuilt(&gguf(name)), rebuilt(&gguf(other)));
        for text in texts().iter().take(500) {
            let ids = first.encode(text, SpecialTokens::Parse).unwrap();
            assert_eq!(
                second.encode(text, SpecialTokens::Parse).unwrap(),
                ids,
                "{name} and {other}: {text:?}"
            );
        }
    }
}
