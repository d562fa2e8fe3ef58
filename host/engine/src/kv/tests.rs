//! Tests of the KV cache, and random operations after each of which every page must have exactly one owner.

use super::*;
use crate::tests::dice::Dice;

fn pages_of_tokens(pages: &[u32]) -> Vec<u32> {
    pages.iter().flat_map(|page| (0..PAGE_TOKENS as u32).map(move |i| page * 100 + i)).collect()
}

fn cache(page_count: usize) -> KvCache {
    KvCache::new(page_count, Arc::default())
}

/// Runs a sequence over all tokens and leaves its pages in the tree.
fn warm(kv: &mut KvCache, tenant: &str, tokens: &[u32]) {
    let mut sequence = kv.borrow_prefix(tenant, tokens);
    assert!(kv.grow(&mut sequence, pages_for(tokens.len())));
    kv.release(tenant, sequence, tokens);
}

fn borrowed_pages(kv: &mut KvCache, tenant: &str, tokens: &[u32]) -> usize {
    let sequence = kv.borrow_prefix(tenant, tokens);
    let count = sequence.pages().len();
    kv.release(tenant, sequence, &tokens[..count * PAGE_TOKENS]);
    count
}

#[test]
fn the_next_turn_reuses_the_pages_of_the_last() {
    let mut kv = cache(16);
    let mut tokens = pages_of_tokens(&[1, 2, 3]);
    warm(&mut kv, "t", &tokens);
    tokens.push(7);
    assert_eq!(borrowed_pages(&mut kv, "t", &tokens), 3);
}

#[test]
fn the_last_token_is_never_borrowed() {
    let mut kv = cache(16);
    let tokens = pages_of_tokens(&[1, 2]);
    warm(&mut kv, "t", &tokens);
    assert_eq!(borrowed_pages(&mut kv, "t", &tokens), 1);
    assert_eq!(borrowed_pages(&mut kv, "t", &tokens[..1]), 0);
}

#[test]
fn tenants_do_not_share() {
    let mut kv = cache(16);
    let tokens = pages_of_tokens(&[1, 2, 3]);
    warm(&mut kv, "one", &tokens);
    assert_eq!(borrowed_pages(&mut kv, "two", &tokens), 0);
}

#[test]
fn prefixes_that_diverge_inside_a_node_share_its_beginning() {
    let mut kv = cache(16);
    warm(&mut kv, "t", &pages_of_tokens(&[1, 2, 3, 4]));
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 9, 9])), 2);
    warm(&mut kv, "t", &pages_of_tokens(&[1, 2, 9, 9]));
    assert_eq!(kv.cached_pages(), 6);
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 3, 4, 5])), 4);
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 9, 9, 5])), 4);
    kv.check_integrity(std::iter::empty());
}

#[test]
fn duplicate_pages_are_freed_and_the_cached_ones_are_used() {
    let mut kv = cache(16);
    let tokens = pages_of_tokens(&[1, 2]);
    let mut first = kv.borrow_prefix("t", &tokens);
    let mut second = kv.borrow_prefix("t", &tokens);
    assert!(kv.grow(&mut first, 2) && kv.grow(&mut second, 2));
    kv.share("t", &mut first, &tokens, tokens.len());
    kv.share("t", &mut second, &tokens, tokens.len());
    assert_eq!(first.pages(), second.pages());
    assert_eq!(kv.cached_pages(), 2);
    kv.check_integrity([&first, &second].into_iter());
}

