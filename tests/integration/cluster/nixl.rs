//! KV pages that one host reads in the memory of another through NIXL, and over HTTP once that does not work.

use super::{
    nodes::{Node, Site, until},
    pages::{ATTEMPTS, REST, chat, kv, long_text, peer_figure, prompt_tokens, written},
    split,
};
use crate::clients::{installed, made};
use futures::future::join_all;
use reqwest::Method;
use serde_json::json;
use std::{
    fs::OpenOptions,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// NIXL with UCX: a download of 69 MB, of which 131 MB are unpacked.
const PACKAGE: &str = "nixl-cu12==1.5.1";
/// Unpacks what is loaded. The rest are headers, and a library for another purpose.
const UNPACK: &str = "import glob, sys, zipfile\narchive = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0])\nfor name in \
                      archive.namelist():\n    if not name.startswith('nixl_ep') and '/headers/' not in name: \
                      archive.extract(name, sys.argv[1])";

/// Returns the folder of the library.
fn library() -> Option<PathBuf> {
    // The tests of the crate of transfers use the same folder.
    made("nixl", &[PACKAGE], |folder: &Path| {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        let mut download = Command::new("python3");
        download.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]);
        download.args(["--retries", "1", "--no-deps", "--only-binary", ":all:", PACKAGE, "--dest"]);
        installed(download.arg(folder))?;
        installed(Command::new("python3").args(["-c", UNPACK]).arg(folder))
    })
}

/// Returns the bytes of pages that took a lane to this host.
async fn lane_bytes(node: &Node, lane: &str) -> u64 {
    lane_metric(node, "skep_cluster_kv_lane_bytes_total", lane).await
}

