//! The ways of a transfer's pages from one host to the other, as they become ready: sealed images in the body of an answer, or sealed
//! images in the memory of the prefill host, a few at a time, which the other host reads (`pages/direct`).
//!
//! No other part of a transfer knows how bytes move. A page that is lent stays in its [`Transfer`](super::transfers::Transfer) until the
//! other host says that it has arrived, so whatever fails with a READ, the page still comes over HTTP.

use super::{
    super::{Shared, fetching::Images, lending},
    messages::{TransferOffer, TransferPart},
    transfers::{Next, Reader},
};
use crate::{
    ApiError,
    cluster::{peers, routes},
};
use axum::body::{Body, Bytes};
use futures::stream;
use skep_engine::{Digest, PageQuestion};
use skep_runtime::{Member, PeerError};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::time::{sleep, timeout};

/// Time for which a host that wants to read pages waits for the next one, before it hears that there is none yet.
const NEXT_PAGE_TIME: Duration = Duration::from_secs(1);

/// Returns the images of a transfer's pages. The body ends with the last page, or early if no further one comes.
pub(super) fn give(shared: Arc<Shared>, reader: Reader) -> Body {
    let images = stream::unfold((shared, reader), |(shared, mut reader)| async move {
        let (name, page) = reader.next().await?;
        let image = seal(&shared, reader.layout(), name, page).await?;
        reader.drop_read();
        sleep(shared.pause(image.len())).await;
        shared.figures.record_given(image.len() as u64);
        Some((Ok::<_, Infallible>(Bytes::from(image)), (shared, reader)))
    });
    Body::from_stream(images)
}

/// Lends the pages of a transfer that are ready, from the reader's next one on, as far as there is room. If none is, it waits a while.
pub(super) async fn lend(shared: &Arc<Shared>, mut reader: Reader) -> Result<TransferOffer, ApiError> {
    // A host that cannot lend says so before the first page is ready.
    lending::direct(shared)?;
    let (layout, wanted) = (reader.layout(), reader.left());
    let (mut name, mut page) = match timeout(NEXT_PAGE_TIME, reader.next()).await {
        Ok(Some(next)) => next,
        Ok(None) => return Ok(TransferOffer::Over {}),
        Err(_) => return Ok(TransferOffer::NotYet {}),
    };
    let image_bytes = PageQuestion::image_bytes_of(page.len());
    let mut loan = lending::room(shared, wanted, image_bytes)?;
    let mut written = 0;
    loop {
        let Some(image) = seal(shared, layout, name, page).await else { break };
        sleep(shared.pause(image.len())).await;
        loan = lending::write(loan, written, image).await?;
        shared.figures.record_given(image_bytes as u64);
        written += 1;
        if written == loan.images() {
            break;
        }
        // Those that have become ready in the meantime are lent as well.
        let Next::Page(next_name, next_page) = reader.poll() else { break };
        (name, page) = (next_name, next_page);
    }
    Ok(TransferOffer::Pages(lending::offer(shared, loan, written)))
}

async fn seal(shared: &Arc<Shared>, layout: Digest, name: Digest, page: Arc<Vec<u8>>) -> Option<Vec<u8>> {
    let shared = shared.clone();
    let sealing = tokio::task::spawn_blocking(move || shared.seal.seal(layout, name, &page));
    sealing.await.ok()?.ok()
}

/// Begins to fetch the images of a part of a transfer from a host, for each of which it is waited for this time.
pub(super) async fn fetch(
    shared: &Shared,
    host: &Member,
    part: &TransferPart,
    patience: Duration,
) -> Result<Images, PeerError> {
    let body = serde_json::to_vec(part).map_err(|error| PeerError::Broken(error.to_string()))?;
    let answer = peers::call(&shared.link, host, routes::PREFILL_PAGES, body).await?;
    Ok(Images::of(answer.into_body(), patience))
}
