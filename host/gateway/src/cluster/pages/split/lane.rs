//! The way of a transfer's pages from one host to the other: sealed images in the body of an answer, in order, as they become
//! ready.
//!
//! No other part of a transfer knows how bytes move. Another lane has two parts as well: one that takes pages from a [`Transfer`] as
//! they are put, and one that returns what has arrived, unchecked.

use super::{
    super::{Shared, fetching::Images},
    messages::TransferName,
    transfers::Transfer,
};
use crate::cluster::{peers, routes};
use axum::body::{Body, Bytes};
use futures::stream;
use skep_runtime::{Member, PeerError};
use std::{convert::Infallible, sync::Arc, time::Duration};

/// Returns the images of a transfer's pages. The body ends with the last page, or early if no further one comes.
pub(super) fn give(shared: Arc<Shared>, transfer: Arc<Transfer>) -> Body {
    let images = stream::unfold((shared, transfer), |(shared, transfer)| async move {
        let (name, page) = transfer.next().await?;
        let sealing = {
            let (shared, layout) = (shared.clone(), transfer.layout);
            tokio::task::spawn_blocking(move || shared.seal.seal(layout, name, &page))
        };
        let image = sealing.await.ok()?.ok()?;
        let bytes = image.len();
        tokio::time::sleep(shared.pause(bytes)).await;
        shared.figures.record_given(bytes as u64);
        Some((Ok::<_, Infallible>(Bytes::from(image)), (shared, transfer)))
    });
    Body::from_stream(images)
}

/// Begins to fetch the images of a transfer from a host, for each of which it is waited for this time.
pub(super) async fn fetch(
    shared: &Shared,
    host: &Member,
    transfer: &str,
    patience: Duration,
) -> Result<Images, PeerError> {
    let body = TransferName { transfer: transfer.to_owned() };
    let body = serde_json::to_vec(&body).map_err(|error| PeerError::Broken(error.to_string()))?;
    let answer = peers::call(&shared.link, host, routes::PREFILL_PAGES, body).await?;
    Ok(Images::of(answer.into_body(), patience))
}
