//! The tokens of sections are compared with those that the library gives to a vocabulary without the special token that a
//! literal spells.

use std::ops::Range;

use serde_json::{Value, json};

use super::Before;
use crate::tokenizer::SpecialTokens::{Literal, Parse};
use crate::tokenizer::{SectionCache, Tokenizer};

const MARK: &str = "</s>";

/// Returns the step of the normalizer, and of the pre-tokenizer, by which vocabularies put a space before a text.
fn kinds() -> [(&'static str, Value, Value); 7] {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let words =
        json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace("always")]});
    let spelled =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    [
        ("prepend", json!({"type": "Sequence", "normalizers": [prepend, replace]}), Value::Null),
        ("none", json!({"type": "Sequence", "normalizers": [replace]}), Value::Null),
        ("always", Value::Null, metaspace("always")),
        ("first", Value::Null, metaspace("first")),
        ("never", Value::Null, metaspace("never")),
        ("words", Value::Null, words),
        ("bytes", Value::Null, spelled),
    ]
}

/// Returns a vocabulary of a few letters with these special tokens, which are looked for in `normalized` text or in any.
fn tokenizer(
    (_, normalizer, pre_tokenizer): &(&str, Value, Value),
    specials: &[&str],
    normalized: bool,
) -> Tokenizer {
    let pieces = ["<unk>", "<s>", MARK, "▁", "Ġ", " ", "h", "e", "l", "o", "<", "/", "s", ">"];
    let merges = ["▁ h", "Ġ h", "e l", "l o", "▁h el", "▁ <", "Ġ <", "▁< /", "s >", "o <", "> h", "▁ ▁"];
    let merged = merges.map(|merge| merge.replace(' ', ""));
    let names = pieces.into_iter().chain(merged.iter().map(String::as_str));
    let vocabulary: serde_json::Map<String, Value> =
        names.zip(0..).map(|(text, id)| (text.to_owned(), json!(id))).collect();
    let added = |content: &&str| {
        json!({"id": vocabulary[*content], "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": normalized, "special": true})
    };
    let added: Vec<Value> = specials.iter().map(added).collect();
    let json = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "vocab": vocabulary, "merges": merges}});
    Tokenizer::from_json(json.to_string().as_bytes()).expect("a valid tokenizer")
}

fn literals(text: &str) -> Vec<Range<usize>> {
    text.match_indices(MARK).map(|(start, mark)| start..start + mark.len()).collect()
}

/// Returns texts with spaces, special tokens and unknown letters in all orders.
fn texts() -> Vec<String> {
    let parts = ["<s>", MARK, " ", "hello", "h", "o", "<", ">", "é"];
    let mut state = 11u64;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % limit
    };
    let mut text = |_: usize| -> String { (0..1 + below(9)).map(|_| parts[below(parts.len())]).collect() };
    (0..3_000).map(&mut text).collect()
}

#[test]
fn a_literal_has_the_tokens_of_text_that_is_not_special() {
    for normalized in [false, true] {
        for kind in kinds() {
            let name = kind.0;
            let (all, without) =
                (tokenizer(&kind, &["<s>", MARK], normalized), tokenizer(&kind, &["<s>"], normalized));
            for text in texts() {
                let found = all.encode_sections(&text, &literals(&text), Before::Nothing).unwrap();
                assert_eq!(found, without.encode(&text, Parse).unwrap(), "{name}, {normalized}: {text:?}");
            }
        }
    }
}

#[test]
fn a_section_from_the_cache_has_the_tokens_of_the_section() {
    for kind in kinds() {
        let all = tokenizer(&kind, &["<s>", MARK], false);
        let cache = SectionCache::new(1, 1 << 20);
        for text in texts() {
            for literals in [literals(&text), Vec::new()] {
                for before in [Before::Nothing, Before::SpecialToken, Before::Text] {
                    let found = all.encode_known_sections(&text, &literals, before, (&cache, "t")).unwrap();
                    let encoded = all.encode_sections(&text, &literals, before).unwrap();
                    assert_eq!(found, encoded, "{}, {literals:?}, {before:?}: {text:?}", kind.0);
                }
            }
        }
    }
}

