//! The marks of what a host names in a session that several hosts may have one after the other: the events of its streams, and
//! the questions that it asks the client.
//!
//! The protocol crate counts both from zero at each host. Without a mark, the answer to a question of the last host would be taken for
//! that to another question with the same number, such as whether to approve a call; and an event of the last host would be
//! looked for in the streams of this one. The mark is the epoch under which the host has the session. A session without an
//! epoch has one host, and no marks.
//!
//! The id of an event is `EPOCH-INDEX` in the session's own stream, and `EPOCH-INDEX/STREAM~TICKET` in the stream of a request, whose
//! ticket tells any host what was asked (see `tickets`). It has no ticket after `~` once the request was answered.

use rmcp::{
    model::{ClientJsonRpcMessage, NumberOrString, RequestId, ServerJsonRpcMessage, ServerNotification},
    transport::streamable_http_server::session::ServerSseMessage,
};
use std::sync::Arc;

/// Separates the id that the protocol crate gives an event from the ticket of the request.
const TICKET: char = '~';

/// The place of a stream that a client wants to continue after an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resumption {
    /// The event is one of the session's own stream at this host, under this id.
    NewsHere(String),
    /// The event is one of the session's own stream at another host.
    News,
    /// The event belongs to a request that this host answers, and has this id. The text is its ticket.
    Here(String, String),
    /// The event belongs to a request that another host was answering. The text is its ticket.
    Lost(String),
    /// The event is the answer to a request, and the last one of its stream.
    Answered,
}

/// Marks an event, and the question in it. In the stream of a request, `ticket` is its ticket.
pub(super) fn mark(
    mut event: ServerSseMessage,
    epoch: Option<u64>,
    ticket: Option<&str>,
) -> ServerSseMessage {
    let is_answer = event.message.as_deref().is_some_and(|message| {
        matches!(message, ServerJsonRpcMessage::Response(_) | ServerJsonRpcMessage::Error(_))
    });
    event.event_id = event.event_id.map(|id| {
        let epoch = epoch.map(|epoch| format!("{epoch}-")).unwrap_or_default();
        match ticket {
            Some(_) if is_answer => format!("{epoch}{id}{TICKET}"),
            Some(ticket) => format!("{epoch}{id}{TICKET}{ticket}"),
            None => format!("{epoch}{id}"),
        }
    });
    let Some(epoch) = epoch else { return event };
    event.message = event.message.map(|message| {
        let may_name_a_question =
            matches!(*message, ServerJsonRpcMessage::Request(_) | ServerJsonRpcMessage::Notification(_));
        if may_name_a_question {
            Arc::new(mark_question(Arc::unwrap_or_clone(message), epoch))
        } else {
            message
        }
    });
    event
}

fn mark_question(mut message: ServerJsonRpcMessage, epoch: u64) -> ServerJsonRpcMessage {
    match &mut message {
        ServerJsonRpcMessage::Request(question) => mark_id(&mut question.id, epoch),
        ServerJsonRpcMessage::Notification(notification) => {
            if let ServerNotification::CancelledNotification(withdrawn) = &mut notification.notification
                && let Some(id) = &mut withdrawn.params.request_id
            {
                mark_id(id, epoch);
            }
        }
        ServerJsonRpcMessage::Response(_) | ServerJsonRpcMessage::Error(_) => {}
    }
    message
}

fn mark_id(id: &mut RequestId, epoch: u64) {
    if let NumberOrString::Number(number) = *id {
        *id = NumberOrString::String(format!("{epoch}-{number}").into());
    }
}

/// Removes the mark from a client's answer. Returns `None` for the answer to a question of another host.
pub(super) fn answer(mut message: ClientJsonRpcMessage, epoch: Option<u64>) -> Option<ClientJsonRpcMessage> {
    let Some(epoch) = epoch else { return Some(message) };
    match &mut message {
        ClientJsonRpcMessage::Response(response) => response.id = own_id(&response.id, epoch)?,
        ClientJsonRpcMessage::Error(error) => {
            if let Some(id) = &error.id {
                error.id = Some(own_id(id, epoch)?);
            }
        }
        ClientJsonRpcMessage::Request(_) | ClientJsonRpcMessage::Notification(_) => {}
    }
    Some(message)
}

fn own_id(id: &RequestId, epoch: u64) -> Option<RequestId> {
    let NumberOrString::String(text) = id else { return None };
    let (mark, number) = text.split_once('-')?;
    if mark.parse::<u64>().ok() != Some(epoch) {
        return None;
    }
    number.parse().ok().map(NumberOrString::Number)
}

/// Returns where the stream continues whose last event the client names.
pub(super) fn resumption(last_event_id: &str, epoch: Option<u64>) -> Resumption {
    let (id, ticket) =
        last_event_id.split_once(TICKET).map_or((last_event_id, None), |(id, ticket)| (id, Some(ticket)));
    if ticket == Some("") {
        return Resumption::Answered;
    }
    let ticket = ticket.unwrap_or_default().to_owned();
    let (mark, event) = match epoch {
        Some(_) => id.split_once('-').unwrap_or_default(),
        None => ("", id),
    };
    let is_here = mark.parse::<u64>().ok() == epoch;
    // The protocol crate names the request that a stream belongs to after a slash.
    match (is_here, event.contains('/')) {
        (true, true) => Resumption::Here(event.to_owned(), ticket),
        (true, false) => Resumption::NewsHere(event.to_owned()),
        (false, true) => Resumption::Lost(ticket),
        (false, false) => Resumption::News,
    }
}

