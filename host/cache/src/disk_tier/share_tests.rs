//! Tests of shares, pins, encryption and the numbers of the writer, with real files.

use std::os::unix::fs::FileExt;

use super::tests::{BYTES, layout, pages_file, read, tokens, write};
use super::*;
use std::path::Path;

/// Opens a tier whose pages are encrypted with a key.
fn sealed(folder: &Path, key: u8) -> (DiskTier, LayoutId) {
    let key = Some(SealingSecret([key; 32]));
    let tier = DiskTier::open(TierOptions { key, ..TierOptions::for_tests(folder) }).unwrap();
    let form = layout(&tier, "form");
    (tier, form)
}

#[test]
fn a_tenant_beyond_its_share_makes_room_among_its_own_pages() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    let shares = TierShares { tenants: [("greedy".to_owned(), 40)].into(), ..TierShares::default() };
    let narrow = TierOptions { max_bytes: 10 * page, shares, ..TierOptions::for_tests(folder.path()) };
    let tier = DiskTier::open(narrow).unwrap();
    let form = layout(&tier, "form");
    let other = write(&tier, form, "other", "s", &tokens(1, 3));
    let first = write(&tier, form, "greedy", "1", &tokens(2, 4));
    assert_eq!((tier.status().pages, tier.status().evicted_pages), (7, 0));
    let second = write(&tier, form, "greedy", "2", &tokens(3, 3));
    assert_eq!(tier.leading(form, &other), 3, "the tier has room, and others keep what they have");
    assert_eq!([tier.leading(form, &first), tier.leading(form, &second)], [1, 3]);
    let long = write(&tier, form, "greedy", "3", &tokens(4, 6));
    assert_eq!((tier.leading(form, &long), tier.leading(form, &other)), (4, 3));
    assert_eq!(tier.status().dropped_pages, 2, "the end of what is longer than the share");
}

#[test]
fn pinned_sessions_are_evicted_last_and_outlive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    let open = || {
        let shares = TierShares { pinned: 50, ..TierShares::default() };
        let tier = DiskTier::open(TierOptions {
            max_bytes: 8 * page,
            shares,
            ..TierOptions::for_tests(folder.path())
        })
        .unwrap();
        let form = layout(&tier, "form");
        (tier, form)
    };
    let pin = |session: &str| Pin { tenant: "t".into(), agent: "agent".into(), session: session.into() };
    let (tier, form) = open();
    let kept = write(&tier, form, "t", "kept", &tokens(1, 4));
    assert!(tier.pin(pin("kept")).unwrap());
    assert!(!tier.pin(pin("kept")).unwrap(), "it is pinned already");
    for session in 0..4 {
        write(&tier, form, "t", &format!("{session}"), &tokens(10 + session, 3));
    }
    assert_eq!(tier.leading(form, &kept), 4, "it was used before all others");
    drop(tier);
    let (tier, form) = open();
    let status = PinStatus { pin: pin("kept"), bytes: 4 * page, is_protected: true };
    assert_eq!(tier.pins(), [status]);
    write(&tier, form, "t", "more", &tokens(20, 4));
    assert_eq!(tier.leading(form, &kept), 4);
    // Beyond the share of pins, a pin protects nothing.
    write(&tier, form, "t", "kept", &tokens(1, 5));
    assert!(!tier.pins()[0].is_protected);
    write(&tier, form, "t", "last", &tokens(30, 8));
    assert_eq!(tier.leading(form, &kept), 0);
    assert!(tier.unpin(&pin("kept")).unwrap());
    assert!(!tier.unpin(&pin("kept")).unwrap());
    // A deleted session takes its pin along.
    assert!(tier.pin(pin("last")).unwrap());
    tier.forget(EraseFilter::Session(tier.keys().owner(Some("agent"), Some("last"))));
    drop(tier);
    assert!(open().0.pins().is_empty());
}

#[test]
fn pins_have_a_maximum_and_names_without_white_space() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = tests::open(folder.path());
    let of = |session: &str| Pin { tenant: "t".into(), agent: "a".into(), session: session.into() };
    let pin = |session: &str| tier.pin(of(session));
    assert!(matches!(pin("a\tb"), Err(PinError::Name(_))));
    assert!(matches!(pin(""), Err(PinError::Name(_))));
    for number in 0..256 {
        assert!(pin(&number.to_string()).unwrap());
    }
    assert!(matches!(pin("one more"), Err(PinError::Name(_))));
    assert!(matches!(pin("257"), Err(PinError::TooMany)));
}

