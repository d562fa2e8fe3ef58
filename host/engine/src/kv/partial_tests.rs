//! Tests of pages that are filled in part.

use super::*;

const PAGES: usize = 16;

fn cache() -> KvCache {
    KvCache::new(PAGES, Arc::default())
}

fn owner(session: &str) -> PrefixOwner {
    PrefixOwner { tenant: "t".into(), agent: Some("agent".into()), session: Some(session.into()) }
}

fn ids(tokens: std::ops::Range<u32>) -> Vec<u32> {
    tokens.collect()
}

/// Computes all tokens for a session, and returns how many of them were computed before.
fn turn(kv: &mut KvCache, session: &str, tokens: &[u32]) -> usize {
    let mut pages = kv.borrow_prefix("t", tokens);
    let found = kv.continue_partial(&mut pages, tokens);
    assert!(kv.grow(&mut pages, pages_for(tokens.len())));
    end(kv, session, pages, tokens);
    found
}

fn end(kv: &mut KvCache, session: &str, mut pages: SequencePages, tokens: &[u32]) {
    let owner = owner(session);
    kv.keep_partial(&owner, &mut pages, tokens);
    kv.release("t", pages, tokens);
    kv.own(&owner, tokens);
    kv.check_integrity(std::iter::empty());
}

#[test]
fn the_next_turn_continues_in_the_page_that_the_last_one_had_filled_in_part() {
    let mut kv = cache();
    assert_eq!(turn(&mut kv, "one", &ids(0..37)), 0);
    assert_eq!((kv.cached_pages(), kv.available_pages()), (3, PAGES));
    assert_eq!(turn(&mut kv, "one", &ids(0..60)), 37);
    assert_eq!(turn(&mut kv, "one", &ids(0..60)), 48 + 11, "the last token is always computed");
    let other = |common: u32| -> Vec<u32> { (0..common).chain(900..910).collect() };
    assert_eq!(
        turn(&mut kv, "one", &other(52)),
        48,
        "the page is not given to one with a third of its tokens"
    );
    assert_eq!(turn(&mut kv, "one", &other(55)), 55, "but to one with more than half");
    assert_eq!(turn(&mut kv, "one", &ids(0..60)), 48, "which has overwritten the others");
}

#[test]
fn a_page_that_is_filled_in_part_has_one_user() {
    let mut kv = cache();
    let tokens = ids(0..40);
    turn(&mut kv, "one", &tokens[..20]);
    let mut first = kv.borrow_prefix("t", &tokens);
    let mut second = kv.borrow_prefix("t", &tokens);
    assert_eq!(kv.continue_partial(&mut first, &tokens), 20);
    assert_eq!(kv.continue_partial(&mut second, &tokens), 16);
    kv.check_integrity([&first, &second].into_iter());
    assert!(kv.grow(&mut second, 2));
    assert_ne!(first.pages()[1], second.pages()[1]);
    end_both(&mut kv, first, second, &tokens[..20]);
    assert_eq!(kv.cached_pages(), 2, "one of two equal pages is kept");
}

fn end_both(kv: &mut KvCache, mut first: SequencePages, mut second: SequencePages, tokens: &[u32]) {
    for pages in [&mut first, &mut second] {
        kv.keep_partial(&owner("one"), pages, tokens);
    }
    kv.release("t", first, tokens);
    kv.release("t", second, tokens);
    kv.check_integrity(std::iter::empty());
}

#[test]
fn few_pages_are_kept_after_one_page_and_the_longest_match_is_continued() {
    let mut kv = cache();
    let branch = |number: u32, length: u32| -> Vec<u32> { (0..17).chain(number..number + length).collect() };
    for number in 1..=5 {
        turn(&mut kv, "one", &branch(100 * number, 6));
    }
    assert_eq!(kv.cached_pages(), 1 + 4);
    assert_eq!(turn(&mut kv, "one", &branch(100, 8)), 16, "the oldest is gone");
    assert_eq!(turn(&mut kv, "one", &branch(300, 8)), 17 + 6);
}

#[test]
fn pages_that_are_filled_in_part_are_evicted_before_others_and_leave_with_the_page_before() {
    let mut kv = cache();
    turn(&mut kv, "one", &ids(0..20));
    turn(&mut kv, "two", &ids(100..120));
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, PAGES - 3));
    kv.check_integrity([&other].into_iter());
    assert_eq!(kv.cached_pages(), 3, "a part of the first session is gone");
    assert_eq!(kv.borrow_prefix("t", &ids(0..20)).pages().len(), 1);
    let mut kv = cache();
    turn(&mut kv, "one", &ids(0..20));
    kv.drop_unowned("t", &ids(0..20));
    assert_eq!(kv.cached_pages(), 2, "it is owned");
    assert_eq!(kv.forget(|owner| owner.session.as_deref() == Some("one")), 2);
    kv.check_integrity(std::iter::empty());
    assert_eq!((kv.cached_pages(), kv.available_pages()), (0, PAGES));
}

#[test]
fn a_forgotten_session_takes_its_partial_page_after_a_page_that_others_have() {
    let mut kv = cache();
    turn(&mut kv, "one", &ids(0..20));
    turn(&mut kv, "two", &ids(0..16));
    assert_eq!(kv.cached_pages(), 2);
    kv.forget(|owner| owner.session.as_deref() == Some("one"));
    kv.check_integrity(std::iter::empty());
    assert_eq!(kv.cached_pages(), 1);
    assert_eq!(turn(&mut kv, "two", &ids(0..20)), 16);
}

#[test]
fn a_page_to_which_a_started_step_writes_is_kept_and_evicted_only_after_that_step() {
    let mut kv = cache();
    let tokens = ids(0..40);
    let mut pages = kv.borrow_prefix("t", &tokens[..20]);
    assert!(kv.grow(&mut pages, 2));
    kv.set_written(vec![pages.pages()[1]]);
    end(&mut kv, "one", pages, &tokens[..20]);
    assert_eq!((kv.cached_pages(), kv.available_pages()), (2, PAGES - 1));
    let mut other = SequencePages::default();
    assert!(!kv.grow(&mut other, PAGES), "a page is written to");
    kv.set_written(Vec::new());
    kv.check_integrity(std::iter::empty());
    assert_eq!(turn(&mut kv, "one", &tokens), 20);
    assert!(kv.grow(&mut other, PAGES));
}