/// Returns a metric of a lane, which every host with the lane has.
async fn lane_metric(node: &Node, name: &str, lane: &str) -> u64 {
    let metrics = node.metrics().await;
    let series = format!("{name}{{lane=\"{lane}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&series));
    line.unwrap_or_else(|| panic!("{metrics}")).parse().unwrap()
}

/// Computes a prompt at one host, and one with the same beginning at both, which must answer alike. Returns the number of tokens
/// of this prompt at the other host, and how many of them were not computed.
async fn ask_both(a: &Node, b: &Node, title: &str) -> (u64, u64) {
    let question = |text: &str| {
        let rules = format!("{title}\n{}", long_text());
        json!([{"role": "system", "content": rules}, {"role": "user", "content": text}])
    };
    let before = kv(a).await["pages"].as_u64().unwrap();
    let (prompt, _) = prompt_tokens(&chat(a, &question("Where does a parcel of 9 kg go?")).await);
    written(a, before + prompt / 16 - 4).await;
    let other = question("And one of 12 kg?");
    let at_b = chat(b, &other).await;
    let at_a = chat(a, &other).await;
    assert_eq!(at_a["choices"][0]["message"], at_b["choices"][0]["message"]);
    prompt_tokens(&at_b)
}

/// Has a host fetch the pages of a prompt that another one has computed, at least some of them on this lane. A busy machine may delay
/// pages until the host that waits for them continues without them or without the lane, which is right, and which its figures say; then
/// another prompt is tried. Returns which prompt it was, and the numbers of pages that were fetched and of tokens that were not computed.
async fn fetch(a: &Node, b: &Node, title: &str, lane: &str) -> (usize, u64, u64) {
    let late = async || {
        peer_figure(b, "missed").await + lane_metric(b, "skep_cluster_kv_lane_errors_total", "nixl").await
    };
    let mut attempt = 1;
    loop {
        let (pages, bytes, late_before) =
            (peer_figure(b, "fetched_pages").await, lane_bytes(b, lane).await, late().await);
        let (prompt, cached) = ask_both(a, b, &format!("{attempt}: {title}")).await;
        let all = kv(b).await;
        let (is_cached, is_on_lane) = (cached + 96 > prompt, lane_bytes(b, lane).await > bytes);
        if !(is_cached && is_on_lane) && attempt < ATTEMPTS && late().await > late_before {
            eprintln!("another prompt is tried, because pages came too late: {all}");
            tokio::time::sleep(REST).await;
            attempt += 1;
            continue;
        }
        assert!(is_cached, "{cached} of {prompt} tokens were cached: {all}");
        assert!(is_on_lane, "no page took the lane {lane}: {all}");
        return (attempt, peer_figure(b, "fetched_pages").await - pages, cached);
    }
}

fn signal(process: u32, name: &str) {
    let sent = Command::new("kill").args([name, &process.to_string()]).status().unwrap();
    assert!(sent.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_read_in_the_memory_of_another_host_and_over_http_without_its_helper() {
    let Some(library) = tokio::task::spawn_blocking(library).await.unwrap() else { return };
    let Some(site) = Site::start(false).await else { return };
    // The library is reached through a link, which the test removes.
    let folder = site.path("nixl");
    std::os::unix::fs::symlink(library, &folder).unwrap();
    let section = "[kv]\ndisk_free_percent = 0\nalways_read = true\ntransfer = \"nixl\"\nnixl_dir = \"nixl\"\n\
                   nixl_devices = \"lo\"\nnixl_mb = 32\n";
    let mut settings = OpenOptions::new().append(true).open(site.path("skep.toml")).unwrap();
    settings.write_all(section.as_bytes()).unwrap();
    // A host on the same machine is read over TCP like any other.
    let node = async || site.node_with_variable("UCX_TLS", "tcp").await;
    let (a, b) = (node().await, node().await);
    let lane = async |node: &Node| kv(node).await["peers"]["lane"].clone();
    for node in [&a, &b] {
        until(async || lane(node).await == "nixl").await;
    }
    let (attempt, pages, cached) = fetch(&a, &b, "The first rules.", "nixl").await;
    let fetched = kv(&b).await;
    // Before the first attempt, the other host had nothing of its own.
    let is_expected = if attempt == 1 { pages == cached / 16 } else { pages + 6 > cached / 16 };
    assert!(is_expected, "{pages} pages for {cached} tokens: {fetched}");
    // A READ that a busy machine delays is given up, and its pages come over HTTP.
    let (bytes, others) = (lane_bytes(&b, "nixl").await, lane_bytes(&b, "http").await);
    assert_eq!(Some(bytes + others), fetched["peers"]["fetched_bytes"].as_u64(), "{fetched}");

    // A helper that is stopped delays the pages, which are then asked for over HTTP. One that is killed is started again.
    let theirs = a.process_with("kv-agent").expect("the helper runs");
    signal(theirs, "-STOP");
    fetch(&a, &b, "Other rules.", "http").await;
    signal(theirs, "-KILL");
    until(async || a.process_with("kv-agent").is_some_and(|process| process != theirs)).await;
    for node in [&a, &b] {
        until(async || lane(node).await == "nixl").await;
    }

    // A helper that cannot be started anymore leaves the pages to HTTP.
    std::fs::remove_file(folder).unwrap();
    let ours = b.process_with("kv-agent").expect("the helper runs");
    signal(ours, "-KILL");
    until(async || lane(&b).await == "http").await;
    fetch(&a, &b, "The last rules.", "http").await;

    // A helper ends with its host, however this one ends.
    let theirs = a.process_with("kv-agent").expect("the helper runs");
    a.kill();
    until(async || !Path::new(&format!("/proc/{theirs}")).exists()).await;
}

/// A decode host and a prefill host whose pages come through NIXL, and the answers that the decode host gave alone.
struct Split {
    site: Site,
    decode: Node,
    prefill: Node,
    expected: Vec<String>,
}

/// Starts both hosts with this much memory for transfers, after the decode host has answered this many questions.
async fn split_hosts(megabytes: usize, questions: usize) -> Option<Split> {
    let library = tokio::task::spawn_blocking(library).await.unwrap()?;
    let site = split::site().await?;
    std::os::unix::fs::symlink(library, site.path("nixl")).unwrap();
    let settings =
        format!("transfer = \"nixl\"\nnixl_dir = \"nixl\"\nnixl_devices = \"lo\"\nnixl_mb = {megabytes}\n");
    let mut file = OpenOptions::new().append(true).open(site.path("skep.toml")).unwrap();
    file.write_all(settings.as_bytes()).unwrap();
    let tcp = ("UCX_TLS", "tcp");
    let decode = site.node_as_with("decode", &[], tcp).await;
    let mut expected = Vec::new();
    for number in 0..questions {
        expected.push(split::chat(&decode, number).await.0);
    }
    decode.ok(Method::DELETE, "/v1/kv", serde_json::Value::Null).await;
    let prefill = site.node_as_with("prefill", &["--kv-disk-gb", "0"], tcp).await;
    split::knows(&decode, &prefill, "prefill").await;
    for node in [&decode, &prefill] {
        until(async || kv(node).await["peers"]["lane"] == "nixl").await;
    }
    Some(Split { site, decode, prefill, expected })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_ring_and_a_helper_that_is_resumed_change_no_page() {
    const TOGETHER: usize = 6;
    // The smallest ring has room for a few pages of one prompt.
    let Some(Split { decode, prefill, expected, .. }) = split_hosts(1, TOGETHER + 1).await else { return };
    let ask = async |number: usize| {
        let (text, usage) = split::chat(&decode, number).await;
        assert_eq!(text, expected[number], "question {number}: {usage}");
        split::prompt_tokens(&usage)
    };
    for (prompt, prefilled, _) in join_all((0..TOGETHER).map(ask)).await {
        assert_eq!(prefilled, (prompt - 1) / 16 * 16, "what finds no room comes over HTTP");
    }
    let (bytes, others) = (lane_bytes(&decode, "nixl").await, lane_bytes(&decode, "http").await);
    assert!(bytes > 0 && others > 0, "{bytes} bytes through NIXL, {others} over HTTP");

    // A READ that waits for a stopped helper is given up, and its memory is not used before it has ended: the helper writes to no
    // page that came meanwhile.
    let theirs = prefill.process_with("kv-agent").expect("the helper runs");
    signal(theirs, "-STOP");
    let (prompt, prefilled, _) = ask(TOGETHER).await;
    signal(theirs, "-CONT");
    assert_eq!(prefilled, (prompt - 1) / 16 * 16);
    for number in 0..=TOGETHER {
        let (prompt, prefilled, cached) = ask(number).await;
        assert!(prefilled == 0 && cached >= (prompt - 1) / 16 * 16, "question {number} is in memory");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_a_prefill_host_computes_are_read_in_its_memory_and_over_http_without_its_helper() {
    let Some(Split { site, decode, prefill, expected }) = split_hosts(32, 3).await else { return };
    let ordered = async |number: usize| {
        let (text, usage) = split::chat(&decode, number).await;
        assert_eq!(text, expected[number], "{usage}");
        let (prompt, prefilled, _) = split::prompt_tokens(&usage);
        assert_eq!(prefilled, (prompt - 1) / 16 * 16, "{usage}");
    };
    ordered(0).await;
    let (bytes, others) = (lane_bytes(&decode, "nixl").await, lane_bytes(&decode, "http").await);
    let fetched = kv(&decode).await;
    assert!(bytes > 0, "{fetched}");
    assert_eq!(Some(bytes + others), fetched["peers"]["fetched_bytes"].as_u64(), "{fetched}");

    // It stops before pages are read, and is killed while a READ waits for it. The pages are still there for the other lane.
    let theirs = prefill.process_with("kv-agent").expect("the helper runs");
    signal(theirs, "-STOP");
    let accepted =
        async || prefill.metric("skep_cluster_prefills_served_total", "outcome=\"accepted\"").await;
    let before = accepted().await;
    tokio::join!(ordered(1), async {
        until(async || accepted().await > before).await;
        signal(theirs, "-KILL");
    });

    // A helper that cannot be started anymore leaves the pages to HTTP.
    until(async || prefill.process_with("kv-agent").is_some_and(|process| process != theirs)).await;
    until(async || kv(&prefill).await["peers"]["lane"] == "nixl").await;
    std::fs::remove_file(site.path("nixl")).unwrap();
    signal(prefill.process_with("kv-agent").expect("the helper runs"), "-KILL");
    until(async || kv(&prefill).await["peers"]["lane"] == "http").await;
    let before = lane_bytes(&decode, "http").await;
    ordered(2).await;
    assert!(lane_bytes(&decode, "http").await > before, "{}", kv(&decode).await);
    assert_eq!(split::used(&decode).await, 3);
}
