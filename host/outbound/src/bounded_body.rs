//! Reading a response without trusting it.

use crate::{Origin, OutboundError};

/// Reads the body. What is announced to be too long is not begun with.
pub(crate) async fn read(
    mut response: reqwest::Response,
    origin: &Origin,
    limit: usize,
) -> Result<Vec<u8>, OutboundError> {
    let too_large = OutboundError::ResponseTooLarge { limit };
    if response.content_length().is_some_and(|announced| announced > limit as u64) {
        return Err(too_large);
    }
    let mut body = Vec::new();
    loop {
        let chunk = response.chunk().await.map_err(|error| OutboundError::Exchange {
            origin: origin.clone(),
            problem: innermost(&error),
        })?;
        let Some(chunk) = chunk else { return Ok(body) };
        if body.len() + chunk.len() > limit {
            return Err(too_large);
        }
        body.extend_from_slice(&chunk);
    }
}

/// The reason at the end of a chain of errors; those before it say only where it went wrong.
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
