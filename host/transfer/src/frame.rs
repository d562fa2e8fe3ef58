//! Frames between a host and its helper: a length of four bytes, and JSON of at most [`MAX_FRAME_BYTES`].
//!
//! Invariant: the length of a frame is checked before memory is taken for it.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum number of bytes of the JSON of a frame.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 20;
const LENGTH_BYTES: usize = 4;
/// Number of bytes that are read at once.
const READ_BYTES: usize = 16 << 10;

/// The reason that a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame has {found} bytes, and at most {max} are allowed", max = MAX_FRAME_BYTES)]
    TooLong { found: usize },
    #[error("a frame is not a message: {0}")]
    Foreign(serde_json::Error),
    #[error("the other process has ended")]
    Ended,
    #[error("the other process has ended in the middle of a frame")]
    Cut,
    #[error(transparent)]
    Io(io::Error),
}

/// Writes a message as one frame.
pub(crate) fn write(to: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    let json = serde_json::to_vec(message).map_err(FrameError::Foreign)?;
    if json.len() > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong { found: json.len() });
    }
    let mut frame = Vec::with_capacity(LENGTH_BYTES + json.len());
    frame.extend((json.len() as u32).to_le_bytes());
    frame.extend(json);
    to.write_all(&frame).map_err(FrameError::Io)
}

/// Reads messages, also over reads that end early because of a timeout.
pub(crate) struct FrameReader<R> {
    from: R,
    /// Bytes that have arrived and were not returned.
    bytes: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    pub(crate) fn new(from: R) -> Self {
        FrameReader { from, bytes: Vec::new() }
    }

    /// Returns the next message, or `None` if it has not arrived within the time that a read may take.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        loop {
            if let Some(message) = self.whole()? {
                return Ok(Some(message));
            }
            let mut read = [0; READ_BYTES];
            let read_now = match self.from.read(&mut read) {
                // The other process has ended with something unread.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(0),
                other => other,
            };
            match read_now {
                Ok(0) if self.bytes.is_empty() => return Err(FrameError::Ended),
                Ok(0) => return Err(FrameError::Cut),
                Ok(bytes) => self.bytes.extend(&read[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) => return Err(FrameError::Io(error)),
            }
        }
    }

    /// Takes the first frame, if it is whole.
    fn whole<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some((length, rest)) = self.bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let found = u32::from_le_bytes(*length) as usize;
        if found > MAX_FRAME_BYTES {
            return Err(FrameError::TooLong { found });
        }
        let Some(json) = rest.get(..found) else { return Ok(None) };
        let message = serde_json::from_slice(json).map_err(FrameError::Foreign)?;
        self.bytes.drain(..LENGTH_BYTES + found);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A connection on which parts arrive one after the other, with a timeout between them.
    struct Parts(VecDeque<Option<Vec<u8>>>);

    impl Parts {
        fn of(bytes: &[u8], length: usize) -> Parts {
            Parts(bytes.chunks(length).flat_map(|part| [Some(part.to_vec()), None]).collect())
        }
    }

    impl Read for Parts {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            match self.0.pop_front() {
                Some(Some(part)) => {
                    into[..part.len()].copy_from_slice(&part);
                    Ok(part.len())
                }
                Some(None) => Err(io::ErrorKind::WouldBlock.into()),
                None => Ok(0),
            }
        }
    }

    fn frames(messages: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| write(&mut bytes, message).unwrap());
        bytes
    }

    #[test]
    fn messages_arrive_however_they_are_cut() {
        let bytes = frames(&["one", "", "three"]);
        for length in 1..=bytes.len() {
            let (mut reader, mut found) = (FrameReader::new(Parts::of(&bytes, length)), Vec::<String>::new());
            let end = loop {
                match reader.next() {
                    Ok(message) => found.extend(message),
                    Err(error) => break error,
                }
            };
            assert!(matches!(end, FrameError::Ended), "{end}");
            assert_eq!(found, ["one", "", "three"], "parts of {length} bytes");
        }
    }

    #[test]
    fn malformed_frames_are_errors() {
        let next = |bytes: &[u8]| loop {
            match FrameReader::new(bytes).next::<String>() {
                Ok(None) => {}
                Ok(Some(message)) => panic!("{message}"),
                Err(error) => return error,
            }
        };
        let whole = frames(&["one"]);
        for end in 1..whole.len() {
            assert!(matches!(next(&whole[..end]), FrameError::Cut), "the first {end} bytes");
        }
        let long = (MAX_FRAME_BYTES as u32 + 1).to_le_bytes();
        assert!(matches!(next(&long), FrameError::TooLong { found } if found == MAX_FRAME_BYTES + 1));
        assert!(matches!(next(&u32::MAX.to_le_bytes()), FrameError::TooLong { .. }));
        assert!(matches!(next(&[0; 4]), FrameError::Foreign(_)), "an empty frame");
        assert!(matches!(next(b"\x02\0\0\0{}"), FrameError::Foreign(_)), "another message");
        assert!(matches!(next(b"\x02\0\0\0\xff\xff"), FrameError::Foreign(_)));
        let much = "a".repeat(MAX_FRAME_BYTES);
        assert!(matches!(write(&mut Vec::<u8>::new(), &much), Err(FrameError::TooLong { .. })));
    }
}
