//! A server that answers only once it is open, so that a turn of the guest `gate` is in the middle of its work for as long as
//! a test wants.

use axum::{Router, extract::State, routing::get};
use std::sync::Arc;
use tokio::sync::watch;

/// A gate that is closed at first. It stands as long as the runtime of its test.
pub struct Gate {
    pub url: String,
    state: Arc<Opening>,
}

struct Opening {
    is_open: watch::Sender<bool>,
    /// Number of requests so far.
    arrived: watch::Sender<usize>,
}

impl Gate {
    pub async fn start() -> Gate {
        async fn pass(State(state): State<Arc<Opening>>) -> &'static str {
            let mut is_open = state.is_open.subscribe();
            state.arrived.send_modify(|arrived| *arrived += 1);
            is_open.wait_for(|is_open| *is_open).await.unwrap();
            "open"
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/gate", listener.local_addr().unwrap());
        let state = Arc::new(Opening { is_open: watch::Sender::new(false), arrived: watch::Sender::new(0) });
        let routes = Router::new().route("/gate", get(pass)).with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Gate { url, state }
    }

    pub fn open(&self) {
        self.state.is_open.send_replace(true);
    }

    /// Waits until this many requests have arrived since the start.
    pub async fn has(&self, requests: usize) {
        let mut arrived = self.state.arrived.subscribe();
        let arrives = arrived.wait_for(|arrived| *arrived >= requests);
        let waited = tokio::time::timeout(super::nodes::PATIENCE, arrives).await;
        assert!(waited.is_ok(), "{} requests, and not {requests}", *self.state.arrived.borrow());
    }

    /// Returns the number of requests so far.
    pub fn arrived(&self) -> usize {
        *self.state.arrived.borrow()
    }
}
