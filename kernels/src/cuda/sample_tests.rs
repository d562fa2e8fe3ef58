//! Compares the kernels of sampling with a plain reference in higher precision.

use super::*;
use crate::{
    cuda::{
        Activation,
        host::{self, Buffer},
    },
    random::Random,
};
use std::collections::BTreeSet;

/// A row with everything that its choice depends on.
#[derive(Clone)]
struct Case {
    row: SampleRow,
    logits: Vec<f32>,
    adjustments: Vec<Adjustment>,
    mask: Option<Vec<u32>>,
    pending: Option<u32>,
}

const GREEDY: SampleRow = SampleRow::GREEDY;

impl Case {
    fn of(row: SampleRow, logits: &[f32]) -> Self {
        Case { row, logits: logits.to_vec(), adjustments: Vec::new(), mask: None, pending: None }
    }

    /// Returns the tokens that a plain reference could choose, allowing for different rounding of sums and shares.
    fn choices(&self) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        for nudge in [-1e-6, 0.0, 1e-6] {
            for shift in [-1e-6, 0.0, 1e-6] {
                found.insert(self.choose(nudge, shift));
            }
        }
        found
    }

    fn choose(&self, nudge: f64, shift: f64) -> u32 {
        let adjusted = self.adjusted();
        let mut order: Vec<usize> =
            (0..adjusted.len()).filter(|token| adjusted[*token] > f64::NEG_INFINITY).collect();
        order.sort_by(|a, b| adjusted[*b].total_cmp(&adjusted[*a]).then(a.cmp(b)));
        let Some(&best) = order.first() else { return NONE };
        let row = &self.row;
        if row.temperature == 0.0 || row.top_k == 1 {
            return best as u32;
        }
        let weight = |token: usize| ((adjusted[token] - adjusted[best]) / f64::from(row.temperature)).exp();
        if row.top_k > 0 {
            order.truncate(row.top_k as usize);
        }
        if row.top_p < 1.0 {
            let total: f64 = order.iter().map(|token| weight(*token)).sum();
            let goal = (f64::from(row.top_p) + nudge) * total;
            let mut sum = 0.0;
            let reached = order.iter().position(|token| {
                sum += weight(*token);
                sum >= goal
            });
            order.truncate(reached.map_or(order.len(), |last| last + 1));
        }
        order.retain(|token| weight(*token) >= f64::from(row.min_p) * (1.0 + nudge));
        order.sort_unstable();
        let total: f64 = order.iter().map(|token| weight(*token)).sum();
        let mut left = (uniform(row.seed, row.step) + shift).clamp(0.0, 1.0 - 1e-12) * total;
        let drawn = order.iter().find(|token| {
            left -= weight(**token);
            left < 0.0
        });
        *drawn.or(order.last()).unwrap_or(&best) as u32
    }

    fn adjusted(&self) -> Vec<f64> {
        let row = &self.row;
        let mut logits: Vec<f64> = self
            .logits
            .iter()
            .map(|logit| if logit.is_nan() { f64::NEG_INFINITY } else { logit.min(f32::MAX).into() })
            .collect();
        let mut adjustments = self.adjustments.clone();
        if let Some(pending) = self.pending {
            match adjustments.iter_mut().find(|of| of.token == pending) {
                Some(of) => (of.occurrences, of.kind) = (of.occurrences + 1, of.kind | SEEN),
                None => {
                    adjustments.push(Adjustment { token: pending, occurrences: 1, bias: 0.0, kind: SEEN })
                }
            }
        }
        for of in &adjustments {
            let Some(logit) = logits.get_mut(of.token as usize) else { continue };
            if of.kind & SEEN != 0 {
                let penalty = f64::from(row.repetition_penalty);
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            if of.occurrences > 0 {
                let frequency = f64::from(of.occurrences) * f64::from(row.frequency_penalty);
                *logit -= frequency + f64::from(row.presence_penalty);
            }
            *logit += f64::from(of.bias);
            if of.kind & BANNED != 0 {
                *logit = f64::NEG_INFINITY;
            }
        }
        if let Some(mask) = &self.mask {
            for (token, logit) in logits.iter_mut().enumerate() {
                if mask.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0) {
                    *logit = f64::NEG_INFINITY;
                }
            }
        }
        logits
    }
}

