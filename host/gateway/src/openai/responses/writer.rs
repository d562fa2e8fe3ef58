//! Writes a response as a stream of events, while it is produced or afterwards.
//!
//! A response in the background can be followed several times, from any event on, also after a restart of the host. Its
//! events are therefore a function of its output alone: texts are cut at blanks, and calls are sent when they are
//! complete.

use super::{output::Output, stored};
use crate::{
    ApiError,
    openai::{now_s, rest_of_reply},
    sse::{Message, Step, Writer},
};
use axum::http::StatusCode;
use skep_api::{NumberedResponseEvent, Response, ResponseEvent, ResponseStatus, TokenLogprob};
use skep_engine::{
    Usage,
    chat::{ChatEvent, ChatFinish},
};
use skep_runtime::{BatchAnswer, Outcome, PartialAnswer, ResponseEnd, RunEvent};

/// Longest piece of a text without a blank in one event of a response in the background.
const PIECE_BYTES: usize = 32;

/// The numbered events of a response.
pub(crate) struct Events {
    response: Response,
    output: Output,
    next: u64,
    /// The number of the last event that the client has seen.
    seen: Option<u64>,
}

impl Events {
    /// Creates the events of a response. `carries_reasoning` says whether its client carries the reasoning to later requests.
    pub(crate) fn new(response: Response, seen: Option<u64>, carries_reasoning: bool) -> Self {
        Events { output: Output::new(&response.id, carries_reasoning), response, next: 0, seen }
    }

    /// Returns the response as far as it has been sent.
    pub(crate) fn into_response(self) -> Response {
        self.response
    }

    fn messages(&mut self, events: Vec<ResponseEvent>) -> Vec<Message> {
        let mut messages = Vec::with_capacity(events.len());
        for event in events {
            let (name, sequence_number) = (event.name(), self.next);
            self.next += 1;
            if self.seen.is_none_or(|seen| sequence_number > seen) {
                messages.push(Message::named(name, &NumberedResponseEvent { event, sequence_number }));
            }
        }
        messages
    }

    fn snapshot(&self) -> Box<Response> {
        Box::new(self.response.clone())
    }

    /// Returns the first events.
    fn begun(&mut self) -> Vec<ResponseEvent> {
        let mut events = match self.response.background {
            true => self.queued(),
            false => vec![ResponseEvent::Created { response: self.snapshot() }],
        };
        events.push(self.in_progress());
        events
    }

    /// Returns the events of a response in the background before it is produced.
    fn queued(&mut self) -> Vec<ResponseEvent> {
        self.response.status = ResponseStatus::Queued;
        vec![
            ResponseEvent::Created { response: self.snapshot() },
            ResponseEvent::Queued { response: self.snapshot() },
        ]
    }

    fn in_progress(&mut self) -> ResponseEvent {
        self.response.status = ResponseStatus::InProgress;
        ResponseEvent::InProgress { response: self.snapshot() }
    }

    fn finished(&mut self, finish: ChatFinish, usage: &Usage, now_s: u64, events: &mut Vec<ResponseEvent>) {
        self.output.finish(finish, events);
        self.response.output = self.output.items();
        stored::finish(&mut self.response, finish, usage, now_s);
        let response = self.snapshot();
        events.push(match self.response.status {
            ResponseStatus::Incomplete => ResponseEvent::Incomplete { response },
            _ => ResponseEvent::Completed { response },
        });
    }

    fn failed(&mut self, error: ApiError) -> Vec<ResponseEvent> {
        stored::fail(&mut self.response, error.code.to_owned(), error.message);
        self.broken_off(ResponseStatus::Failed)
    }

    /// Returns the events that end a response before its output is complete.
    fn broken_off(&mut self, status: ResponseStatus) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        self.output.close(ResponseStatus::Incomplete, &mut events);
        self.response.output = self.output.items();
        self.response.status = status;
        events.push(ResponseEvent::Failed { response: self.snapshot() });
        events
    }

    /// Returns the events for an event of a model. `score` describes tokens.
    pub(crate) fn of_chat(
        &mut self,
        event: ChatEvent,
        score: impl FnOnce(&[skep_engine::TokenLogprob]) -> Vec<TokenLogprob>,
    ) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        match event {
            ChatEvent::Routed(routed) => self.response.model = routed.model,
            ChatEvent::Started { .. } => return self.begun(),
            ChatEvent::Reasoning { delta } => self.output.reasoning(delta, &mut events),
            ChatEvent::Text { delta, logprobs } if delta.is_empty() && logprobs.is_empty() => {}
            ChatEvent::Text { delta, logprobs } => self.output.text(delta, score(&logprobs), &mut events),
            ChatEvent::ToolCallStarted { id, name, .. } => self.output.call(id, name, &mut events),
            ChatEvent::ToolCallArguments { delta, .. } => self.output.arguments(delta, &mut events),
            ChatEvent::ToolCallFinished { .. } => self.output.close(ResponseStatus::Completed, &mut events),
            ChatEvent::Finished(outcome) => {
                self.finished(outcome.finish, &outcome.usage, now_s(), &mut events)
            }
        }
        events
    }
}

