//! The events of one turn, read from streams of several hosts.

use anyhow::{Result, bail};
use serde_json::Value;

/// An event is far smaller; a larger one means that something else answers.
const MAX_EVENT_BYTES: usize = 4 << 20;

/// Everything that a client has seen of a turn.
#[derive(Default)]
pub struct Seen {
    bytes: Vec<u8>,
    pub turn_id: Option<String>,
    pub last_id: Option<u64>,
}

/// The last event of a turn.
#[derive(Debug, PartialEq)]
pub enum End {
    Done(Value),
    /// Contains the error's code.
    Failed(String),
}

impl Seen {
    /// Takes more of a stream. Returns the end of the turn if it is in there.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Option<End>> {
        self.bytes.extend_from_slice(bytes);
        while let Some(length) = self.bytes.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.bytes.drain(..length + 2).collect();
            let event = String::from_utf8_lossy(&event);
            if let Some(end) = self.event(&event)? {
                return Ok(Some(end));
            }
        }
        if self.bytes.len() > MAX_EVENT_BYTES {
            bail!("an event has more than {MAX_EVENT_BYTES} bytes");
        }
        Ok(None)
    }

    /// Prepares for the stream of another host, which may have been cut off in the middle of an event.
    pub fn reconnect(&mut self) {
        self.bytes.clear();
    }

    fn event(&mut self, event: &str) -> Result<Option<End>> {
        let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let (Some(name), Some(data)) = (field("event:"), field("data:")) else { return Ok(None) };
        let data: Value = serde_json::from_str(data)?;
        if let Some(id) = field("id:") {
            let id: u64 = id.parse()?;
            if self.last_id.is_some_and(|last| id <= last) {
                bail!("event {id} comes after {:?}", self.last_id);
            }
            self.last_id = Some(id);
        }
        Ok(match name {
            "turn" => {
                self.turn_id = data["turn_id"].as_str().map(str::to_owned);
                None
            }
            "done" => Some(End::Done(data)),
            "error" => Some(End::Failed(data["error"]["code"].as_str().unwrap_or_default().to_owned())),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const STREAM: &str = "id: 1\nevent: turn\ndata: {\"turn\":1,\"turn_id\":\"t\"}\n\n: still there\n\n\
                          id: 2\nevent: delta\ndata: {\"text\":\"é\"}\n\n\
                          id: 3\nevent: done\ndata: {\"turn\":1}\n\n";

    #[test]
    fn the_end_is_found_however_the_stream_is_cut() {
        for size in 1..STREAM.len() {
            let mut seen = Seen::default();
            let ends: Vec<End> =
                STREAM.as_bytes().chunks(size).filter_map(|bytes| seen.take(bytes).expect("valid")).collect();
            assert_eq!(ends, [End::Done(json!({"turn": 1}))], "in pieces of {size}");
            assert_eq!((seen.turn_id.as_deref(), seen.last_id), (Some("t"), Some(3)));
        }
    }

    #[test]
    fn a_repeated_event_is_refused_and_one_that_was_cut_off_is_read_again() {
        let mut seen = Seen::default();
        assert_eq!(seen.take(b"id: 1\nevent: delta\ndata: {}\n\nid: 2\nevent: del").expect("valid"), None);
        seen.reconnect();
        let failed = b"id: 2\nevent: error\ndata: {\"error\":{\"code\":\"turn_lost\"}}\n\n";
        assert_eq!(seen.take(failed).expect("valid"), Some(End::Failed("turn_lost".to_owned())));
        let error = seen.take(failed).expect_err("it was seen").to_string();
        assert_eq!(error, "event 2 comes after Some(2)");
    }
}
