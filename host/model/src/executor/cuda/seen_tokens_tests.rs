//! Tests that draws are the same with the tokens that a sequence has marked as without.

use super::*;
use crate::seen_tokens::SeenTokens;

#[test]
fn rows_of_a_sequence_that_marks_its_tokens_are_drawn_as_without_marks() {
    let (ids, _) = expected("llama-gqa");
    let mut executor = load("llama-gqa", cuda_options(), "0");
    let sampling = Sampling { repetition_penalty: 1.8, temperature: 0.9, ..Sampling::default() };
    let mut seen = SeenTokens::new(executor.limits.vocabulary_size);
    for known in 10..20 {
        // A step checks a draft of three tokens, of which one is accepted.
        let drafted = &ids[known - 1..known + 3];
        let batch = match known {
            10 => sequence(&ids[..13], 0, 9, LogitsWanted::Tail(4)),
            _ => sequence(drafted, known - 1, 9, LogitsWanted::Tail(4)),
        };
        executor.forward(&Batch { sequences: vec![batch] }).unwrap();
        let new = if known == 10 { 10 } else { 1 };
        assert_eq!(seen.mark(&ids[..known]), new);
        let (mut kept, mut fresh) = (Vec::new(), Vec::new());
        for row in 0..4 {
            let (prompt, output) = ids[..known + row].split_at(10);
            let step = (known + row) as u64;
            let plain = SampleRow { seed: 5, step, prompt, output, ..SampleRow::plain(row, &sampling) };
            kept.push(LogitRow::Sample(SampleRow { seen: Some(&seen), ..plain.clone() }));
            fresh.push(LogitRow::Sample(plain));
        }
        assert_eq!(executor.sample(&kept).unwrap(), executor.sample(&fresh).unwrap(), "{known} tokens");
    }
}
