//! Splits a stream of bytes into server-sent events, within bounds.
//!
//! Only the data of events is kept: every format repeats the event's name in its data. The result does not depend on
//! where the bytes were split.

use std::collections::VecDeque;

use crate::failure::Failure;

/// Reads events as bytes arrive.
#[derive(Debug)]
pub(crate) struct EventReader {
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// The data lines of the event that has not ended yet.
    data: Option<String>,
    ready: VecDeque<String>,
    after_return: bool,
    at_start: bool,
    max_event: usize,
}

impl EventReader {
    /// Creates a reader of events of at most `max_event` bytes.
    pub(crate) fn new(max_event: usize) -> Self {
        EventReader {
            line: Vec::new(),
            data: None,
            ready: VecDeque::new(),
            after_return: false,
            at_start: true,
            max_event,
        }
    }

    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.after_return) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + self.data.as_ref().map_or(0, String::len) + part.len() > self.max_event {
                return Err(Failure::malformed(format!("an event has more than {} bytes", self.max_event)));
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { return Ok(()) };
            self.after_return = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line()?;
        }
        Ok(())
    }

    /// Returns the data of the next complete event.
    pub(crate) fn next(&mut self) -> Option<String> {
        self.ready.pop_front()
    }

    /// Ends the stream. An event whose last line is complete counts as complete, because some servers leave out
    /// the empty line after the last one. Returns whether the stream ended in the middle of a line.
    pub(crate) fn finish(&mut self) -> bool {
        self.ready.extend(self.data.take());
        !self.line.is_empty()
    }

    fn end_line(&mut self) -> Result<(), Failure> {
        let line = std::mem::take(&mut self.line);
        let line =
            String::from_utf8(line).map_err(|_| Failure::malformed("a line of the stream is not UTF-8"))?;
        let line = match std::mem::take(&mut self.at_start) {
            true => line.trim_start_matches('\u{feff}'),
            false => line.as_str(),
        };
        if line.is_empty() {
            self.ready.extend(self.data.take());
            return Ok(());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        match field {
            "data" => {
                let value = value.strip_prefix(' ').unwrap_or(value);
                match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => self.data = Some(value.to_owned()),
                }
                Ok(())
            }
            // A comment, which keeps the connection open, has no name.
            "" | "event" | "id" | "retry" => Ok(()),
            _ => Err(Failure::malformed(format!(
                "a line of the stream is not one of an event: {:?}",
                line.chars().take(80).collect::<String>()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&[u8]], max_event: usize) -> Result<(Vec<String>, bool), Failure> {
        let mut reader = EventReader::new(max_event);
        for chunk in chunks {
            reader.push(chunk)?;
        }
        let cut = reader.finish();
        Ok((std::iter::from_fn(|| reader.next()).collect(), cut))
    }

    const STREAM: &str =
        "\u{feff}data: é1\n\n: comment\r\n\r\nevent: x\rid: 7\rdata:2\rdata: 3\r\rdata\n\ndata: 4\n";

    #[test]
    fn events_do_not_depend_on_where_the_bytes_are_split() {
        let expected = (["é1", "2\n3", "", "4"].map(str::to_owned).to_vec(), false);
        let bytes = STREAM.as_bytes();
        for at in 0..=bytes.len() {
            assert_eq!(read(&[&bytes[..at], &bytes[at..]], 100).expect("valid"), expected, "split at {at}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(read(&single, 100).expect("valid"), expected);
    }

    #[test]
    fn a_stream_that_ends_inside_a_line_was_cut() {
        assert_eq!(read(&[b"data: 1\n\ndata: [DO"], 100).expect("valid"), (vec!["1".to_owned()], true));
    }

    #[test]
    fn long_events_invalid_text_and_other_documents_are_refused() {
        for bad in [&b"data: 0123456789"[..], b"data: 01234\ndata: 56789", b"data: \xff\n", b"<html>\n"] {
            assert_eq!(read(&[bad], 12).expect_err("refused").outcome(), "malformed");
        }
    }
}
