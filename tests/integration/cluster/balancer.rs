//! A balancer as it stands in front of a cluster: it asks each host whether it is ready, and gives requests to those that are,
//! one after the other.

use super::nodes::PATIENCE;
use crate::harness::client;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Time between two questions to a host, and the time that a host has to answer one.
const INTERVAL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(1);

pub struct Balancer {
    /// Addresses of hosts, each with whether it is ready.
    hosts: Mutex<Vec<(String, bool)>>,
    next: AtomicUsize,
    http: reqwest::Client,
}

impl Balancer {
    /// Starts to ask hosts, for as long as the runtime of its test runs.
    pub fn start(urls: &[&str]) -> Arc<Balancer> {
        let (hosts, next) = (Mutex::default(), AtomicUsize::new(0));
        let balancer = Arc::new(Balancer { hosts, next, http: client() });
        for url in urls {
            balancer.add(url);
        }
        let asking = Arc::clone(&balancer);
        tokio::spawn(async move {
            loop {
                asking.ask().await;
                tokio::time::sleep(INTERVAL).await;
            }
        });
        balancer
    }

    pub fn add(&self, url: &str) {
        self.hosts.lock().unwrap().push((url.to_owned(), false));
    }

    pub fn remove(&self, url: &str) {
        self.hosts.lock().unwrap().retain(|(known, _)| known != url);
    }

    async fn ask(&self) {
        let urls: Vec<String> = self.hosts.lock().unwrap().iter().map(|(url, _)| url.clone()).collect();
        let asked = urls.into_iter().map(|url| async move {
            let answer = self.http.get(format!("{url}/readyz")).timeout(TIMEOUT).send().await;
            (url, answer.is_ok_and(|answer| answer.status().is_success()))
        });
        for (url, is_ready) in futures::future::join_all(asked).await {
            let mut hosts = self.hosts.lock().unwrap();
            if let Some(host) = hosts.iter_mut().find(|(known, _)| *known == url) {
                host.1 = is_ready;
            }
        }
    }

    /// Returns the address of the next host that is ready. Waits for one, because on a busy machine no host may answer in time.
    pub async fn pick(&self) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(url) = self.ready() {
                return url;
            }
            assert!(Instant::now() < until, "no host is ready: {:?}", self.hosts.lock().unwrap());
            tokio::time::sleep(INTERVAL).await;
        }
    }

    fn ready(&self) -> Option<String> {
        let hosts = self.hosts.lock().unwrap();
        let ready: Vec<&String> =
            hosts.iter().filter(|(_, is_ready)| *is_ready).map(|(url, _)| url).collect();
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        ready.get(next % ready.len().max(1)).map(|url| (*url).clone())
    }

    /// Waits until this many hosts are ready.
    pub async fn has(&self, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.hosts.lock().unwrap().iter().filter(|(_, is_ready)| *is_ready).count() != count {
            assert!(Instant::now() < until, "{:?}", self.hosts.lock().unwrap());
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
