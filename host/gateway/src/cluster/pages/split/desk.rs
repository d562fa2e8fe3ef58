//! Computes prompts for other hosts, within a bound on the tokens in flight.

use super::{
    super::Shared,
    figures, lane,
    messages::{Line, PrefillOrderBody, TransferOffer, TransferPart},
    transfers::{LEASE, Reader, Transfer, Transfers},
};
use crate::{ApiError, cluster::routes::LINES};
use axum::{
    body::{Body, Bytes},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use skep_engine::{
    EngineError, GenerateRequest, MAX_ASKED_PAGES, ModelSet, PageSink, TokenEvent, TokenStream,
};
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::runtime::Handle;

/// Maximum number of tokens of all orders in work. A single order is always allowed.
const MAX_TOKENS_IN_FLIGHT: usize = 1 << 17;
/// Longest time between two lines of an answer.
const KEEP_ALIVE: Duration = Duration::from_millis(500);
/// Longest time that an order may take.
const LONGEST: Duration = Duration::from_secs(600);

/// The orders that a prefill host works on.
#[derive(Default)]
pub(in crate::cluster::pages) struct PrefillDesk {
    transfers: Transfers,
    tokens_in_flight: Arc<AtomicUsize>,
}

/// The tokens of one order among those in flight.
struct InFlight {
    all: Arc<AtomicUsize>,
    tokens: usize,
}

impl InFlight {
    fn take(all: &Arc<AtomicUsize>, tokens: usize) -> Result<InFlight, ApiError> {
        let before = all.fetch_add(tokens, Relaxed);
        figures::add_in_flight(tokens);
        let taken = InFlight { all: all.clone(), tokens };
        if before > 0 && before + tokens > MAX_TOKENS_IN_FLIGHT {
            let message = format!(
                "this host computes prompts of {before} tokens already, and takes at most {MAX_TOKENS_IN_FLIGHT}"
            );
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "prefill_full", message));
        }
        Ok(taken)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.all.fetch_sub(self.tokens, Relaxed);
        figures::remove_in_flight(self.tokens);
    }
}

/// Ends a transfer when its order is given up, and lets its pages wait for a while if it was computed.
struct Lease {
    transfers: Transfers,
    name: String,
    transfer: Arc<Transfer>,
    is_computed: bool,
    /// Time for which computed pages wait.
    time: Duration,
}

impl Lease {
    fn computed(&mut self) {
        self.is_computed = true;
        self.transfer.finish();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.is_computed {
            self.transfers.end(&self.name);
            return;
        }
        let (transfers, name, time) = (self.transfers.clone(), std::mem::take(&mut self.name), self.time);
        // Without a runtime, the host is ending.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                tokio::time::sleep(time).await;
                transfers.end(&name);
            });
        }
    }
}

/// An order that is being computed.
struct Work {
    tokens: TokenStream,
    lease: Lease,
    _in_flight: InFlight,
}

impl PrefillDesk {
    /// Takes an order, and returns the lines of its answer. Dropping the answer before the prompt is computed gives the order up.
    pub(in crate::cluster::pages) fn order(
        &self,
        shared: &Shared,
        models: &ModelSet,
        order: PrefillOrderBody,
    ) -> Result<Response, ApiError> {
        let accepted = self.accept(shared, models, order);
        figures::record_order(accepted.as_ref().map_or_else(|error| error.code, |_| "accepted"));
        let lines = lines(accepted?, KEEP_ALIVE).map(|line| Ok::<_, Infallible>(text(&line)));
        Ok(([(header::CONTENT_TYPE, LINES)], Body::from_stream(lines)).into_response())
    }

    fn accept(&self, shared: &Shared, models: &ModelSet, order: PrefillOrderBody) -> Result<Work, ApiError> {
        let engine = models.engine_at_once(&order.model)?;
        let page_tokens = engine.page_tokens();
        let pages = order.tokens.len() / page_tokens;
        if pages * page_tokens != order.tokens.len() || pages > MAX_ASKED_PAGES || order.first >= pages {
            let message = format!(
                "an order has the tokens of 1 to {MAX_ASKED_PAGES} whole pages of {page_tokens}, some of which are wanted"
            );
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_order", message));
        }
        let layout = engine.page_layout(&shared.names);
        if layout != Some((order.layout(), order.page_bytes)) {
            let message = format!(
                "the KV pages of {:?} have another layout here: the weights, the format of the pages or the version differ",
                order.model
            );
            return Err(ApiError::new(StatusCode::CONFLICT, "layout_differs", message));
        }
        let in_flight = InFlight::take(&self.tokens_in_flight, order.tokens.len())?;
        let names = order.affinity.page_names(&shared.names, &order.tokens, page_tokens);
        let transfer = self.transfers.open(&order.transfer, order.layout(), names, order.first)?;
        let (within, priority) = (order.within().min(LONGEST), order.priority());
        let sink: Arc<dyn PageSink> = transfer.clone();
        let transfers = self.transfers.clone();
        let lease = Lease { transfers, name: order.transfer, transfer, is_computed: false, time: LEASE };
        let request = GenerateRequest {
            affinity: order.affinity,
            priority,
            deadline: Some(Instant::now() + within),
            ..GenerateRequest::new(order.tokens)
        };
        let tokens = engine.prefill(request, sink)?;
        Ok(Work { tokens, lease, _in_flight: in_flight })
    }

