//! Tests of how tokens are chosen.

use super::*;

fn row<'a>(sampling: &'a Sampling, step: u64) -> SampleRow<'a> {
    SampleRow { seed: 7, step, ..SampleRow::plain(0, sampling) }
}

fn chosen(logits: &[f32], row: &SampleRow<'_>) -> Result<u32, ModelError> {
    choose(logits, highest(logits).expect("numbers"), row)
}

fn drawn(logits: &[f32], sampling: &Sampling, draws: u64) -> Vec<u32> {
    (0..draws).map(|step| chosen(logits, &row(sampling, step)).unwrap()).collect()
}

#[test]
fn greedy_takes_the_first_highest_logit_and_rejects_nan() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    assert_eq!(chosen(&[1.0, 2.0, 3.0, 3.0], &row(&greedy, 0)).unwrap(), 2);
    let row_of = LogitRow::Sample(row(&greedy, 0));
    let error = draw(Isa::detect(), &[1.0, f32::NAN, 3.0], &row_of).unwrap_err();
    assert!(matches!(error, ModelError::NotNumbers { row: 0, token: 1 }), "{error}");
    assert_eq!(chosen(&[1.0, f32::INFINITY], &row(&greedy, 0)).unwrap(), 1);
    assert!(chosen(&[f32::NEG_INFINITY; 2], &row(&greedy, 0)).is_err());
}

#[test]
fn the_first_highest_logit_is_found_wherever_it_is() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    // Chunks of 16 and 64 logits are compared at once.
    for length in [1, 15, 16, 17, 63, 64, 65, 200] {
        for token in 0..length {
            let mut logits = vec![-3.0; length];
            logits[token] = -0.5;
            logits[length - 1] = -0.5;
            assert_eq!(highest(&logits), Ok(-0.5), "{token} of {length}");
            assert_eq!(chosen(&logits, &row(&greedy, 0)).unwrap() as usize, token, "of {length}");
            logits[token] = f32::NAN;
            assert_eq!(highest(&logits), Err(token), "of {length}");
        }
    }
}

#[test]
fn draws_follow_the_distribution_and_repeat_with_the_seed() {
    let sampling = Sampling::default();
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let tokens = drawn(&logits, &sampling, 20_000);
    for (token, share) in [(0, 0.5), (1, 0.3), (2, 0.2)] {
        let found = tokens.iter().filter(|drawn| **drawn == token).count() as f64 / 20_000.0;
        assert!((found - share).abs() < 0.02, "{token}: {found}");
    }
    assert_eq!(tokens, drawn(&logits, &sampling, 20_000));
}

#[test]
fn truncation_keeps_only_the_likely_tokens() {
    let logits: Vec<f32> = (0..1000).map(|token| if token < 3 { 10.0 - token as f32 } else { 0.0 }).collect();
    for (sampling, most) in [
        (Sampling { top_k: 2, ..Sampling::default() }, 1),
        (Sampling { top_p: 0.5, ..Sampling::default() }, 0),
        (Sampling { top_p: 0.8, temperature: 1.0, ..Sampling::default() }, 1),
        (Sampling { min_p: 0.2, ..Sampling::default() }, 1),
        (Sampling { temperature: 0.01, ..Sampling::default() }, 0),
    ] {
        assert_eq!(drawn(&logits, &sampling, 500).into_iter().max(), Some(most), "{sampling:?}");
    }
    let flat = vec![0.0; 1000];
    let half = Sampling { top_p: 0.5, ..Sampling::default() };
    assert!(drawn(&flat, &half, 2000).into_iter().all(|token| token < 500));
}

#[test]
fn masks_bans_bias_and_penalties_decide() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let logits = [4.0, 3.0, 2.0, 1.0];
    let masked = SampleRow { mask: Some(&[0b1100]), ..row(&greedy, 0) };
    assert_eq!(chosen(&logits, &masked).unwrap(), 2);
    let banned = SampleRow { banned: &[2, 99], ..masked.clone() };
    assert_eq!(chosen(&logits, &banned).unwrap(), 3);
    assert!(chosen(&logits, &SampleRow { mask: Some(&[]), ..masked }).is_err());

    let biased = Sampling { logit_bias: vec![(3, 10.0), (1000, 1.0)], ..greedy.clone() };
    assert_eq!(chosen(&logits, &row(&biased, 0)).unwrap(), 3);
    let frequent = Sampling { frequency_penalty: 0.6, ..greedy.clone() };
    assert_eq!(chosen(&logits, &SampleRow { output: &[0, 0], ..row(&frequent, 0) }).unwrap(), 1);
    let present = Sampling { presence_penalty: 0.9, ..greedy.clone() };
    assert_eq!(chosen(&logits, &SampleRow { output: &[0, 0], ..row(&present, 0) }).unwrap(), 0);
    let repeated = Sampling { repetition_penalty: 2.0, ..greedy };
    assert_eq!(chosen(&logits, &SampleRow { prompt: &[0], ..row(&repeated, 0) }).unwrap(), 1);
}

