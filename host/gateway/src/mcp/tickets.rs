//! A ticket is the part of the ids of a stream's events that names the request which the stream answers, so that whichever host a
//! client asks to continue the stream can tell what became of the request.
//!
//! A ticket travels with the client and is stored nowhere. It names the request and, for the call of a tool, where its result is
//! found: the turn, as soon as it is known, and before that the idempotency key that the host has made for it.
//!
//! Invariant: a ticket counts only in the session that it was issued in, and names only the session's own calls. Otherwise an API
//! key that may call agents, but not read sessions, could read the results of others. So tickets are sealed with a key that all
//! hosts of a cluster have, and a turn is not looked for by a key that the client has chosen.

use super::{
    answer::{KEY, SESSION},
    catalog::Target,
    scope::PathAgent,
};
use axum::http::request::Parts;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{hmac, rand::SystemRandom};
use rmcp::model::{CallToolRequest, ClientJsonRpcMessage, ClientRequest, GetMeta, RequestId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

/// Maximum size of an encoded ticket, which each event of a stream carries. What is too large for it is left out.
const MAX_BYTES: usize = 1_024;
/// Size of a seal, which is an HMAC-SHA256.
const SEAL_BYTES: usize = 32;

/// The key that the seals of all sessions are derived from.
pub(super) struct TicketKey(hmac::Key);

/// Seals the tickets of one session.
#[derive(Clone)]
pub(super) struct TicketSeal(hmac::Key);

impl TicketKey {
    /// Makes the key from a secret, or one of its own.
    pub(super) fn new(secret: Option<[u8; 32]>) -> Self {
        let own = || hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let key = secret.map(|secret| hmac::Key::new(hmac::HMAC_SHA256, &secret));
        TicketKey(key.unwrap_or_else(|| own().expect("the operating system makes random numbers")))
    }

    /// Returns the seal of an MCP session.
    pub(super) fn of_session(&self, id: &str) -> TicketSeal {
        TicketSeal(hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&self.0, id.as_bytes()).as_ref()))
    }
}

/// The request that a stream answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ticket {
    #[serde(rename = "i")]
    pub(super) request: RequestId,
    /// `None` for a request that is not the call of a tool.
    #[serde(rename = "c", default, skip_serializing_if = "Option::is_none")]
    pub(super) call: Option<CalledTool>,
}

/// The call of a tool, without its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CalledTool {
    #[serde(rename = "n")]
    pub(super) name: String,
    /// The agent session that the client has named.
    #[serde(rename = "s", default, skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<String>,
    /// The key that the client has chosen. The host that gets the call checks that it is one of the same call.
    #[serde(rename = "k", default, skip_serializing_if = "Option::is_none")]
    pub(super) own_key: Option<String>,
    /// The key of a call that needs one and whose client has chosen none.
    #[serde(rename = "p")]
    pub(super) spare_key: String,
    #[serde(rename = "t", default, skip_serializing_if = "Option::is_none")]
    pub(super) turn: Option<String>,
}

/// The part of a ticket that the handler of a call uses and completes, in the extensions of the request.
#[derive(Clone, Debug)]
pub(super) struct CallTicket {
    /// The idempotency key of a call whose client has chosen none, if the call needs one.
    pub(super) spare_key: String,
    turn: Arc<Mutex<Option<oneshot::Sender<String>>>>,
}

impl CallTicket {
    /// Adds the id of the call's turn to the ticket, which the client gets with the next event.
    pub(super) fn tell_turn(&self, turn_id: &str) {
        let waiting = self.turn.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The stream may have ended.
        let _ = waiting.map(|waiting| waiting.send(turn_id.to_owned()));
    }
}

impl Ticket {
    /// Issues the ticket of a message, if it is a request, and gives the handler of a call its part. The receiver gets the id of
    /// the call's turn.
    pub(super) fn issue(message: &mut ClientJsonRpcMessage) -> Option<(Ticket, oneshot::Receiver<String>)> {
        let ClientJsonRpcMessage::Request(request) = message else { return None };
        let (sender, turn) = oneshot::channel();
        let spare_key = uuid::Uuid::now_v7().simple().to_string();
        let meta = request.request.get_meta();
        let named = |key: &str| meta.0.0.get(key).and_then(Value::as_str).map(str::to_owned);
        let (key, session) = (named(KEY), named(SESSION));
        let call = match &mut request.request {
            ClientRequest::CallToolRequest(call) => {
                let session = session_argument(call).map(str::to_owned).or(session);
                let turn = Arc::new(Mutex::new(Some(sender)));
                call.extensions.insert(CallTicket { spare_key: spare_key.clone(), turn });
                let name = call.params.name.to_string();
                Some(CalledTool { name, session, own_key: key, spare_key, turn: None })
            }
            _ => None,
        };
        Some((Ticket { request: request.id.clone(), call }, turn))
    }