/// Returns the id of the answer that ends a stream, whose last event the client names.
pub(super) fn answered(last_event_id: &str) -> String {
    let id = last_event_id.split_once(TICKET).map_or(last_event_id, |(id, _)| id);
    format!("{id}{TICKET}")
}

/// Returns the position of an event in its stream.
pub(super) fn index(event: &str) -> Option<u64> {
    event.split_once('/').map_or(event, |(index, _)| index).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn marked(message: Value, epoch: Option<u64>) -> (Option<String>, Value) {
        let message: ServerJsonRpcMessage = serde_json::from_value(message).unwrap();
        let event = mark(ServerSseMessage::new("3/1", message), epoch, None);
        (event.event_id, serde_json::to_value(&*event.message.unwrap()).unwrap())
    }

    fn answered(message: Value, epoch: Option<u64>) -> Option<Value> {
        let message: ClientJsonRpcMessage = serde_json::from_value(message).unwrap();
        answer(message, epoch).map(|message| serde_json::to_value(message).unwrap())
    }

    #[test]
    fn a_question_and_its_withdrawal_are_marked_and_everything_else_stays() {
        let question = json!({"jsonrpc": "2.0", "id": 0, "method": "ping"});
        let (event, sent) = marked(question.clone(), Some(7));
        assert_eq!((event.as_deref(), &sent["id"]), (Some("7-3/1"), &json!("7-0")));
        let (event, sent) = marked(question, None);
        assert_eq!((event.as_deref(), &sent["id"]), (Some("3/1"), &json!(0)), "it is not a cluster");
        let withdrawn =
            json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 0}});
        assert_eq!(marked(withdrawn, Some(7)).1["params"]["requestId"], "7-0");
        let answer = json!({"jsonrpc": "2.0", "id": 5, "result": {}});
        assert_eq!(marked(answer, Some(7)).1["id"], 5, "the client has chosen the id of its request");
    }

    #[test]
    fn an_answer_counts_only_at_the_host_that_has_asked() {
        let result = |id: Value| json!({"jsonrpc": "2.0", "id": id, "result": {}});
        assert_eq!(answered(result(json!("7-0")), Some(7)).unwrap()["id"], 0);
        for foreign in [json!("6-0"), json!(0), json!("0"), json!("7-x"), json!("-0")] {
            assert_eq!(answered(result(foreign.clone()), Some(7)), None, "{foreign}");
        }
        let refused = |id: &str| json!({"jsonrpc": "2.0", "id": id, "error": {"code": -1, "message": "no"}});
        assert_eq!(answered(refused("7-4"), Some(7)).unwrap()["id"], 4);
        assert_eq!(answered(refused("6-4"), Some(7)), None);
        assert_eq!(answered(result(json!(0)), None).unwrap()["id"], 0, "it is not a cluster");
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
        assert_eq!(answered(request, Some(7)).unwrap()["id"], 1);
    }

    #[test]
    fn a_stream_continues_after_an_event_of_this_host() {
        let resumed = resumption;
        for (id, epoch) in [("7-3/1~tic-ket", Some(7)), ("3/1~tic-ket", None)] {
            assert_eq!(resumed(id, epoch), Resumption::Here("3/1".to_owned(), "tic-ket".to_owned()));
        }
        // Another version gives no tickets.
        assert_eq!(resumed("7-3/1", Some(7)), Resumption::Here("3/1".to_owned(), String::new()));
        assert_eq!(resumed("7-3", Some(7)), Resumption::NewsHere("3".to_owned()));
        assert_eq!(resumed("3", None), Resumption::NewsHere("3".to_owned()));
        assert_eq!(resumed("6-3/1~tic-ket", Some(7)), Resumption::Lost("tic-ket".to_owned()));
        assert_eq!(resumed("6-3/1", Some(7)), Resumption::Lost(String::new()));
        for (id, epoch) in [("7-3/1~", Some(7)), ("6-3/1~", Some(7)), ("3/1~", None)] {
            assert_eq!(resumed(id, epoch), Resumption::Answered);
        }
        for news in ["6-3", "nothing", "0", ""] {
            assert_eq!(resumed(news, Some(7)), Resumption::News, "{news}");
        }
        assert_eq!((index("3/1"), index("3"), index("x")), (Some(3), Some(3), None));
    }

    #[test]
    fn the_ids_of_a_stream_carry_its_ticket_until_the_answer() {
        let id = |message: Value, epoch, ticket| {
            let message: ServerJsonRpcMessage = serde_json::from_value(message).unwrap();
            mark(ServerSseMessage::new("3/1", message), epoch, ticket).event_id.unwrap()
        };
        let question = || json!({"jsonrpc": "2.0", "id": 0, "method": "ping"});
        let answer = || json!({"jsonrpc": "2.0", "id": 5, "result": {}});
        assert_eq!(id(question(), Some(7), Some("t")), "7-3/1~t");
        assert_eq!(id(question(), None, Some("t")), "3/1~t");
        assert_eq!(id(answer(), Some(7), Some("t")), "7-3/1~");
        assert_eq!(id(answer(), Some(7), None), "7-3/1");
        let ended = ["7-3/1~t", "6-3/1"].map(super::answered);
        assert_eq!(ended, ["7-3/1~", "6-3/1~"]);
    }
}
