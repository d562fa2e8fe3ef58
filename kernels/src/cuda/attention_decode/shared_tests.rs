//! Checks that rows of several sequences that read common pages together get the same attention as alone.

use super::tests::{Case, Shape};
use super::*;
use crate::cuda::Activation;
use crate::random::Random;

impl Case {
    /// Gives sequences the first pages of another one: a pair of their indices and a number of pages each.
    fn share(&mut self, copies: &[(usize, usize, usize)]) {
        let stride = self.paged.table_stride;
        for (from, to, pages) in copies.iter().copied() {
            let range = from * stride..from * stride + pages;
            self.paged.page_tables.copy_within(range, to * stride);
        }
    }

    fn ranges(&self, blocks: &Blocks) -> Vec<SharedRange> {
        let tables: Vec<&[u32]> = self.paged.page_tables.chunks(self.paged.table_stride).collect();
        shared_ranges(&self.rows, &tables, blocks)
    }
}

/// Checks a plan with shared ranges against the reference, and whether it has shared splits.
fn check(case: &Case, shape: Shape, is_shared: bool) -> Plan {
    let blocks = shape.blocks();
    let mut plan = Plan::new(&case.rows, &case.ranges(&blocks), shape.window, &blocks);
    assert_eq!(plan.splits.iter().any(|split| split.is_shared == 1), is_shared, "{shape:?}: {plan:?}");
    let found = case.attended(&plan);
    case.activation.assert_close(&found, &case.expected(), 2.0 * case.paged.weight_rounding());
    // The order in which splits arrive changes nothing.
    let last = plan.splits.len() as u32 - 1;
    plan.splits.reverse();
    plan.shared_rows.iter_mut().for_each(|row| row.tile = last - row.tile);
    assert!(case.attended(&plan) == found, "{shape:?}");
    plan.splits.reverse();
    plan.shared_rows.iter_mut().for_each(|row| row.tile = last - row.tile);
    plan
}

#[test]
fn rows_that_read_a_prefix_together_match_the_reference() {
    for activation in Activation::ALL {
        for (heads, kv_heads, head_size) in
            [(9, 3, 64), (8, 1, 128), (2, 2, 16), (4, 2, 96), (9, 1, 32), (38, 2, 16), (5, 1, 256)]
        {
            for pages in PageFormat::ALL {
                let shape = Shape { blocks: 48, pages, ..Shape::new(heads, kv_heads, head_size) };
                let mut case =
                    Case::new(activation, shape, &[(170, 1), (300, 1), (37, 2), (161, 1), (320, 2), (16, 1)]);
                // The fourth sequence shares all of its pages but the last one, and the others differ after 160 positions.
                case.share(&[(0, 1, 10), (0, 3, 10), (0, 4, 10)]);
                check(&case, shape, true);
            }
        }
    }
}

#[test]
fn groups_of_two_to_sixty_four_sequences_match_the_reference() {
    for count in [2, 3, 17, 64] {
        let shape = Shape { blocks: 24, ..Shape::new(4, 1, 16) };
        let contexts: Vec<(u32, u32)> = (0..count).map(|at| (145 + at as u32 % 40, 1)).collect();
        let mut case = Case::new(Activation::F16, shape, &contexts);
        let copies: Vec<_> = (1..count).map(|to| (0, to, 9)).collect();
        case.share(&copies);
        let plan = check(&case, shape, true);
        assert_eq!(plan.shared_rows.len(), count);
    }
}

#[test]
fn ranges_within_ranges_and_long_ranges_match_the_reference() {
    let shape = Shape { blocks: 64, ..Shape::new(4, 2, 32) };
    let mut case = Case::new(Activation::Bf16, shape, &[(450, 1), (700, 3), (460, 1), (300, 2), (130, 1)]);
    // All but the last share 256 positions, and two of them 192 more.
    case.share(&[(0, 1, 28), (0, 2, 28), (0, 3, 16)]);
    let plan = check(&case, shape, true);
    let starts: Vec<u32> =
        plan.splits.iter().filter(|split| split.is_shared == 1).map(|split| split.first_key).collect();
    assert!(starts.contains(&0) && starts.iter().any(|start| *start >= 256), "{starts:?}");
}

#[test]
fn windows_and_short_prefixes_are_read_alone() {
    let shape = Shape::new(4, 2, 32);
    let windowed = Shape { window: 100, ..shape };
    let mut case = Case::new(Activation::Bf16, windowed, &[(200, 1), (210, 1)]);
    case.share(&[(0, 1, 12)]);
    check(&case, windowed, false);
    let mut case = Case::new(Activation::Bf16, shape, &[(200, 1), (210, 1)]);
    case.share(&[(0, 1, 7)]);
    check(&case, shape, false);
}

