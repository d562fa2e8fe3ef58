//! The parts that all requests to an upstream share.

use std::sync::Arc;

use reqwest::Url;

use crate::{breaker::Breaker, http::Http, limits::Limits, options::UpstreamOptions};

pub(crate) struct Shared {
    pub options: UpstreamOptions,
    pub base: Url,
    pub http: Http,
    pub limits: Arc<Limits>,
    pub breaker: Arc<Breaker>,
}
