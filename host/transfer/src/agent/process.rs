//! The life of the helper's processes: each is started, followed until it ends, reaped, and replaced after a pause.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use super::AgentOptions;
use super::state::{Connection, Shared};
use crate::descriptor;
use crate::frame::{self, FrameReader};
use crate::message::{Command, Event, Peer};

/// Time within which a helper must be ready.
const START_TIME: Duration = Duration::from_secs(30);
/// Interval at which the supervisor checks whether the helper has to end.
const TICK: Duration = Duration::from_millis(100);
/// Time that the helper may take to read a command.
const WRITE_TIME: Duration = Duration::from_secs(1);
/// Shortest and longest pause before the helper is started again: each is twice the one before. After a helper that has run
/// for longer than the longest pause, the next pause is the shortest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(60)];
/// Beginnings of the names of variables that the helper gets from this process. It gets no key and no address of a database.
const PASSED_ON: [&str; 8] = ["UCX_", "NIXL_", "CUDA_", "LD_LIBRARY_PATH", "PATH", "HOME", "TMPDIR", "LANG"];

/// Keeps a helper running until the host stops it.
pub(super) fn supervise(shared: &Shared, options: &AgentOptions) {
    let ([first, longest], mut said) = (PAUSES, String::new());
    let mut pause = first;
    for incarnation in 1_u64.. {
        let began = Instant::now();
        shared.starting();
        let name = format!("{}.{incarnation}", options.name);
        let why = match start(options) {
            Ok((child, stream)) => follow(shared, options, &name, child, stream),
            Err(error) => {
                format!("{} cannot be started: {error}", options.program.display())
            }
        };
        shared.dead(&why);
        if shared.is_stopping() {
            return;
        }
        if began.elapsed() > longest {
            pause = first;
        }
        if why == said {
            tracing::debug!(helper = name, why, "the helper of KV transfers has ended again");
        } else {
            tracing::warn!(
                helper = name,
                why,
                "the helper of KV transfers has ended; pages travel over HTTP until it runs again"
            );
            said = why;
        }
        if !shared.pause(pause) {
            return;
        }
        pause = (pause * 2).min(longest);
    }
}

fn start(options: &AgentOptions) -> std::io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut process = Process::new(&options.program);
    process.args(&options.arguments).env_clear();
    let is_passed_on = |name: &str| PASSED_ON.iter().any(|beginning| name.starts_with(beginning));
    process.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_passed_on)));
    process.envs(options.environment.iter().map(|(name, value)| (name, value)));
    // A signal of the terminal is for the host, which ends its helper.
    process.process_group(0).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
    let child = process.spawn()?;
    // The other end of the socket is closed here with the description of the process.
    drop(process);
    Ok((child, ours))
}

/// Follows a helper until it has ended or has to end, and reaps it. Returns why it ended.
fn follow(
    shared: &Shared,
    options: &AgentOptions,
    name: &str,
    mut child: Child,
    stream: UnixStream,
) -> String {
    let why = converse(shared, options, name, child.id(), &stream);
    // Killing one that is dead already fails, which changes nothing.
    let _ = child.kill();
    match child.wait() {
        Ok(status) => format!("{why} ({status})"),
        Err(error) => format!("{why} (and cannot be waited for: {error})"),
    }
}

/// Sends a helper its first command, and handles its events until it has to end. Returns the reason.
fn converse(
    shared: &Shared,
    options: &AgentOptions,
    name: &str,
    process: u32,
    stream: &UnixStream,
) -> String {
    let opened = || -> std::io::Result<(UnixStream, UnixStream)> {
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        descriptor::send(stream, shared.ring.file())?;
        Ok((stream.try_clone()?, stream.try_clone()?))
    };
    let (mut commands, events) = match opened() {
        Ok(streams) => streams,
        Err(error) => return format!("it cannot be reached: {error}"),
    };
    let begin = Command::Begin {
        name: name.to_owned(),
        library: options.library.clone(),
        ring_bytes: shared.ring.bytes() as u64,
    };
    if let Err(error) = frame::write(&mut commands, &begin) {
        return format!("it cannot be reached: {error}");
    }
    let (mut events, mut commands, until) =
        (FrameReader::new(events), Some(commands), Instant::now() + START_TIME);
    loop {
        if shared.is_stopping() {
            return "the host has stopped it".to_owned();
        }
        if shared.is_clogged() {
            return "too many pages did not arrive, so it is ended to free their memory".to_owned();
        }
        match events.next() {
            Ok(Some(Event::Ready { metadata, base })) => {
                let Some(stream) = commands.take() else { return "it was ready twice".to_owned() };
                tracing::info!(helper = name, "KV pages of other hosts travel through NIXL");
                let peer = Peer { name: name.to_owned(), metadata };
                shared.ready(Connection::new(peer, base, process, stream));
            }
            Ok(Some(Event::Failed { why })) => return why,
            Ok(Some(Event::Ended { transfer, fault })) => {
                if !shared.ended(transfer, fault) {
                    return format!("it reports the end of the READ {transfer}, which does not exist");
                }
            }
            Ok(None) if commands.is_some() && Instant::now() > until => {
                return format!("it was not ready within {START_TIME:?}");
            }
            Ok(None) => {}
            Err(error) => return error.to_string(),
        }
    }
}
