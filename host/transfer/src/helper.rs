//! The helper process: it has the library, obeys the commands of one host, and dies with it.
//!
//! One thread reads commands and one works, so a call that hangs in the library does not keep the process from ending with its
//! host. The process ends by killing itself, because an orderly end destroys the agent, which can abort the peers.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use crate::descriptor;
use crate::error::TransferError;
use crate::frame::{self, FrameReader};
use crate::mapping::Mapping;
use crate::message::{Command, Event};
use crate::nixl::{Nixl, Progress, Read};

/// Shortest and longest interval at which READs are polled. It grows with the time since the last one was posted.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];
/// Number of polls in the time that the newest READ has taken so far.
const POLLS: u32 = 16;
/// Number of commands that wait. A host that sends more waits itself.
const WAITING_COMMANDS: usize = 64;

/// Serves the host at the other end of this socket until either process ends. It returns only if it cannot begin.
pub fn serve(socket: OwnedFd) -> Result<Infallible, TransferError> {
    let mut host = UnixStream::from(socket);
    let ring = descriptor::receive(&host).map_err(TransferError::NotStarted)?;
    let mut commands = FrameReader::new(host.try_clone().map_err(TransferError::NotStarted)?);
    let begin = loop {
        if let Some(command) = commands.next()? {
            break command;
        }
    };
    let Command::Begin { name, library, ring_bytes } = begin else { return Err(unexpected()) };
    let waiting = hear(commands);
    let map = Mapping::new(&ring, ring_bytes).map_err(TransferError::Memory);
    let nixl = match map.and_then(|ring| begin_agent(&library, &name, ring)) {
        Ok((nixl, ready)) => {
            frame::write(&mut host, &ready)?;
            nixl
        }
        Err(error) => {
            frame::write(&mut host, &Event::Failed { why: error.to_string() })?;
            return Err(error);
        }
    };
    work(nixl, host, &waiting)
}

/// Reads commands in a thread of its own, which ends the process when the host has ended, also while the library starts.
fn hear(mut commands: FrameReader<UnixStream>) -> Receiver<Command> {
    let (sender, waiting) = sync_channel(WAITING_COMMANDS);
    let begun = Arc::new(Barrier::new(2));
    let begins = Arc::clone(&begun);
    std::thread::spawn(move || {
        begins.wait();
        // The worker lives as long as the process, so it always receives.
        while let Ok(command) = commands.next() {
            if command.is_some_and(|command| sender.send(command).is_err()) {
                break;
            }
        }
        end();
    });
    // A thread that begins needs the loader's lock, which the library holds for as long as it is being loaded.
    begun.wait();
    waiting
}

fn begin_agent(library: &Path, name: &str, ring: Mapping) -> Result<(Nixl, Event), TransferError> {
    let nixl = Nixl::start(library, name, ring)?;
    let ready = Event::Ready { metadata: nixl.metadata()?, base: nixl.base() };
    Ok((nixl, ready))
}

/// Obeys commands, and reports each READ when it has ended.
fn work(mut nixl: Nixl, mut host: UnixStream, commands: &Receiver<Command>) -> ! {
    let mut reads: Vec<(u64, Read)> = Vec::new();
    let mut newest = Instant::now();
    loop {
        let command = match reads.is_empty() {
            true => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => {
                let [shortest, longest] = POLL_INTERVALS;
                commands.recv_timeout((newest.elapsed() / POLLS).clamp(shortest, longest))
            }
        };
        let mut ended = Vec::new();
        match command {
            Ok(Command::Read { transfer, peer, blocks }) => {
                newest = Instant::now();
                match nixl.read(&peer, &blocks, reads.iter().map(|(_, read)| read)) {
                    Ok(read) => reads.push((transfer, read)),
                    Err(error) => ended.push((transfer, Some(error.to_string()))),
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Command::Begin { .. }) | Err(RecvTimeoutError::Disconnected) => end(),
        }
        let mut at = 0;
        while at < reads.len() {
            let fault = match nixl.poll(&reads[at].1) {
                Progress::UnderWay => {
                    at += 1;
                    continue;
                }
                Progress::Done => None,
                Progress::Failed(status) => Some(format!("NIXL gave up with status {status}")),
            };
            let (transfer, read) = reads.swap_remove(at);
            nixl.release(read);
            ended.push((transfer, fault));
        }
        for (transfer, fault) in ended {
            if frame::write(&mut host, &Event::Ended { transfer, fault }).is_err() {
                end();
            }
        }
    }
}

fn unexpected() -> TransferError {
    TransferError::NotStarted(io::Error::new(io::ErrorKind::InvalidData, "the first command does not begin"))
}

/// Ends this process at once, without running any code of the library.
fn end() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    // The signal ends all threads, so nothing after it matters.
    std::process::abort()
}
