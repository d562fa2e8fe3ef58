//! Gives pages of this host's disk to another host.
//!
//! Invariant: a page is given only while it is on the disk. One that was read ahead and erased since is not sent anymore.

use super::{MAX_GIVEN, Shared};
use crate::ApiError;
use axum::{
    body::{Body, Bytes},
    http::StatusCode,
};
use skep_engine::{Digest, DiskTier, LayoutId, PageQuestion, PageRead, PageStream};
use std::{
    convert::Infallible,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// Time that the disk may take for a page, and the other host until it has room for one.
const STALL: Duration = Duration::from_secs(5);
/// Interval at which the answer checks whether the disk has read the next page.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum rate at which pages are given to all other hosts.
const GIVEN_BYTES_PER_S: f64 = 500e6;
/// Number of images that wait for the network, in each answer.
const SENT_AHEAD: usize = 1;

/// Returns the layout of a question, and how many of its pages are here from the first on.
pub(super) fn find(tier: &DiskTier, question: &PageQuestion) -> Option<(LayoutId, usize)> {
    let layout = tier.find_layout(question.layout, question.payload_bytes)?;
    Some((layout, tier.leading(layout, &question.names)))
}

/// Returns the images of the pages that are here, as they are read.
pub(super) fn give(shared: &Arc<Shared>, question: PageQuestion) -> Result<Body, ApiError> {
    let permit = shared.giving.clone().try_acquire_owned().map_err(|_| {
        busy(format!("this host gives pages to {MAX_GIVEN} others already; they can be computed meanwhile"))
    })?;
    let found = shared.tier.as_ref().and_then(|tier| Some((tier, find(tier, &question)?)));
    let Some((tier, (layout, pages))) = found.filter(|(_, (_, pages))| *pages > 0) else {
        return Ok(Body::empty());
    };
    let names = question.names[..pages].to_vec();
    let reading = tier.read(layout, names.clone());
    let reading = reading.ok_or_else(|| busy("too many reads wait for the disk of this host".to_owned()))?;
    let (sender, receiver) = mpsc::channel(SENT_AHEAD);
    let (shared, tier, name) = (shared.clone(), tier.clone(), question.layout);
    tokio::spawn(async move {
        let _permit = permit;
        send((shared, tier), (layout, name), names, reading, sender).await;
    });
    // The answer ends early if a page is missing, which the other host notices.
    let images = futures::stream::unfold(receiver, |mut receiver: mpsc::Receiver<Bytes>| async move {
        let image = receiver.recv().await?;
        Some((Ok::<_, Infallible>(image), receiver))
    });
    Ok(Body::from_stream(images))
}

async fn send(
    (shared, tier): (Arc<Shared>, Arc<DiskTier>),
    (layout, layout_name): (LayoutId, Digest),
    names: Vec<Digest>,
    mut reading: PageStream,
    images: mpsc::Sender<Bytes>,
) {
    for name in names {
        let Some(page) = next(&mut reading).await else { return };
        let sealing = {
            let shared = shared.clone();
            tokio::task::spawn_blocking(move || shared.seal.seal(layout_name, name, &page))
        };
        let Ok(Ok(image)) = sealing.await else { return };
        let bytes = image.len();
        tokio::time::sleep(shared.pause(bytes)).await;
        if tier.leading(layout, &[name]) == 0 {
            return;
        }
        match tokio::time::timeout(STALL, images.send(Bytes::from(image))).await {
            Ok(Ok(())) => shared.figures.record_given(bytes as u64),
            // The other host is gone, or does not read.
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

/// Returns the next page of the disk, or `None` if there is none in time.
async fn next(reading: &mut PageStream) -> Option<Vec<u8>> {
    let until = Instant::now() + STALL;
    loop {
        match reading.poll() {
            PageRead::Page(page) => return Some(page),
            PageRead::NotYet if Instant::now() < until => tokio::time::sleep(LOOK_INTERVAL).await,
            PageRead::NotYet | PageRead::Ended => return None,
        }
    }
}

impl Shared {
    /// Returns how long to wait before this many bytes more are given.
    pub(super) fn pause(&self, bytes: usize) -> Duration {
        let mut next = self.next_given.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let start = (*next).max(now);
        *next = start + Duration::from_secs_f64(bytes as f64 / GIVEN_BYTES_PER_S);
        start - now
    }
}

fn busy(message: String) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "pages_busy", message)
}