#[test]
fn the_state_of_a_row_has_the_same_bits_however_many_rows_read_a_range_with_it() {
    PageFormat::ALL.into_iter().for_each(check_state_of_a_row);
}

fn check_state_of_a_row(pages: PageFormat) {
    // All steps have the same splits, because the device runs few blocks.
    let shape = Shape { blocks: 8, pages, ..Shape::new(4, 1, 64) };
    let contexts: Vec<(u32, u32)> = (0..9).map(|_| (300, 1)).collect();
    let mut case = Case::new(Activation::Bf16, shape, &contexts);
    let copies: Vec<_> = (1..9).map(|to| (0, to, 16)).collect();
    case.share(&copies);
    let blocks = shape.blocks();
    let all = SharedRange { members: (0..9).collect(), from: 0, to: 256 };
    let halves = [0..4, 4..9].map(|members| SharedRange { members: members.collect(), from: 0, to: 256 });
    let plans = [Plan::new(&case.rows, &[all], 0, &blocks), Plan::new(&case.rows, &halves, 0, &blocks)];
    let keys = |plan: &Plan, shared| {
        let splits = plan.splits.iter().filter(|split| split.is_shared == shared);
        splits.map(|split| [split.first_key, split.last_key]).collect::<std::collections::BTreeSet<_>>()
    };
    for shared in [0, 1] {
        assert_eq!(keys(&plans[0], shared), keys(&plans[1], shared));
    }
    assert!(case.attended(&plans[0]) == case.attended(&plans[1]));
}

#[test]
fn plans_with_shared_ranges_cover_each_position_once_and_stay_within_their_bounds() {
    let mut random = Random::fresh();
    for _ in 0..200 {
        let mut below = |bound: u64| random.next_u64() % bound;
        let [heads, kv_heads, head_size] =
            [[32, 8, 128], [9, 3, 64], [4, 4, 16], [40, 2, 256]][below(4) as usize];
        let count = 1 + below(80) as u32;
        let blocks = Blocks {
            at_once: below(300) as u32,
            per_split: blocks_per_split(heads, kv_heads),
            rows: rows_per_split(heads, kv_heads),
            shared_rows: rows_per_shared_split(heads, kv_heads, head_size),
        };
        let (mut rows, mut tables, mut first_row) = (Vec::new(), Vec::new(), 0);
        let families = 1 + below(4);
        for sequence in 0..count {
            let (prefix, own, count) = (8 + below(4) * 8, 1 + below(500) as u32, 1 + below(3) as u32);
            let family = below(families) as u32;
            let shared = (0..prefix as u32).map(|page| family * 1000 + page);
            let first_position = prefix as u32 * 16 + own;
            let all = shared.chain((0..100).map(|page| 100_000 + sequence * 1000 + page));
            tables.push(all.collect::<Vec<u32>>());
            rows.push(Rows { sequence, first_row, count, first_position });
            first_row += count;
        }
        let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
        let plan = Plan::new(&rows, &shared_ranges(&rows, &tables, &blocks), 0, &blocks);
        let mut ends = vec![0; first_row as usize];
        let mut parts = vec![0; first_row as usize];
        let mut covers = |row: u32, split: &Split| {
            assert_eq!((ends[row as usize], parts[row as usize]), (split.first_key, split.part));
            ends[row as usize] = split.last_key;
            parts[row as usize] += 1;
        };
        for split in &plan.splits {
            let range = split.first_row..split.first_row + split.rows;
            match split.is_shared {
                0 => range.for_each(|row| covers(row, split)),
                _ => {
                    assert!(split.rows <= blocks.shared_rows);
                    for shared in &plan.shared_rows[range.start as usize..range.end as usize] {
                        let tile = plan.splits[shared.tile as usize];
                        assert!((tile.first_row..tile.first_row + tile.rows).contains(&shared.row));
                        let first_state = tile.first_state + (shared.row - tile.first_row) * tile.parts;
                        assert_eq!(shared.first_state, first_state);
                        covers(shared.row, split);
                    }
                }
            }
        }
        for rows in &rows {
            for row in 0..rows.count {
                assert!(ends[(rows.first_row + row) as usize] > rows.first_position + row);
            }
        }
        assert!(plan.splits.len() as u32 <= blocks.max_splits(first_row), "{blocks:?}");
        assert!(plan.states <= blocks.max_states(first_row), "{blocks:?}");
        assert!(plan.shared_rows.len() as u32 <= blocks.max_shared_rows(first_row));
        let arrivals = plan.splits.iter().filter(|split| split.parts > 1 && split.is_shared == 0);
        let arrivals = arrivals.map(|split| split.arrival + 1).max().unwrap_or(0);
        assert!(arrivals * blocks.per_split <= blocks.max_arrivals(first_row), "{blocks:?}");
    }
}