#[test]
fn pins_are_read_while_the_disk_does_not_take_one() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = tests::open(folder.path());
    // Whoever opens this pipe to write the list waits until somebody reads from it.
    let pipe = folder.path().join("pins.new");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let pin = Pin { tenant: "t".into(), agent: "a".into(), session: "s".into() };
    let (done, read) = channel();
    std::thread::scope(|scope| {
        let pinning = scope.spawn(|| tier.pin(pin));
        scope.spawn(|| {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(300) {
                assert!(tier.pins().is_empty());
            }
            done.send(()).unwrap();
        });
        let was_read = read.recv_timeout(Duration::from_secs(20)).is_ok();
        let _reader = std::fs::File::open(&pipe).unwrap();
        assert!(pinning.join().unwrap().is_err(), "a pipe cannot be synced");
        assert!(was_read, "it waited for the disk");
    });
}

#[test]
fn the_bytes_of_a_day_outlive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = tests::open(folder.path());
    write(&tier, form, "t", "s", &tokens(1, 3));
    let page = DiskTier::page_bytes(BYTES);
    let of_days = |tier: &DiskTier| {
        let TierStatus { written_today_bytes, written_yesterday_bytes, .. } = tier.status();
        // The test may run past midnight.
        written_today_bytes + written_yesterday_bytes
    };
    assert_eq!(of_days(&tier), 3 * page);
    drop(tier);
    let (tier, form) = tests::open(folder.path());
    assert_eq!((of_days(&tier), tier.status().written_bytes), (3 * page, 0));
    write(&tier, form, "t", "s", &tokens(1, 4));
    assert_eq!(of_days(&tier), 4 * page);
}

#[test]
fn writes_take_as_long_as_their_rate_says() {
    let folder = tempfile::tempdir().unwrap();
    let page = DiskTier::page_bytes(BYTES);
    let tier =
        DiskTier::open(TierOptions { write_bytes_per_s: 20 * page, ..TierOptions::for_tests(folder.path()) })
            .unwrap();
    let form = layout(&tier, "form");
    let begun = Instant::now();
    write(&tier, form, "t", "s", &tokens(1, 6));
    assert!(begun.elapsed() >= Duration::from_millis(250), "six pages at 20 pages a second");
    assert_eq!(tier.status().written_pages, 6);
}

#[test]
fn reads_take_as_long_as_their_rate_says_and_are_expected_to() {
    let folder = tempfile::tempdir().unwrap();
    let rate = Some(20 * BYTES as u64);
    let tier =
        DiskTier::open(TierOptions { read_bytes_per_s: rate, ..TierOptions::for_tests(folder.path()) })
            .unwrap();
    let form = layout(&tier, "form");
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 6));
    let begun = Instant::now();
    assert_eq!(read(&tier, form, &prefixes).len(), 6);
    assert!(begun.elapsed() >= Duration::from_millis(300), "six pages at 20 pages a second");
    assert!(tier.read_time(BYTES as u64) >= Duration::from_millis(50));
}

#[test]
fn sealed_pages_cannot_be_read_in_the_files_and_open_only_with_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let sealed = |key: u8| sealed(folder.path(), key);
    let page = |at: u8| vec![b'a' + at; BYTES];
    let in_files = |part: &[u8]| {
        let files = std::fs::read_dir(folder.path()).unwrap();
        let mut files = files.map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        files.any(|file| file.windows(part.len()).any(|found| found == part))
    };
    let (tier, form) = sealed(1);
    let prefixes = tier.keys().prefixes("t", &tokens(1, 3), 16);
    for (at, prefix) in prefixes.iter().enumerate() {
        assert!(tier.write(PageWrite {
            layout: form,
            prefix: *prefix,
            parent: at.checked_sub(1).map(|before| prefixes[before]),
            tenant: tier.keys().tenant("t"),
            owner: Owner::default(),
            bytes: page(at as u8),
        }));
    }
    tier.flush();
    let all = [page(0), page(1), page(2)];
    assert_eq!(read(&tier, form, &prefixes), all);
    assert!((0..3).all(|at| !in_files(&page(at)[..16])), "a page can be read in the files");
    drop(tier);
    let (tier, form) = sealed(1);
    assert_eq!(read(&tier, form, &prefixes), all, "after a restart");
    // Ciphertext that was changed is a miss, as any other damage.
    let file = std::fs::OpenOptions::new().write(true).open(pages_file(folder.path())).unwrap();
    file.write_all_at(b"x", DiskTier::page_bytes(BYTES) + 5000).unwrap();
    assert_eq!(read(&tier, form, &prefixes), all[..1]);
    tier.flush();
    assert_eq!(tier.status().damaged_pages, 1);
    drop(tier);
    // With another key or without one, nothing is left.
    let (tier, form) = sealed(2);
    assert_eq!((tier.leading(form, &prefixes), tier.status().pages), (0, 0));
    write(&tier, form, "t", "s", &tokens(1, 2));
    drop(tier);
    let (tier, form) = tests::open(folder.path());
    assert_eq!((tier.leading(form, &prefixes), tier.status().pages), (0, 0));
}

