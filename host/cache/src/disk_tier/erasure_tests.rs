//! Tests of erasures with real files: who is notified of them, disks that do not take them, and what a power cut leaves.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::{CWD, Mode, mkfifoat};

use super::record::{EMPTY, RECORD_BYTES};
use super::tests::{index_file, is_on_disk, open, read, session_of, tokens, write};
use super::unfinished::UnfinishedErasures;
use super::*;

/// Returns a copy of the folder of a tier, as a power cut would leave it.
fn copy(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

fn pin_of(session: &str) -> Pin {
    Pin { tenant: "t".to_owned(), agent: "agent".to_owned(), session: session.to_owned() }
}

/// Looks until `is_so` returns true, or for ten seconds. Returns whether it did.
fn until(mut is_so: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        if is_so() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn pages_that_are_erased_here_alone_are_not_reported_to_holders_of_copies() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let (erased, notices) = channel();
    tier.when_erased(move |pages| erased.send(pages).unwrap());
    write(&tier, form, "t", "s", &tokens(1, 3));
    assert_eq!((tier.forget(EraseFilter::AllHere), tier.status().pages), (3, 0));
    write(&tier, form, "t", "s", &tokens(1, 2));
    assert_eq!((tier.forget(EraseFilter::All), tier.status().pages), (2, 0));
    assert_eq!(notices.try_iter().collect::<Vec<_>>(), [ErasedPages::All]);
}

#[test]
fn an_erasure_that_the_disk_does_not_take_is_made_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let shared = write(&tier, form, "t", "stays", &tokens(1, 2));
    let gone = write(&tier, form, "t", "gone", &tokens(1, 4));
    let of_agent = write(&tier, form, "u", "other", &tokens(5, 3));
    tier.faults().erasures_fail.store(true, SeqCst);
    assert!(tier.erase(vec![session_of(&tier, "gone")]).is_err());
    assert!(tier.erase(vec![EraseFilter::Tenant(tier.keys().tenant("u"))]).is_err());
    assert_eq!(tier.status().dropped_pages, 0, "all pages were written");
    drop(tier);
    assert!(is_on_disk(folder.path(), gone[3]) && is_on_disk(folder.path(), of_agent[2]));
    let (tier, form) = open(folder.path());
    assert_eq!([tier.leading(form, &gone), tier.leading(form, &of_agent)], [2, 0]);
    assert_eq!(tier.status().pages_at_start, 2);
    tier.flush();
    assert_eq!(tier.status().erased_pages, 5);
    assert!(gone[2..].iter().chain(&of_agent).all(|prefix| !is_on_disk(folder.path(), *prefix)));
    // The session may come back with the same name.
    write(&tier, form, "t", "gone", &tokens(1, 4));
    drop(tier);
    let (tier, form) = open(folder.path());
    assert_eq!([tier.leading(form, &shared), tier.leading(form, &gone)], [2, 4]);
}

#[test]
fn an_erasure_that_cannot_even_be_noted_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    write(&tier, form, "t", "s", &tokens(1, 2));
    tier.faults().erasures_fail.store(true, SeqCst);
    // The file of the note cannot be written.
    std::fs::create_dir(folder.path().join("unerased.new")).unwrap();
    let error = tier.erase(vec![EraseFilter::All]).unwrap_err().to_string();
    assert!(error.contains("a restart would bring the pages back"), "{error}");
}

#[test]
fn pages_without_a_record_are_erased_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let [first, second, third] =
        [1, 2, 3].map(|session| write(&tier, form, "t", &format!("{session}"), &tokens(session, 2)));
    drop(tier);
    // The record of the fourth page is empty, and that of the sixth was not written.
    let index = index_file(folder.path());
    index.write_all_at(&EMPTY, 4 * RECORD_BYTES as u64).unwrap();
    index.set_len(6 * RECORD_BYTES as u64).unwrap();
    let (tier, form) = open(folder.path());
    tier.flush();
    assert!(![second[1], third[1]].iter().any(|prefix| is_on_disk(folder.path(), *prefix)));
    // The pages before them have lost their owner.
    assert_eq!([&first, &second, &third].map(|names| read(&tier, form, names).len()), [2, 0, 0]);
    // Their slots are used again.
    let more = write(&tier, form, "t", "4", &tokens(4, 2));
    assert_eq!(read(&tier, form, &more).len(), 2);
}

#[test]
fn an_erasure_waits_for_a_disk_that_hangs_no_longer_than_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let gone = write(&tier, form, "t", "s", &tokens(1, 1));
    tier.faults().erase_delay_ms.store(3_000, SeqCst);
    let begun = Instant::now();
    let error = tier.erase_within(vec![EraseFilter::All], Duration::from_millis(50)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(2), "it waited for the disk");
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    // The disk answers in the end.
    tier.faults().erase_delay_ms.store(0, SeqCst);
    assert_eq!(tier.erase(vec![EraseFilter::All]).unwrap(), 0);
    assert!(!is_on_disk(folder.path(), gone[0]));
}

