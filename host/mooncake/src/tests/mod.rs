//! Tests of the cluster cache over a store in this process: what goes into it, what comes out of it, and what happens when the
//! store changes pages, loses them, hangs or is away. Tests with a real store are among the integration tests.

mod gauges;
mod removals;

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use skep_cache::{
    Digest, DiskTier, EraseFilter, PageQuestion, PageRead, PageStream, PageWrite, SealingSecret, TierOptions,
};

use crate::arena::Lane;
use crate::cache::ClusterCache;
use crate::connection::Connect;
use crate::figures::CacheStatus;
use crate::objects::{Failure, Objects};

const PAGE_BYTES: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// A store that several caches share, which fails on demand.
#[derive(Default)]
struct Store {
    objects: Mutex<HashMap<CString, Vec<u8>>>,
    is_away: AtomicBool,
    is_full: AtomicBool,
    /// Maximum number of objects; 0 for any number.
    room: AtomicUsize,
    /// Whether the host that has the bytes of objects has stopped.
    hangs: AtomicBool,
    /// Whether somebody uses all objects, so that none can be removed.
    is_in_use: AtomicBool,
    /// Time that each removal takes, in milliseconds.
    remove_ms: AtomicUsize,
    /// Whether the master does not answer a client that takes leave.
    ignores_leave: AtomicBool,
    /// Whether bytes of objects cannot be moved, because the host that has them is gone.
    has_no_owner: AtomicBool,
    connects: AtomicUsize,
    /// The most objects that were moved in one call.
    most: AtomicUsize,
}

impl Store {
    fn answer(&self) -> Result<(), Failure> {
        match self.is_away.load(SeqCst) {
            true => Err(Failure::Master { call: "test", code: -1 }),
            false => Ok(()),
        }
    }

    fn len(&self) -> usize {
        self.objects.lock().unwrap().len()
    }

    fn change(&self, how: impl Fn(&mut Vec<u8>)) {
        self.objects.lock().unwrap().values_mut().for_each(how);
    }
}

/// A client of the store.
struct Client(Arc<Store>);

