//! Digests that distinguish two models with the same name.
//!
//! Token ids are meaningful only to the tokenizer that produced them, and a model's output belongs to its weights.
//! Code that stores either stores the model's digest with it, and compares digests before it continues.

use std::fmt::{self, Display, Formatter, Write};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::chat_template::ChatTemplate;
use crate::checkpoint::{Checkpoint, Tensor};
use crate::tokenizer::Tokenizer;

/// Total bytes sampled over all weights. Reading all of a large model would take minutes at each start.
const SAMPLED_BYTES: usize = 64 << 20;
const BLOCK_BYTES: usize = 4 << 10;
/// Maximum number of blocks sampled per tensor. A tensor smaller than its blocks is read whole.
const MAX_BLOCKS: usize = 16;

/// The identity of a model's parts, each as the first 16 bytes of a SHA-256 hash in hexadecimal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelDigest {
    /// Covers the name, type and shape of each tensor, and samples of its bytes, scales and zero points.
    pub weights: String,
    /// Covers the text of each token id, and which ids are special.
    pub tokenizer: String,
    /// Covers the source of the chat template.
    pub template: String,
}

impl ModelDigest {
    /// Digests the three parts. Only samples of the weights are read, so that large models start quickly.
    pub fn new(checkpoint: &Checkpoint, tokenizer: &Tokenizer, template: &ChatTemplate) -> Self {
        ModelDigest {
            weights: weights(&checkpoint.tensors().collect::<Vec<_>>()),
            tokenizer: vocabulary(tokenizer),
            template: hex(Sha256::new_with_prefix(template.source())),
        }
    }

    /// Returns the digest of a model that another server computes. It has no tokens, and its weights are known by
    /// the server's address and the model's name alone.
    pub fn remote(server: &str, model: &str) -> Self {
        ModelDigest {
            weights: hex(Sha256::new_with_prefix(format!("{server:?} {model:?}"))),
            tokenizer: String::new(),
            template: String::new(),
        }
    }
}

/// Formats the three digests, joined by hyphens.
impl Display for ModelDigest {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.weights, self.tokenizer, self.template)
    }
}

/// Returns the digest of weights. Scales and zero points count as the codes do.
pub(crate) fn weights(tensors: &[Tensor<'_>]) -> String {
    let mut hash = Sha256::new();
    let blocks = (SAMPLED_BYTES / BLOCK_BYTES / tensors.len().max(1)).clamp(1, MAX_BLOCKS);
    for tensor in tensors {
        // `{:?}` quotes the name, so different lists of tensors never produce the same text.
        hash.update(format!("{:?} {:?} {:?}\n", tensor.name, tensor.dtype, tensor.shape));
        sampled(tensor.data, blocks).for_each(|block| hash.update(block));
        let Some((coding, companions)) = tensor.coding.described() else { continue };
        hash.update(coding);
        for companion in companions {
            hash.update((companion.len() as u64).to_le_bytes());
            sampled(companion, blocks).for_each(|block| hash.update(block));
        }
    }
    hex(hash)
}

/// Returns blocks that are spread evenly from the first byte to the last.
fn sampled(data: &[u8], blocks: usize) -> impl Iterator<Item = &[u8]> {
    let (blocks, length) = match data.len() <= blocks * BLOCK_BYTES {
        true => (1, data.len()),
        false => (blocks, BLOCK_BYTES),
    };
    let rest = data.len() - length;
    (0..blocks).map(move |block| {
        let start = rest / (blocks - 1).max(1) * block;
        &data[start..start + length]
    })
}

fn vocabulary(tokenizer: &Tokenizer) -> String {
    let mut hash = Sha256::new();
    for id in 0..tokenizer.vocabulary_size() as u32 {
        let text = tokenizer.token_text(id).unwrap_or_default();
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
        hash.update([u8::from(tokenizer.is_special(id))]);
    }
    hex(hash)
}

fn hex(hash: Sha256) -> String {
    hash.finalize()[..16].iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
    }

    fn tokenizer(change: impl FnOnce(String) -> String) -> Tokenizer {
        let text = std::fs::read_to_string(fixtures().join("tokenizer/byte-level-chatml.json")).unwrap();
        Tokenizer::from_json(change(text).as_bytes()).unwrap()
    }

    #[test]
    fn a_changed_weight_or_two_swapped_tokens_change_the_digest() {
        let folder = tempfile::tempdir().unwrap();
        let source = fixtures().join("tiny/llama-gqa");
        std::fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
        let mut bytes = std::fs::read(source.join("model.safetensors")).unwrap();
        let open = |bytes: &[u8]| {
            std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            ModelDigest::new(&checkpoint, &tokenizer(|text| text), &ChatTemplate::chatml_default())
        };
        let digest = open(&bytes);
        assert_eq!(open(&bytes), digest, "the same files must have the same digest");
        *bytes.last_mut().unwrap() ^= 1;
        let changed = open(&bytes);
        assert_ne!(changed.weights, digest.weights);
        assert_eq!((changed.tokenizer, changed.template), (digest.tokenizer.clone(), digest.template));

        let exchanged = tokenizer(|text| {
            let (a, b) = ("\"a\": ", "\"b\": ");
            assert!(
                text.contains(a) && text.contains(b),
                "the fixture must list its vocabulary in this form"
            );
            text.replace(a, "\"\u{1}\": ").replace(b, a).replace("\"\u{1}\": ", b)
        });
        assert_ne!(vocabulary(&exchanged), digest.tokenizer);
    }

    #[test]
    fn samples_of_a_tensor_reach_from_its_first_byte_to_its_last() {
        let data: Vec<u8> = (0..200_000u32).map(|byte| byte as u8).collect();
        for blocks in [1, 2, 16] {
            let sampled: Vec<&[u8]> = sampled(&data, blocks).collect();
            assert_eq!(sampled.len(), blocks);
            assert_eq!(sampled[0].as_ptr(), data.as_ptr());
            assert!(sampled.iter().all(|block| block.len() == BLOCK_BYTES));
        }
        assert_eq!(sampled(&data[..10], 16).collect::<Vec<_>>(), [&data[..10]]);
        assert_eq!(sampled(&[], 16).collect::<Vec<_>>(), [&data[..0]]);
    }
}
