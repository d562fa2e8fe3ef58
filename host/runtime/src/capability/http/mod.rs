//! `skep:agent/http`: HTTP requests that the host makes for a guest.
//!
//! A request and its outcome are recorded in the turn's journal. A request that changes something is sent only after the
//! journal says that it will be. If the host terminates before the response is recorded, an idempotent request is made
//! again; for any other request the guest gets an error that says that the outcome is unknown.

pub(super) mod budget;
mod record;
mod request;

pub(super) use request::DEFAULT_TIMEOUT as DEFAULT_FETCH_TIMEOUT;

use crate::{
    bindings::http::{Host, HostWithStore, HttpError, Request, Response},
    capability::{
        Capabilities, TurnContext,
        http::{record::FetchRecord, request::FetchError},
        turn::Turn,
    },
    journal::{Call, Identity, Stopped},
};
use skep_outbound::OutboundError;
use std::{sync::Arc, time::Duration};
use wasmtime::component::Accessor;

impl HostWithStore<TurnContext> for Capabilities {
    async fn fetch(
        accessor: &Accessor<TurnContext, Self>,
        request: Request,
    ) -> wasmtime::Result<Result<Response, HttpError>> {
        let turn = accessor.with(|mut access| {
            let context = access.get();
            context.charge(request.bytes())?;
            wasmtime::error::Ok(context.turn.clone())
        })?;
        let Some(turn) = turn else { return Ok(Err(outside_a_turn())) };
        let result = fetch(&turn, request).await?;
        let bytes = result.as_ref().map_or(0, response_bytes);
        accessor.with(|mut access| access.get().charge_result(bytes))?;
        Ok(result)
    }
}

impl Host for TurnContext {
    fn secret(&mut self, name: String) -> wasmtime::Result<Result<String, HttpError>> {
        self.charge(name.len())?;
        let Some(turn) = &self.turn else { return Ok(Err(outside_a_turn())) };
        if turn.agent.manifest.grants.secrets.iter().any(|grant| grant.name.as_str() == name) {
            return Ok(Ok(turn.placeholder(&name)));
        }
        let name = crate::text::cut(&name, 80);
        Ok(Err(HttpError::Denied(format!(
            "the secret {name:?} is not granted; add {{ name = {name:?}, hosts = [...] }} to secrets under [grants] in \
             agent.toml"
        ))))
    }
}

/// Returns the recorded response, or makes the request.
async fn fetch(turn: &Arc<Turn>, request: Request) -> Result<Result<Response, HttpError>, Stopped> {
    let mut call = turn.journal.begin(Identity::new("fetch", &request)).await?;
    if let Some((record, position)) = turn.journal.recorded::<FetchRecord>(&mut call)? {
        position.reached().await;
        turn.fetched_before(request.bytes(), record.body_bytes());
        return Ok(record.into_result());
    }
    turn.journal.label(&call, &request.summary());
    turn.journal.caught_up().await;
    let result = make_request(turn, &call, request).await?;
    turn.journal.ended(&call, &FetchRecord::new(&result), Vec::new());
    Ok(result)
}

/// Makes the request of a call that has no recorded result. After a restart this may be a repetition, which only idempotent
/// requests allow.
pub(crate) async fn make_request(
    turn: &Arc<Turn>,
    call: &Call,
    request: Request,
) -> Result<Result<Response, HttpError>, Stopped> {
    let timeout = request.timeout_ms.map(|ms| Duration::from_millis(ms.into()));
    let request = match outgoing(request) {
        Ok(request) => request,
        Err(error) => return Ok(Err(http_error(error.into()))),
    };
    if call.was_dispatched() && !request.is_idempotent() {
        return Ok(Err(HttpError::Interrupted));
    }
    // A request may depend on everything before it in the journal. One that changes something must not be sent before
    // that is durable.
    if !request.method().is_safe() {
        turn.journal.dispatched(call).await?;
    }
    Ok(match turn.fetch(request, timeout).await {
        Ok(response) => Ok(incoming(response)),
        Err(error) => Err(http_error(error)),
    })
}

fn outgoing(request: Request) -> Result<skep_outbound::Request, OutboundError> {
    let Request { method, url, headers, body, timeout_ms: _ } = request;
    let request = skep_outbound::Request::new(&method, &url)?;
    let request = headers.iter().try_fold(request, |request, (name, value)| request.header(name, value))?;
    Ok(request.body(body.unwrap_or_default()))
}

fn incoming(response: skep_outbound::Response) -> Response {
    let headers = response.headers.iter();
    let headers = headers
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    Response {
        status: response.status,
        url: response.url.into(),
        headers: headers.collect(),
        body: response.body,
    }
}

fn http_error(error: FetchError) -> HttpError {
    use OutboundError as E;
    let text = error.to_string();
    match error {
        FetchError::Limit(text) => HttpError::LimitExceeded(text),
        FetchError::Host(text) => HttpError::Failed(text),
        FetchError::Outbound(error) => match error {
            E::NotGranted { .. }
            | E::AddressDenied { .. }
            | E::SecretNotGranted { .. }
            | E::SecretUnset { .. } => HttpError::Denied(text),
            E::Origin(_)
            | E::Method { .. }
            | E::Header { .. }
            | E::Range { .. }
            | E::SecretMisplaced { .. } => HttpError::InvalidRequest(text),
            E::Resolve { .. }
            | E::Connect { .. }
            | E::Exchange { .. }
            | E::Redirect { .. }
            | E::Concealed { .. }
            | E::TooManyRedirects { .. } => HttpError::Failed(text),
            E::RequestTooLarge { .. } | E::ResponseTooLarge { .. } => HttpError::TooLarge(text),
            E::DeadlineExceeded => HttpError::Timeout,
        },
    }
}

fn outside_a_turn() -> HttpError {
    HttpError::Denied("requests can be made only in a turn, not while the agent describes itself".to_owned())
}

impl Request {
    /// Returns the size of URL, headers and body.
    pub(crate) fn bytes(&self) -> usize {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        self.url.len() + headers + self.body.as_ref().map_or(0, Vec::len)
    }

    /// Returns the method and the origin. The path and the query may hold secrets.
    fn summary(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host = authority.rsplit('@').next().unwrap_or_default();
        format!("{} {scheme}://{host}", self.method)
    }
}

fn response_bytes(response: &Response) -> usize {
    let headers = response.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
    headers + response.body.len()
}
