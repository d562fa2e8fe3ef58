//! Tests of the tier with real files: restarts, damage, full and slow disks, deletion and budgets.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::atomic::Ordering::SeqCst;

use super::*;

pub(super) const BYTES: usize = 10_000;

pub(super) fn open(folder: &Path) -> (DiskTier, LayoutId) {
    let tier = DiskTier::open(TierOptions::for_tests(folder)).unwrap();
    let layout = layout(&tier, "form");
    (tier, layout)
}

pub(super) fn layout(tier: &DiskTier, form: &str) -> LayoutId {
    tier.layout(tier.keys().layout("weights", form), BYTES).unwrap()
}

/// Returns recognizable contents of a page.
fn contents(prefix: Digest) -> Vec<u8> {
    prefix.0.iter().copied().cycle().take(BYTES).collect()
}

/// Writes the whole pages of `tokens` for a session, and returns their names.
pub(super) fn write(
    tier: &DiskTier,
    layout: LayoutId,
    tenant: &str,
    session: &str,
    tokens: &[u32],
) -> Vec<Digest> {
    let prefixes = tier.keys().prefixes(tenant, tokens, 16);
    let owner = tier.keys().owner(Some("agent"), Some(session));
    for (at, prefix) in prefixes.iter().enumerate() {
        assert!(tier.write(PageWrite {
            layout,
            prefix: *prefix,
            parent: at.checked_sub(1).map(|before| prefixes[before]),
            tenant: tier.keys().tenant(tenant),
            owner,
            bytes: contents(*prefix),
        }));
    }
    tier.flush();
    prefixes
}

/// Returns the erasure of the pages that [`write`] wrote for a session.
pub(super) fn session_of(tier: &DiskTier, session: &str) -> EraseFilter {
    EraseFilter::Session(tier.keys().owner(Some("agent"), Some(session)))
}

pub(super) fn tokens(seed: u32, pages: u32) -> Vec<u32> {
    (0..pages * 16).map(|at| at * 31 + seed).collect()
}

/// Reads pages until the read ends.
pub(super) fn read(tier: &DiskTier, layout: LayoutId, prefixes: &[Digest]) -> Vec<Vec<u8>> {
    let mut pages = tier.read(layout, prefixes.to_vec()).unwrap();
    let mut read = Vec::new();
    loop {
        match pages.poll() {
            PageRead::Page(page) => read.push(page),
            PageRead::NotYet => std::thread::yield_now(),
            PageRead::Ended => return read,
        }
    }
}

/// Returns whether the contents of a page are anywhere in the files.
pub(super) fn is_on_disk(folder: &Path, prefix: Digest) -> bool {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    files.into_iter().any(|file| file.windows(32).any(|part| part == prefix.0))
}

pub(super) fn pages_file(folder: &Path) -> PathBuf {
    let mut paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.find(|path| path.extension().is_some_and(|extension| extension == "pages")).unwrap()
}

/// Opens the index of the only layout in a folder for writing.
pub(super) fn index_file(folder: &Path) -> std::fs::File {
    let path = pages_file(folder).with_extension("index");
    std::fs::OpenOptions::new().write(true).open(path).unwrap()
}

#[test]
fn pages_come_back_after_a_restart_and_only_for_their_layout_and_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 5));
    assert_eq!(tier.leading(form, &prefixes), 5);
    drop(tier);
    let (tier, form) = open(folder.path());
    assert_eq!((tier.leading(form, &prefixes), tier.status().pages_at_start), (5, 5));
    let expected: Vec<Vec<u8>> = prefixes.iter().map(|prefix| contents(*prefix)).collect();
    assert_eq!(read(&tier, form, &prefixes), expected);
    let other = layout(&tier, "other form");
    assert_eq!(tier.leading(other, &prefixes), 0);
    assert_eq!(read(&tier, other, &prefixes), Vec::<Vec<u8>>::new());
    assert_eq!(tier.leading(form, &tier.keys().prefixes("u", &tokens(1, 5), 16)), 0);
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    assert_eq!(std::fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn an_image_of_the_folder_at_any_moment_opens() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    for session in 0..6 {
        let prefixes = write(&tier, form, "t", &format!("{session}"), &tokens(session, 4));
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let (copied, form) = open(copy.path());
        assert_eq!(copied.leading(form, &prefixes), 4, "the process was not closed before the copy");
        assert_eq!(read(&copied, form, &prefixes).len(), 4);
    }
}

