//! Pages that keep what layers with a window need: which ones give way, and which prefixes can still be continued.

use super::*;
use crate::tests::dice::Dice;

/// Length of the window in tokens. Two pages are seen beside the one that is being written.
const WINDOW: usize = 16;

fn cache(page_count: usize, windowed: usize) -> KvCache {
    let mut kv = KvCache::new(page_count, Arc::default());
    kv.limit_windows(WindowLimits { window: WINDOW, pages: windowed });
    kv
}

fn pages_of_tokens(pages: &[u32]) -> Vec<u32> {
    pages.iter().flat_map(|page| (0..PAGE_TOKENS as u32).map(move |i| page * 100 + i)).collect()
}

/// Computes tokens page by page. Returns the sequence, which still runs.
fn run(kv: &mut KvCache, tokens: &[u32]) -> SequencePages {
    let mut sequence = kv.borrow_prefix("t", tokens);
    for page in sequence.pages().len()..pages_for(tokens.len()) {
        assert!(kv.grow(&mut sequence, page + 1), "page {page}");
        let computed = tokens.len().min((page + 1) * PAGE_TOKENS);
        kv.share("t", &mut sequence, &tokens[..computed], computed);
    }
    kv.check_integrity([&sequence].into_iter());
    sequence
}

fn warm(kv: &mut KvCache, tokens: &[u32]) {
    let sequence = run(kv, tokens);
    kv.release("t", sequence, tokens);
}

/// Returns how many pages of a prefix can be continued.
fn usable(kv: &mut KvCache, tokens: &[u32]) -> usize {
    let sequence = kv.borrow_prefix("t", tokens);
    let pages = sequence.pages().len();
    kv.check_integrity([&sequence].into_iter());
    kv.release("t", sequence, &[]);
    pages
}

fn released(kv: &KvCache) -> usize {
    kv.window_changes().iter().filter(|change| matches!(change, WindowChange::Release(_))).count()
}

#[test]
fn a_long_sequence_needs_few_pages_for_windows() {
    let mut kv = cache(32, 4);
    let tokens = pages_of_tokens(&(1..=20).collect::<Vec<_>>());
    let sequence = run(&mut kv, &tokens);
    assert_eq!((sequence.pages().len(), kv.cached_pages()), (20, 20));
    assert_eq!(released(&kv), 16, "all but four pages gave way");
    kv.release("t", sequence, &tokens);
    assert_eq!(kv.cached_pages(), 20, "they stay cached for layers without a window");
}

#[test]
fn a_prefix_is_continued_where_its_last_window_is_kept() {
    let mut kv = cache(32, 4);
    let mut tokens = pages_of_tokens(&(1..=10).collect::<Vec<_>>());
    warm(&mut kv, &tokens);
    tokens.push(7);
    assert_eq!(usable(&mut kv, &tokens), 10, "at its end");
    let mut other = tokens[..5 * PAGE_TOKENS].to_vec();
    other.push(9);
    assert_eq!(usable(&mut kv, &other), 0, "the window before the place where it diverges is gone");
    let mut short = cache(32, 16);
    warm(&mut short, &tokens);
    assert_eq!(usable(&mut short, &other), 5, "with enough pages, nothing is evicted");
}

#[test]
fn the_page_that_was_seen_longest_ago_gives_way() {
    let mut kv = cache(32, 6);
    let (old, young) = (pages_of_tokens(&[1, 2, 3]), pages_of_tokens(&[4, 5, 6]));
    warm(&mut kv, &old);
    warm(&mut kv, &young);
    let continued = |tokens: &[u32]| [tokens, &[7]].concat();
    // A use makes the older prefix the younger one.
    assert_eq!(usable(&mut kv, &continued(&old)), 3);
    warm(&mut kv, &pages_of_tokens(&[8, 9, 10]));
    assert_eq!(usable(&mut kv, &continued(&old)), 3);
    assert_eq!(usable(&mut kv, &continued(&young)), 0);
}

#[test]
fn pages_that_are_seen_never_give_way() {
    let mut kv = cache(32, 5);
    let first = run(&mut kv, &pages_of_tokens(&[1, 2]));
    let mut second = SequencePages::default();
    assert!(kv.has_window_room(3) && !kv.has_window_room(4));
    assert!(!kv.grow(&mut second, 4), "two pages are seen, and there are five");
    assert!(kv.grow(&mut second, 3));
    kv.check_integrity([&first, &second].into_iter());
    kv.release("t", first, &[]);
    assert!(kv.grow(&mut second, 5));
    kv.check_integrity([&second].into_iter());
}