/// The file that names the key was lost or copied: the tier then relies on the cipher alone.
#[test]
fn pages_of_another_key_are_damaged_pages() {
    let folder = tempfile::tempdir().unwrap();
    let sealed = |key: u8| sealed(folder.path(), key);
    let (tier, form) = sealed(1);
    let prefixes = write(&tier, form, "t", "s", &tokens(1, 2));
    drop(tier);
    let other = PageCipher::new(&SealingSecret([2; 32])).id();
    std::fs::write(folder.path().join("sealed"), other).unwrap();
    let (tier, form) = sealed(2);
    assert_eq!(tier.leading(form, &prefixes), 2);
    assert_eq!(read(&tier, form, &prefixes), Vec::<Vec<u8>>::new());
    tier.flush();
    assert_eq!((tier.status().damaged_pages, tier.leading(form, &prefixes)), (1, 0));
}

#[test]
fn hosts_with_a_common_key_name_pages_alike_and_pages_under_another_key_are_removed() {
    let [one, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let shared = |folder: &Path, key: u8| {
        let name_key = Some(SealingSecret([key; 32]));
        let tier = DiskTier::open(TierOptions { name_key, ..TierOptions::for_tests(folder) }).unwrap();
        let form = layout(&tier, "form");
        (tier, form)
    };
    // A folder that had a key of its own starts over, and others that join find the same names.
    let own = DiskTier::open(TierOptions::for_tests(one.path())).unwrap();
    let form = layout(&own, "form");
    let before = write(&own, form, "t", "s", &tokens(1, 3));
    drop(own);
    let (first, form) = shared(one.path(), 7);
    assert_eq!(first.status().pages_at_start, 0, "their names belong to the key of the folder");
    let named = write(&first, form, "t", "s", &tokens(1, 3));
    assert_ne!(named, before);
    let (second, form) = shared(other.path(), 7);
    assert_eq!(second.keys().prefixes("t", &tokens(1, 3), 16), named);
    assert_eq!(second.leading(form, &named), 0);
    drop(first);
    // The pages stay while the key does, also for a host that leaves the others.
    assert_eq!(shared(one.path(), 7).0.status().pages_at_start, 3);
    assert_eq!(DiskTier::open(TierOptions::for_tests(one.path())).unwrap().status().pages_at_start, 3);
    assert_eq!(shared(one.path(), 8).0.status().pages_at_start, 0);
}

#[test]
fn a_layout_is_found_only_as_it_was_made() {
    for key in [None, Some(SealingSecret([1; 32]))] {
        let folder = tempfile::tempdir().unwrap();
        let tier = DiskTier::open(TierOptions { key, ..TierOptions::for_tests(folder.path()) }).unwrap();
        let name = tier.keys().layout("weights", "form");
        assert_eq!(tier.find_layout(name, BYTES), None);
        let form = layout(&tier, "form");
        assert_eq!(tier.find_layout(name, BYTES), Some(form));
        assert_eq!(tier.find_layout(name, BYTES + 1), None);
        assert_eq!(tier.find_layout(name, usize::MAX), None);
    }
}

#[test]
fn the_last_erasure_of_all_hosts_is_remembered_by_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let tier = DiskTier::open(TierOptions::for_tests(folder.path())).unwrap();
    assert_eq!(tier.erased_until().unwrap(), None);
    tier.set_erased_until(41).unwrap();
    drop(tier);
    let tier = DiskTier::open(TierOptions::for_tests(folder.path())).unwrap();
    assert_eq!(tier.erased_until().unwrap(), Some(41));
    std::fs::write(folder.path().join("erased"), "no number").unwrap();
    assert_eq!(tier.erased_until().unwrap(), None);
}