impl Drop for Client {
    fn drop(&mut self) {
        let began = Instant::now();
        while self.0.ignores_leave.load(SeqCst) && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Objects for Client {
    fn exist(&self, names: &[CString]) -> Result<Vec<bool>, Failure> {
        self.0.answer()?;
        let objects = self.0.objects.lock().unwrap();
        Ok(names.iter().map(|name| objects.contains_key(name)).collect())
    }

    fn put(&self, lane: &mut Lane, names: &[CString], objects: &[Vec<u8>]) -> Result<usize, Failure> {
        self.0.answer()?;
        if self.0.is_full.load(SeqCst) || lane.fill(objects).is_none() {
            return Err(Failure::Transfer { code: -200 });
        }
        self.0.most.fetch_max(names.len(), SeqCst);
        let copies = objects
            .iter()
            .enumerate()
            .map(|(at, object)| lane.copy(at, object.len()).expect("the objects have the same size and fit"));
        let mut stored = self.0.objects.lock().unwrap();
        let taken = match self.0.room.load(SeqCst) {
            0 => names.len(),
            room => room.saturating_sub(stored.len()).min(names.len()),
        };
        stored.extend(names.iter().cloned().zip(copies).take(taken));
        match taken {
            0 => Err(Failure::Transfer { code: -200 }),
            _ => Ok(taken),
        }
    }

    fn get(&self, lane: &mut Lane, names: &[CString], bytes: usize) -> Result<Vec<Option<Vec<u8>>>, Failure> {
        self.0.answer()?;
        if self.0.has_no_owner.load(SeqCst) {
            return Err(Failure::Transfer { code: -800 });
        }
        while self.0.hangs.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.0.most.fetch_max(names.len(), SeqCst);
        let objects = self.0.objects.lock().unwrap();
        let found: Vec<Vec<u8>> = names
            .iter()
            .map_while(|name| objects.get(name).filter(|found| found.len() == bytes))
            .cloned()
            .collect();
        lane.fill(&found).expect("they fit");
        Ok((0..names.len()).map(|at| (at < found.len()).then(|| lane.copy(at, bytes)).flatten()).collect())
    }

    fn remove(&self, name: &CStr) -> Result<bool, Failure> {
        self.0.answer()?;
        std::thread::sleep(Duration::from_millis(self.0.remove_ms.load(SeqCst) as u64));
        let is_free = !self.0.is_in_use.load(SeqCst);
        if is_free {
            self.0.objects.lock().unwrap().remove(name);
        }
        Ok(is_free)
    }

    fn remove_beginning(&self, prefix: &str) -> Result<u64, Failure> {
        self.0.answer()?;
        let mut objects = self.0.objects.lock().unwrap();
        let before = objects.len();
        objects.retain(|name, _| !name.to_string_lossy().starts_with(prefix));
        Ok((before - objects.len()) as u64)
    }
}

/// A host with a disk and the cluster cache.
struct Host {
    cache: ClusterCache,
    tier: Arc<DiskTier>,
    _folder: tempfile::TempDir,
}

fn tier(folder: &Path) -> Arc<DiskTier> {
    let options = TierOptions {
        reads_always: true,
        name_key: Some(SealingSecret([7; 32])),
        ..TierOptions::for_tests(folder)
    };
    Arc::new(DiskTier::open(options).unwrap())
}

/// Returns the way to connect to the store.
fn connect(store: &Arc<Store>) -> Connect {
    let store = store.clone();
    Box::new(move || {
        store.connects.fetch_add(1, SeqCst);
        store.answer()?;
        let client: Arc<dyn Objects> = Arc::new(Client(store.clone()));
        Ok(client)
    })
}

impl Host {
    fn with(store: &Arc<Store>, (secret, namespace): (u8, u64)) -> Host {
        let folder = tempfile::tempdir().unwrap();
        let tier = tier(folder.path());
        // Ten images have room in each lane.
        let lanes = (0..3).map(|_| Lane::new(10 * PageQuestion::image_bytes_of(PAGE_BYTES))).collect();
        let key = SealingSecret([secret; 32]);
        let cache = ClusterCache::start(connect(store), lanes, (&key, namespace), tier.clone());
        Host { cache, tier, _folder: folder }
    }

    fn new(store: &Arc<Store>) -> Host {
        let host = Host::with(store, (1, 1));
        host.until(|status| status.is_up);
        host
    }

    fn until(&self, is_so: impl Fn(&CacheStatus) -> bool) {
        let began = Instant::now();
        while !is_so(&self.cache.status()) {
            assert!(began.elapsed() < PATIENCE, "{:?}", self.cache.status());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Writes pages of a session to the disk, and puts them into the cache.
    fn keep(&self, session: &str, pages: u32) -> PageQuestion {
        let keys = self.tier.keys();
        let tokens: Vec<u32> = session.bytes().map(u32::from).chain(0..).take(pages as usize * 16).collect();
        let (layout, names) = (keys.layout("weights", "form"), keys.prefixes("tenant", &tokens, 16));
        let id = self.tier.layout(layout, PAGE_BYTES).unwrap();
        for (at, name) in names.iter().enumerate() {
            assert!(self.tier.write(PageWrite {
                layout: id,
                prefix: *name,
                parent: at.checked_sub(1).map(|before| names[before]),
                tenant: keys.tenant("tenant"),
                owner: keys.owner(Some("agent"), Some(session)),
                bytes: contents(*name),
            }));
        }
        self.cache.keep(layout, PAGE_BYTES, names.clone());
        PageQuestion { layout, payload_bytes: PAGE_BYTES, names }
    }

    /// Puts pages into the cache, and waits until they are there.
    fn put(&self, session: &str, pages: u32) -> PageQuestion {
        let before = self.cache.status().put_pages;
        let question = self.keep(session, pages);
        self.until(|status| status.put_pages == before + u64::from(pages));
        question
    }

    /// Asks for pages, and returns how many came. They are the right ones.
    fn fetch(&self, question: &PageQuestion) -> usize {
        let pages = taken(self.cache.fetch(question.clone()).expect("there is a thread for it"));
        for (name, page) in question.names.iter().zip(&pages) {
            assert_eq!(*page, contents(*name));
        }
        pages.len()
    }
}

fn taken(mut stream: PageStream) -> Vec<Vec<u8>> {
    let mut pages = Vec::new();
    loop {
        match stream.next_within(PATIENCE) {
            PageRead::Page(page) => pages.push(page),
            PageRead::Ended => return pages,
            PageRead::NotYet => panic!("nothing came after {} pages", pages.len()),
        }
    }
}

fn contents(name: Digest) -> Vec<u8> {
    name.0.iter().copied().cycle().take(PAGE_BYTES).collect()
}

#[test]
fn pages_that_one_host_puts_come_to_another_in_bounded_batches() {
    let store = Arc::<Store>::default();
    let (one, other) = (Host::new(&store), Host::new(&store));
    let question = one.put("s", 70);
    assert_eq!((other.fetch(&question), store.most.load(SeqCst)), (70, 10));
    // A longer prompt gets what there is, and a page alone is not worth a transfer.
    let absent = one.tier.keys().prefixes("tenant", &vec![9; 64], 16);
    let longer =
        PageQuestion { names: [question.names.clone(), absent.clone()].concat(), ..question.clone() };
    assert_eq!(other.fetch(&longer), 70);
    let names = [&question.names[..1], &absent].concat();
    assert_eq!(other.fetch(&PageQuestion { names, ..question.clone() }), 0);
    assert_eq!(other.fetch(&PageQuestion { names: absent, ..question.clone() }), 0);
    let status = other.cache.status();
    assert_eq!((status.questions, status.missed, status.fetched_pages), (4, 2, 140));
    // A page that the cache has is not put again.
    one.cache.keep(question.layout, PAGE_BYTES, question.names.clone());
    one.put("t", 3);
    assert_eq!((one.cache.status().put_pages, store.len()), (73, 73));
}

#[test]
fn an_image_that_the_store_has_changed_or_that_others_sealed_is_not_used() {
    let store = Arc::<Store>::default();
    let (one, other) = (Host::new(&store), Host::new(&store));
    let question = one.put("s", 5);
    store.change(|image| *image.last_mut().unwrap() ^= 1);
    assert_eq!(other.fetch(&question), 0);
    // It leaves the store, into which it is put again.
    other.until(|status| status.removed_pages == 1);
    store.change(|image| *image.last_mut().unwrap() ^= 1);
    let put_again = |put_pages| {
        one.cache.keep(question.layout, PAGE_BYTES, question.names.clone());
        one.until(|status| status.put_pages == put_pages);
    };
    put_again(6);
    assert_eq!(one.fetch(&question), 5);
    let (stranger, namesake) = (Host::with(&store, (1, 2)), Host::with(&store, (2, 1)));
    for host in [&stranger, &namesake] {
        host.until(|status| status.is_up);
        assert_eq!(host.fetch(&question), 0);
    }
    namesake.until(|status| status.removed_pages == 1);
    put_again(7);
    store.change(|image| image.truncate(100));
    assert_eq!(other.fetch(&question), 0);
    assert_eq!(other.cache.status().fetched_pages, 0);
}

#[test]
fn a_master_that_does_not_answer_does_not_keep_a_host_from_ending() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    store.ignores_leave.store(true, SeqCst);
    let began = Instant::now();
    one.cache.close();
    assert!(began.elapsed() < PATIENCE / 2);
    store.ignores_leave.store(false, SeqCst);
}

#[test]
fn a_store_that_is_away_costs_nobody_time_and_is_used_once_it_is_back() {
    let store = Arc::<Store>::default();
    store.is_away.store(true, SeqCst);
    let one = Host::with(&store, (1, 1));
    one.until(|status| status.problem.is_some());
    assert!(!one.cache.is_up());
    one.keep("s", 3);
    assert_eq!(one.cache.status().dropped_pages, 0, "nothing is queued for a store that is away");
    store.is_away.store(false, SeqCst);
    one.until(|status| status.is_up);
    assert_eq!(one.cache.status().problem, None);
    let question = one.put("t", 4);
    // The master is gone: one request finds out, the next ones are not asked.
    store.is_away.store(true, SeqCst);
    assert_eq!(one.fetch(&question), 0);
    assert!(one.cache.status().problem.is_some_and(|problem| problem.contains("code -1")));
    // Pages that are erased meanwhile are removed when it is back.
    one.tier.forget(EraseFilter::Session(one.tier.keys().owner(Some("agent"), Some("t"))));
    store.is_away.store(false, SeqCst);
    one.until(|status| status.removed_pages == 4);
    assert_eq!(store.len(), 0);
}

#[test]
fn a_store_whose_master_fails_again_and_again_is_connected_again() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    let question = one.put("s", 4);
    store.is_away.store(true, SeqCst);
    let began = Instant::now();
    while store.connects.load(SeqCst) < 2 {
        if one.cache.is_up() {
            assert_eq!(one.fetch(&question), 0);
        }
        assert!(began.elapsed() < PATIENCE, "{:?}", one.cache.status());
        std::thread::sleep(Duration::from_millis(2));
    }
    store.is_away.store(false, SeqCst);
    one.until(|status| status.is_up);
    assert_eq!(one.fetch(&question), 4);
}

#[test]
fn pages_of_an_owner_that_is_gone_and_a_full_store_are_misses() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    let question = one.put("s", 4);
    store.has_no_owner.store(true, SeqCst);
    assert_eq!(one.fetch(&question), 0);
    assert!(one.cache.status().problem.is_some());
    store.has_no_owner.store(false, SeqCst);
    one.until(|status| status.is_up);
    assert_eq!(one.fetch(&question), 4);
    store.is_full.store(true, SeqCst);
    one.keep("t", 5);
    one.until(|status| status.dropped_pages == 5);
    assert_eq!((one.cache.is_up(), store.len()), (true, 4), "pages can still be got");
}

#[test]
fn pages_that_a_full_store_does_not_take_are_counted_without_those_that_it_has() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    one.put("s", 4);
    store.room.store(6, SeqCst);
    one.keep("t", 5);
    one.until(|status| status.dropped_pages == 3);
    assert_eq!((one.cache.status().put_pages, store.len()), (6, 6));
    // The store rests from puts for a while, and has four of these six pages.
    one.keep("s", 6);
    one.until(|status| status.dropped_pages == 5);
}

