//! Helpers as processes: what they do with a library that is missing, with the real one, and when they are stopped or killed.
//!
//! The library comes from a Python package, which pip downloads into the target folder once (69 MB, of which 131 MB are
//! unpacked). Where it cannot be had, the tests that need it are skipped.

use std::fs;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::ring::Ring;
use crate::{AgentOptions, AgentStatus, Peer, SlotCounts, TransferAgent, TransferError, find_library, serve};
use crate::{descriptor, frame, message};

const PACKAGE: &str = "nixl-cu12==1.5.1";
/// Unpacks what is loaded. The rest are headers, and a library for another purpose.
const UNPACK: &str = "import sys, zipfile\narchive = zipfile.ZipFile(sys.argv[1])\nfor name in archive.namelist():\n    if not \
                      name.startswith('nixl_ep') and '/headers/' not in name: archive.extract(name, sys.argv[2])";
/// Time in which everything happens that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);
const IMAGE_BYTES: usize = 200_000;

/// This is the helper of the other tests, which start this program with the name of this test.
#[test]
#[ignore = "it is started by other tests, with a socket as its standard input"]
fn helper_process() {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let error = serve(socket).unwrap_err();
    println!("{error}");
}

/// Returns the library, or reports that the test of this thread is skipped.
fn library() -> Option<PathBuf> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match FOUND.get_or_init(fetched) {
        Ok(path) => Some(path.clone()),
        Err(why) => {
            assert!(std::env::var_os("SKEP_REQUIRE").is_none_or(|what| what != "all"), "{why}");
            let thread = std::thread::current();
            let line = format!(
                "{}: {}\n",
                thread.name().unwrap_or("a test"),
                why.lines().next().unwrap_or_default()
            );
            eprint!("skipped: {line}");
            let file = target().join("tmp/skipped.txt");
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            let file = fs::OpenOptions::new().create(true).append(true).open(file);
            file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
            None
        }
    }
}

/// Returns the target folder, from which this test runs.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).expect("target/profile/deps/test").to_owned()
}

/// Downloads and unpacks the package, unless an earlier run has.
fn fetched() -> Result<PathBuf, String> {
    let folder = target().join("tmp/nixl");
    fs::create_dir_all(target().join("tmp")).map_err(|error| error.to_string())?;
    // The integration tests make the same folder, and may do so at this moment.
    let lock = fs::File::create(target().join("tmp/nixl.lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    let ready = folder.join("ready");
    if fs::read_to_string(&ready).is_ok_and(|made| made == PACKAGE) {
        return find_library(&folder).map_err(|error| error.to_string());
    }
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let mut download = Command::new("python3");
    download.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "1",
    ]);
    run(download.args(["--no-deps", "--only-binary", ":all:", PACKAGE, "--dest"]).arg(&folder))?;
    let files = fs::read_dir(&folder).map_err(|error| error.to_string())?.flatten().map(|entry| entry.path());
    let wheel = files.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    let wheel = wheel.ok_or("pip left no package")?;
    run(Command::new("python3").args(["-c", UNPACK]).arg(&wheel).arg(&folder))?;
    fs::remove_file(&wheel).map_err(|error| error.to_string())?;
    fs::write(ready, PACKAGE).map_err(|error| error.to_string())?;
    find_library(&folder).map_err(|error| error.to_string())
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("python3: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{PACKAGE}: {}", said.trim())) }
}

