//! Tests of what leaves the store: pages that a host erases, at once, later or when it ends.

use super::*;

#[test]
fn erased_pages_leave_the_cache() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("deleted", 6);
    let kept = one.put("kept", 4);
    let session = EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some("deleted")));
    assert_eq!(one.tier.forget(session), 6);
    one.until(|status| status.removed_pages == 6);
    assert_eq!((store.len(), one.fetch(&kept)), (4, 4));
    // Another cluster uses the same store.
    let stranger = Host::with(&store, (1, 2));
    stranger.until(|status| status.is_up);
    stranger.put("theirs", 3);
    assert_eq!(one.tier.forget(EraseFilter::All), 4);
    one.until(|status| status.removed_pages == 10);
    assert_eq!(store.len(), 3);
}

#[test]
fn pages_that_leave_one_host_alone_stay_in_the_cache() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("s", 4);
    assert_eq!(one.tier.forget(EraseFilter::AllHere), 4);
    // Everything before this was done when it is there.
    one.put("t", 2);
    assert_eq!((store.len(), one.cache.status().removed_pages), (6, 0));
}

#[test]
fn pages_that_are_erased_before_their_turn_are_not_put_or_leave_again() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    for round in 0..20 {
        let session = format!("session {round}");
        one.keep(&session, 10);
        one.tier.forget(EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some(&session))));
    }
    // Everything before this was done when it is there.
    let last = one.keep("last", 2);
    let began = Instant::now();
    while !(one.fetch(&last) == 2 && store.len() == 2) {
        assert!(began.elapsed() < PATIENCE, "{} objects", store.len());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_page_that_somebody_uses_is_removed_later_and_holds_up_nothing() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("deleted", 3);
    store.is_in_use.store(true, SeqCst);
    let session = EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some("deleted")));
    assert_eq!(one.tier.forget(session), 3);
    let kept = one.put("kept", 4);
    assert_eq!((one.fetch(&kept), one.cache.status().removed_pages, store.len()), (4, 0, 7));
    store.is_in_use.store(false, SeqCst);
    one.until(|status| status.removed_pages == 3);
    assert_eq!((store.len(), store.connects.load(SeqCst)), (4, 1));
}

#[test]
fn pages_that_wait_to_be_removed_are_removed_when_the_cache_is_closed() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("deleted", 3);
    store.is_in_use.store(true, SeqCst);
    let session = EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some("deleted")));
    assert_eq!(one.tier.forget(session), 3);
    // Once the next page is there, the removals have been tried.
    one.put("kept", 1);
    store.is_in_use.store(false, SeqCst);
    one.cache.close();
    assert_eq!((store.len(), one.cache.status().removed_pages), (1, 3));
}

#[test]
fn many_slow_removals_do_not_make_the_cache_unusable() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("deleted", 100);
    store.remove_ms.store(30, SeqCst);
    let session = EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some("deleted")));
    assert_eq!(one.tier.forget(session), 100);
    one.until(|status| {
        assert!(status.is_up, "{status:?}");
        status.removed_pages == 100
    });
    assert_eq!(store.len(), 0);
}
