//! Tests that the text of a generation depends neither on how its bytes became tokens nor on where the tokens
//! were cut. Each case is identified by its seed, which a failure prints.

use std::sync::Arc;

use super::draws::Draws;
use super::fixture::byte_tokenizer;
use crate::detokenize::Detokenizer;

const CASES: u64 = 2000;

/// Returns bytes of whole and broken characters.
fn bytes(draws: &mut Draws) -> Vec<u8> {
    let pieces: [&[u8]; 14] = [
        b"a",
        b"b",
        b"ab",
        b"the ",
        b"\n",
        b"tool_call",
        "é".as_bytes(),
        "🐝".as_bytes(),
        "–".as_bytes(),
        b"\xC3",
        b"\xF0\x9F",
        b"\x9D",
        b"\xED\xA0\x80",
        b"hello",
    ];
    (0..draws.below(24)).flat_map(|_| draws.pick(&pieces).to_vec()).collect()
}

/// Returns tokens of exactly these bytes, each of random length.
fn tokens(bytes: &[u8], vocabulary: &[(Vec<u8>, u32)], draws: &mut Draws) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let fitting: Vec<_> = vocabulary.iter().filter(|(piece, _)| rest.starts_with(piece)).collect();
        let (piece, id) = draws.pick(&fitting);
        tokens.push(*id);
        rest = &rest[piece.len()..];
    }
    tokens
}

/// Returns the text before the stop string that is complete first, or among several of these, the one that
/// began first.
fn expected(text: &str, stops: &[String]) -> (String, Option<String>) {
    let found = stops.iter().filter_map(|stop| {
        let at = text.find(stop.as_str())?;
        Some((at + stop.len(), at, stop.clone()))
    });
    match found.min() {
        Some((_, at, stop)) => (text[..at].to_string(), Some(stop)),
        None => (text.to_string(), None),
    }
}

#[test]
fn text_depends_on_the_bytes_alone() {
    let tokenizers = [Arc::new(byte_tokenizer()), Arc::new(crate::chat::fixture::tokenizer())];
    let vocabularies = tokenizers.clone().map(|tokenizer| {
        let ordinary = (0..320).filter(|id| !tokenizer.is_special(*id));
        let pieces = ordinary.filter_map(|id| Some((tokenizer.token_bytes(id)?.to_vec(), id)));
        pieces.filter(|(piece, _)| !piece.is_empty()).collect::<Vec<_>>()
    });
    for seed in 0..CASES {
        let mut draws = Draws::new(seed);
        let bytes = bytes(&mut draws);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let letters: Vec<char> = text.chars().collect();
        let stops: Vec<String> = (0..draws.below(4))
            .map(|_| match letters.len() {
                0 => "never".to_string(),
                count => {
                    let begin = draws.below(count);
                    let stop =
                        letters[begin..count.min(begin + 1 + draws.below(5))].iter().collect::<String>();
                    if draws.one_in(3) { stop + "!" } else { stop }
                }
            })
            .collect();
        let wanted = expected(&text, &stops);
        for _ in 0..4 {
            let which = draws.below(2);
            let tokens = tokens(&bytes, &vocabularies[which], &mut draws);
            let mut detokenizer =
                Detokenizer::new(&tokenizers[which], std::sync::Arc::default(), stops.clone());
            let (mut joined, mut stopped) = (String::new(), None);
            for token in &tokens {
                let delta = detokenizer.push(*token);
                joined += &delta.text;
                stopped = stopped.or(delta.stopped);
                if stopped.is_some() {
                    break;
                }
            }
            if stopped.is_none() {
                let rest = detokenizer.finish();
                joined += &rest.text;
                stopped = rest.stopped;
            }
            assert_eq!((joined, stopped), wanted, "seed {seed}: {bytes:?} as {tokens:?} with {stops:?}");
        }
    }
}
