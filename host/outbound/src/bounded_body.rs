//! Reads response bodies without trusting the server about their size.

use crate::{Origin, OutboundError};

/// Reads the body. A body whose announced length is over `limit` is not read at all.
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

/// Returns the last error of a chain, which is the cause; those before it say only where it happened.
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