#[test]
fn a_damaged_page_is_a_miss_and_is_removed_with_those_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 6));
    let file = std::fs::OpenOptions::new().write(true).open(pages_file(folder.path())).unwrap();
    file.write_all_at(b"x", 3 * DiskTier::page_bytes(BYTES) + 5000).unwrap();
    assert_eq!(read(&tier, form, &prefixes).len(), 3);
    tier.flush();
    assert_eq!((tier.leading(form, &prefixes), tier.status().damaged_pages), (3, 1));
    // It can be written again.
    assert_eq!(write(&tier, form, "t", "s", &tokens(1, 6)), prefixes);
    assert_eq!(read(&tier, form, &prefixes).len(), 6);
    // A file that is cut off has only whole pages.
    file.set_len(2 * DiskTier::page_bytes(BYTES) + 100).unwrap();
    assert_eq!(read(&tier, form, &prefixes).len(), 2);
    drop(tier);
    std::fs::write(pages_file(folder.path()).with_extension("index"), b"rubbish").unwrap();
    let (tier, form) = open(folder.path());
    assert_eq!((tier.leading(form, &prefixes), tier.status().pages), (0, 0));
}

#[test]
fn a_damaged_page_that_two_readers_find_counts_once_and_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 6));
    let file = std::fs::OpenOptions::new().write(true).open(pages_file(folder.path())).unwrap();
    file.write_all_at(b"x", 3 * DiskTier::page_bytes(BYTES) + 5000).unwrap();
    // The writer is busy while both read.
    tier.faults().write_delay_ms.store(500, SeqCst);
    let other = tier.keys().prefixes("t", &tokens(9, 1), 16)[0];
    assert!(tier.write(PageWrite {
        layout: form,
        prefix: other,
        parent: None,
        tenant: tier.keys().tenant("t"),
        owner: Owner::default(),
        bytes: contents(other),
    }));
    assert_eq!([(); 2].map(|()| read(&tier, form, &prefixes).len()), [3, 3]);
    assert_eq!(
        prefixes.iter().filter(|prefix| tier.has(form, **prefix)).count(),
        3,
        "the writer is still busy"
    );
    tier.faults().write_delay_ms.store(0, SeqCst);
    write(&tier, form, "t", "s", &tokens(1, 6));
    let status = tier.status();
    assert_eq!((status.pages, status.damaged_pages, status.dropped_pages), (7, 1, 0));
    drop(tier);
    let (tier, form) = open(folder.path());
    assert_eq!(read(&tier, form, &prefixes).len(), 6);
}

#[test]
fn pages_of_a_lost_key_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 2));
    drop(tier);
    std::fs::write(folder.path().join("key"), b"short").unwrap();
    let (tier, form) = open(folder.path());
    assert_eq!((tier.leading(form, &prefixes), tier.status().pages), (0, 0));
    assert!(!is_on_disk(folder.path(), prefixes[0]));
}

#[test]
fn pages_of_a_deleted_session_are_erased_from_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let one = write(&tier, form, "t", "one", &tokens(1, 4));
    let mut other_tokens = tokens(1, 2);
    other_tokens.extend(tokens(9, 2));
    let other = write(&tier, form, "t", "other", &other_tokens);
    assert_eq!(one[..2], other[..2], "both begin with the same tokens");
    drop(tier);
    // The model need not be there for a deletion.
    let tier = DiskTier::open(TierOptions::for_tests(folder.path())).unwrap();
    assert_eq!(tier.forget(EraseFilter::Session(tier.keys().owner(Some("agent"), Some("one")))), 2);
    for (prefix, stays) in
        [(one[0], true), (one[1], true), (one[2], false), (one[3], false), (other[3], true)]
    {
        assert_eq!(is_on_disk(folder.path(), prefix), stays, "{prefix:?}");
    }
    let form = layout(&tier, "form");
    assert_eq!(read(&tier, form, &other).len(), 4);
    assert_eq!(tier.forget(EraseFilter::Tenant(tier.keys().tenant("t"))), 4);
    assert!(one.iter().chain(&other).all(|prefix| !is_on_disk(folder.path(), *prefix)));
    let status = tier.status();
    assert_eq!((status.pages, status.used_bytes, status.erased_pages), (0, 0, 6));
}

#[test]
fn an_erasure_that_the_disk_does_not_take_fails_and_is_made_with_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let gone = write(&tier, form, "t", "gone", &tokens(1, 3));
    let stays = write(&tier, form, "t", "stays", &tokens(9, 2));
    let session = |name| session_of(&tier, name);
    tier.faults().erasures_fail.store(true, SeqCst);
    assert!(tier.erase(vec![session("gone")]).is_err());
    assert!(tier.erase(vec![session("nobody")]).is_err(), "pages of an earlier erasure are left");
    assert_eq!((tier.leading(form, &gone), tier.status().erased_pages), (0, 0));
    assert!(is_on_disk(folder.path(), gone[0]));
    tier.faults().erasures_fail.store(false, SeqCst);
    assert_eq!(tier.erase(vec![session("nobody")]).unwrap(), 3);
    assert!(gone.iter().all(|prefix| !is_on_disk(folder.path(), *prefix)));
    assert_eq!((tier.erase(vec![session("gone")]).unwrap(), tier.status().erased_pages), (0, 3));
    drop(tier);
    let (tier, form) = open(folder.path());
    assert_eq!((tier.leading(form, &gone), tier.leading(form, &stays)), (0, 2));
}

