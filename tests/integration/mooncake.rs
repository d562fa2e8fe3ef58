//! KV pages in Mooncake Store: real processes with a real master, of which one after the other is killed.

use crate::{
    clients::{installed, made},
    durability::{Process, tiny_model},
    harness::{Host, client, skipped_without},
    ports::unused_port,
};
use serde_json::{Value, json};
use std::{
    net::TcpStream,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Python packages: the store with its C library and its master (66 MB), and the CUDA runtime that the library is linked with,
/// which needs no GPU (2 MB).
const WHEELS: [&str; 2] = ["tokenspeed-mooncake==0.3.13.post20261027", "nvidia-cuda-runtime==13.0.96"];
/// Debian's packages for the libraries of RDMA devices (0.6 MB), which need no such device.
const DEBIAN: [&str; 4] = ["libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200"];
/// Time in which everything happens that the test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// The folders of a Mooncake that was fetched.
struct Mooncake {
    folder: PathBuf,
}

impl Mooncake {
    /// Returns Mooncake; `None` where it cannot be had, which skips the test.
    fn fetched() -> Option<Mooncake> {
        let Some(debian) = debian_packages() else {
            skipped_without("libibverbs");
            return None;
        };
        let packages = [&WHEELS[..], &DEBIAN[..]].concat();
        let folder = made("mooncake", &packages, |folder| {
            std::fs::create_dir_all(folder.join("wheels")).unwrap();
            // The wheel is one for Python 3.11, of which only the libraries are used.
            let place = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"];
            let platform = ["--platform", "manylinux2014_x86_64", "--only-binary", ":all:"];
            let mut download = Command::new("python3");
            download.args(["-m", "pip", "download", "--quiet", "--no-deps"]).args(place).args(platform);
            installed(download.args(WHEELS).arg("--dest").arg(folder.join("wheels")))?;
            for wheel in files(&folder.join("wheels")) {
                let mut unpack = Command::new("python3");
                unpack.args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder.join("unpacked"));
                installed(&mut unpack)?;
            }
            std::fs::remove_dir_all(folder.join("wheels")).unwrap();
            for package in files(&debian) {
                let mut unpack = Command::new("dpkg");
                installed(unpack.arg("-x").arg(package).arg(folder.join("unpacked")))?;
            }
            // The library calls the driver of a GPU only if there is one.
            std::fs::write(folder.join("empty.c"), "").unwrap();
            let mut stub = Command::new("cc");
            stub.args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"]);
            installed(stub.arg(folder.join("unpacked/libcuda.so.1")).arg(folder.join("empty.c")))?;
            let master = folder.join("unpacked/mooncake/mooncake_master");
            std::fs::set_permissions(&master, std::fs::Permissions::from_mode(0o755)).unwrap();
            let mut check = Command::new(master);
            installed(check.arg("--version").env("LD_LIBRARY_PATH", libraries(folder)))
        })?;
        Some(Mooncake { folder })
    }

    fn libraries(&self) -> String {
        libraries(&self.folder)
    }

    /// Starts a master, and waits until it listens.
    fn master(&self, folder: &Path) -> Master {
        let [port, metrics] = [(); 2].map(|()| unused_port());
        let mut command = Command::new(self.folder.join("unpacked/mooncake/mooncake_master"));
        command.args([format!("--rpc_port={port}"), format!("--metrics_port={metrics}")]);
        command.env("LD_LIBRARY_PATH", self.libraries()).current_dir(folder).stdin(Stdio::null());
        let log = std::fs::File::create(folder.join("master.log")).unwrap();
        let process = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let (master, began) = (Master { process, port }, Instant::now());
        while TcpStream::connect(master.address()).is_err() {
            assert!(began.elapsed() < PATIENCE, "the master does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        master
    }
}

/// A running master. It ends with the test.
struct Master {
    process: Child,
    port: u16,
}

impl Master {
    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a folder with Debian's packages, which are downloaded once; `None` where they cannot be had, as on a machine that has
/// no lists of packages.
fn debian_packages() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mooncake-debian");
    let (ready, wanted) = (folder.with_extension("ready"), DEBIAN.join("\n"));
    if std::fs::read_to_string(&ready).is_ok_and(|made| made == wanted) {
        return Some(folder);
    }
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let mut download = Command::new("apt-get");
    installed(download.arg("download").args(DEBIAN).current_dir(&folder)).ok()?;
    std::fs::write(ready, wanted).unwrap();
    Some(folder)
}

/// Returns the folders in which the libraries are found that Mooncake needs.
fn libraries(folder: &Path) -> String {
    let unpacked = folder.join("unpacked");
    let folders = ["", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "nvidia/cu13/lib"];
    folders.map(|name| unpacked.join(name).display().to_string()).join(":")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Hosts with databases of their own and one key.
struct Site {
    mooncake: Mooncake,
    folder: TempDir,
}

impl Site {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the settings of a host that gives so much memory to the others.
    fn settings(&self, name: &str, master: &Master, segment_mb: u32) -> PathBuf {
        let file = self.path(&format!("{name}.toml"));
        // The disk of a test may be full, and other work may make the cache slower than computing.
        let text = format!(
            "[cluster]\nkey_file = \"cluster.key\"\n[kv]\ndisk_free_percent = 0\nalways_read = true\n[kv.cluster]\nkind = \
             \"mooncake\"\nlibrary = {:?}\nmaster = {:?}\nhostname = \"127.0.0.1\"\nsegment_mb = {segment_mb}\nbuffer_mb = 16\n",
            self.mooncake.folder.join("unpacked/mooncake"),
            master.address(),
        );
        std::fs::write(&file, text).unwrap();
        file
    }

    fn host(&self, name: &str, settings: Option<&Path>) -> (Host, Process) {
        let libraries = self.mooncake.libraries();
        let settings = settings.map(|file| file.display().to_string());
        let arguments: Vec<&str> = settings.iter().flat_map(|file| ["--config", file.as_str()]).collect();
        let process = Process::in_environment(
            &[("LD_LIBRARY_PATH", libraries.as_str())],
            Stdio::inherit(),
            &arguments,
            &self.path("tiny"),
            &self.path(&format!("data-{name}")),
        );
        (Host::elsewhere(process.url.clone()), process)
    }
}

/// Returns a text of about two thousand tokens that begins with its own number.
fn long_text(number: u32) -> String {
    let rule = |rule: u32| format!("Rule {rule} of {number}: {} kg go to {}. ", rule * 3 % 17, rule % 7);
    (1..60).map(rule).collect()
}

/// Asks a host. Returns its answer, and the tokens of the prompt with those of them that were not computed.
async fn chat(host: &Host, number: u32) -> (String, u64, u64) {
    let messages = json!([{"role": "user", "content": long_text(number)}]);
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 16});
    let answer = host.ok("/v1/chat/completions", body).await;
    let (usage, text) = (&answer["usage"], &answer["choices"][0]["message"]["content"]);
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    let tokens = |value: &Value| value.as_u64().unwrap();
    (text.as_str().unwrap().to_owned(), tokens(&usage["prompt_tokens"]), tokens(cached))
}

/// Waits for a state of a host's cluster cache, and returns it.
async fn until(host: &Host, is_so: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let cache = host.get("/v1/kv").await.1["cluster_cache"].clone();
        if is_so(&cache) {
            return cache;
        }
        assert!(began.elapsed() < PATIENCE, "{cache}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_share_pages_in_a_store_and_compute_what_is_lost_with_an_owner_or_the_master() {
    let Some(mooncake) = tokio::task::spawn_blocking(Mooncake::fetched).await.unwrap() else { return };
    let site = Site { mooncake, folder: tempfile::tempdir().unwrap() };
    std::fs::create_dir(site.path("tiny")).unwrap();
    tiny_model(&site.path("tiny"));
    let mut key = std::fs::OpenOptions::new();
    let mut key = key.write(true).create_new(true).mode(0o600).open(site.path("cluster.key")).unwrap();
    std::io::Write::write_all(&mut key, "the key of these hosts ".repeat(2).as_bytes()).unwrap();
    let master = site.mooncake.master(site.folder.path());
    let (plain, _plain) = site.host("plain", None);
    let giving = site.settings("a", &master, 256);
    let (a, owner) = site.host("a", Some(&giving));
    let (b, other) = site.host("b", Some(&site.settings("b", &master, 0)));
    for host in [&a, &b] {
        until(host, |cache| cache["is_up"] == true).await;
    }

    // The pages that one host has computed come to the other, with the same answer.
    let expected = chat(&plain, 1).await.0;
    let (answer, prompt, _) = chat(&a, 1).await;
    assert_eq!(answer, expected);
    until(&a, |cache| cache["put_pages"].as_u64() >= Some(prompt / 16)).await;
    let (answer, prompt, cached) = chat(&b, 1).await;
    let cache = until(&b, |_| true).await;
    assert_eq!(answer, expected);
    assert!(cached as f64 >= 0.9 * prompt as f64, "{cached} of {prompt} tokens were cached; {cache}");
    assert_eq!((&cache["fetched_pages"], &cache["missed"]), (&json!(cached / 16), &json!(0)), "{cache}");
    let metrics = client().get(b.at("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains(&format!("skep_kv_cluster_fetched_pages_total {}\n", cached / 16)), "{metrics}");
    crate::metrics::check_those_of_a_cluster_cache(&metrics);

    // A guest that traps does not end the host, although the library has handlers for the same signals.
    for guest in ["panic", "recurse"] {
        assert_eq!(b.deploy_guest(guest, guest, "").await.0, 201);
        let (status, failed) = b.message(guest, "s", "go").await;
        assert_eq!(status, 500, "{failed}");
    }

    // The commands show it.
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        let output = command.args(arguments).env("LD_LIBRARY_PATH", site.mooncake.libraries()).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let shown = run(&["kv", "status", "--url", &b.url]);
    assert!(shown.contains(&format!("cluster cache (mooncake at {}): in use", master.address())), "{shown}");
    let shown = run(&["doctor", "--config", giving.to_str().unwrap()]);
    assert!(shown.contains("libmooncake_store.so") && shown.contains(&master.address()), "{shown}");

    // Pages of an owner that is killed are computed.
    let (expected, prompt, _) = chat(&a, 2).await;
    until(&a, |cache| cache["put_pages"].as_u64() >= Some(prompt / 16 * 2 - 2)).await;
    owner.kill();
    let (answer, _, cached) = chat(&b, 2).await;
    assert_eq!((answer, cached < 64), (expected, true), "{cached}");

    // The pages of a store whose master is killed are gone as well, and the host stays usable and ends in order.
    drop(master);
    let mut number = 3;
    let cache = loop {
        assert_eq!(chat(&b, number).await.0, chat(&plain, number).await.0);
        number += 1;
        let cache = until(&b, |_| true).await;
        if number > 5 && cache["is_up"] == false {
            break cache;
        }
        assert!(number < 40, "{cache}");
    };
    assert!(cache["problem"].is_string(), "{cache}");
    tokio::task::spawn_blocking(move || other.terminate()).await.unwrap();
}

#[test]
fn a_host_whose_library_is_missing_does_not_start_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("skep.toml");
    std::fs::write(
        &settings,
        "[kv.cluster]\nkind = \"mooncake\"\nmaster = \"127.0.0.1:9\"\nlibrary = \".\"\n",
    )
    .unwrap();
    let start = |key: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(folder.path().join("data"));
        command.arg("--config").arg(&settings).env("SKEP_CLUSTER_KEY", key).stdin(Stdio::null());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = start(&"k".repeat(32));
    assert!(said.contains("libmooncake_store.so") && said.contains("hint: name the folder"), "{said}");
    let said = start("");
    assert!(said.contains("SKEP_CLUSTER_KEY"), "{said}");
}
