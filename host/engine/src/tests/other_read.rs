//! Tests of requests that need pages which another request reads from a slow disk: they wait for what the read brings them, and for
//! nothing else.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use futures::FutureExt as _;
use skep_cache::{DiskTier, TierOptions};

use super::disk_pages::{bare, cached, engine, open, prompt, written};
use super::fixture::{collect, generate, greedy, ids_together};
use crate::{Affinity, Engine, GenerateRequest, PublicPart};

/// Number of pages of the long prompt on the disk.
const PAGES: usize = 28;
/// Number of the first of them that all tenants share.
const PUBLIC: usize = 6;
/// Number of them with which the short prompt begins.
const SHARED: usize = 4;
/// Time in which a slow disk reads a page.
const PAGE_MS: u64 = 150;

fn long(tenant: &str) -> GenerateRequest {
    let mut request = greedy(&format!("{:.455}", prompt("a").repeat(2)), 4);
    request.affinity = Affinity {
        tenant: tenant.into(),
        agent: Some("agent".into()),
        public: PublicPart::Tokens(PUBLIC * 16),
        ..Affinity::default()
    };
    request
}

fn short() -> GenerateRequest {
    let mut request = long("one");
    request.prompt.truncate(SHARED * 16);
    request.prompt.extend("and something else".bytes().map(u32::from));
    request
}

/// Returns a host whose disk has the pages of the long prompt, and takes this time for each of them.
async fn host(folder: &Path, page_ms: u64, reads_always: bool) -> (Engine, Arc<DiskTier>) {
    {
        let tier = open(folder);
        let before = engine(&tier);
        generate(&before, long("one")).await.unwrap();
        written(&before, &tier, PAGES as u64).await;
    }
    let options = TierOptions { reads_always, ..TierOptions::for_tests(folder) };
    let tier = Arc::new(DiskTier::open(options).unwrap());
    tier.faults().read_delay_ms.store(page_ms, SeqCst);
    (engine(&tier), tier)
}

#[tokio::test]
async fn a_request_that_needs_the_first_pages_of_a_read_waits_for_those_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, tier) = host(folder.path(), PAGE_MS, true).await;
    let expected = ids_together(&bare(), &[short(), long("one")]).await;
    let mut reading = engine.generate(long("one")).unwrap();
    let served = generate(&engine, short()).await.unwrap();
    assert!(reading.next().now_or_never().is_none(), "the short prompt waited for the whole read");
    tier.faults().read_delay_ms.store(0, SeqCst);
    let whole = collect(reading).await.unwrap();
    assert_eq!([cached(&served), cached(&whole)], [SHARED * 16, PAGES * 16]);
    assert_eq!(tier.status().read_pages, PAGES as u64, "pages are read once");
    assert_eq!([served.ids, whole.ids], *expected);
}

#[tokio::test]
async fn a_request_waits_for_another_read_no_longer_than_for_its_own() {
    let folder = tempfile::tempdir().unwrap();
    // Longer than the long prompt waits.
    let (engine, tier) = host(folder.path(), 3_000, false).await;
    let expected = ids_together(&bare(), &[short(), long("one")]).await;
    let mut reading = engine.generate(long("one")).unwrap();
    let served = generate(&engine, short()).await.unwrap();
    assert!(reading.next().now_or_never().is_none(), "the short prompt waited as long as the long one");
    tier.faults().read_delay_ms.store(0, SeqCst);
    assert_eq!(cached(&served), 0);
    assert_eq!([served.ids, collect(reading).await.unwrap().ids], *expected);
}

#[tokio::test]
async fn a_request_does_not_wait_for_the_read_of_another_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, tier) = host(folder.path(), PAGE_MS, true).await;
    let expected = generate(&bare(), long("one")).await.unwrap().ids;
    let mut reading = engine.generate(long("one")).unwrap();
    let served = generate(&engine, long("other")).await.unwrap();
    assert!(reading.next().now_or_never().is_none(), "it waited for the read of another tenant");
    tier.faults().read_delay_ms.store(0, SeqCst);
    let whole = collect(reading).await.unwrap();
    assert_eq!([cached(&served), cached(&whole)], [PUBLIC * 16, PAGES * 16]);
    assert_eq!([&served.ids, &whole.ids], [&expected; 2]);
}