#[test]
fn a_text_without_literals_has_the_tokens_of_the_library() {
    for normalized in [false, true] {
        for kind in kinds() {
            let all = tokenizer(&kind, &["<s>", MARK], normalized);
            for text in texts() {
                let found = all.encode_sections(&text, &[], Before::Nothing).unwrap();
                assert_eq!(found, all.encode(&text, Parse).unwrap(), "{}, {normalized}: {text:?}", kind.0);
            }
        }
    }
}

#[test]
fn the_rest_after_a_special_token_has_the_tokens_of_the_whole_text() {
    for kind in kinds() {
        let all = tokenizer(&kind, &["<s>", MARK], false);
        for text in texts().iter().filter(|text| text.contains("<s>")) {
            let (known, rest) = text.split_at(text.find("<s>").unwrap() + "<s>".len());
            let mut found = all.encode_sections(known, &literals(known), Before::Nothing).unwrap();
            found.extend(all.encode_sections(rest, &literals(rest), Before::SpecialToken).unwrap());
            let whole = all.encode_sections(text, &literals(text), Before::Nothing).unwrap();
            assert_eq!(found, whole, "{}: {text:?}", kind.0);
        }
    }
}

#[test]
fn text_that_continues_a_section_gets_no_space() {
    for kind in kinds() {
        let all = tokenizer(&kind, &["<s>", MARK], false);
        let ids =
            |tokens: &[&str]| -> Vec<u32> { tokens.iter().map(|text| all.token_id(text).unwrap()).collect() };
        let inside = all.encode_inside("lo</s>h").unwrap();
        // A vocabulary that splits at white space first has a space before each word.
        let expected: &[&str] = match kind.0 {
            "words" => &["▁", "lo", "<", "/", "s>", "h"],
            _ => &["lo", "<", "/", "s>", "h"],
        };
        assert_eq!(inside, ids(expected), "{}", kind.0);
        let begins = all.encode("lo", Literal).unwrap();
        let spaced = if kind.0 == "bytes" { ["Ġ", "lo"] } else { ["▁", "lo"] };
        let has_space = !["none", "never"].contains(&kind.0);
        assert_eq!(begins, if has_space { ids(&spaced) } else { ids(&["lo"]) }, "{}", kind.0);
        // The section after the special token begins as the library begins it.
        let continued = all.encode_sections("lo<s>lo", &[], Before::Text).unwrap();
        let mut expected = all.encode_inside("lo").unwrap();
        let whole = all.encode("<s>lo", Parse).unwrap();
        expected.extend(&whole);
        assert_eq!(continued, expected, "{}", kind.0);
        assert_eq!(whole.contains(&ids(&spaced)[0]), has_space && kind.0 != "first", "{}", kind.0);
    }
}

#[test]
fn unknown_text_beside_a_literal_stays_unknown() {
    let [prepend, ..] = kinds();
    let all = tokenizer(&prepend, &["<unk>", "<s>", MARK], false);
    let text = "é</s>é";
    let found = all.encode_sections(text, &literals(text), Before::Text).unwrap();
    let expected = ["<unk>", "<", "/", "s>", "<unk>"];
    assert_eq!(found, expected.map(|text| all.token_id(text).unwrap()));
}

#[test]
fn a_literal_is_neither_found_nor_merged_as_an_added_token() {
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special})
    };
    let json = json!({"version": "1.0", "added_tokens": [added(6, MARK, true), added(8, "as", false)],
        "model": {"type": "BPE", "merges": ["< /", "s >", "</ s>"],
            "vocab": {"<": 0, "/": 1, "s": 2, ">": 3, "</": 4, "s>": 5, "</s>": 6, "a": 7, "as": 8}}});
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).expect("a valid tokenizer");
    let encode =
        |literals: &[Range<usize>]| tokenizer.encode_sections("as</s>as", literals, Before::Nothing).unwrap();
    assert_eq!(encode(&[]), [8, 6, 8]);
    assert_eq!(encode(&literals("as</s>as")), [8, 0, 1, 2, 3, 8]);
    assert_eq!(encode(&[0..2, 2..8]), [7, 2, 0, 1, 2, 3, 7, 2]);
    // A mark that begins in a literal and ends after it is not one.
    assert_eq!(encode(std::slice::from_ref(&(0..4))), [7, 2, 0, 1, 2, 3, 8]);
}
