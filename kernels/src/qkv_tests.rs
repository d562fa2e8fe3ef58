//! Compares norms, rotation and storage with a double-precision reference, over sequences of different lengths in
//! shuffled pages.

use super::*;
use crate::kv::KvFormat;
use crate::random::Random;
use crate::rope::rotary_table;

/// Returns one head, normalized and rotated.
fn expected_head(head: &[f32], norm: Option<Norm<'_>>, angles: &[f64], pairing: Pairing) -> Vec<f64> {
    let mut values: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
    if let Some(norm) = norm {
        let squares: f64 = values.iter().map(|x| x * x).sum();
        let rms = (squares / values.len() as f64 + f64::from(norm.epsilon)).sqrt();
        values.iter_mut().zip(norm.weight).for_each(|(x, weight)| *x *= f64::from(*weight) / rms);
    }
    let half = values.len() / 2;
    for (at, angle) in angles.iter().enumerate() {
        let (a, b) = match pairing {
            Pairing::Halves => (at, at + half),
            Pairing::Interleaved => (2 * at, 2 * at + 1),
        };
        let (x, y) = (values[a], values[b]);
        values[a] = x * angle.cos() - y * angle.sin();
        values[b] = x * angle.sin() + y * angle.cos();
    }
    values
}

/// Returns the index of a key's dimension among the values of the layer. `offset` counts the heads of all pages.
fn key_at(kv: &KvLayer, offset: usize, d: usize, slot: usize) -> usize {
    match kv.format {
        KvFormat::Bf16 => ((offset * kv.head_size() + d) / 2 * 16 + slot) * 2 + d % 2,
        _ => (offset * kv.head_size() + d) * 16 + slot,
    }
}

/// Returns the index of a value's column among the values of the layer.
fn value_at(kv: &KvLayer, offset: usize, slot: usize, d: usize) -> usize {
    match kv.format {
        KvFormat::Bf16 => (offset * 16 + slot / 2 * 2) * kv.value_stride + 2 * d + slot % 2,
        _ => (offset * 16 + slot) * kv.value_stride + d,
    }
}

/// Returns a stored value. `index` counts values; `scale` points to the scale of its head and token.
fn stored(kv: &KvLayer, bytes: &[u8], index: usize, scale: *const f32) -> f64 {
    match kv.format {
        // SAFETY: the pointer is to one of the layer's scales, and no thread writes it.
        KvFormat::I8 => f64::from(bytes[index] as i8) * f64::from(unsafe { *scale }),
        KvFormat::F32 => f64::from(f32::from_ne_bytes(bytes[index * 4..][..4].try_into().unwrap())),
        KvFormat::F16 => half::f16::from_ne_bytes(bytes[index * 2..][..2].try_into().unwrap()).to_f64(),
        KvFormat::Bf16 => half::bf16::from_ne_bytes(bytes[index * 2..][..2].try_into().unwrap()).to_f64(),
    }
}

struct Case {
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    normed: bool,
    /// (start, tokens) of each sequence.
    sequences: Vec<(usize, usize)>,
}

