//! An entry point for fuzz targets into the readers of upstreams' answers, which are otherwise private.

use crate::{
    UpstreamKind,
    assembly::{AssembledAnswer, Assembly},
    delta::Delta,
    failure::Failure,
    sse::EventReader,
    wire,
};

const MAX_EVENT: usize = 4096;
const MAX_TOKENS: u64 = 100;

/// The deltas of a stream up to its first error, and how it ended.
type Read = (Vec<Delta>, Result<bool, &'static str>);

/// Reads the stream of a server, both at once and in pieces of the given number of bytes. It panics if the pieces
/// give another result.
pub fn read_answer(kind: UpstreamKind, stream: &[u8], piece: usize) {
    let whole = read(kind, &[stream]);
    let pieces: Vec<&[u8]> = stream.chunks(piece.max(1)).collect();
    assert_eq!(read(kind, &pieces), whole);
    let text = |delta: &Delta| if let Delta::Text(text) = delta { text.len() } else { 0 };
    if let Ok(answer) = assembled(&whole.0) {
        assert_eq!(answer.text.len(), whole.0.iter().map(text).sum::<usize>());
        assert!(answer.calls.iter().all(|call| !call.id.is_empty()));
    }
}

fn read(kind: UpstreamKind, pieces: &[&[u8]]) -> Read {
    let mut reader = EventReader::new(MAX_EVENT);
    let mut decoder = wire::decoder(kind, Some(MAX_TOKENS));
    let mut deltas = Vec::new();
    for piece in pieces {
        let pushed = reader.push(piece);
        while let Some(data) = reader.next() {
            match decoder.event(&data) {
                Ok(more) => deltas.extend(more),
                Err(failure) => return (deltas, Err(failure.outcome())),
            }
        }
        if let Err(failure) = pushed {
            return (deltas, Err(failure.outcome()));
        }
    }
    (deltas, Ok(reader.finish()))
}

fn assembled(deltas: &[Delta]) -> Result<AssembledAnswer, Failure> {
    let mut assembly = Assembly::default();
    deltas.iter().try_for_each(|delta| assembly.add(delta))?;
    Ok(assembly.answer(&[], 0))
}

/// Reads the body of a response that is not a stream, and as one of an error.
pub fn read_document(kind: UpstreamKind, body: &str, status: u16) {
    let _ = wire::decoder(kind, Some(MAX_TOKENS)).whole(body).map(|deltas| assembled(&deltas));
    let error = wire::failure(kind, status, body, None).cleaned(None);
    assert!(error.message().len() < 600);
}
