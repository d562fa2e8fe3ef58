//! Tests of ownership, eviction and loading, without files.

use super::super::shares::{ByteShares, TierShares};
use super::*;

const LAYOUT: LayoutId = LayoutId(0);
const TENANT: TenantTag = TenantTag(1);

fn key(number: u8) -> PageKey {
    PageKey { layout: LAYOUT, prefix: Digest([number; 32]) }
}

fn owner(number: u64) -> Owner {
    Owner { agent: 1, session: number }
}

fn bytes(_: LayoutId) -> u64 {
    10
}

/// Adds a path of pages, each of which is marked as the last one of the owner in turn.
fn path(index: &mut Index, pages: &[u8], tenant: TenantTag, who: Owner) {
    let mut parent = None;
    for page in pages {
        match index.contains(&key(*page)) {
            true => drop(index.mark(key(*page), who)),
            false => drop(index.insert(key(*page), u32::from(*page), (parent, tenant), who, 10)),
        }
        parent = Some(key(*page).prefix);
        index.check();
    }
}

/// Returns the rules that leave a page.
fn keeping(page: u8) -> Eviction<'static> {
    Eviction { keep: Some(key(page)), ..Eviction::default() }
}

fn slots(changes: &Changes) -> Vec<u32> {
    let mut slots: Vec<u32> = changes.removed.iter().map(|slot| slot.number).collect();
    slots.sort_unstable();
    slots
}

#[test]
fn a_deleted_session_erases_only_its_own_pages() {
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3, 4], TENANT, owner(1));
    path(&mut index, &[1, 2, 5], TENANT, owner(2));
    path(&mut index, &[1, 2], TENANT, owner(3));
    let gone = index.forget(EraseFilter::Session(owner(1)), bytes);
    assert_eq!(slots(&gone), [3, 4]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::Session(owner(2)), bytes)), [5]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::Session(owner(3)), bytes)), [1, 2]);
    assert_eq!(index.len(), 0);
    assert_eq!(index.forget(EraseFilter::Session(owner(3)), bytes), Changes::default());
}

#[test]
fn a_continued_session_owns_only_its_last_page() {
    let mut index = Index::default();
    path(&mut index, &[1, 2], TENANT, owner(1));
    path(&mut index, &[1, 2, 3], TENANT, owner(1));
    assert_eq!(index.record(&key(2)).unwrap().1.owners, []);
    assert_eq!(index.record(&key(3)).unwrap().1.owners, [owner(1)]);
    // Another conversation of the session branches off.
    path(&mut index, &[1, 4], TENANT, owner(1));
    assert_eq!(slots(&index.forget(EraseFilter::Session(owner(1)), bytes)), [1, 2, 3, 4]);
}

/// Public pages have a tag of their own, and those of tenants follow them.
#[test]
fn pages_of_tenants_that_follow_public_ones_are_removed_without_them() {
    const PUBLIC: TenantTag = TenantTag(9);
    let agent = Owner { agent: 1, session: 0 };
    let mut index = Index::default();
    path(&mut index, &[1, 2], PUBLIC, agent);
    path(&mut index, &[1, 2, 3, 4], TENANT, owner(1));
    path(&mut index, &[1, 2, 5], TenantTag(2), owner(2));
    assert_eq!(index.record(&key(2)).unwrap().1.owners, [agent]);
    assert_eq!((index.bytes_of(PUBLIC), index.bytes_of(TENANT)), (20, 20));
    assert_eq!(slots(&index.forget(EraseFilter::Tenant(TENANT), bytes)), [3, 4]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::Session(owner(2)), bytes)), [5]);
    index.check();
    path(&mut index, &[1, 2, 6], TENANT, owner(1));
    assert_eq!(slots(&index.evict(&Eviction::default(), bytes).unwrap()), [6]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::Agent(1), bytes)), [1, 2]);
    assert_eq!(index.len(), 0);
}