#[test]
fn an_erasure_that_a_disk_has_not_taken_in_time_is_made_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let [first, second] =
        [1, 2].map(|session| write(&tier, form, "t", &format!("{session}"), &tokens(session, 2)));
    tier.faults().erase_delay_ms.store(60_000, SeqCst);
    // The writer does not even begin the second one.
    for session in ["1", "2"] {
        let which = session_of(&tier, session);
        let error = tier.erase_within(vec![which], Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
    let noted = || UnfinishedErasures::read(folder.path()).unwrap().list().len();
    assert!(until(|| noted() == 2), "{} erasures are noted", noted());
    let left = copy(folder.path());
    assert!(is_on_disk(left.path(), first[1]) && is_on_disk(left.path(), second[1]));
    let (tier, form) = open(left.path());
    assert_eq!([tier.leading(form, &first), tier.leading(form, &second)], [0, 0]);
    tier.flush();
    assert!(!is_on_disk(left.path(), first[1]) && !is_on_disk(left.path(), second[1]));
}

#[test]
fn a_note_of_an_erasure_stays_until_the_disk_has_taken_that_one_too() {
    let folder = tempfile::tempdir().unwrap();
    let erasures = Erasures::default();
    let noted = || UnfinishedErasures::read(folder.path()).unwrap().list().to_vec();
    let all = [1, 2].map(EraseFilter::Agent);
    for which in all {
        erasures.want(vec![which], channel().0);
    }
    assert_eq!(erasures.take().unwrap().which, all[..1]);
    erasures.note_wanted(folder.path());
    assert_eq!(noted(), all);
    erasures.finish(folder.path()).unwrap();
    assert!(noted().contains(&all[1]), "it is not made yet");
    assert_eq!(erasures.take().unwrap().which, all[1..]);
    erasures.finish(folder.path()).unwrap();
    assert_eq!(noted(), []);
    // A request that comes too late notes nothing.
    erasures.note_wanted(folder.path());
    assert_eq!(noted(), []);
}

#[test]
fn many_erasures_wait_for_a_disk_that_hangs_no_longer_than_one_and_all_of_them_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let sessions = ["1", "2", "3"];
    let pages: Vec<Vec<Digest>> = sessions
        .iter()
        .zip(1..)
        .map(|(session, seed)| write(&tier, form, "t", session, &tokens(seed, 1)))
        .collect();
    let kept = write(&tier, form, "t", "4", &tokens(4, 1));
    tier.faults().erase_delay_ms.store(3_000, SeqCst);
    let which: Vec<EraseFilter> = sessions.iter().map(|session| session_of(&tier, session)).collect();
    let begun = Instant::now();
    let error = tier.erase_within(which.clone(), Duration::from_millis(50)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(2), "it waited for the disk");
    let text = error.to_string();
    assert!(error.kind() == io::ErrorKind::TimedOut && text.contains("all 3 erasures"), "{text}");
    // The disk answers in the end.
    tier.faults().erase_delay_ms.store(0, SeqCst);
    assert_eq!((tier.erase(which).unwrap(), tier.erase(Vec::new()).unwrap()), (0, 0));
    assert!(pages.iter().all(|pages| !is_on_disk(folder.path(), pages[0])));
    assert_eq!((tier.leading(form, &kept), tier.status().erased_pages), (1, 3));
}

#[test]
fn a_note_is_made_of_each_of_the_erasures_that_fail_together() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let [first, second] =
        [1, 2].map(|session| write(&tier, form, "t", &format!("{session}"), &tokens(session, 2)));
    tier.faults().erasures_fail.store(true, SeqCst);
    let which = ["1", "2"].map(|session| session_of(&tier, session));
    let error = tier.erase(which.to_vec()).unwrap_err().to_string();
    assert!(error.contains("4 pages are left"), "{error}");
    assert_eq!(UnfinishedErasures::read(folder.path()).unwrap().list(), which);
    drop(tier);
    let (tier, form) = open(folder.path());
    assert_eq!([tier.leading(form, &first), tier.leading(form, &second)], [0, 0]);
}

#[test]
fn pages_are_out_of_use_before_the_disk_has_taken_the_list_of_pins() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let pages = write(&tier, form, "t", "s", &tokens(1, 2));
    tier.pin(pin_of("s")).unwrap();
    // A pipe is opened for writing only once somebody reads it.
    let pipe = folder.path().join("pins.new");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    let (which, is_out_of_use) = (session_of(&tier, "s"), || tier.leading(form, &pages) == 0);
    let (erased, seen) = std::thread::scope(|scope| {
        let erasing = scope.spawn(|| tier.erase(vec![which]));
        let seen = until(is_out_of_use);
        std::fs::File::open(&pipe).unwrap().read_to_end(&mut Vec::new()).unwrap();
        (erasing.join().unwrap(), seen)
    });
    assert!(seen, "the pages are used as long as the disk does not answer");
    assert_eq!(erased.unwrap(), 2);
}

#[test]
fn a_pin_whose_removal_the_disk_does_not_take_is_gone_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    for session in ["gone", "stays"] {
        write(&tier, form, "t", session, &tokens(1, 2));
        tier.pin(pin_of(session)).unwrap();
    }
    // The list cannot be written.
    let new = folder.path().join("pins.new");
    std::fs::create_dir(&new).unwrap();
    tier.erase(vec![session_of(&tier, "gone")]).unwrap();
    // Neither the next erasure nor the next start finishes it before the list can be written.
    tier.erase(vec![session_of(&tier, "nobody")]).unwrap();
    let pinned = |tier: &DiskTier| tier.pins().into_iter().map(|pin| pin.pin).collect::<Vec<_>>();
    drop(tier);
    for _ in 0..2 {
        let (tier, _) = open(folder.path());
        tier.flush();
        assert_eq!(pinned(&tier), [pin_of("stays")]);
    }
    std::fs::remove_dir(new).unwrap();
    let (tier, _) = open(folder.path());
    tier.flush();
    assert!(UnfinishedErasures::read(folder.path()).unwrap().list().is_empty());
    // A session of this name may be pinned later.
    tier.pin(pin_of("gone")).unwrap();
    drop(tier);
    assert_eq!(pinned(&open(folder.path()).0), [pin_of("stays"), pin_of("gone")]);
}