fn uniform(seed: u64, step: u64) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(mix(seed) ^ step) >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws all cases in one batch, on a device of this many multiprocessors. Their masks must have the same length.
fn drawn_on(cases: &[Case], format: Logits, multiprocessors: u32) -> Vec<u32> {
    let vocabulary = cases[0].logits.len();
    let mask_words = cases.iter().filter_map(|case| case.mask.as_ref().map(Vec::len)).max().unwrap_or(0);
    let (mut rows, mut adjustments) = (Vec::new(), Vec::<Adjustment>::new());
    let (mut masks, mut pending) = (Vec::<u32>::new(), Vec::<u32>::new());
    // The rows of logits are stored in reverse order of the sampled rows, each before values that are no logits.
    let stride = vocabulary.next_multiple_of(8);
    let padding = std::iter::repeat_n(f32::MAX, stride - vocabulary);
    let padded = |case: &Case| case.logits.clone().into_iter().chain(padding.clone());
    let logits: Vec<f32> = cases.iter().rev().flat_map(padded).collect();
    for (index, case) in cases.iter().enumerate() {
        let first = adjustments.len() as u32;
        adjustments.extend(&case.adjustments);
        let mask = case.mask.as_ref().map_or(NONE, |mask| {
            masks.extend(mask);
            (masks.len() / mask_words) as u32 - 1
        });
        let pending = case.pending.map_or(NONE, |token| {
            pending.push(token);
            pending.len() as u32 - 1
        });
        rows.push(SampleRow {
            logits: (cases.len() - 1 - index) as u32,
            mask,
            first_adjustment: first,
            last_adjustment: adjustments.len() as u32,
            pending,
            ..case.row
        });
    }
    let narrow: Vec<u16> = match format {
        Logits::F32 => Vec::new(),
        Logits::Bf16 => logits.iter().map(|logit| Activation::Bf16.encode(*logit)).collect(),
        Logits::F16 => logits.iter().map(|logit| Activation::F16.encode(*logit)).collect(),
    };
    // Stored as 16-bit values, because `host::run` compares these.
    let mut adjusted = Buffer::new(vec![0; 2 * rows.len() * vocabulary]);
    let mut states = Buffer::new(vec![0; rows.len() * STATE_BYTES / 2]);
    let mut tokens = Buffer::new(vec![0; 2 * rows.len()]);
    let params = SampleParams {
        logits: if format == Logits::F32 { host::address(&logits) } else { host::address(&narrow) },
        rows: host::address(&rows),
        adjustments: host::address(&adjustments),
        masks: host::address(&masks),
        drawn: host::address(&pending),
        adjusted: adjusted.address(),
        states: states.address(),
        tokens: tokens.address(),
        vocabulary: vocabulary as u32,
        logits_stride: stride as u32,
        mask_words: mask_words as u32,
    };
    let choice = rows.iter().map(SampleRow::choice).max().unwrap_or_default();
    let launches =
        launches(&params, rows.len() as u32, choice, format, multiprocessors).expect("good shapes");
    for launch in launches.into_iter().flatten() {
        let written = &mut [tokens.values_mut(), adjusted.values_mut(), states.values_mut()];
        host::run(&launch, &params, written);
    }
    for state in states.values().chunks(STATE_BYTES / 2) {
        let (bins, arrivals) = (&state[..2 * 4 * BINS as usize], &state[state.len() - 4..state.len() - 2]);
        assert!(bins.iter().chain(arrivals).all(|word| *word == 0), "bins and arrivals must end as zeros");
    }
    tokens.values().chunks(2).map(|halves| u32::from(halves[0]) | u32::from(halves[1]) << 16).collect()
}

fn drawn(cases: &[Case], format: Logits) -> Vec<u32> {
    drawn_on(cases, format, 4)
}

#[track_caller]
fn check(cases: &[Case]) {
    for (index, (token, case)) in drawn(cases, Logits::F32).iter().zip(cases).enumerate() {
        let choices = case.choices();
        assert!(choices.contains(token), "case {index}: {token}, not one of {choices:?}: {:?}", case.row);
    }
}

