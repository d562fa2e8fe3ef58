//! Passes the file of the ring to the helper, over their socket.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// The byte that a file comes with, because it cannot travel alone.
const MARK: u8 = b'R';
/// A program that the library may start does not get the file.
#[cfg(target_os = "linux")]
const FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
const FLAGS: RecvFlags = RecvFlags::empty();

/// Sends a file.
pub(crate) fn send(over: &UnixStream, file: &File) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    if !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::other("a file does not fit into a message"));
    }
    sendmsg(over, &[IoSlice::new(&[MARK])], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Receives the file that the other process sends first.
pub(crate) fn receive(over: &UnixStream) -> io::Result<File> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut mark = [0_u8];
    let received = recvmsg(over, &mut [IoSliceMut::new(&mut mark)], &mut control, FLAGS)?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file: Option<OwnedFd> = files.next().and_then(|mut files| files.next());
    match file {
        Some(file) if received.bytes == 1 && mark == [MARK] => Ok(File::from(file)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the first message has no file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Seek as _, Write as _};

    #[test]
    fn a_file_arrives_and_anything_else_is_an_error() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"shared").unwrap();
        send(&one, &file).unwrap();
        let mut text = String::new();
        let mut received = receive(&other).unwrap();
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
        one.write_all(b"R").unwrap();
        assert!(receive(&other).is_err());
        drop(one);
        assert!(receive(&other).is_err());
    }
}
