//! A response body that marks its request as finished when it is dropped.

use super::{bounds::Slot, pace::Pace};
use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

pub(super) struct PacedBody {
    body: Body,
    pace: Arc<Pace>,
    /// The slot of the client for whom a proxy forwarded the request.
    _slot: Option<Slot>,
}

impl PacedBody {
    pub(super) fn new(body: Body, pace: Arc<Pace>, slot: Option<Slot>) -> Self {
        PacedBody { body, pace, _slot: slot }
    }
}

impl HttpBody for PacedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for PacedBody {
    fn drop(&mut self) {
        self.pace.answer_ended();
    }
}