#[test]
fn a_host_that_has_stopped_holds_up_no_further_requests() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    let question = one.put("s", 4);
    store.hangs.store(true, SeqCst);
    let held_up = one.cache.fetch(question.clone()).unwrap();
    one.until(|status| !status.is_up);
    store.hangs.store(false, SeqCst);
    assert_eq!(taken(held_up).len(), 0, "a call that took so long is a failure");
    one.until(|status| status.is_up);
    assert_eq!(one.fetch(&question), 4);
}

#[test]
fn a_fetch_ends_when_nobody_takes_its_pages() {
    let store = Arc::<Store>::default();
    let one = Host::new(&store);
    let question = one.put("s", 60);
    // More fetches than threads wait, and then one that is taken.
    let mut untaken: Vec<PageStream> = Vec::new();
    while let Some(stream) = one.cache.fetch(question.clone()) {
        untaken.push(stream);
        assert!(untaken.len() < 100, "a bounded number of fetches waits");
    }
    assert!(untaken.len() >= 8, "{}", untaken.len());
    drop(untaken);
    let began = Instant::now();
    let stream = loop {
        match one.cache.fetch(question.clone()) {
            Some(stream) => break stream,
            None => assert!(began.elapsed() < PATIENCE),
        }
    };
    assert_eq!(taken(stream).len(), 60);
}

#[test]
fn settings_that_name_no_library_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let settings = crate::Settings {
        library: Some(folder.path().to_owned()),
        master: "127.0.0.1:50051".to_owned(),
        metadata: "P2PHANDSHAKE".to_owned(),
        hostname: "127.0.0.1".to_owned(),
        protocol: "tcp".to_owned(),
        devices: String::new(),
        segment_bytes: 0,
        buffer_bytes: 1 << 20,
    };
    let tier = tier(&folder.path().join("kv"));
    let error = ClusterCache::open(settings, (&SealingSecret([1; 32]), 1), tier).unwrap_err().to_string();
    assert!(error.contains("hint: name the folder"), "{error}");
}