#[test]
fn agents_and_tenants_are_removed_as_a_whole() {
    let mut index = Index::default();
    path(&mut index, &[1, 2], TENANT, owner(1));
    path(&mut index, &[1, 3], TENANT, Owner { agent: 2, session: 7 });
    path(&mut index, &[8, 9], TenantTag(2), owner(1));
    assert_eq!(slots(&index.forget(EraseFilter::Agent(2), bytes)), [3]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::Tenant(TenantTag(2)), bytes)), [8, 9]);
    index.check();
    assert_eq!(slots(&index.forget(EraseFilter::All, bytes)), [1, 2]);
    assert_eq!(index.bytes_by_tenant().count(), 0);
}

#[test]
fn eviction_takes_leaves_of_the_largest_tenant_and_owners_move_up() {
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3], TENANT, owner(1));
    path(&mut index, &[8], TenantTag(2), owner(2));
    path(&mut index, &[1, 2, 4], TENANT, owner(3));
    let evicted = index.evict(&Eviction::default(), bytes).unwrap();
    assert_eq!(slots(&evicted), [3], "the least recently used leaf");
    assert_eq!(evicted.rewritten, [key(2)]);
    assert_eq!(index.record(&key(2)).unwrap().1.owners, [owner(1)]);
    index.check();
    assert_eq!(slots(&index.evict(&keeping(4), bytes).unwrap()), [8], "the kept page stays");
    assert_eq!(index.evict(&keeping(4), bytes), None, "all others are before it");
    for expected in [4, 2, 1] {
        assert_eq!(slots(&index.evict(&Eviction::default(), bytes).unwrap()), [expected]);
        index.check();
    }
    assert_eq!(index.evict(&Eviction::default(), bytes), None);
}

#[test]
fn a_tenant_beyond_its_share_comes_first_and_pinned_pages_come_last() {
    let keys = crate::PageNamer::random();
    let (small, large) = (keys.tenant("small"), keys.tenant("large"));
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3], small, owner(1));
    path(&mut index, &[4, 5], small, owner(2));
    path(&mut index, &[11, 12, 13, 14, 15, 16], large, owner(3));
    assert_eq!((index.bytes_of(small), index.bytes_of(large)), (50, 60));
    assert_eq!([index.path_bytes(owner(1), &bytes), index.path_bytes(owner(3), &bytes)], [30, 60]);
    let shares = ByteShares::new(&TierShares::default(), 1_000, &keys);
    let unlimited = Eviction { shares: Some(&shares), ..Eviction::default() };
    assert_eq!(slots(&index.evict(&unlimited, bytes).unwrap()), [16], "the tenant with the most bytes");
    path(&mut index, &[11, 12, 13, 14, 15, 16], large, owner(3));
    let narrow = TierShares { tenants: [("small".to_owned(), 4)].into(), ..TierShares::default() };
    let shares = ByteShares::new(&narrow, 1_000, &keys);
    let rules = Eviction { shares: Some(&shares), ..Eviction::default() };
    assert_eq!(slots(&index.evict(&rules, bytes).unwrap()), [3], "the tenant beyond its share");
    let pinned = || Eviction { only: Some(small), last: [owner(1)].into(), ..Eviction::default() };
    for expected in [5, 4, 2, 1] {
        assert_eq!(slots(&index.evict(&pinned(), bytes).unwrap()), [expected]);
        index.check();
    }
    assert_eq!(index.evict(&pinned(), bytes), None);
}

#[test]
fn pins_protect_their_share_in_the_order_in_which_they_were_made() {
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3], TENANT, owner(1));
    path(&mut index, &[1, 2, 3, 4, 5, 6], TENANT, owner(2));
    path(&mut index, &[8], TENANT, owner(3));
    let protected = |share| {
        let mut found: Vec<u64> =
            crate::disk_tier::pins::protected(&[owner(1), owner(2), owner(3)], &index, share, &bytes)
                .into_iter()
                .map(|owner| owner.session)
                .collect();
        found.sort_unstable();
        found
    };
    assert_eq!(protected(100), [1, 2, 3]);
    assert_eq!(protected(99), [1, 2], "nothing is left for the third");
    assert_eq!(protected(89), [1, 3], "the second does not fit");
    assert_eq!(protected(0), [0; 0]);
}