fn normal(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| (0..6).map(|_| random.signed()).sum::<f32>() * 2.0).collect()
}

#[test]
fn truncated_draws_match_a_plain_reference() {
    let mut random = Random::fresh();
    let rows = [
        SampleRow { temperature: 1.0, ..GREEDY },
        SampleRow { temperature: 0.7, top_k: 40, ..GREEDY },
        SampleRow { temperature: 1.3, top_p: 0.9, ..GREEDY },
        SampleRow { temperature: 1.0, min_p: 0.05, ..GREEDY },
        SampleRow { temperature: 0.8, top_k: 20, top_p: 0.8, min_p: 0.1, ..GREEDY },
        SampleRow { temperature: 0.01, ..GREEDY },
        SampleRow { temperature: 100.0, top_k: 100_000, ..GREEDY },
        SampleRow { temperature: 1.0, top_p: 0.0, ..GREEDY },
        SampleRow { temperature: 1.0, top_k: 1, ..GREEDY },
        GREEDY,
    ];
    for vocabulary in [1, 31, 33, 1000, 5003] {
        let cases: Vec<Case> = rows
            .iter()
            .map(|row| {
                let row = SampleRow { seed: random.next_u64(), step: random.next_u64() % 100, ..*row };
                Case::of(row, &normal(&mut random, vocabulary))
            })
            .collect();
        check(&cases);
    }
}

#[test]
fn ties_keep_the_first_tokens() {
    let mut random = Random::fresh();
    // There are only seven distinct values, so that every cut falls among equal logits.
    let logits: Vec<f32> = (0..700).map(|_| (random.next_u64() % 7) as f32 / 2.0).collect();
    let mut cases = Vec::new();
    for (top_k, top_p) in [(3, 1.0), (150, 1.0), (0, 0.1), (0, 0.5), (0, 0.97), (150, 0.5), (150, 0.999)] {
        for step in 0..8 {
            let row = SampleRow { temperature: 1.0, top_k, top_p, step, seed: 3, ..GREEDY };
            cases.push(Case::of(row, &logits));
        }
    }
    check(&cases);
    let flat = vec![0.0; 1000];
    let half = |step| Case::of(SampleRow { temperature: 1.0, top_p: 0.5, step, ..GREEDY }, &flat);
    let tokens = drawn(&(0..64).map(half).collect::<Vec<_>>(), Logits::F32);
    assert!(tokens.iter().all(|token| *token < 500), "{tokens:?}");
}

#[test]
fn history_bias_bans_masks_and_pending_tokens_match_the_reference() {
    let mut random = Random::fresh();
    let vocabulary = 300;
    let mut cases = Vec::new();
    for index in 0..40 {
        let row = SampleRow {
            seed: random.next_u64(),
            temperature: if index % 2 == 0 { 0.0 } else { 0.9 },
            top_p: if index % 3 == 0 { 0.7 } else { 1.0 },
            frequency_penalty: random.signed() * 2.0,
            presence_penalty: random.signed() * 2.0,
            repetition_penalty: [0.5, 1.0, 1.5][index % 3],
            ..GREEDY
        };
        let mut case = Case::of(row, &normal(&mut random, vocabulary));
        let first = random.next_u64() % 7;
        case.adjustments = (0..60)
            .map(|i| Adjustment {
                // The last ones are outside the vocabulary.
                token: (first + 5 * i + (i / 58) * 1000) as u32,
                occurrences: (random.next_u64() % 3) as u32,
                bias: if i % 4 == 0 { random.signed() * 5.0 } else { 0.0 },
                kind: [0, SEEN, BANNED, SEEN | BANNED][random.next_u64() as usize % 4],
            })
            .map(|of| Adjustment { kind: of.kind | if of.occurrences > 0 { SEEN } else { 0 }, ..of })
            .collect();
        case.pending = [None, Some(case.adjustments[3].token), Some(4 + first as u32)][index % 3];
        if index % 4 < 2 {
            // The last mask words are missing, so their tokens are not allowed.
            case.mask = Some((0..8).map(|_| random.next_u64() as u32).collect());
        }
        cases.push(case);
    }
    check(&cases);
}

