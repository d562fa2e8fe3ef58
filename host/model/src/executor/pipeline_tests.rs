//! Tests of the division of layers and steps: nothing is lost, and no better division exists.

use super::*;
use crate::batch::PageId;

fn cost(fixed_s: f64, per_row_s: f64) -> Cost {
    Cost { fixed_s, per_row_s }
}

/// Returns the smallest possible time of the slowest stage, by trying every division.
fn best(seconds: &[f64], stages: usize) -> f64 {
    if stages == 1 {
        return seconds.iter().sum();
    }
    (1..=seconds.len() + 1 - stages)
        .map(|first| seconds[..first].iter().sum::<f64>().max(best(&seconds[first..], stages - 1)))
        .fold(f64::INFINITY, f64::min)
}

#[test]
fn no_other_division_has_a_faster_slowest_stage() {
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / 1e6 + 0.1
    };
    for layers in 1..=9 {
        for count in 1..=layers {
            let seconds: Vec<f64> = (0..layers).map(|_| random()).collect();
            let (entry, exit) = (random(), 5.0 * random());
            let model = ModelCost {
                entry: cost(entry, 0.0),
                layers: seconds.iter().map(|layer| cost(*layer, 0.0)).collect(),
                exit: cost(exit, 0.0),
            };
            let ranges = stages(&model, count);
            let mut whole = seconds.clone();
            whole[0] += entry;
            whole[layers - 1] += exit;
            assert_eq!(ranges.len(), count);
            assert_eq!((ranges[0].start, ranges[count - 1].end), (0, layers));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
            assert!(ranges.iter().all(|range| !range.is_empty()), "{ranges:?}");
            let slowest = ranges.iter().map(|range| whole[range.clone()].iter().sum()).fold(0.0, f64::max);
            assert!((slowest - best(&whole, count)).abs() < 1e-9, "{ranges:?} of {whole:?}");
        }
    }
}

#[test]
fn a_heavy_head_makes_the_last_stage_short() {
    let model = ModelCost { entry: cost(0.0, 0.0), layers: vec![cost(1.0, 0.0); 12], exit: cost(3.0, 0.0) };
    assert_eq!(stages(&model, 3), [0..5, 5..10, 10..12]);
}

#[test]
fn the_number_of_micro_batches_balances_idle_time_and_weight_reads() {
    let (reading, computing, both) = (cost(1.0, 0.0), cost(0.0, 1.0), cost(8.0, 1.0));
    assert_eq!(micro_batches(&reading, 4, 512), 1, "more passes only read the weights again");
    assert_eq!(micro_batches(&computing, 4, 512), 16, "only the idle time at both ends counts");
    assert_eq!(micro_batches(&computing, 4, 3), 3, "no micro-batch is empty");
    assert_eq!(micro_batches(&computing, 1, 512), 1, "one stage is never idle");
    assert_eq!(micro_batches(&both, 2, 1), 1);
    let few = micro_batches(&both, 2, 32);
    assert!((2..8).contains(&few), "{few}");
}

#[test]
fn micro_batches_in_order_make_up_the_step() {
    let rows = |tokens: std::ops::Range<u32>, start, logits| BatchSequence {
        tokens: tokens.collect(),
        start,
        pages: vec![PageId(start as u32)],
        logits,
    };
    let batch = Batch {
        sequences: vec![
            rows(0..1, 5, LogitsWanted::Last),
            rows(10..27, 0, LogitsWanted::Last),
            rows(30..33, 9, LogitsWanted::All),
            rows(40..42, 3, LogitsWanted::None),
            rows(50..59, 40, LogitsWanted::Tail(4)),
        ],
    };
    // Token, position and page of every row, and whether its logits are requested.
    let described = |batches: &[Batch]| -> Vec<(u32, usize, PageId, bool)> {
        let sequences = batches.iter().flat_map(|batch| &batch.sequences);
        let describe = |rows: &BatchSequence| {
            let (start, page, count) = (rows.start, rows.pages[0], rows.tokens.len());
            let wanted_from = count - rows.logit_rows();
            let tokens = rows.tokens.clone().into_iter().enumerate();
            tokens.map(move |(at, token)| (token, start + at, page, at >= wanted_from)).collect::<Vec<_>>()
        };
        sequences.flat_map(describe).collect()
    };
    let whole = described(std::slice::from_ref(&batch));
    assert_eq!(whole.len(), 32);
    for count in [1, 2, 3, 5, 23, 32, 99] {
        let micro_batches = split(&batch, count);
        let sizes: Vec<usize> = micro_batches.iter().map(Batch::token_count).collect();
        assert_eq!(sizes.len(), count.min(32));
        assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
        assert_eq!(described(&micro_batches), whole, "{count}");
    }
}
