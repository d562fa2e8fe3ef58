//! The words inside of which the tokens of a byte-level vocabulary merge.
//!
//! A GGUF file names the patterns that split text into words, and this table has the patterns of each name. They are facts
//! of the vocabularies: another split gives other tokens than those that the model was trained with, so an unknown name
//! is an error.

use serde_json::{Value as Json, json};

use crate::error::ModelError;

/// The patterns of one kind of vocabulary and how words become tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Words {
    /// Each pattern splits the parts that the patterns before it left. A match is a part, and so is the text between
    /// two matches.
    splits: &'static [&'static str],
    /// Whether GPT-2's pattern, which is built into the library, splits last.
    gpt2: bool,
    /// Whether text is composed (NFC) first.
    composed: bool,
    /// Whether a word that is a token becomes that token without merging, as in tiktoken.
    pub(super) ignore_merges: bool,
    /// Whether merges follow from the order of the tokens, so that those of a file are not needed.
    pub(super) ranked: bool,
}

/// A pattern that takes English contractions first.
macro_rules! contractions_and {
    ($rest:literal) => {
        concat!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?", $rest, r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    };
}

/// The two alternatives for words in which lowercase letters follow uppercase ones, and the rest of such a pattern.
/// `$upper` and `$lower` are classes of letters, and `$end` is what may follow a word.
macro_rules! cased {
    ($upper:literal, $lower:literal, $end:literal, $rest:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?",
            $upper,
            "*",
            $lower,
            "+",
            $end,
            r"|[^\r\n\p{L}\p{N}]?",
            $upper,
            "+",
            $lower,
            "*",
            $end,
            "|",
            $rest,
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const GPT2: Words = Words { splits: &[], gpt2: true, composed: false, ignore_merges: false, ranked: false };

const SMOLLM: Words = Words { splits: &[r"\p{N}"], ..GPT2 };

/// Llama 3's pattern, which GLM-4 shares.
const LLAMA3: Words = Words {
    splits: &[contractions_and!(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*")],
    gpt2: false,
    composed: false,
    ignore_merges: true,
    ranked: false,
};

/// Llama 3's pattern without words that no merges make.
const CHATGLM: Words = Words { ignore_merges: false, ..LLAMA3 };

const QWEN2: Words = Words {
    splits: &[contractions_and!(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*")],
    gpt2: false,
    composed: true,
    ignore_merges: false,
    ranked: false,
};

/// The pattern of the vocabulary o200k, which gpt-oss and Llama 4 use.
const GPT4O: Words = Words {
    splits: &[cased!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    )],
    gpt2: false,
    composed: false,
    ignore_merges: true,
    ranked: false,
};

/// Mistral's pattern since Nemo.
const TEKKEN: Words = Words {
    splits: &[cased!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
        "",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    )],
    ..GPT4O
};

/// The pattern of Kimi K2, in which a run of Chinese characters is a word of its own.
pub(super) const KIMI: Words = Words {
    splits: &[concat!(
        r"[\p{Han}]+|",
        cased!(
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        )
    )],
    ranked: true,
    ..GPT4O
};

const DEEPSEEK_V3: Words = Words {
    splits: &[
        r"\p{N}{1,3}",
        r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ],
    gpt2: false,
    composed: false,
    ignore_merges: false,
    ranked: false,
};

const DEEPSEEK_LLM: Words = Words {
    splits: &[
        r"[\r\n]",
        // The letters with case of an older Unicode, as the vocabulary's own file lists them.
        concat!(
            r"\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}",
            r"\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}",
            r"\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}",
            r"\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}",
            r"\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}",
            r"\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}",
            r"\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}",
            r"\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}",
            r"\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}",
            r"\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}",
            r"\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}",
            r"\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}",
            r"\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+"
        ),
        r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+",
        r"\s+$",
        r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+",
        r"\p{N}",
    ],
    ..DEEPSEEK_V3
};

const DEEPSEEK_CODER: Words = Words {
    splits: &[
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+",
        r"\p{N}",
    ],
    ..DEEPSEEK_V3
};

/// The values of `tokenizer.ggml.pre`.
const NAMES: &[(&str, Words)] = &[
    ("default", GPT2),
    ("gpt-2", GPT2),
    ("smollm", SMOLLM),
    ("llama-bpe", LLAMA3),
    ("llama3", LLAMA3),
    ("llama-v3", LLAMA3),
    ("qwen2", QWEN2),
    ("deepseek-r1-qwen", QWEN2),
    ("kimi-k2", KIMI),
    ("deepseek-v3", DEEPSEEK_V3),
    ("deepseek-llm", DEEPSEEK_LLM),
    ("deepseek-coder", DEEPSEEK_CODER),
    ("glm4", LLAMA3),
    ("glm5", LLAMA3),
    ("chatglm-bpe", CHATGLM),
    ("gpt-4o", GPT4O),
    ("llama4", GPT4O),
    ("tekken", TEKKEN),
];

impl Words {
    /// Returns the words of vocabularies with this value of `key` in a GGUF file.
    pub(super) fn named(key: &str, name: &str) -> Result<Self, ModelError> {
        match NAMES.iter().find(|(known, _)| *known == name) {
            Some((_, words)) => Ok(*words),
            None => Err(ModelError::unsupported(
                key,
                name,
                NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
            )),
        }
    }

    /// Returns the description of the step before splitting, as in tokenizer.json.
    pub(super) fn normalizer(&self) -> Json {
        if self.composed { json!({"type": "NFC"}) } else { Json::Null }
    }

    /// Returns the description of the splits, as in tokenizer.json. The last step spells bytes as characters.
    pub(super) fn pre_tokenizer(&self) -> Json {
        let split = |pattern: &&str| {
            let pattern = json!({"Regex": pattern});
            json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
        };
        let steps: Vec<Json> = self.splits.iter().map(split).chain([byte_level(self.gpt2)]).collect();
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// Returns the description of the step that spells bytes as characters, and of its inverse.
pub(super) fn byte_level(splits: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits})
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

    use super::*;

    fn split(name: &str, text: &str) -> Vec<String> {
        let described = Words::named("tokenizer.ggml.pre", name).unwrap().pre_tokenizer();
        let step: PreTokenizerWrapper = serde_json::from_value(described).unwrap();
        let mut pieces = PreTokenizedString::from(text);
        step.pre_tokenize(&mut pieces).unwrap();
        let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        pieces.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    #[test]
    fn the_families_split_text_differently() {
        for (name, text, words) in [
            ("gpt-2", "It's 2024  now", &["It", "'s", " 2024", " ", " now"][..]),
            ("smollm", "a 12", &["a", " ", "1", "2"]),
            ("llama-bpe", "IT'S 12345!\n", &["IT", "'S", " ", "123", "45", "!\n"]),
            ("qwen2", "12a", &["1", "2", "a"]),
            ("kimi-k2", "fooBar中文it's", &["foo", "Bar", "中文", "it's"]),
            ("gpt-4o", "fooBar中文it's/\n", &["foo", "Bar中文it's", "/\n"]),
            ("tekken", "it's 12", &["it", "'s", " ", "1", "2"]),
            ("deepseek-v3", "1234中文ア x_y", &["123", "4", "中文ア", " x", "_y"]),
            ("deepseek-llm", "a12\n\nb中 ", &["a", "1", "2", "\n", "\n", "b", "中", " "]),
            ("deepseek-coder", "é 7!", &["é", " ", "7", "!"]),
        ] {
            assert_eq!(split(name, text), words, "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let message = Words::named("tokenizer.ggml.pre", "klingon").unwrap_err().to_string();
        assert!(message.contains("klingon") && message.contains("kimi-k2"), "{message}");
    }
}