#[test]
fn nan_is_never_chosen_and_no_allowed_token_gives_none() {
    let case = |logits: &[f32]| Case::of(GREEDY, logits);
    let none = Case { mask: Some(vec![0]), ..case(&[1.0, 2.0, 3.0, 4.0]) };
    let cases = [
        case(&[1.0, f32::NAN, 3.0, 3.0]),
        case(&[1.0, f32::INFINITY, f32::MAX, 0.0]),
        case(&[f32::NAN, f32::NEG_INFINITY, f32::NAN, f32::NAN]),
        none,
    ];
    for format in [Logits::F32, Logits::Bf16, Logits::F16] {
        assert_eq!(drawn(&cases, format), [2, 1, NONE, NONE], "{format:?}");
    }
}

#[test]
fn a_draw_is_the_same_in_every_batch() {
    let mut random = Random::fresh();
    let row = SampleRow { temperature: 1.0, top_p: 0.95, seed: 9, ..GREEDY };
    let cases: Vec<Case> =
        (0..12).map(|step| Case::of(SampleRow { step, ..row }, &normal(&mut random, 2000))).collect();
    for format in [Logits::F32, Logits::Bf16, Logits::F16] {
        let together = drawn(&cases, format);
        let alone: Vec<u32> =
            cases.iter().flat_map(|case| drawn(std::slice::from_ref(case), format)).collect();
        assert_eq!(together, alone, "{format:?}");
    }
}

#[test]
fn a_draw_is_the_same_for_every_number_of_blocks() {
    let mut random = Random::fresh();
    let vocabulary = 9000;
    let logits = normal(&mut random, vocabulary);
    let flat: Vec<f32> = (0..vocabulary).map(|token| (token % 2) as f32).collect();
    let mut cases = Vec::new();
    for (top_k, top_p, min_p) in
        [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (5000, 0.5, 0.0), (0, 1.0, 0.02), (4700, 0.999, 0.0)]
    {
        for step in 0..2 {
            let row = SampleRow { temperature: 1.5, top_k, top_p, min_p, step, ..GREEDY };
            cases.extend([Case::of(row, &logits), Case::of(row, &flat)]);
        }
    }
    let pending =
        Case { pending: Some(4095), ..Case::of(SampleRow { presence_penalty: -9.0, ..GREEDY }, &flat) };
    cases.extend([Case::of(GREEDY, &logits), pending]);
    check(&cases);
    let alone = drawn_on(&cases, Logits::F32, 1);
    for multiprocessors in [30, 1000] {
        assert_eq!(drawn_on(&cases, Logits::F32, multiprocessors), alone, "{multiprocessors}");
    }
}

#[test]
fn few_rows_are_divided_and_many_are_not() {
    assert_eq!(blocks_per_row(1, 49_152, 132), 24);
    assert_eq!(blocks_per_row(64, 128_256, 132), 6);
    assert_eq!(blocks_per_row(MAX_ROWS, 128_256, 20), 1);
    assert_eq!(blocks_per_row(1, MAX_VOCABULARY, 1000), MAX_ROW_BLOCKS);
}

#[test]
fn a_vocabulary_whose_sums_could_overflow_is_rejected() {
    let none = Address::NONE;
    let params = SampleParams {
        logits: none,
        rows: none,
        adjustments: none,
        masks: none,
        drawn: none,
        adjusted: none,
        states: none,
        tokens: none,
        vocabulary: (1 << 18) + 1,
        logits_stride: 1 << 19,
        mask_words: 0,
    };
    assert!(
        launches(&params, 1, Choice::Highest, Logits::F32, 4)
            .expect_err("too many")
            .to_string()
            .contains("262145")
    );
    let params = SampleParams { vocabulary: 100, logits_stride: 96, ..params };
    let error =
        launches(&params, 1, Choice::Highest, Logits::F32, 4).expect_err("rows would overlap").to_string();
    assert!(error.contains("logits_stride is 96") && error.contains("at least the vocabulary"), "{error}");
}