#[test]
fn pages_that_a_sequence_shares_one_by_one_become_one_node_unless_others_have_its_end() {
    let mut kv = cache(32);
    let tokens = pages_of_tokens(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let grow = |kv: &mut KvCache, sequence: &mut SequencePages, pages: std::ops::RangeInclusive<usize>| {
        for count in pages {
            assert!(kv.grow(sequence, count));
            kv.share("t", sequence, &tokens[..count * PAGE_TOKENS], count * PAGE_TOKENS);
            kv.check_integrity([&*sequence].into_iter());
        }
    };
    let mut first = SequencePages::default();
    grow(&mut kv, &mut first, 1..=4);
    assert_eq!((kv.cached_pages(), kv.tree.node_count()), (4, 1));
    // Another sequence has the beginning of the node, which is divided, and the first one continues at its end.
    let other = kv.borrow_prefix("t", &pages_of_tokens(&[1, 2, 9]));
    assert_eq!((other.pages().len(), kv.tree.node_count()), (2, 2));
    for count in 5..=6 {
        assert!(kv.grow(&mut first, count));
        kv.share("t", &mut first, &tokens[..count * PAGE_TOKENS], count * PAGE_TOKENS);
        kv.check_integrity([&first, &other].into_iter());
    }
    assert_eq!((kv.cached_pages(), kv.tree.node_count()), (6, 2));
    kv.release("t", other, &[]);
    // A node that another sequence has as well, or that somebody owns, does not grow.
    let second = kv.borrow_prefix("t", &[tokens[..6 * PAGE_TOKENS].to_vec(), vec![7]].concat());
    assert_eq!(second.pages().len(), 6);
    assert!(kv.grow(&mut first, 7));
    kv.share("t", &mut first, &tokens[..7 * PAGE_TOKENS], 7 * PAGE_TOKENS);
    kv.check_integrity([&first, &second].into_iter());
    assert_eq!((kv.cached_pages(), kv.tree.node_count()), (7, 3));
    kv.release("t", second, &[]);
    kv.own(&PrefixOwner::tenant("t"), &tokens[..7 * PAGE_TOKENS]);
    grow(&mut kv, &mut first, 8..=8);
    assert_eq!((kv.cached_pages(), kv.tree.node_count()), (8, 4));
    kv.release("t", first, &tokens);
    let mut all = SequencePages::default();
    assert!(kv.grow(&mut all, 32), "nothing is locked any more");
    kv.check_integrity([&all].into_iter());
}

#[test]
fn borrowed_pages_stay_and_the_least_recently_used_are_evicted_first() {
    let mut kv = cache(6);
    let (old, young) = (pages_of_tokens(&[1, 2]), pages_of_tokens(&[3, 4]));
    warm(&mut kv, "t", &old);
    warm(&mut kv, "t", &young);
    let held = kv.borrow_prefix("t", &pages_of_tokens(&[3, 4, 5]));
    let mut other = SequencePages::default();
    assert!(!kv.grow(&mut other, 5), "only four pages are free or evictable");
    assert!(kv.grow(&mut other, 3));
    assert_eq!(kv.cached_pages(), 3, "one page of the older prefix was evicted");
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 5])), 1);
    kv.check_integrity([&held, &other].into_iter());
}

/// Returns the number of cached pages of each prefix, after an allocation of `count` pages.
fn left_after_growth(kv: &mut KvCache, count: usize, prefixes: [&[u32]; 2]) -> [usize; 2] {
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, count));
    kv.check_integrity([&other].into_iter());
    kv.release("t", other, &[]);
    prefixes.map(|tokens| kv.peek_prefix("t", tokens).len())
}

#[test]
fn a_look_at_a_prefix_is_no_use_of_it() {
    let (old, young) = (pages_of_tokens(&[1, 2]), pages_of_tokens(&[3, 4]));
    for is_used in [false, true] {
        let mut kv = cache(4);
        warm(&mut kv, "t", &old);
        warm(&mut kv, "t", &young);
        assert_eq!(kv.peek_prefix("t", &pages_of_tokens(&[1, 9])).len(), 1, "a part of a node");
        assert!(kv.peek_prefix("other", &old).is_empty());
        kv.peek_prefix("t", &old);
        if is_used {
            kv.touch_prefix("t", &old);
        }
        let left = left_after_growth(&mut kv, 2, [&old, &young]);
        assert_eq!(left, if is_used { [2, 0] } else { [0, 2] });
    }
}

