//! The HTTP client of a server.
//!
//! Its errors do not name the URL, which may hold a key: agents, models and clients get the messages of errors, and the
//! protocol crate logs them.

use super::McpOptions;
use crate::tls::Tls;
use reqwest::{
    Client, Error,
    header::{HeaderName, HeaderValue},
};
use rmcp::{
    model::ClientJsonRpcMessage,
    transport::{
        common::client_side_sse::BoxedSseResponse,
        streamable_http_client::{StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse},
    },
};
use std::{collections::HashMap, sync::Arc};

/// The client of one server.
#[derive(Clone)]
pub(super) struct HttpClient(Client);

/// The reason why a request has no response.
pub(super) type HttpError = StreamableHttpError<Error>;

impl HttpClient {
    /// Builds the client. The operator configured the address, so it is not checked; redirects are not followed,
    /// because they would lead to other addresses.
    pub(super) fn new(options: &McpOptions) -> Result<Self, String> {
        let client = Client::builder()
            .tls_backend_preconfigured(Tls::of_the_machine().config)
            .user_agent(concat!("skep/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(options.bounds.connect)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        client.build().map(HttpClient).map_err(|error| error.to_string())
    }
}

impl StreamableHttpClient for HttpClient {
    type Error = Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let posted = self.0.post_message(uri, message, session_id, auth_header, custom_headers);
        posted.await.map_err(without_url)
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
        limit: usize,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let posted = self.0.post_message_with_max_sse_event_size(
            uri,
            message,
            session_id,
            auth_header,
            custom_headers,
            limit,
        );
        posted.await.map_err(without_url)
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), HttpError> {
        self.0.delete_session(uri, session_id, auth_header, custom_headers).await.map_err(without_url)
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxedSseResponse, HttpError> {
        let opened = self.0.get_stream(uri, session_id, last_event_id, auth_header, custom_headers);
        opened.await.map_err(without_url)
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
        limit: usize,
    ) -> Result<BoxedSseResponse, HttpError> {
        let opened = self.0.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            auth_header,
            custom_headers,
            limit,
        );
        opened.await.map_err(without_url)
    }
}

fn without_url(error: HttpError) -> HttpError {
    match error {
        StreamableHttpError::Client(error) => StreamableHttpError::Client(error.without_url()),
        other => other,
    }
}