#[test]
fn the_tokens_that_a_sequence_has_marked_and_counted_change_no_logit() {
    let sampling = Sampling {
        repetition_penalty: 1.7,
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        ..Sampling::default()
    };
    let logits: Vec<f32> = (0..100).map(|token| (token as f32 * 0.7).sin()).collect();
    let bits =
        |row: &SampleRow<'_>| -> Vec<u32> { adjust(&logits, row).into_iter().map(f32::to_bits).collect() };
    // Some tokens are outside the vocabulary.
    let tokens: Vec<u32> = (0..60).map(|at| at * at % 120).collect();
    for vocabulary in [100, 110] {
        let (mut seen, mut occurrences) = (SeenTokens::new(vocabulary), Occurrences::default());
        for known in [8, 9, 40, 60] {
            seen.mark(&tokens[..known]);
            occurrences.count(&tokens[8..known]);
            // The rows of a draft come after more tokens than are marked.
            for end in known..=tokens.len() {
                let fresh = SampleRow { prompt: &tokens[..8], output: &tokens[8..end], ..row(&sampling, 0) };
                let kept = SampleRow { seen: Some(&seen), occurrences: Some(&occurrences), ..fresh.clone() };
                assert_eq!(bits(&kept), bits(&fresh), "{known} of {end}, {vocabulary}");
            }
        }
    }
}

#[test]
fn counted_tokens_of_an_output_are_not_read_again() {
    let sampling = Sampling { frequency_penalty: 0.3, presence_penalty: 0.2, ..Sampling::default() };
    let logits: Vec<f32> = (0..100).map(|token| (token as f32 * 0.7).sin()).collect();
    let tokens: Vec<u32> = (0..60).map(|at| at * at % 120).collect();
    let others: Vec<u32> = [vec![5; 50], tokens[50..].to_vec()].concat();
    let mut occurrences = Occurrences::default();
    occurrences.count(&tokens[..50]);
    for end in 50..=60 {
        let fresh = SampleRow { output: &tokens[..end], ..row(&sampling, 0) };
        let kept = SampleRow { output: &others[..end], occurrences: Some(&occurrences), ..fresh.clone() };
        assert_eq!(adjust(&logits, &kept), adjust(&logits, &fresh), "{end}");
    }
}

#[test]
fn logprobs_come_from_the_raw_logits_and_are_sorted() {
    let sampling = Sampling { temperature: 0.0, logit_bias: vec![(0, 100.0)], ..Sampling::default() };
    let logits = [0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()];
    let sample = SampleRow { top_logprobs: Some(2), ..row(&sampling, 0) };
    let out = draw(Isa::detect(), &logits, &LogitRow::Sample(sample)).unwrap();
    assert_eq!(out.token, 0);
    assert!((out.logprob.unwrap() - 0.2f32.ln()).abs() < 1e-5);
    assert_eq!(out.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 2]);
    let score = |target| LogitRow::Score(ScoreRow { row: 0, target, top: 0 });
    assert!(draw(Isa::detect(), &logits, &score(3)).is_err());
    assert!((draw(Isa::detect(), &logits, &score(2)).unwrap().logprob.unwrap() - 0.3f32.ln()).abs() < 1e-5);
}

#[test]
fn validation_names_the_setting_that_is_out_of_range() {
    for (sampling, name) in [
        (Sampling { temperature: f32::NAN, ..Sampling::default() }, "temperature"),
        (Sampling { top_p: 1.5, ..Sampling::default() }, "top_p"),
        (Sampling { repetition_penalty: 0.0, ..Sampling::default() }, "repetition_penalty"),
        (Sampling { logit_bias: vec![(1, f32::INFINITY)], ..Sampling::default() }, "logit_bias"),
    ] {
        assert!(sampling.validate().unwrap_err().starts_with(name));
    }
    assert_eq!(Sampling::default().validate(), Ok(()));
}