#[test]
fn an_undone_mark_leaves_the_order_of_eviction_as_it_was() {
    let (old, young) = (pages_of_tokens(&[1, 2]), pages_of_tokens(&[3, 4]));
    let cases = [(false, false, [2, 0]), (true, false, [0, 2]), (true, true, [2, 0])];
    for (is_undone, is_used_since, left) in cases {
        let mut kv = cache(4);
        warm(&mut kv, "t", &old);
        warm(&mut kv, "t", &young);
        let mark = kv.mark_prefix("t", &old).unwrap();
        if is_used_since {
            kv.touch_prefix("t", &old);
        }
        if is_undone {
            kv.unmark_prefix("t", &old, mark);
        }
        assert_eq!(left_after_growth(&mut kv, 2, [&old, &young]), left);
    }
}

#[test]
fn a_tenant_without_pages_leaves_no_trace() {
    let mut kv = cache(4);
    warm(&mut kv, "gone", &pages_of_tokens(&[1, 2, 3, 4]));
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, 4));
    assert_eq!(kv.cached_pages(), 0);
    kv.release("t", other, &[]);
    assert_eq!(kv.available_pages(), 4);
    kv.check_integrity(std::iter::empty());
}

#[test]
fn pages_are_counted_for_each_tenant() {
    let mut kv = cache(16);
    warm(&mut kv, "a", &pages_of_tokens(&[1, 2, 3]));
    warm(&mut kv, "a", &pages_of_tokens(&[1, 9]));
    warm(&mut kv, "b", &pages_of_tokens(&[1]));
    let mut own = kv.borrow_prefix("a", &pages_of_tokens(&[1, 2, 5]));
    assert!(kv.grow(&mut own, 3));
    let counted = kv.cached_pages_by_owner();
    let tenant = PrefixOwner::tenant;
    assert_eq!(counted.into_iter().collect::<Vec<_>>(), [(tenant("a"), 4), (tenant("b"), 1)]);
    assert_eq!((own.pages().len(), own.own_pages()), (3, 1));
    kv.release("a", own, &[]);
}

#[test]
fn own_and_shared_pages_of_sessions_are_counted_separately() {
    let mut kv = cache(32);
    let owner = |agent: &str, session: Option<&str>| PrefixOwner {
        tenant: "a".to_owned(),
        agent: Some(agent.to_owned()),
        session: session.map(str::to_owned),
    };
    let mut session = |name: &str, agent: &str, keys: &[u32]| {
        let tokens = pages_of_tokens(keys);
        warm(&mut kv, "a", &tokens);
        kv.own(&owner(agent, Some(name)), &tokens);
    };
    session("s", "x", &[1, 2, 3, 4]);
    session("t", "x", &[1, 2, 5]);
    session("u", "y", &[1, 7, 8, 9]);
    let counted = kv.cached_pages_by_owner();
    let expected = [
        (PrefixOwner::tenant("a"), 1),
        (owner("x", None), 1),
        (owner("x", Some("s")), 2),
        (owner("x", Some("t")), 1),
        (owner("y", Some("u")), 3),
    ];
    assert_eq!(counted.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn cached_prefixes_are_published_until_evicted() {
    let hash = crate::keyed_hash::KeyedHash::default();
    let published = Arc::new(PublishedPrefixes::new(&hash));
    let mut kv = KvCache::new(4, published.clone());
    let long = pages_of_tokens(&[1, 2, 3, 4]);
    let matching =
        |tenant: &str, tokens: &[u32]| published.matching_pages(&prompt_digests(&hash, tenant, tokens));
    warm(&mut kv, "t", &long[..3 * PAGE_TOKENS]);
    assert_eq!(matching("t", &long), 3);
    assert_eq!(matching("t", &long[..3 * PAGE_TOKENS]), 2, "the page of the last token is always computed");
    assert_eq!(matching("t", &pages_of_tokens(&[1, 9, 3, 4])), 1);
    assert_eq!(matching("other", &long), 0);
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, 3));
    assert_eq!((matching("t", &long), published.page_count()), (1, 1));
    kv.release("t", other, &[]);
}