/// Writes the events of a model's response, as it is produced.
pub(crate) struct ModelWriter<S> {
    pub events: Events,
    pub score: S,
}

impl<S> Writer for ModelWriter<S>
where
    S: Fn(&[skep_engine::TokenLogprob]) -> Vec<TokenLogprob> + Send + 'static,
{
    type Item = Result<ChatEvent, ApiError>;

    fn write(&mut self, event: Self::Item) -> Step {
        match event {
            Ok(event) => {
                let events = self.events.of_chat(event, &self.score);
                Step::Go(self.events.messages(events))
            }
            Err(error) => {
                let events = self.events.failed(error);
                Step::Break(self.events.messages(events))
            }
        }
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

/// Writes the events of an agent's response from those of its turn.
pub(crate) struct AgentWriter {
    pub events: Events,
    /// The text of the reply that has been sent.
    said: String,
    /// Whether the events before the turn have been sent.
    is_queued: bool,
}

impl AgentWriter {
    pub(crate) fn new(events: Events) -> Self {
        AgentWriter { events, said: String::new(), is_queued: false }
    }

    fn started(&mut self) -> Vec<ResponseEvent> {
        match self.is_queued {
            true => vec![self.events.in_progress()],
            false => self.events.begun(),
        }
    }

    fn done(&mut self, outcome: &Outcome, events: &mut Vec<ResponseEvent>) {
        let rest = rest_of_reply(&self.said, &outcome.text).unwrap_or_else(|| {
            self.events.output.close(ResponseStatus::Completed, events);
            &outcome.text
        });
        if !rest.is_empty() {
            self.events.output.text(rest.to_owned(), Vec::new(), events);
        }
        self.events.finished(ChatFinish::Stop, &outcome.usage, now_s(), events);
    }
}

impl Writer for AgentWriter {
    type Item = Result<RunEvent, ApiError>;

    fn write(&mut self, event: Self::Item) -> Step {
        let mut events = Vec::new();
        match event {
            Ok(RunEvent::Started { .. }) => events = self.started(),
            Ok(RunEvent::Thinking { text }) => self.events.output.reasoning(text, &mut events),
            Ok(RunEvent::Delta { text }) => {
                self.said.push_str(&text);
                self.events.output.text(text, Vec::new(), &mut events);
            }
            // The text before a call is a message of its own.
            Ok(RunEvent::ToolCall { .. }) => {
                self.said.clear();
                self.events.output.close(ResponseStatus::Completed, &mut events);
            }
            Ok(RunEvent::Generation { .. }) => self.events.output.generated(),
            Ok(RunEvent::GenerationRestarted) => {
                self.said.clear();
                self.events.output.begin_again(&mut events);
            }
            Ok(RunEvent::Done(outcome)) => self.done(&outcome, &mut events),
            Ok(_) => {}
            Err(error) => {
                let events = self.events.failed(error);
                return Step::Break(self.events.messages(events));
            }
        }
        Step::Go(self.events.messages(events))
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

/// Writes the events of an agent's response in the background: the first ones before its turn begins, which may wait
/// for earlier turns.
pub(crate) struct AgentFollowWriter(pub AgentWriter);

impl Writer for AgentFollowWriter {
    /// An event of the turn, after the beginning of the stream.
    type Item = Option<Result<RunEvent, ApiError>>;

    fn write(&mut self, event: Self::Item) -> Step {
        let AgentFollowWriter(writer) = self;
        match event {
            Some(event) => writer.write(event),
            None => {
                writer.is_queued = true;
                let events = writer.events.queued();
                Step::Go(writer.events.messages(events))
            }
        }
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

/// The progress of a response in the background.
pub(crate) enum Progress {
    Started,
    /// More of the reasoning and the text.
    Partial(PartialAnswer),
    Ended {
        at_ms: u64,
        end: ResponseEnd,
    },
}

/// Writes the events of a model's response in the background.
pub(crate) struct FollowWriter {
    events: Events,
    reasoning: Words,
    text: Words,
}

/// A text that is sent in pieces, which are the same however the text arrives.
#[derive(Default)]
struct Words {
    /// The number of bytes that have arrived.
    arrived: usize,
    rest: String,
}

impl Words {
    /// Returns the pieces that are complete.
    fn add(&mut self, more: &str) -> Vec<String> {
        self.arrived += more.len();
        self.rest.push_str(more);
        let mut pieces = Vec::new();
        let mut from = 0;
        for (index, letter) in self.rest.char_indices() {
            let end = index + letter.len_utf8();
            if letter.is_whitespace() || end - from >= PIECE_BYTES {
                pieces.push(self.rest[from..end].to_owned());
                from = end;
            }
        }
        self.rest.drain(..from);
        pieces
    }

    /// Returns the last piece.
    fn end(&mut self) -> Option<String> {
        Some(std::mem::take(&mut self.rest)).filter(|rest| !rest.is_empty())
    }
}

impl FollowWriter {
    pub(crate) fn new(events: Events) -> Self {
        FollowWriter { events, reasoning: Words::default(), text: Words::default() }
    }

    fn said(&mut self, said: &PartialAnswer, events: &mut Vec<ResponseEvent>) {
        let output = &mut self.events.output;
        // Reasoning after the text has begun is left to the end.
        if self.text.arrived == 0 {
            self.reasoning.add(&said.reasoning).into_iter().for_each(|piece| output.reasoning(piece, events));
        }
        if said.text.is_empty() {
            return;
        }
        if let Some(piece) = self.reasoning.end() {
            output.reasoning(piece, events);
        }
        self.text.add(&said.text).into_iter().for_each(|piece| output.text(piece, Vec::new(), events));
    }

    fn done(&mut self, answer: &BatchAnswer, at_ms: u64, events: &mut Vec<ResponseEvent>) {
        let beyond = |text: &str, from: usize| text.get(from..).unwrap_or_default().to_owned();
        let reasoning = beyond(&answer.reasoning, self.reasoning.arrived);
        self.said(&PartialAnswer { reasoning, text: beyond(&answer.text, self.text.arrived) }, events);
        if let Some(piece) = self.reasoning.end() {
            self.events.output.reasoning(piece, events);
        }
        if let Some(piece) = self.text.end() {
            self.events.output.text(piece, Vec::new(), events);
        }
        self.events.output.calls(&answer.tool_calls, events);
        self.events.finished(answer.finish, &answer.usage, at_ms / 1000, events);
    }
}

impl Writer for FollowWriter {
    type Item = Result<Progress, ApiError>;

    fn write(&mut self, progress: Self::Item) -> Step {
        let mut events = Vec::new();
        match progress {
            Ok(Progress::Started) => events = self.events.begun(),
            Ok(Progress::Partial(said)) => self.said(&said, &mut events),
            Ok(Progress::Ended { at_ms, end }) => match end {
                ResponseEnd::Done(answer) => self.done(&answer, at_ms, &mut events),
                ResponseEnd::Failed { code, message } => {
                    let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, code, message);
                    events = self.events.failed(error);
                }
                ResponseEnd::Cancelled => {
                    events = self.events.broken_off(ResponseStatus::Cancelled);
                }
            },
            Err(error) => {
                let events = self.events.failed(error);
                return Step::Break(self.events.messages(events));
            }
        }
        Step::Go(self.events.messages(events))
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::responses::output;
    use crate::openai::responses::{
        request::ResponseRequest,
        stored::{StoredRequest, without_output},
    };
    use serde_json::{Value, json};
    use skep_engine::chat::{ChatOutcome, ToolCall};

    fn writer(seen: Option<u64>) -> FollowWriter {
        let request = serde_json::from_value(json!({"input": "x", "background": true})).unwrap();
        let request = ResponseRequest::read(request).unwrap();
        let stored = StoredRequest {
            model: "m".into(),
            is_background: true,
            settings: request.settings(None),
            caller: request.caller.clone(),
            input: Vec::new(),
            carries_reasoning: false,
        };
        let response = without_output("resp_0123456789abcdef0123456789abcdef", None, &stored, 1);
        FollowWriter::new(Events::new(response, seen, false))
    }

    fn answer() -> BatchAnswer {
        let call = |id: &str| ToolCall { id: id.into(), name: "look".into(), arguments: "{}".into() };
        let outcome = ChatOutcome {
            reasoning: "Let me think about  this.".into(),
            tool_calls: vec![call("a"), call("b")],
            ..ChatOutcome::remote(format!("Well, é {} done", "x".repeat(100)), ChatFinish::ToolCalls)
        };
        BatchAnswer::of_chat(String::new(), &outcome)
    }

    fn write(writer: &mut FollowWriter, progress: Progress) -> Vec<Value> {
        let (Step::Go(messages) | Step::Break(messages)) = writer.write(Ok(progress));
        messages.iter().map(|message| serde_json::from_str(&message.data).unwrap()).collect()
    }

    /// Returns the events of the answer if its text arrives in pieces of this many characters, up to `upto` pieces
    /// before it ends.
    fn events(piece: usize, upto: usize, seen: Option<u64>) -> Vec<Value> {
        let mut writer = writer(seen);
        let mut events = write(&mut writer, Progress::Started);
        let BatchAnswer { reasoning, text, .. } = answer();
        let split = |text: &str| {
            let letters: Vec<char> = text.chars().collect();
            letters.chunks(piece).map(|piece| piece.iter().collect::<String>()).collect::<Vec<_>>()
        };
        let reasoning =
            split(&reasoning).into_iter().map(|reasoning| PartialAnswer { reasoning, text: String::new() });
        let text = split(&text).into_iter().map(|text| PartialAnswer { reasoning: String::new(), text });
        for said in reasoning.chain(text).take(upto) {
            events.extend(write(&mut writer, Progress::Partial(said)));
        }
        let end = ResponseEnd::Done(Box::new(answer()));
        events.extend(write(&mut writer, Progress::Ended { at_ms: 5_000, end }));
        events
    }

    #[test]
    fn the_events_of_a_response_in_the_background_do_not_depend_on_how_it_arrived() {
        let all = events(1, 0, None);
        for (piece, upto) in [(1, 1000), (2, 1000), (3, 7), (5, 1000), (7, 6), (1000, 1), (1000, 2)] {
            assert_eq!(events(piece, upto, None), all, "{piece} {upto}");
        }
        for seen in [0, 4, 11, all.len() as u64 - 1] {
            assert_eq!(events(3, 20, Some(seen)), all[seen as usize + 1..]);
        }
        let longest = all.iter().filter_map(|event| event["delta"].as_str()).map(str::len).max();
        assert_eq!(longest, Some(PIECE_BYTES));
        let response = &all.last().unwrap()["response"];
        let kinds: Vec<&str> = response["output"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
        let stored = output::of_answer("resp_0123456789abcdef0123456789abcdef", &answer(), false);
        assert_eq!(response["output"], serde_json::to_value(stored).unwrap());
        assert_eq!((&response["status"], &response["completed_at"]), (&json!("completed"), &json!(5)));
    }

    #[test]
    fn a_failure_ends_the_item_that_grows() {
        let mut writer = writer(None);
        write(&mut writer, Progress::Started);
        write(
            &mut writer,
            Progress::Partial(PartialAnswer { reasoning: String::new(), text: "half a ".into() }),
        );
        let end = ResponseEnd::Failed { code: "busy", message: "later".into() };
        let events = write(&mut writer, Progress::Ended { at_ms: 1, end });
        let last = &events.last().unwrap()["response"];
        assert_eq!(last["error"], json!({"code": "busy", "message": "later"}));
        assert_eq!((&last["status"], &last["output"][0]["status"]), (&json!("failed"), &json!("incomplete")));
    }

    #[test]
    fn a_cancel_ends_the_item_that_grows() {
        let mut writer = writer(None);
        write(&mut writer, Progress::Started);
        write(
            &mut writer,
            Progress::Partial(PartialAnswer { reasoning: String::new(), text: "half a ".into() }),
        );
        let events = write(&mut writer, Progress::Ended { at_ms: 1, end: ResponseEnd::Cancelled });
        assert!(events.iter().any(|event| event["type"] == "response.output_item.done"), "{events:?}");
        let last = &events.last().unwrap()["response"];
        assert_eq!(
            (&last["status"], &last["output"][0]["status"]),
            (&json!("cancelled"), &json!("incomplete"))
        );
        assert_eq!(last["error"], Value::Null);
    }
}
