//! Lists the vocabularies that can be read, for catalogs that name them.
//!
//! The reader itself gives the answer: this module gives it the smallest file with such a name, so no list can contradict it.

use std::path::Path;

use super::from_gguf;
use crate::gguf::GgufFile;

/// Returns whether GGUF files whose `tokenizer.ggml.pre` has this value are read.
pub fn reads_pre_tokenizer(name: &str) -> bool {
    let bytes = smallest_file(name);
    let parsed = GgufFile::parse(Path::new("the smallest vocabulary"), &bytes);
    parsed.is_ok_and(|file| matches!(from_gguf(&file, &bytes), Ok(Some(_))))
}

/// Returns a GGUF file without weights, whose byte-level vocabulary has one token and no merges.
fn smallest_file(pre_tokenizer: &str) -> Vec<u8> {
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    fn put(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    // No tensors, and four keys.
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(4u64.to_le_bytes());
    for (key, value) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", pre_tokenizer)] {
        put(&mut bytes, key);
        bytes.extend(STRING.to_le_bytes());
        put(&mut bytes, value);
    }
    for (key, values) in [("tokenizer.ggml.tokens", &["a"][..]), ("tokenizer.ggml.merges", &[])] {
        put(&mut bytes, key);
        bytes.extend(ARRAY.to_le_bytes());
        bytes.extend(STRING.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| put(&mut bytes, value));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_exactly_if_the_reader_of_files_knows_them() {
        for name in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"] {
            assert!(reads_pre_tokenizer(name), "{name}");
        }
        for name in ["", "klingon", "qwen2 "] {
            assert!(!reads_pre_tokenizer(name), "{name:?}");
        }
    }
}
