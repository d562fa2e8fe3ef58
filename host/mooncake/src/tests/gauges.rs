//! Test of the metric that says whether the cache can be used.

use std::sync::atomic::AtomicU64;

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit, with_local_recorder,
};
use skep_cache::metric;

use super::*;
use crate::keeping;
use crate::state::Shared;
use crate::work::KeptPages;

/// Records the one gauge of a thread.
#[derive(Default)]
struct Up(Arc<AtomicU64>);

impl Recorder for Up {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        match key.name() == metric::CLUSTER_UP {
            true => Gauge::from_arc(self.0.clone()),
            false => Gauge::noop(),
        }
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn the_metric_says_that_a_cache_is_used_again_after_its_pause() {
    let store = Arc::<Store>::default();
    let folder = tempfile::tempdir().unwrap();
    let key = SealingSecret([1; 32]);
    let shared = Arc::new(Shared::new(connect(&store), (&key, 1), tier(folder.path())));
    let up = Up::default();
    let gauge = up.0.clone();
    let shows = |value: f64| f64::from_bits(gauge.load(SeqCst)) == value;
    let kept = shared.clone();
    let thread = std::thread::spawn(move || {
        with_local_recorder(&up, || keeping::run(&kept, Lane::new(PAGE_BYTES)));
    });
    until("it is connected", || shows(1.0));
    // A page that is to be put finds that the store is away, and nothing else is tried.
    store.is_away.store(true, SeqCst);
    let (disk, keys) = (&shared.tier, shared.tier.keys());
    let (layout, name) = (keys.layout("weights", "form"), keys.prefixes("tenant", &[7; 16], 16)[0]);
    assert!(disk.write(PageWrite {
        layout: disk.layout(layout, PAGE_BYTES).unwrap(),
        prefix: name,
        parent: None,
        tenant: keys.tenant("tenant"),
        owner: keys.owner(None, None),
        bytes: contents(name),
    }));
    let (payload_bytes, names, asked) = (PAGE_BYTES, vec![name], Instant::now());
    shared.work.put(KeptPages { layout, payload_bytes, names, asked });
    until("it rests", || shared.connection.problem().is_some());
    store.is_away.store(false, SeqCst);
    until("it has rested", || shared.is_up());
    until("its gauge is up", || shows(1.0));
    shared.is_closing.store(true, SeqCst);
    thread.join().unwrap();
    assert!(shows(0.0), "a cache that is closed is not used");
}
