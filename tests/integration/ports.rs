//! Ports that a test knows before a process of its own listens on them, or while that process is away.

use std::{
    net::TcpListener,
    process,
    sync::atomic::{AtomicU32, Ordering},
};

/// Number of ports that are handed out before one comes again.
const COUNT: u32 = 10_000;
/// Distance of the first ports of processes that start one after the other. Few of them use so many.
const OF_A_PROCESS: u32 = 17;
/// The lowest port that a process without root may listen on.
const LOWEST: u32 = 1_024;
/// The first port that Linux gives to those who let the system choose, unless its settings say otherwise.
const FIRST_CHOSEN: u32 = 32_768;

/// Returns a port of 127.0.0.1 on which nothing listens. The system gives it to nobody who lets the system choose, as most servers and
/// clients of other tests do, so it stays free until the test uses it.
pub fn unused_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // If the system may choose almost any port, none is better than another one.
    let first = first_chosen().checked_sub(COUNT).filter(|first| *first >= LOWEST).unwrap_or(20_000);
    let start = process::id() % COUNT * OF_A_PROCESS;
    let mut ports = (0..COUNT).map(|_| {
        let place = (start + NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        u16::try_from(first + place).unwrap()
    });
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a port is unused")
}

/// Returns such a port with its address, as `--listen` wants it.
pub fn unused_address() -> String {
    format!("127.0.0.1:{}", unused_port())
}

/// Returns the first of the ports that the system chooses from.
fn first_chosen() -> u32 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(FIRST_CHOSEN)
}