fn options(name: &str, library: &Path) -> AgentOptions {
    let arguments = ["--exact", "tests::helper_process", "--ignored", "--nocapture"];
    AgentOptions {
        name: name.to_owned(),
        library: library.to_owned(),
        program: std::env::current_exe().unwrap(),
        arguments: arguments.map(str::to_owned).into(),
        // A peer on the same machine is read over TCP like any other, and not without its help.
        environment: [("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ring_bytes: 8 << 20,
    }
}

fn ready(name: &str, library: &Path) -> TransferAgent {
    let agent = TransferAgent::start(options(name, library)).unwrap();
    let peer = agent.wait_until_ready(PATIENCE).unwrap();
    assert_eq!(peer.name, format!("{name}.1"));
    agent
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(agent: &TransferAgent, signal: Signal) {
    let process = agent.helper_process().expect("the helper runs");
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
    if signal == Signal::STOP {
        // Its threads stop one after the other, after this process continues.
        let tasks = format!("/proc/{process}/task");
        let is_stopped = |task: fs::DirEntry| {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            status.contains("State:\tT")
        };
        until("the helper does not stop", || fs::read_dir(&tasks).unwrap().flatten().all(is_stopped));
    }
}

fn image(seed: usize) -> Vec<u8> {
    (0..IMAGE_BYTES).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed) as u8).collect()
}

/// Lends images with these seeds.
fn lend(agent: &TransferAgent, seeds: std::ops::Range<usize>) -> crate::Loan {
    let loan = agent.lend(seeds.len(), IMAGE_BYTES).expect("room");
    assert_eq!(loan.images(), seeds.len());
    seeds.enumerate().for_each(|(at, seed)| loan.write(at, &image(seed)).unwrap());
    loan
}

/// Reads images of a peer.
fn read(
    agent: &TransferAgent,
    peer: &Peer,
    addresses: &[u64],
    within: Duration,
) -> Result<Vec<Vec<u8>>, TransferError> {
    let arrived = agent.reserve(addresses.len(), IMAGE_BYTES).expect("room").read(peer, addresses, within)?;
    (0..arrived.images()).map(|at| arrived.image(at)).collect()
}

fn images(seeds: std::ops::Range<usize>) -> Vec<Vec<u8>> {
    seeds.map(image).collect()
}

#[test]
fn a_helper_that_does_not_speak_the_protocol_is_ended() {
    for (what, script, expected) in [
        ("garbage", "printf 'something else' >&0; exec sleep 600", "a frame has"),
        ("another message", "printf '\\002\\000\\000\\000{}' >&0; exec sleep 600", "not a message"),
        ("nothing", "exit 3", "exit status: 3"),
        ("half a frame", "printf '\\100\\000\\000\\000{' >&0", "in the middle of a frame"),
        (
            "an end without a beginning",
            "printf '\\045\\000\\000\\000{\"Ended\":{\"transfer\":7,\"fault\":null}}' >&0; exec sleep 600",
            "the READ 7",
        ),
    ] {
        // It answers once it was sent everything.
        let script = format!("head -c 60 >/dev/null; {script}");
        let agent = TransferAgent::start(AgentOptions {
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script],
            ..options("wrong", Path::new("/nowhere"))
        });
        let agent = agent.unwrap();
        let error = agent.wait_until_ready(PATIENCE).unwrap_err().to_string();
        assert!(error.contains(expected), "{what}: {error}");
        assert!(agent.lend(1, 1).is_none() && agent.reserve(1, 1).is_none(), "{what}");
    }
}

#[test]
fn a_missing_program_or_library_is_an_error_that_names_it() {
    let missing = |options| {
        let agent = TransferAgent::start(options).unwrap();
        agent.wait_until_ready(PATIENCE).unwrap_err().to_string()
    };
    let none = AgentOptions { program: "/nowhere/skep".into(), ..options("none", Path::new("/nowhere")) };
    let error = missing(none);
    assert!(error.contains("/nowhere/skep cannot be started"), "{error}");
    let error = missing(options("none", Path::new("/nowhere/libnixl_capi.so")));
    assert!(error.contains("/nowhere/libnixl_capi.so") && error.contains("pip download"), "{error}");
}

#[test]
fn a_helper_ends_with_its_host_while_it_loads_the_library() {
    let folder = tempfile::tempdir().unwrap();
    // Whoever opens a pipe waits until somebody writes into it.
    let library = folder.path().join("libnixl_capi.so");
    assert!(Command::new("mkfifo").arg(&library).status().unwrap().success());
    let (mut host, theirs) = UnixStream::pair().unwrap();
    let AgentOptions { name, program, arguments, .. } = options("loads", &library);
    let mut process = Command::new(program);
    let child = process.args(arguments).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().unwrap();
    drop(process);
    let ring = Ring::create(0).unwrap();
    descriptor::send(&host, ring.file()).unwrap();
    let begin = message::Command::Begin { name, library, ring_bytes: ring.bytes() as u64 };
    frame::write(&mut host, &begin).unwrap();
    drop(host);
    let child = Mutex::new(child);
    until("the helper does not end", || child.lock().unwrap().try_wait().unwrap().is_some());
}

#[test]
fn images_move_between_the_rings_of_two_helpers() {
    let Some(library) = library() else { return };
    let (there, here) = (ready("there", &library), ready("here", &library));
    let mut loan = lend(&there, 0..10);
    loan.truncate(8);
    let (peer, addresses) = (loan.peer().clone(), loan.addresses());
    for order in [[0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 0, 1, 6, 3, 5, 4]] {
        let found = read(&here, &peer, &order.map(|at| addresses[at]), PATIENCE).unwrap();
        assert!(found == order.map(image), "{order:?}");
    }
    // Addresses and descriptions that do not fit are errors, after which everything works.
    let base = addresses[0];
    for wrong in [[0], [base - 1], [base + (8 << 20) - 1], [u64::MAX]] {
        let error = read(&here, &peer, &wrong, PATIENCE).unwrap_err();
        assert!(matches!(error, TransferError::Failed { .. }), "{wrong:?}: {error}");
    }
    for metadata in [Vec::new(), vec![7; 300], peer.metadata[..100].to_vec()] {
        let wrong = Peer { name: "nobody/1".to_owned(), metadata };
        let error = read(&here, &wrong, &addresses[..1], PATIENCE).unwrap_err();
        assert!(matches!(error, TransferError::Failed { .. }), "{error}");
    }
    let other = Peer { name: "another/1".to_owned(), ..peer.clone() };
    assert!(read(&here, &other, &addresses[..1], PATIENCE).is_err(), "the description is of another peer");
    assert!(read(&here, &peer, &addresses, PATIENCE).unwrap() == images(0..8));
    let room = here.reserve(100, IMAGE_BYTES).unwrap();
    assert_eq!(room.images(), 16, "half of the ring, in slots of 64 KiB");
    let few = here.reserve(1, IMAGE_BYTES);
    assert!(few.is_none());
    assert!(matches!(room.read(&peer, &[], PATIENCE), Err(TransferError::Reserved { .. })));
    drop(loan);
    for agent in [&here, &there] {
        assert_eq!(agent.slots(), SlotCounts { free: 128, ..SlotCounts::default() });
    }
    // The helper ends with the host's last handle.
    let process = here.helper_process().unwrap();
    drop(here);
    assert!(!Path::new(&format!("/proc/{process}")).exists());
}