#[test]
fn a_full_tier_evicts_and_never_grows_beyond_its_budget() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    let tier =
        DiskTier::open(TierOptions { max_bytes: 8 * page + 1, ..TierOptions::for_tests(folder.path()) })
            .unwrap();
    let form = layout(&tier, "form");
    let first = write(&tier, form, "t", "1", &tokens(1, 4));
    let second = write(&tier, form, "t", "2", &tokens(2, 4));
    // The first is used again, so the second makes room.
    tier.mark(form, first[3], tier.keys().owner(Some("agent"), Some("1")));
    let third = write(&tier, form, "t", "3", &tokens(3, 3));
    let status = tier.status();
    assert_eq!((status.used_bytes, status.pages, status.evicted_pages), (8 * page, 8, 3));
    let leading = [&first, &second, &third].map(|prefixes| tier.leading(form, prefixes));
    assert_eq!(leading, [4, 1, 3]);
    assert!(std::fs::metadata(pages_file(folder.path())).unwrap().len() <= 8 * page);
    // A conversation that is longer than the tier keeps its beginning.
    let long = write(&tier, form, "t", "4", &tokens(4, 12));
    assert_eq!(tier.leading(form, &long), 8);
    drop(tier);
    let tier =
        DiskTier::open(TierOptions { max_bytes: 3 * page, ..TierOptions::for_tests(folder.path()) }).unwrap();
    tier.flush();
    assert_eq!((tier.status().pages, tier.status().evicted_pages), (3, 5), "the budget was lowered");
}

#[test]
fn a_layout_whose_slots_are_all_taken_evicts_its_own_pages() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let other = layout(&tier, "other form");
    let of_other = write(&tier, other, "t", "first", &tokens(1, 3));
    let slots = super::layout_files::MAX_SLOTS as u32;
    for session in 0..slots / 64 {
        write(&tier, form, "t", &format!("{session}"), &tokens(10 + session, 64));
    }
    assert_eq!((tier.status().pages, tier.status().evicted_pages), (u64::from(slots) + 3, 0));
    let last = write(&tier, form, "t", "last", &tokens(5, 70));
    assert_eq!([tier.leading(form, &last), tier.leading(other, &of_other)], [70, 3]);
    let status = tier.status();
    assert_eq!((status.pages, status.evicted_pages, status.dropped_pages), (u64::from(slots) + 3, 70, 0));
}

#[test]
fn the_largest_tenant_makes_room() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    let tier =
        DiskTier::open(TierOptions { max_bytes: 8 * page, ..TierOptions::for_tests(folder.path()) }).unwrap();
    let form = layout(&tier, "form");
    let small = write(&tier, form, "small", "s", &tokens(1, 2));
    for session in 0..5 {
        write(&tier, form, "large", &format!("{session}"), &tokens(session, 3));
    }
    assert_eq!(tier.leading(form, &small), 2, "the least recently used page belongs to a smaller tenant");
}

#[test]
fn a_full_disk_loses_nothing_but_pages() {
    let folder = tempfile::tempdir().unwrap();
    let tier = DiskTier::open(TierOptions { min_free_percent: 100, ..TierOptions::for_tests(folder.path()) })
        .unwrap();
    let form = layout(&tier, "form");
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 2));
    assert_eq!((tier.leading(form, &prefixes), tier.status().dropped_pages), (0, 2));
    assert_eq!(tier.accepts(1), Acceptance::Never, "too little of the disk is free");
    drop(tier);
    let (tier, form) = open(folder.path());
    let kept = write(&tier, form, "t", "kept", &tokens(5, 2));
    tier.faults().disk_is_full.store(true, SeqCst);
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 2));
    assert_eq!(tier.leading(form, &prefixes), 0);
    assert_eq!(tier.accepts(1), Acceptance::Never, "nothing is copied for a disk that is full");
    assert_eq!(read(&tier, form, &kept).len(), 2);
    assert!(!tier.has(form, prefixes[0]));
}

