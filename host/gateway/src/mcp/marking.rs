//! Marks the events of the stream of a request, and tells the client the turn of a call as soon as it is known.

use super::{
    marks,
    resumed::RECONNECT,
    tickets::{Ticket, TicketSeal},
};
use futures::{Stream, StreamExt, stream};
use rmcp::transport::streamable_http_server::session::ServerSseMessage;
use std::pin::Pin;
use tokio::sync::oneshot;

/// The stream of a request that is marked.
pub(super) struct Marking<S> {
    stream: Pin<Box<S>>,
    epoch: Option<u64>,
    request: Option<Request>,
    /// The id that the protocol crate has given to the last event.
    last_id: Option<String>,
}

struct Request {
    ticket: Ticket,
    seal: TicketSeal,
    encoded: String,
    /// Receives the id of the call's turn; `None` afterwards.
    turn: Option<oneshot::Receiver<String>>,
}

impl<S: Stream<Item = ServerSseMessage> + Send + Sync + 'static> Marking<S> {
    pub(super) fn new(
        stream: S,
        epoch: Option<u64>,
        issued: Option<(Ticket, oneshot::Receiver<String>)>,
        seal: TicketSeal,
    ) -> Self {
        let request = issued.map(|(ticket, turn)| {
            let encoded = ticket.encode(&seal);
            Request { ticket, seal, encoded, turn: Some(turn) }
        });
        Marking { stream: Box::pin(stream), epoch, request, last_id: None }
    }

    /// Returns the marked events. One without a message tells the client the turn of its call, in the id.
    pub(super) fn events(self) -> impl Stream<Item = ServerSseMessage> + Send + Sync + 'static {
        stream::unfold(self, |mut marking| async move {
            let event = marking.next().await?;
            Some((event, marking))
        })
    }

    async fn next(&mut self) -> Option<ServerSseMessage> {
        let event = tokio::select! {
            biased;
            // The client learns the turn before the answer, which it may not get.
            turn = turn_of(&mut self.request), if self.last_id.is_some() => {
                if let Some(request) = &mut self.request {
                    request.add(turn);
                }
                ServerSseMessage::priming(self.last_id.clone().unwrap_or_default(), RECONNECT)
            }
            event = self.stream.next() => event?,
        };
        if let Some(id) = &event.event_id {
            self.last_id = Some(id.clone());
        }
        let ticket = self.request.as_ref().map(|request| request.encoded.as_str());
        Some(marks::mark(event, self.epoch, ticket))
    }
}

impl Request {
    fn add(&mut self, turn: String) {
        if let Some(call) = &mut self.ticket.call {
            call.turn = Some(turn);
            self.encoded = self.ticket.encode(&self.seal);
        }
    }
}

/// Resolves once with the id of the call's turn.
async fn turn_of(request: &mut Option<Request>) -> String {
    if let Some(Request { turn, .. }) = request
        && let Some(waiting) = turn
    {
        let found = waiting.await;
        *turn = None;
        if let Ok(id) = found {
            return id;
        }
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tickets::{CallTicket, TicketKey};
    use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ServerJsonRpcMessage};
    use serde_json::{Value, json};
    use std::time::Duration;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn the_turn_of_a_call_is_named_between_two_events() {
        let params = json!({"name": "echo"});
        let call = json!({"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params});
        let mut call: ClientJsonRpcMessage = serde_json::from_value(call).unwrap();
        let issued = Ticket::issue(&mut call);
        let seal = TicketKey::new(Some([7; 32])).of_session("m");
        let ClientJsonRpcMessage::Request(call) = call else { panic!("it is a request") };
        let ClientRequest::CallToolRequest(call) = call.request else { panic!("it is a call") };
        let part = call.extensions.get::<CallTicket>().unwrap().clone();
        let (sender, received) = mpsc::channel(4);
        let received =
            stream::unfold(received, |mut received| async move { Some((received.recv().await?, received)) });
        let mut events = Box::pin(Marking::new(received, Some(7), issued, seal.clone()).events());
        let ticket_of = |event: &ServerSseMessage| {
            let id = event.event_id.clone().unwrap();
            let (id, ticket) = id.split_once('~').unwrap();
            (id.to_owned(), Ticket::decode(ticket, &seal).and_then(|ticket| ticket.call?.turn))
        };
        sender.send(ServerSseMessage::priming("0/1", Duration::from_secs(3))).await.unwrap();
        assert_eq!(ticket_of(&events.next().await.unwrap()), ("7-0/1".to_owned(), None));
        part.tell_turn("t");
        let told = events.next().await.unwrap();
        assert!(told.message.is_none());
        assert_eq!(ticket_of(&told), ("7-0/1".to_owned(), Some("t".to_owned())));
        let answer: Value = json!({"jsonrpc": "2.0", "id": 5, "result": {}});
        let answer: ServerJsonRpcMessage = serde_json::from_value(answer).unwrap();
        sender.send(ServerSseMessage::new("1/1", answer)).await.unwrap();
        assert_eq!(events.next().await.unwrap().event_id.as_deref(), Some("7-1/1~"));
        drop(sender);
        assert!(events.next().await.is_none(), "the stream ends, although the handler lives");
    }
}