    /// Returns the pages of a part of a transfer, as they become ready.
    pub(in crate::cluster::pages) fn pages(
        &self,
        shared: &Arc<Shared>,
        part: &TransferPart,
    ) -> Result<Body, ApiError> {
        Ok(lane::give(shared.clone(), self.read(part)?))
    }

    /// Lends the first pages of a part of a transfer, once they are ready.
    pub(in crate::cluster::pages) async fn lend(
        &self,
        shared: &Arc<Shared>,
        part: &TransferPart,
    ) -> Result<TransferOffer, ApiError> {
        lane::lend(shared, self.read(part)?).await
    }

    fn read(&self, part: &TransferPart) -> Result<Reader, ApiError> {
        self.transfers.read(&part.transfer, part.from, part.held)
    }

    /// Drops the pages of a transfer that were not fetched.
    pub(in crate::cluster::pages) fn end(&self, transfer: &str) {
        self.transfers.end(transfer);
    }

    /// Returns the number of transfers, the bytes of their pages, and the tokens in flight.
    #[cfg(test)]
    pub(in crate::cluster::pages) fn held(&self) -> (usize, u64, usize) {
        (self.transfers.count(), self.transfers.waiting_bytes(), self.tokens_in_flight.load(Relaxed))
    }
}

/// Returns the lines about an order.
fn lines(work: Work, keep_alive: Duration) -> impl Stream<Item = Line> + Send + 'static {
    stream::unfold(Some(work), move |work| async move {
        let mut work = work?;
        loop {
            let Ok(event) = tokio::time::timeout(keep_alive, work.tokens.next()).await else {
                return Some((Line::Alive {}, Some(work)));
            };
            let line = match event {
                Some(Ok(TokenEvent::Started { cached_tokens, .. })) => {
                    let line = Line::Started { reused_tokens: cached_tokens as usize };
                    return Some((line, Some(work)));
                }
                Some(Ok(TokenEvent::Finished(finished))) => {
                    work.lease.computed();
                    let (usage, timing) = (finished.usage, finished.timing);
                    let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
                    figures::record_computed(u64::from(computed));
                    Line::Done {
                        computed_tokens: computed as usize,
                        queue_us: timing.queue_us,
                        compute_us: timing.total_us.saturating_sub(timing.queue_us),
                    }
                }
                Some(Ok(TokenEvent::Token(_) | TokenEvent::PromptLogprobs(_))) => continue,
                Some(Err(error)) => failed(&error),
                None => failed(&EngineError::ShuttingDown),
            };
            return Some((line, None));
        }
    })
}

fn failed(error: &EngineError) -> Line {
    Line::Failed { code: error.code().to_owned(), message: error.to_string() }
}

fn text(line: &Line) -> Bytes {
    let mut text = serde_json::to_vec(line).expect("strings and numbers always serialize");
    text.push(b'\n');
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::Digest;

    #[tokio::test]
    async fn pages_that_nobody_fetches_are_gone_when_their_order_is_given_up_or_their_lease_ends() {
        let transfers = Transfers::default();
        for is_computed in [false, true] {
            let transfer = transfers.open("a", Digest([9; 32]), vec![Digest([0; 32])], 0).unwrap();
            assert!(transfer.put(0, vec![0; 10]));
            let (name, time) = ("a".to_owned(), Duration::from_millis(500));
            let mut lease = Lease { transfers: transfers.clone(), name, transfer, is_computed: false, time };
            if is_computed {
                lease.computed();
            }
            let dropped = Instant::now();
            drop(lease);
            let kept = if is_computed { (1, 10) } else { (0, 0) };
            assert_eq!((transfers.count(), transfers.waiting_bytes()), kept);
            while transfers.count() > 0 {
                assert!(dropped.elapsed() < Duration::from_secs(30), "the lease does not end");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(transfers.waiting_bytes(), 0);
        }
    }
}