#[test]
fn random_operations_keep_every_page_owned_once() {
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let mut kv = cache(24);
        let mut live: Vec<(String, Vec<u32>, usize, SequencePages)> = Vec::new();
        for _ in 0..400 {
            match dice.roll(6) {
                0 if live.len() < 6 => {
                    let tenant = ["a", "b"][dice.roll(2)].to_string();
                    let length = 1 + dice.roll(7);
                    let pages: Vec<u32> = (0..length).map(|_| dice.roll(2) as u32).collect();
                    let mut tokens = pages_of_tokens(&pages);
                    tokens.truncate(tokens.len() - dice.roll(PAGE_TOKENS));
                    let mut borrowed = kv.borrow_prefix(&tenant, &tokens);
                    let computed = kv.continue_partial(&mut borrowed, &tokens);
                    assert!(computed < tokens.len() && computed <= borrowed.capacity_tokens());
                    live.push((tenant, tokens, computed, borrowed));
                }
                1 | 2 if !live.is_empty() => {
                    let at = dice.roll(live.len());
                    let (tenant, tokens, computed, pages) = &mut live[at];
                    let to = (*computed + 1 + dice.roll(40)).min(tokens.len());
                    if kv.grow(pages, pages_for(to)) {
                        *computed = to.max(*computed);
                        kv.share(tenant, pages, &tokens[..*computed], *computed);
                    }
                }
                3 if !live.is_empty() => {
                    let at = dice.roll(live.len());
                    let (tenant, tokens, computed, mut pages) = live.swap_remove(at);
                    let owner = owner(&tenant, ["", "1", "2", "3"][dice.roll(4)]);
                    let is_forgotten = owner.session.as_deref() == Some("");
                    if !is_forgotten {
                        kv.keep_partial(&owner, &mut pages, &tokens[..computed]);
                    }
                    kv.release(&tenant, pages, &tokens[..computed]);
                    match is_forgotten {
                        true => kv.drop_unowned(&tenant, &tokens[..computed]),
                        false => kv.own(&owner, &tokens[..computed]),
                    }
                }
                4 => drop(kv.forget(|owner| owner.session.as_deref() == Some("1"))),
                5 => {
                    let ends = live
                        .iter()
                        .filter_map(|(_, _, computed, pages)| pages.pages().get(computed / PAGE_TOKENS));
                    let written = ends.filter(|_| dice.roll(2) == 0).copied().collect();
                    kv.set_written(written);
                }
                _ => {}
            }
            kv.check_integrity(live.iter().map(|(_, _, _, pages)| pages));
        }
        for (tenant, tokens, computed, pages) in live.drain(..) {
            kv.release(&tenant, pages, &tokens[..computed]);
        }
        kv.set_written(Vec::new());
        kv.check_integrity(std::iter::empty());
        assert_eq!(kv.available_pages(), 24, "seed {seed}");
    }
}

fn owner(tenant: &str, session: &str) -> PrefixOwner {
    PrefixOwner { tenant: tenant.into(), agent: Some("agent".into()), session: Some(session.into()) }
}

/// Runs a turn of a session over all tokens.
fn turn(kv: &mut KvCache, owner: &PrefixOwner, tokens: &[u32]) {
    warm(kv, &owner.tenant, tokens);
    kv.own(owner, tokens);
}

#[test]
fn a_freed_page_that_a_started_step_writes_to_is_handed_out_only_after_that_step() {
    let mut kv = cache(3);
    let mut ended = SequencePages::default();
    assert!(kv.grow(&mut ended, 2));
    let written = ended.pages()[1];
    kv.set_written(vec![written]);
    kv.release("t", ended, &pages_of_tokens(&[1]));
    kv.check_integrity(std::iter::empty());
    assert_eq!((kv.cached_pages(), kv.available_pages()), (1, 2));
    let mut next = SequencePages::default();
    assert!(!kv.grow(&mut next, 3), "one of three pages is held");
    assert!(kv.grow(&mut next, 2) && !next.pages().contains(&written));
    kv.check_integrity([&next].into_iter());
    kv.set_written(Vec::new());
    assert!(kv.grow(&mut next, 3) && next.pages()[2] == written);
    kv.check_integrity([&next].into_iter());
}