#[test]
fn an_abandoned_read_ends_and_a_slow_disk_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 40));
    let before = tier.read_time(BYTES as u64);
    // No page arrives before the next lines have run.
    tier.faults().read_delay_ms.store(1_000, SeqCst);
    let mut pages = tier.read(form, prefixes.clone()).unwrap();
    assert!(tier.read_time(0) > before, "what waits is counted");
    assert_eq!(pages.poll(), PageRead::NotYet);
    drop(pages);
    tier.faults().read_delay_ms.store(3, SeqCst);
    assert_eq!(read(&tier, form, &prefixes).len(), 40);
    assert!(tier.status().read_pages < 80, "the first read ended early");
    assert!(tier.read_time(BYTES as u64) > before, "the measured rate counts");
}

#[test]
fn a_page_without_its_predecessor_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = tier.keys().prefixes("t", &tokens(1, 3), 16);
    let write = |at: usize, bytes: usize| {
        tier.write(PageWrite {
            layout: form,
            prefix: prefixes[at],
            parent: at.checked_sub(1).map(|before| prefixes[before]),
            tenant: tier.keys().tenant("t"),
            owner: Owner::default(),
            bytes: vec![1; bytes],
        });
        tier.flush();
    };
    write(1, BYTES);
    write(0, BYTES - 1);
    assert_eq!((tier.status().pages, tier.status().dropped_pages), (0, 2));
}

#[test]
fn an_erasure_overtakes_the_pages_that_wait_to_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    // One page a minute: the second page would be written in a minute.
    let tier =
        DiskTier::open(TierOptions { write_bytes_per_s: page / 60, ..TierOptions::for_tests(folder.path()) })
            .unwrap();
    let form = layout(&tier, "form");
    let prefixes = tier.keys().prefixes("t", &tokens(1, 4), 16);
    let others = tier.keys().prefixes("t", &tokens(9, 1), 16);
    let write = |prefixes: &[Digest], session: &str| {
        for (at, prefix) in prefixes.iter().enumerate() {
            assert!(tier.write(PageWrite {
                layout: form,
                prefix: *prefix,
                parent: at.checked_sub(1).map(|before| prefixes[before]),
                tenant: tier.keys().tenant("t"),
                owner: tier.keys().owner(Some("agent"), Some(session)),
                bytes: contents(*prefix),
            }));
        }
    };
    write(&prefixes, "deleted");
    tier.mark(form, prefixes[0], tier.keys().owner(Some("agent"), Some("deleted")));
    write(&others, "stays");
    while tier.status().written_pages == 0 {
        std::thread::yield_now();
    }
    let begun = Instant::now();
    assert_eq!(tier.forget(EraseFilter::Session(tier.keys().owner(Some("agent"), Some("deleted")))), 1);
    assert!(begun.elapsed() < Duration::from_secs(30), "it waited for the pace of writes");
    drop(tier);
    // Pages that were queued before the erasure are not written after it, but other sessions' pages are.
    let (tier, form) = open(folder.path());
    assert_eq!((tier.leading(form, &prefixes), tier.leading(form, &others)), (0, 1));
    assert!(prefixes.iter().all(|prefix| !is_on_disk(folder.path(), *prefix)));
    // A session of the same name is written as before.
    assert_eq!(super::tests::write(&tier, form, "t", "deleted", &tokens(1, 4)), prefixes);
    assert_eq!(tier.leading(form, &prefixes), 4);
}

#[test]
fn a_read_that_is_not_taken_does_not_hold_up_others() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let long = write(&tier, form, "t", "long", &tokens(1, 60));
    let short = write(&tier, form, "t", "short", &tokens(9, 20));
    let mut untaken = tier.read(form, long.clone()).unwrap();
    assert_eq!(read(&tier, form, &short).len(), 20);
    let mut taken = 0;
    loop {
        match untaken.next_within(Duration::from_secs(30)) {
            PageRead::Page(page) => {
                assert_eq!(page, contents(long[taken]));
                taken += 1;
            }
            PageRead::NotYet => panic!("a read stopped after {taken} pages"),
            PageRead::Ended => break,
        }
    }
    assert_eq!(taken, 60);
    assert_eq!(tier.shared.queued_read_bytes.load(SeqCst), 0);
}

#[test]
fn a_disk_that_hangs_does_not_keep_the_tier_from_closing() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 1));
    tier.faults().write_delay_ms.store(20_000, SeqCst);
    tier.faults().read_delay_ms.store(20_000, SeqCst);
    let _read = tier.read(form, prefixes.clone()).unwrap();
    let more = tier.keys().prefixes("t", &tokens(1, 2), 16);
    assert!(tier.write(PageWrite {
        layout: form,
        prefix: more[1],
        parent: Some(more[0]),
        tenant: tier.keys().tenant("t"),
        owner: Owner::default(),
        bytes: contents(more[1]),
    }));
    let begun = Instant::now();
    drop(tier);
    assert!(begun.elapsed() < Duration::from_secs(10), "it waited for the disk");
}
