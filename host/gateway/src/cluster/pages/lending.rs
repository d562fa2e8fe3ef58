//! Lends pages to another host, which reads them in the memory that this one shares with its helper.
//!
//! Invariant: a page is lent only while it is on the disk or in a transfer (`split`), and for [`LEASE`] at most. What is lent is sealed as
//! every page that travels, because whoever reaches the helper can read it.

use super::{
    Shared,
    direct::Direct,
    fetching::{Images, PAGE_TIME},
    giving,
};
use crate::ApiError;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use skep_engine::PageQuestion;
use skep_transfer::{Loan, Peer};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// Time after which the memory of a loan is used for something else, whoever reads it.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// Maximum number of pages of a loan.
pub(super) const MAX_LENT: usize = 16;

/// The pages of a loan, as the other host needs to know them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(super) loan: String,
    /// The helper that has the images.
    pub(super) peer: Peer,
    /// The address of the image of each page, from the first page of the question on.
    pub(super) addresses: Vec<u64>,
}

/// The end of a loan before its lease ends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Return {
    pub(super) loan: String,
}

/// The loans that have not ended.
#[derive(Default)]
pub(super) struct Loans {
    given: Mutex<HashMap<String, Loan>>,
}

impl Loans {
    /// Ends a loan. One that has ended already is not changed.
    pub(super) fn end(&self, ended: &Return) {
        self.given().remove(&ended.loan);
    }

    fn given(&self) -> MutexGuard<'_, HashMap<String, Loan>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lends the pages that are here, from the first on, as far as there is room.
pub(super) async fn lend(shared: &Arc<Shared>, mut question: PageQuestion) -> Result<Offer, ApiError> {
    let image_bytes = question.image_bytes();
    let mut loan = room(shared, question.names.len(), image_bytes)?;
    question.names.truncate(loan.images());
    let wanted = question.names.len();
    let mut images = Images::of(giving::give(shared, question)?, PAGE_TIME);
    let mut written = 0;
    while written < wanted {
        let Ok(Ok(Some(image))) = timeout(PAGE_TIME, images.next(image_bytes)).await else { break };
        loan = write(loan, written, image).await?;
        written += 1;
    }
    Ok(offer(shared, loan, written))
}

/// Takes memory for at most this many images, and for one at least.
pub(super) fn room(shared: &Shared, images: usize, image_bytes: usize) -> Result<Loan, ApiError> {
    direct(shared)?.agent().lend(images.clamp(1, MAX_LENT), image_bytes).ok_or_else(|| {
        let message =
            "the memory for lent KV pages is in use, or its helper is starting; they can be read over HTTP";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "pages_busy", message)
    })
}

/// Returns the memory that this host lends.
pub(super) fn direct(shared: &Shared) -> Result<&Direct, ApiError> {
    shared.direct.get().ok_or_else(|| {
        let message =
            "this host lends no KV pages: `transfer` under [kv] is \"http\", or there is no NIXL library";
        ApiError::new(StatusCode::NOT_FOUND, "transfer_off", message)
    })
}

/// Writes an image into the memory of a loan.
pub(super) async fn write(loan: Loan, at: usize, image: Vec<u8>) -> Result<Loan, ApiError> {
    let writing = tokio::task::spawn_blocking(move || loan.write(at, &image).map(|()| loan));
    match writing.await {
        Ok(Ok(loan)) => Ok(loan),
        Ok(Err(error)) => Err(unwritten(&error.to_string())),
        Err(error) => Err(unwritten(&error.to_string())),
    }
}

/// Begins a loan of the images that were written, and says where they are. It ends with its lease at the latest.
pub(super) fn offer(shared: &Arc<Shared>, mut loan: Loan, written: usize) -> Offer {
    loan.truncate(written);
    let id = Uuid::now_v7().to_string();
    let offer = Offer { loan: id.clone(), peer: loan.peer().clone(), addresses: loan.addresses() };
    if written > 0 {
        shared.loans.given().insert(id.clone(), loan);
        let shared = Arc::downgrade(shared);
        tokio::spawn(async move {
            sleep(LEASE).await;
            if let Some(shared) = shared.upgrade() {
                shared.loans.end(&Return { loan: id });
            }
        });
    }
    offer
}

fn unwritten(why: &str) -> ApiError {
    let message = format!("a KV page cannot be lent: {why}");
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
}