fn check_case(random: &mut Random, isa: Isa, format: KvFormat, pairing: Pairing, case: &Case) {
    let Case { heads, kv_heads, head_size: size, .. } = *case;
    let pool = WorkerPool::new(3).unwrap();
    let tokens: usize = case.sequences.iter().map(|(_, tokens)| tokens).sum();
    let page_count: usize = case.sequences.iter().map(|(start, tokens)| (start + tokens).div_ceil(16)).sum();
    let mut kv = KvLayer::new(format, page_count, kv_heads, size).unwrap();
    let mut free: Vec<u32> = (0..page_count as u32).collect();
    free.sort_by_cached_key(|_| random.next_u64());
    let pages: Vec<Vec<u32>> = case
        .sequences
        .iter()
        .map(|(start, tokens)| free.split_off(free.len() - (start + tokens).div_ceil(16)))
        .collect();
    let mut row = 0;
    let sequences: Vec<AttentionSequence> = case
        .sequences
        .iter()
        .zip(&pages)
        .map(|(&(start, tokens), pages)| {
            row += tokens;
            AttentionSequence { row: row - tokens, tokens, start, pages: pages.clone() }
        })
        .collect();
    let positions: Vec<usize> =
        case.sequences.iter().flat_map(|(start, tokens)| *start..start + tokens).collect();
    let frequencies: Vec<f32> = (0..size / 2).map(|at| 0.1f32.powf(at as f32 * 4.0 / size as f32)).collect();
    let mut table = Vec::new();
    rotary_table(&positions, &frequencies, &mut table);
    let (query_weight, key_weight) = (random.floats(size), random.floats(size));
    let norm = |weight| Norm { weight, epsilon: 1e-5 };
    let norms = case.normed.then(|| (norm(&query_weight[..]), norm(&key_weight[..])));
    let stride = (heads + 2 * kv_heads) * size;
    let input = random.floats(tokens * stride);
    let mut rows = input.clone();
    let params = HeadParams { heads, rotated: size, pairing, norms };
    rotate_and_store(&pool, isa, params, &mut rows, &table, &sequences, &mut kv).unwrap();

    // The rounding of values below 1. Rotated and normalized values are below 3.
    let rounding = match format {
        KvFormat::I8 => 1.0 / 127.0,
        KvFormat::Bf16 => 1.0 / 256.0,
        KvFormat::F32 | KvFormat::F16 => 1e-3,
    };
    for (sequence, pages) in sequences.iter().zip(&pages) {
        for token in 0..sequence.tokens {
            let (row, position) = (sequence.row + token, sequence.start + token);
            let angles: Vec<f64> = frequencies.iter().map(|f| position as f64 * f64::from(*f)).collect();
            for head in 0..heads + 2 * kv_heads {
                let column = row * stride + head * size;
                let found = &rows[column..][..size];
                let kv_head = head.saturating_sub(heads) % kv_heads;
                let offset = pages[position / 16] as usize * kv_heads + kv_head;
                let scales = kv.scales(offset * 16 + position % 16);
                if head >= heads + kv_heads {
                    assert_eq!(found, &input[column..][..size], "values are not changed");
                    for (d, value) in found.iter().enumerate() {
                        let at = value_at(&kv, offset, position % 16, d);
                        let kept = stored(&kv, kv.values.as_slice(), at, scales.1);
                        assert!((kept - f64::from(*value)).abs() < rounding, "{isa} {format:?}");
                    }
                    continue;
                }
                let norm = norms.map(|(query, key)| if head < heads { query } else { key });
                let expected = expected_head(&input[column..][..size], norm, &angles, pairing);
                for (d, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < 1e-5, "{isa} {pairing:?} position {position} head {head}: {error}");
                    if head >= heads {
                        let at = key_at(&kv, offset, d, position % 16);
                        let kept = stored(&kv, kv.keys.as_slice(), at, scales.0);
                        assert!(
                            (kept - expected).abs() < 3.0 * rounding,
                            "{isa} {format:?}: {kept} for {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn heads_are_normalized_rotated_and_stored_in_every_tier_and_format() {
    let mut random = Random::fresh();
    let cases = [
        Case {
            heads: 9,
            kv_heads: 3,
            head_size: 64,
            normed: false,
            sequences: vec![(0, 37), (50, 1), (15, 3)],
        },
        Case { heads: 4, kv_heads: 2, head_size: 24, normed: true, sequences: vec![(3, 1)] },
        Case { heads: 2, kv_heads: 1, head_size: 128, normed: true, sequences: vec![(16, 70), (7, 40)] },
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for format in KvFormat::of_tier(isa) {
            for pairing in [Pairing::Halves, Pairing::Interleaved] {
                cases.iter().for_each(|case| check_case(&mut random, isa, format, pairing, case));
            }
        }
    }
}

#[test]
fn other_slots_are_untouched_and_nonfinite_values_are_not_stored() {
    let pool = WorkerPool::new(1).unwrap();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for format in KvFormat::of_tier(isa) {
            let mut kv = KvLayer::new(format, 1, 1, 20).unwrap();
            let mut put = |start: usize, value: f32| {
                let params = HeadParams { heads: 1, rotated: 20, pairing: Pairing::Halves, norms: None };
                let sequence = AttentionSequence { row: 0, tokens: 1, start, pages: vec![0] };
                let table = [[1.0; 10], [0.0; 10]].concat();
                rotate_and_store(&pool, isa, params, &mut [value; 60], &table, &[sequence], &mut kv).unwrap();
            };
            put(3, 127.0);
            put(4, f32::NAN);
            put(5, f32::NEG_INFINITY);
            for d in 0..20 {
                let key =
                    |slot: usize| stored(&kv, kv.keys.as_slice(), key_at(&kv, 0, d, slot), kv.scales(slot).0);
                let value = |slot: usize| {
                    stored(&kv, kv.values.as_slice(), value_at(&kv, 0, slot, d), kv.scales(slot).1)
                };
                assert_eq!(
                    (key(3), value(3), key(2), value(6)),
                    (127.0, 127.0, 0.0, 0.0),
                    "{isa} {format:?}"
                );
                assert!(
                    [key(4), value(4), key(5), value(5)].iter().all(|x| x.is_finite()),
                    "{isa} {format:?}"
                );
            }
        }
    }
}

#[test]
fn rows_and_pages_that_are_missing_or_shared_are_errors() {
    let pool = WorkerPool::new(1).unwrap();
    let mut pairs = KvLayer::new(KvFormat::Bf16, 1, 1, 16).unwrap();
    let params = HeadParams { heads: 1, rotated: 16, pairing: Pairing::Halves, norms: None };
    let refused = rotate_and_store(&pool, Isa::Portable, params, &mut [], &[], &[], &mut pairs);
    assert_eq!(refused, Err(KernelError::Tier { op: OP, isa: Isa::Portable }));
    let mut kv = KvLayer::new(KvFormat::F16, 2, 1, 16).unwrap();
    let sequence =
        |row, tokens, start, pages: &[u32]| AttentionSequence { row, tokens, start, pages: pages.to_vec() };
    let mut run = |rows: usize, sequences: &[AttentionSequence]| {
        let params = HeadParams { heads: 1, rotated: 16, pairing: Pairing::Halves, norms: None };
        let (mut values, table) = (vec![0.0; rows * 48], vec![0.0; rows * 16]);
        rotate_and_store(&pool, Isa::detect(), params, &mut values, &table, sequences, &mut kv)
    };
    assert_eq!(run(2, &[sequence(0, 1, 0, &[0]), sequence(1, 1, 0, &[1])]), Ok(()));
    let shared = run(2, &[sequence(0, 1, 0, &[1]), sequence(1, 1, 3, &[1])]);
    assert_eq!(shared, Err(KernelError::Conflict { op: OP, what: "page", index: 1 }));
    let twice = run(2, &[sequence(0, 2, 0, &[0]), sequence(1, 1, 0, &[1])]);
    assert_eq!(twice, Err(KernelError::Conflict { op: OP, what: "row", index: 1 }));
    assert!(run(1, &[sequence(0, 1, 0, &[2])]).is_err(), "no such page");
    assert!(run(1, &[sequence(0, 1, 16, &[0])]).is_err(), "a position without a page");
    assert!(run(1, &[sequence(1, 1, 0, &[0])]).is_err(), "no such row");
}

#[test]
fn only_the_first_values_of_a_head_rotate_if_fewer_are_asked() {
    let pool = WorkerPool::new(1).unwrap();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        let mut kv = KvLayer::new(KvFormat::F32, 1, 1, 16).unwrap();
        let mut rows: Vec<f32> = (0..48).map(|at| at as f32).collect();
        // A quarter of a turn for the four pairs of the first eight values.
        let table = [[0.0; 4], [1.0; 4]].concat();
        let params = HeadParams { heads: 1, rotated: 8, pairing: Pairing::Halves, norms: None };
        let sequence = AttentionSequence { row: 0, tokens: 1, start: 0, pages: vec![0] };
        rotate_and_store(&pool, isa, params, &mut rows, &table, std::slice::from_ref(&sequence), &mut kv)
            .unwrap();
        assert_eq!(rows[..8], [-4.0, -5.0, -6.0, -7.0, 0.0, 1.0, 2.0, 3.0], "{isa}");
        assert_eq!(rows[8..16], [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0], "{isa}");
        assert_eq!(rows[16..20], [-20.0, -21.0, -22.0, -23.0], "{isa}");
        assert_eq!(rows[24], 24.0, "{isa}");
        let too_many = HeadParams { rotated: 18, ..params };
        let table = [0.0; 18];
        let sequences = &[sequence];
        assert!(rotate_and_store(&pool, isa, too_many, &mut rows, &table, sequences, &mut kv).is_err());
    }
}