    /// Returns the text of the ticket, which says nothing if even the id of the request is too long. It is never empty.
    pub(super) fn encode(&self, seal: &TicketSeal) -> String {
        let fits = |ticket: &Ticket| {
            let mut bytes = serde_json::to_vec(ticket).expect("strings and numbers always serialize");
            bytes.extend_from_slice(hmac::sign(&seal.0, &bytes).as_ref());
            Some(URL_SAFE_NO_PAD.encode(bytes)).filter(|text| text.len() <= MAX_BYTES)
        };
        let without_call = || fits(&Ticket { request: self.request.clone(), call: None });
        fits(self).or_else(without_call).unwrap_or_else(|| NOTHING.to_owned())
    }

    /// Reads the text of a ticket. Returns `None` for one that was not issued in the session of this seal.
    pub(super) fn decode(text: &str, seal: &TicketSeal) -> Option<Ticket> {
        if text.len() > MAX_BYTES {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (ticket, mac) = bytes.split_at_checked(bytes.len().checked_sub(SEAL_BYTES)?)?;
        hmac::verify(&seal.0, ticket, mac).ok()?;
        serde_json::from_slice(ticket).ok()
    }
}

/// The text of a ticket that says nothing.
const NOTHING: &str = "-";

/// Returns the session that a message to an agent names in its arguments. Those of an agent's tool are its own.
fn session_argument(call: &CallToolRequest) -> Option<&str> {
    let parts = call.extensions.get::<Parts>();
    let is_of_agent = parts.is_some_and(|parts| parts.extensions.get::<PathAgent>().is_some());
    if is_of_agent || Target::of(&call.params.name).tool.is_some() {
        return None;
    }
    call.params.arguments.as_ref()?.get("session")?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(value: Value) -> ClientJsonRpcMessage {
        serde_json::from_value(value).unwrap()
    }

    fn seal(session: &str) -> TicketSeal {
        TicketKey::new(Some([7; 32])).of_session(session)
    }

    fn issued(value: Value) -> Ticket {
        Ticket::issue(&mut message(value)).expect("it is a request").0
    }

    #[test]
    fn a_ticket_says_where_the_result_of_a_call_is_found() {
        let meta = json!({KEY: "k", SESSION: "s"});
        let params = json!({"name": "bank__pay", "arguments": {"session": "other"}, "_meta": meta});
        let call =
            |params: Value| json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params});
        let ticket = issued(call(params));
        let expected = CalledTool {
            name: "bank__pay".into(),
            session: Some("s".into()),
            own_key: Some("k".into()),
            spare_key: ticket.call.as_ref().unwrap().spare_key.clone(),
            turn: None,
        };
        assert_eq!(ticket, Ticket { request: RequestId::Number(7), call: Some(expected) });
        let text = ticket.encode(&seal("m"));
        assert_eq!(Ticket::decode(&text, &seal("other")), None, "it was issued in another session");
        assert_eq!(Ticket::decode(&text, &TicketKey::new(Some([8; 32])).of_session("m")), None);
        assert_eq!(Ticket::decode(&text, &seal("m")), Some(ticket));

        let mut sent = message(call(json!({"name": "echo", "arguments": {"text": "a", "session": "mine"}})));
        let (ticket, mut turn) = Ticket::issue(&mut sent).unwrap();
        let called = ticket.call.expect("it is a call");
        assert_eq!((called.session.as_deref(), called.own_key), (Some("mine"), None));
        let ClientJsonRpcMessage::Request(request) = &sent else { panic!("it is a request") };
        let ClientRequest::CallToolRequest(request) = &request.request else { panic!("it is a call") };
        let part = request.extensions.get::<CallTicket>().expect("the handler gets its part");
        assert_eq!(part.spare_key, called.spare_key);
        part.tell_turn("t");
        part.tell_turn("again");
        assert_eq!(turn.try_recv().as_deref(), Ok("t"));

        let list = issued(json!({"jsonrpc": "2.0", "id": "a", "method": "tools/list"}));
        assert_eq!(list, Ticket { request: RequestId::String("a".into()), call: None });
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert!(Ticket::issue(&mut message(ready)).is_none());
    }

    #[test]
    fn what_is_too_long_for_a_ticket_is_left_out() {
        let call = |id: String, name: String| {
            issued(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name}}))
        };
        let without_call =
            Ticket::decode(&call("a".into(), "n".repeat(5_000)).encode(&seal("m")), &seal("m"));
        assert_eq!(without_call, Some(Ticket { request: RequestId::String("a".into()), call: None }));
        let text = call("a".repeat(5_000), "n".into()).encode(&seal("m"));
        assert_eq!((text.as_str(), Ticket::decode(&text, &seal("m"))), (NOTHING, None));
        for foreign in ["", "-", "e30", "!", &"e".repeat(MAX_BYTES + 1)] {
            assert_eq!(Ticket::decode(foreign, &seal("m")), None, "{foreign}");
        }
    }
}