#[test]
fn windows_leave_pages_that_are_computed_but_not_settled() {
    let mut kv = cache(32, 5);
    let tokens = pages_of_tokens(&(1..=12).collect::<Vec<_>>());
    let mut sequence = SequencePages::default();
    for page in 1..=12 {
        assert!(kv.grow(&mut sequence, page), "page {page}");
        // Everything after the first page may be rolled back.
        kv.share("t", &mut sequence, &tokens[..PAGE_TOKENS], page * PAGE_TOKENS);
        kv.check_integrity([&sequence].into_iter());
    }
    assert_eq!((sequence.own_pages(), sequence.seen_pages()), (11, 2));
    let first = 10 * PAGE_TOKENS;
    assert!(!kv.has_left(&sequence, first + WINDOW - 1), "the first page that is seen suffices");
    assert!(kv.has_left(&sequence, first + WINDOW - 2), "a token of the page before it is needed");
    kv.shrink(&mut sequence, 5);
    kv.release("t", sequence, &tokens[..PAGE_TOKENS]);
    kv.check_integrity(std::iter::empty());
    assert_eq!(usable(&mut kv, &tokens), 0, "what the first page kept gave way");
    warm(&mut kv, &tokens);
}

#[test]
fn a_prefix_that_is_kept_gives_way_last() {
    let (old, young) = (pages_of_tokens(&[1, 2, 3]), pages_of_tokens(&[4, 5, 6]));
    let continued = |tokens: &[u32]| [tokens, &[7]].concat();
    for is_marked in [false, true] {
        let mut kv = cache(32, 6);
        warm(&mut kv, &old);
        warm(&mut kv, &young);
        match is_marked {
            false => kv.touch_prefix("t", &old),
            true => assert!(kv.mark_prefix("t", &old).is_some()),
        }
        warm(&mut kv, &pages_of_tokens(&[8, 9, 10]));
        assert_eq!(kv.usable_prefix("t", &continued(&young)), 0, "marked: {is_marked}");
        assert_eq!(kv.peek_prefix("t", &continued(&young)).len(), 3, "it is cached for other layers");
        assert_eq!(usable(&mut kv, &continued(&old)), 3, "marked: {is_marked}");
    }
}

#[test]
fn pages_count_as_free_as_far_as_windows_have_room() {
    let mut kv = cache(32, 4);
    assert_eq!(kv.free_in_proportion(), 32);
    let tokens = pages_of_tokens(&(1..=20).collect::<Vec<_>>());
    let sequence = run(&mut kv, &tokens);
    assert_eq!((kv.available_pages(), kv.free_in_proportion()), (12, 12), "two of four windows are free");
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, 2));
    assert_eq!((kv.available_pages(), kv.free_in_proportion()), (10, 0));
    kv.release("t", other, &[]);
    kv.release("t", sequence, &tokens);
    assert_eq!(kv.free_in_proportion(), 32);
}

#[test]
fn a_cached_page_gets_the_window_that_its_copy_kept() {
    let mut kv = cache(32, 4);
    let tokens = pages_of_tokens(&(1..=10).collect::<Vec<_>>());
    warm(&mut kv, &tokens);
    let mut other = tokens[..5 * PAGE_TOKENS].to_vec();
    other.push(9);
    // The prefix cannot be continued anywhere, so it is computed again, and its pages are there already.
    kv.forget_window_changes();
    warm(&mut kv, &other);
    let moves = kv.window_changes().iter().filter(|change| matches!(change, WindowChange::Move { .. }));
    assert!(moves.count() >= 3, "{:?}", kv.window_changes());
    assert_eq!(kv.cached_pages(), 10);
    assert_eq!(usable(&mut kv, &other), 5);
}

#[test]
fn random_work_keeps_the_counters_right() {
    for seed in 0..20 {
        let mut dice = Dice(seed);
        let mut kv = cache(24, 8);
        let mut live: Vec<(SequencePages, Vec<u32>, usize)> = Vec::new();
        for _ in 0..300 {
            match dice.roll(4) {
                0 if live.len() < 3 => {
                    let count = 1 + dice.roll(8);
                    let pages: Vec<u32> = (0..count).map(|at| (at + 1 + dice.roll(2) * 50) as u32).collect();
                    let mut tokens = pages_of_tokens(&pages);
                    tokens.push(1);
                    let sequence = kv.borrow_prefix("t", &tokens);
                    let computed = sequence.capacity_tokens();
                    live.push((sequence, tokens, computed));
                }
                1 | 2 if !live.is_empty() => {
                    let at = dice.roll(live.len());
                    let (sequence, tokens, computed) = &mut live[at];
                    let next = (*computed + 1 + dice.roll(20)).min(tokens.len());
                    if kv.grow(sequence, pages_for(next)) {
                        *computed = next;
                        kv.share("t", sequence, &tokens[..next], next);
                        kv.shrink(sequence, pages_for(next));
                    }
                }
                3 if !live.is_empty() => {
                    let (sequence, tokens, computed) = live.swap_remove(dice.roll(live.len()));
                    kv.release("t", sequence, &tokens[..computed]);
                }
                _ => kv.forget_window_changes(),
            }
            kv.check_integrity(live.iter().map(|(sequence, ..)| sequence));
        }
    }
}
