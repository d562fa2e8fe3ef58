//! Checks where the arrays of a step are, and that steps of one shape have them at the same offsets.

use super::*;
use crate::batch::{LogitsWanted, PageId};

fn cuts() -> Cuts {
    Cuts {
        windows: vec![None, Some(4)],
        blocks: Blocks { at_once: 8, per_split: 2, rows: 4, shared_rows: 16 },
        most_shape_rows: 8,
        spare_page: 99,
        attention: Attention::Split,
    }
}

fn sequence(start: usize, tokens: &[u32], logits: LogitsWanted) -> BatchSequence {
    let pages = (0..(start + tokens.len()).div_ceil(PAGE_TOKENS) as u32).map(|page| PageId(10 + page));
    BatchSequence { tokens: tokens.to_vec(), start, pages: pages.collect(), logits }
}

fn words(bytes: &[u8], at: &Range<usize>) -> Vec<u32> {
    bytes[at.clone()].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn decoded_rows_come_first_and_logits_keep_the_order_of_the_batch() {
    let batch = Batch {
        sequences: vec![
            sequence(15, &[1; 17], LogitsWanted::Tail(2)),
            sequence(40, &[7], LogitsWanted::Last),
            sequence(14, &[4, 5, 6, 7, 8], LogitsWanted::None),
        ],
    };
    let mut bytes = Vec::new();
    let step = cuts().pack(&batch, true, &mut bytes);
    assert_eq!((step.rows, step.decoded, step.sequences), (23, 6, 3));
    assert_eq!((step.logit_rows, step.shape), (3, None));
    assert_eq!(words(&bytes, &step.tokens)[..8], [7, 4, 5, 6, 7, 8, 1, 1]);
    assert_eq!(words(&bytes, &step.positions)[..8], [40, 14, 15, 16, 17, 18, 15, 16]);
    let slots: Vec<u32> = words(&bytes, &step.slots).chunks(2).map(|pair| pair[0]).collect();
    assert_eq!(slots[..4], [12 * 16 + 8, 10 * 16 + 14, 10 * 16 + 15, 11 * 16]);
    assert_eq!(words(&bytes, step.wanted.as_ref().unwrap()), [21, 22, 0]);
    assert_eq!(words(&bytes, &step.tiles), [6, 17, 15, 2, 0, u32::MAX, 6, 0]);
    assert_eq!(words(&bytes, &step.page_tables)[..4], [10, 11, 12, 99]);
    // Five rows are two tiles, each with one split.
    let [whole, windowed] = [0, 1].map(|plan| words(&bytes, &step.plans[plan].splits));
    let splits: Vec<_> = whole.chunks(11).map(|split| (split[..6].to_vec(), split[8])).collect();
    let expected = [[0, 0, 1, 40, 0, 41], [1, 1, 4, 14, 0, 18], [1, 5, 1, 18, 0, 19]];
    assert_eq!(splits, expected.map(|split| (split.to_vec(), 1)));
    let keys: Vec<_> = windowed.chunks(11).map(|split| [split[4], split[5]]).collect();
    assert_eq!(keys, [[37, 41], [11, 18], [15, 19]]);
    assert!(bytes.len() <= cuts().most_bytes(23, 3, 3, 3));
}

#[test]
fn steps_of_one_shape_have_their_arrays_at_the_same_offsets() {
    let step = |starts: &[usize]| {
        let sequences = starts.iter().map(|start| sequence(*start, &[5], LogitsWanted::Last)).collect();
        let mut bytes = Vec::new();
        (cuts().pack(&Batch { sequences }, true, &mut bytes), bytes)
    };
    let (three, bytes) = step(&[0, 900, 33]);
    let (four, _) = step(&[1, 2, 3, 1000]);
    assert_eq!(three.shape, Some(DecodeShape { rows: 4, stride: 64 }));
    assert_eq!((three.rows, three.decoded), (4, 4));
    assert_eq!(Step { logit_rows: 4, ..three.clone() }, four);
    // The padding row writes to a page that is never read, and sees only what it writes.
    assert_eq!(words(&bytes, &three.slots)[6..], [99 * 16, 0]);
    assert_eq!(words(&bytes, &three.page_tables)[3 * 64..], [99; 64]);
    let splits = words(&bytes, &three.plans[0].splits);
    assert!(splits.chunks(11).any(|split| split[..6] == [3, 3, 1, 0, 0, 1]), "{splits:?}");
    let (longer, _) = step(&[64 * 16, 1, 2, 3]);
    assert_eq!(longer.shape, Some(DecodeShape { rows: 4, stride: 128 }));
    // Drafts have the shape of as many rows.
    let drafts = |tokens: &[usize]| {
        let draft = |count: &usize| sequence(100, &vec![5; *count], LogitsWanted::Tail(*count));
        let mut bytes = Vec::new();
        (cuts().pack(&Batch { sequences: tokens.iter().map(draft).collect() }, true, &mut bytes), bytes)
    };
    let (drafted, bytes) = drafts(&[1, 3]);
    assert_eq!(Step { logit_rows: 4, ..drafted }, four);
    assert!(bytes.len() <= cuts().most_bytes(8, 8, 8, 8));
    assert_eq!(drafts(&[5, 4]).0.shape, None, "such a step has more rows than any shape");
    assert_eq!(drafts(&[4, 3]).0.shape, Some(DecodeShape { rows: 8, stride: 64 }));
}

#[test]
fn with_attention_in_one_order_every_row_has_a_tile_and_shapes_keep_their_offsets() {
    let cuts = Cuts { attention: Attention::FixedOrder { split_keys: 512 }, ..cuts() };
    let mut bytes = Vec::new();
    let sequences = vec![
        sequence(15, &[1, 2, 3], LogitsWanted::Tail(2)),
        sequence(40, &[7], LogitsWanted::Last),
        sequence(0, &[4, 5], LogitsWanted::None),
    ];
    let step = cuts.pack(&Batch { sequences }, true, &mut bytes);
    // A page table of 64 pages has room for two splits.
    assert_eq!((step.rows, step.decoded, step.plans.len(), step.tile_count), (6, 0, 0, 4));
    let all = u32::MAX;
    let tiles = [
        [0, 1, 40, 0, 0, 512, 0, 1],
        QueryTile::NONE.words(),
        [1, 3, 15, 1, 0, all, 3, 0],
        [4, 2, 0, 2, 0, all, 6, 0],
    ];
    assert_eq!(words(&bytes, &step.tiles), tiles.as_flattened());
    let splits = step.splits.as_ref().unwrap();
    assert_eq!((splits.keys, words(&bytes, &splits.joins)), (512, vec![0, 0, 1]));
    assert!(cuts.attention.max_states(6, 3, 64) >= 8);
    assert!(bytes.len() <= cuts.most_bytes(6, 3, 3, 3));
    let mut decode = |starts: &[usize]| {
        let sequences = starts.iter().map(|start| sequence(*start, &[5], LogitsWanted::Last)).collect();
        (cuts.pack(&Batch { sequences }, true, &mut bytes), bytes.clone())
    };
    let (three, bytes_of_three) = decode(&[0, 900, 33]);
    let (four, _) = decode(&[1, 2, 3, 1000]);
    assert_eq!(Step { logit_rows: 4, ..three.clone() }, four);
    let joins = words(&bytes_of_three, &three.splits.as_ref().unwrap().joins);
    assert_eq!(joins, [0, 0, 1, 1, 2, 2, 2, 4, 1, 3, 6, 1]);
    // The padding row is the first row of its own page table, which has only the spare page.
    assert_eq!(words(&bytes_of_three, &three.tiles)[6 * 8..][..8], [3, 1, 0, 3, 0, 512, 6, 1]);
    assert_eq!(words(&bytes_of_three, &three.page_tables)[3 * 64..], [99; 64]);
}

#[test]
fn splits_depend_only_on_the_model() {
    for (context, expected) in [(512, 64), (2048, 128), (8192, 512), (10_000, 1024), (131_072, 1024)] {
        assert_eq!(Attention::in_fixed_order(context), Attention::FixedOrder { split_keys: expected });
    }
}

#[test]
fn decode_steps_are_rounded_up_to_few_shapes() {
    for (rows, expected) in [(1, 1), (3, 4), (8, 8), (9, 16), (64, 64), (65, 96)] {
        assert_eq!(bucket(rows), expected);
    }
}