#[test]
fn a_read_ends_when_its_peer_is_killed_and_the_next_incarnation_has_another_name() {
    let Some(library) = library() else { return };
    let (there, here) = (ready("killed", &library), ready("reads", &library));
    let loan = lend(&there, 0..12);
    let (peer, addresses) = (loan.peer().clone(), loan.addresses());
    assert!(read(&here, &peer, &addresses, PATIENCE).unwrap() == images(0..12));
    signal(&there, Signal::STOP);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&here, &peer, &addresses, PATIENCE));
        until("the READ is not posted", || here.slots().reading > 0);
        signal(&there, Signal::KILL);
        let error = reading.join().unwrap().unwrap_err();
        assert!(matches!(error, TransferError::Failed { .. }), "{error}");
    });
    assert_eq!(here.slots(), SlotCounts { free: 128, ..SlotCounts::default() });
    assert_eq!(here.status(), AgentStatus::Ready { name: "reads.1".to_owned() }, "its helper survives");
    let again = AgentStatus::Ready { name: "killed.2".to_owned() };
    until("the helper is not started again", || there.status() == again);
    assert!(read(&here, &peer, &addresses, PATIENCE).is_err(), "the old incarnation is gone");
    let loan = lend(&there, 20..22);
    assert!(read(&here, loan.peer(), &loan.addresses(), PATIENCE).unwrap() == images(20..22));
}

#[test]
fn slots_stay_quarantined_until_a_late_read_has_ended_or_its_helper_is_dead() {
    let Some(library) = library() else { return };
    let (there, here) = (ready("stopped", &library), ready("waits", &library));
    let loan = lend(&there, 0..3);
    let (peer, addresses) = (loan.peer().clone(), loan.addresses());
    assert!(read(&here, &peer, &addresses, PATIENCE).unwrap() == images(0..3));
    let late = || {
        let error = read(&here, &peer, &addresses, Duration::from_millis(200)).unwrap_err();
        assert!(matches!(error, TransferError::Late(_)), "{error}");
    };
    signal(&there, Signal::STOP);
    late();
    let quarantined = SlotCounts { free: 116, quarantined: 12, ..SlotCounts::default() };
    assert_eq!(here.slots(), quarantined);
    // The slots are used for nothing else meanwhile, and a peer that resumes ends the READ.
    let others = here.reserve(100, IMAGE_BYTES).unwrap();
    assert_eq!(others.images(), 13);
    assert_eq!(here.slots().quarantined, 12);
    signal(&there, Signal::CONT);
    until("the READ does not end", || here.slots().quarantined == 0);
    drop(others);
    assert!(read(&here, &peer, &addresses, PATIENCE).unwrap() == images(0..3));
    // The helper is killed.
    signal(&there, Signal::STOP);
    late();
    assert_eq!(here.slots(), quarantined);
    signal(&here, Signal::KILL);
    let second = AgentStatus::Ready { name: "waits.2".to_owned() };
    until("the helper is not started again", || here.status() == second);
    assert_eq!(here.slots(), SlotCounts { free: 128, ..SlotCounts::default() });
    // When too much is quarantined, the host kills it by itself.
    let third = AgentStatus::Ready { name: "waits.3".to_owned() };
    for _ in 0..3 {
        late();
    }
    until("the helper is not replaced", || here.status() == third);
    assert_eq!(here.slots(), SlotCounts { free: 128, ..SlotCounts::default() });
    // A peer whose readers have died while it was stopped may be aborted by the library. Its host then starts it again.
    signal(&there, Signal::CONT);
    let is_read = |loan: crate::Loan| {
        loan.write(0, &image(7)).unwrap();
        read(&here, loan.peer(), &loan.addresses(), PATIENCE).is_ok_and(|found| found == images(7..8))
    };
    until("images do not move again", || there.lend(1, IMAGE_BYTES).is_some_and(&is_read));
}