#[test]
fn a_forgotten_session_takes_the_pages_that_only_it_has() {
    let mut kv = cache(32);
    let (one, other) = (owner("t", "one"), owner("t", "other"));
    turn(&mut kv, &one, &pages_of_tokens(&[1, 2, 3]));
    turn(&mut kv, &other, &pages_of_tokens(&[1, 2, 9, 9]));
    turn(&mut kv, &one, &pages_of_tokens(&[1, 2, 3, 4, 5]));
    assert_eq!(kv.forget(|owner| owner.session.as_deref() == Some("one")), 3);
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 3, 4])), 2);
    assert_eq!(borrowed_pages(&mut kv, "t", &pages_of_tokens(&[1, 2, 9, 9, 5])), 4);
    assert_eq!(kv.forget(|owner| owner.session.as_deref() == Some("one")), 0);
    assert_eq!(kv.forget(|owner| owner.tenant == "t"), 4);
    assert_eq!((kv.cached_pages(), kv.available_pages()), (0, 32));
    kv.check_integrity(std::iter::empty());
}

#[test]
fn pages_in_use_survive_until_their_sequence_drops_them() {
    let mut kv = cache(16);
    let tokens = pages_of_tokens(&[1, 2, 3]);
    turn(&mut kv, &owner("t", "one"), &tokens);
    let running = kv.borrow_prefix("t", &tokens);
    assert_eq!(kv.forget(|_| true), 1, "two pages are in use");
    kv.check_integrity([&running].into_iter());
    kv.release("t", running, &tokens[..2 * PAGE_TOKENS]);
    assert_eq!(kv.cached_pages(), 2);
    kv.drop_unowned("t", &tokens);
    assert_eq!((kv.cached_pages(), kv.available_pages()), (0, 16));
}

#[test]
fn forgets_the_rest_of_a_partly_evicted_prefix() {
    let mut kv = cache(6);
    turn(&mut kv, &owner("t", "one"), &pages_of_tokens(&[1, 2]));
    turn(&mut kv, &owner("t", "one"), &pages_of_tokens(&[1, 2, 3, 4]));
    let mut other = SequencePages::default();
    assert!(kv.grow(&mut other, 5));
    assert_eq!(kv.cached_pages(), 1);
    assert_eq!(kv.forget(|owner| owner.session.as_deref() == Some("one")), 1);
    kv.release("t", other, &[]);
    assert_eq!(kv.available_pages(), 6);
    kv.check_integrity(std::iter::empty());
}

#[test]
fn random_sessions_leave_exactly_the_prefixes_of_those_that_stay() {
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let mut kv = cache(4096);
        let mut turns: Vec<(PrefixOwner, Vec<u32>)> = Vec::new();
        for _ in 0..60 {
            let owner = owner(["a", "b"][dice.roll(2)], ["1", "2", "3", "4"][dice.roll(4)]);
            if dice.roll(4) == 0 {
                kv.forget(|other| *other == owner);
                turns.retain(|(other, _)| *other != owner);
            } else {
                let length = 1 + dice.roll(6);
                let pages: Vec<u32> = (0..length).map(|_| dice.roll(2) as u32).collect();
                turn(&mut kv, &owner, &pages_of_tokens(&pages));
                turns.push((owner, pages));
            }
            let prefixes = turns
                .iter()
                .flat_map(|(owner, pages)| (1..=pages.len()).map(|end| (&owner.tenant, &pages[..end])));
            let distinct: std::collections::BTreeSet<_> = prefixes.collect();
            assert_eq!(kv.cached_pages(), distinct.len(), "seed {seed}");
            kv.check_integrity(std::iter::empty());
        }
    }
}