#[test]
fn a_page_has_a_bounded_number_of_owners() {
    let mut index = Index::default();
    for number in 0..20 {
        path(&mut index, &[1], TENANT, owner(number));
    }
    assert_eq!(index.record(&key(1)).unwrap().1.owners.len(), MAX_OWNERS);
    for number in 0..7 {
        assert_eq!(slots(&index.forget(EraseFilter::Session(owner(number)), bytes)), [0; 0]);
    }
    assert_eq!(slots(&index.forget(EraseFilter::Session(owner(7)), bytes)), [1]);
}

#[test]
fn an_index_loads_only_reachable_pages_with_owners() {
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3], TENANT, owner(1));
    path(&mut index, &[1, 4], TENANT, owner(2));
    let all = |index: &Index| -> Vec<(Slot, Record)> {
        (0..=255).filter_map(|number| index.record(&key(number))).collect()
    };
    let records = all(&index);
    let (loaded, useless) = Index::load(records.clone(), bytes);
    loaded.check();
    assert_eq!((loaded.len(), useless.len()), (4, 0));
    assert_eq!(all(&loaded), records);
    // The record of page 2 was torn: page 3 cannot be reached.
    let torn: Vec<_> = records.iter().filter(|(slot, _)| slot.number != 2).cloned().collect();
    let (loaded, useless) = Index::load(torn, bytes);
    loaded.check();
    assert_eq!((loaded.len(), useless[0].number), (2, 3));
    // The record of page 3 was torn: page 2 belongs to nobody, because its owner stood at page 3.
    let torn: Vec<_> = records.iter().filter(|(slot, _)| slot.number != 3).cloned().collect();
    let (loaded, useless) = Index::load(torn, bytes);
    loaded.check();
    assert_eq!((loaded.len(), useless[0].number), (2, 2));
    // Two slots hold one page.
    let mut twice = records.clone();
    twice.push((Slot { layout: LAYOUT, number: 99 }, records[0].1.clone()));
    let (loaded, useless) = Index::load(twice, bytes);
    loaded.check();
    assert_eq!((loaded.len(), useless.len()), (4, 1));
}

#[test]
fn a_damaged_page_is_removed_with_its_successors() {
    let mut index = Index::default();
    path(&mut index, &[1, 2, 3, 4], TENANT, owner(1));
    path(&mut index, &[1, 5], TENANT, owner(2));
    assert_eq!(slots(&index.remove_tree(key(2), bytes)), [2, 3, 4]);
    index.check();
    assert_eq!(index.record(&key(1)).unwrap().1.owners, [owner(1)]);
    assert_eq!(slots(&index.remove_tree(key(5), bytes)), [5]);
    assert_eq!(index.record(&key(1)).unwrap().1.owners, [owner(1), owner(2)]);
    assert_eq!(slots(&index.remove_tree(key(9), bytes)), [0; 0]);
}

fn numbered(number: u32) -> PageKey {
    let mut prefix = [0; 32];
    prefix[..4].copy_from_slice(&number.to_le_bytes());
    PageKey { layout: LAYOUT, prefix: Digest(prefix) }
}

/// Adds a path of `count` pages that begins with page `first`.
fn long_path(index: &mut Index, first: u32, count: u32, who: Owner) {
    for number in first..first + count {
        let parent = (number > first).then(|| numbered(number - 1).prefix);
        index.insert(numbered(number), number, (parent, TENANT), who, 10);
    }
}

#[test]
fn the_work_for_a_page_does_not_grow_with_its_prefix_or_the_index() {
    let mut index = Index::default();
    // A second conversation of the session is what makes a search for the owner necessary.
    long_path(&mut index, 0, 2_000, owner(1));
    long_path(&mut index, 10_000, 2_000, owner(1));
    let visited = index.take_visited();
    assert!(visited < 3 * 4_000, "{visited} pages were looked at for 4,000 writes");
    assert_eq!(index.remove_tree(numbered(10_500), bytes).removed.len(), 1_500);
    let visited = index.take_visited();
    assert!(visited < 2 * 1_500, "{visited} pages were looked at to remove 1,500");
    index.check();
}
