//! The items of an output and the events in which they grow.

use super::{
    carried,
    item_id::{self, Position},
};
use crate::openai::logprobs;
use skep_api::{
    ReasoningPart, ResponseEvent, ResponseItem, ResponsePart, ResponseStatus, TokenLogprob, marker,
};
use skep_engine::chat::{ChatFinish, ToolCall};
use skep_runtime::BatchAnswer;
use std::collections::BTreeSet;

/// The output of a response. Each item grows until the next one begins.
#[derive(Debug)]
pub(super) struct Output {
    response: String,
    /// Whether the items of reasoning have the text by which clients carry it.
    carries_reasoning: bool,
    items: Vec<ResponseItem>,
    /// Whether the last item grows.
    is_open: bool,
    /// Index of the first item of the generation that runs.
    first: usize,
    /// The indexes of the items that are void, because their generation began again.
    void: BTreeSet<usize>,
}

impl Output {
    pub(super) fn new(response: &str, carries_reasoning: bool) -> Self {
        Output {
            response: response.to_owned(),
            carries_reasoning,
            items: Vec::new(),
            is_open: false,
            first: 0,
            void: BTreeSet::new(),
        }
    }

    /// Returns the items of the output, without those that are void.
    pub(super) fn items(&self) -> Vec<ResponseItem> {
        let items = self.items.iter().enumerate();
        items.filter(|(index, _)| !self.void.contains(index)).map(|(_, item)| item.clone()).collect()
    }

    /// Notes that a generation has ended. Later items are of the next one.
    pub(super) fn generated(&mut self) {
        self.first = self.items.len();
    }

    /// Ends the items of the generation that runs, because it begins again. A client that has seen them finds them neither
    /// complete nor in the whole output.
    pub(super) fn begin_again(&mut self, events: &mut Vec<ResponseEvent>) {
        self.close(ResponseStatus::Incomplete, events);
        self.void.extend(self.first..self.items.len());
        self.generated();
    }

    pub(super) fn reasoning(&mut self, delta: String, events: &mut Vec<ResponseEvent>) {
        if !matches!(self.open(), Some(ResponseItem::Reasoning { .. })) {
            self.begin(events, |id, status| ResponseItem::Reasoning {
                id: id("rs"),
                summary: Vec::new(),
                content: Vec::new(),
                encrypted_content: None,
                status,
            });
            let part = ResponsePart::ReasoningText { text: String::new() };
            let (item_id, output_index) = self.place();
            events.push(ResponseEvent::PartAdded { item_id, output_index, content_index: 0, part });
            if let Some(ResponseItem::Reasoning { content, .. }) = self.items.last_mut() {
                content.push(ReasoningPart::ReasoningText { text: String::new() });
            }
        }
        if let Some(ResponseItem::Reasoning { content, .. }) = self.items.last_mut() {
            content.iter_mut().for_each(|ReasoningPart::ReasoningText { text }| text.push_str(&delta));
        }
        let (item_id, output_index) = self.place();
        events.push(ResponseEvent::ReasoningDelta { item_id, output_index, content_index: 0, delta });
    }

    pub(super) fn text(&mut self, delta: String, scored: Vec<TokenLogprob>, events: &mut Vec<ResponseEvent>) {
        let empty = || ResponsePart::OutputText {
            text: String::new(),
            annotations: Vec::new(),
            logprobs: Vec::new(),
        };
        if !matches!(self.open(), Some(ResponseItem::Message { .. })) {
            self.begin(events, |id, status| ResponseItem::Message {
                id: id("msg"),
                role: marker::Assistant,
                content: Vec::new(),
                status,
            });
            let (item_id, output_index) = self.place();
            events.push(ResponseEvent::PartAdded { item_id, output_index, content_index: 0, part: empty() });
            if let Some(ResponseItem::Message { content, .. }) = self.items.last_mut() {
                content.push(empty());
            }
        }
        if let Some(ResponseItem::Message { content, .. }) = self.items.last_mut()
            && let Some(ResponsePart::OutputText { text, logprobs, .. }) = content.last_mut()
        {
            text.push_str(&delta);
            logprobs.extend(scored.iter().cloned());
        }
        let ((item_id, output_index), logprobs) = (self.place(), scored);
        events.push(ResponseEvent::TextDelta { item_id, output_index, content_index: 0, delta, logprobs });
    }

    pub(super) fn call(&mut self, call_id: String, name: String, events: &mut Vec<ResponseEvent>) {
        self.begin(events, |id, status| ResponseItem::FunctionCall {
            id: id("fc"),
            call_id,
            name,
            arguments: String::new(),
            status,
        });
    }

    pub(super) fn arguments(&mut self, delta: String, events: &mut Vec<ResponseEvent>) {
        if let Some(ResponseItem::FunctionCall { arguments, .. }) = self.items.last_mut() {
            arguments.push_str(&delta);
        }
        let (item_id, output_index) = self.place();
        events.push(ResponseEvent::ArgumentsDelta { item_id, output_index, delta });
    }

    /// Adds calls that are complete.
    pub(super) fn calls(&mut self, calls: &[ToolCall], events: &mut Vec<ResponseEvent>) {
        for ToolCall { id, name, arguments } in calls {
            self.call(id.clone(), name.clone(), events);
            self.arguments(arguments.clone(), events);
        }
    }

    /// Ends the output. One without anything is an empty message.
    pub(super) fn finish(&mut self, finish: ChatFinish, events: &mut Vec<ResponseEvent>) {
        if self.items.len() == self.void.len() {
            self.text(String::new(), Vec::new(), events);
        }
        self.close(end_of(finish), events);
    }

    /// Ends the item that grows.
    pub(super) fn close(&mut self, end: ResponseStatus, events: &mut Vec<ResponseEvent>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let (item_id, output_index) = self.place();
        let content_index = 0;
        let Some(item) = self.items.last_mut() else { return };
        match item {
            ResponseItem::Reasoning { content, encrypted_content, status, .. } => {
                *status = end;
                if let Some(ReasoningPart::ReasoningText { text }) = content.last() {
                    *encrypted_content = self.carries_reasoning.then(|| carried::packed(text));
                    let (text, part) = (text.clone(), ResponsePart::ReasoningText { text: text.clone() });
                    let id = item_id.clone();
                    events.push(ResponseEvent::ReasoningDone {
                        item_id: id,
                        output_index,
                        content_index,
                        text,
                    });
                    events.push(ResponseEvent::PartDone { item_id, output_index, content_index, part });
                }
            }
            ResponseItem::Message { content, status, .. } => {
                *status = end;
                if let Some(part @ ResponsePart::OutputText { text, logprobs, .. }) = content.last() {
                    let (text, logprobs, part) = (text.clone(), logprobs.clone(), part.clone());
                    let id = item_id.clone();
                    events.push(ResponseEvent::TextDone {
                        item_id: id,
                        output_index,
                        content_index,
                        text,
                        logprobs,
                    });
                    events.push(ResponseEvent::PartDone { item_id, output_index, content_index, part });
                }
            }
            ResponseItem::FunctionCall { name, arguments, status, .. } => {
                *status = end;
                let (name, arguments) = (name.clone(), arguments.clone());
                events.push(ResponseEvent::ArgumentsDone { item_id, output_index, name, arguments });
            }
        }
        events.push(ResponseEvent::ItemDone { output_index, item: item.clone() });
    }

    fn open(&self) -> Option<&ResponseItem> {
        self.items.last().filter(|_| self.is_open)
    }

    /// Begins an item, which `item` makes from what makes its id and from its status.
    fn begin(
        &mut self,
        events: &mut Vec<ResponseEvent>,
        item: impl FnOnce(&dyn Fn(&str) -> String, ResponseStatus) -> ResponseItem,
    ) {
        self.close(ResponseStatus::Completed, events);
        let index = self.items.len();
        let id = |prefix: &str| item_id::of(prefix, &self.response, Position::Output(index));
        let item = item(&id, ResponseStatus::InProgress);
        events.push(ResponseEvent::ItemAdded { output_index: index as u32, item: item.clone() });
        self.items.push(item);
        self.is_open = true;
    }

    /// Returns the id and the index of the last item, which has one part.
    fn place(&self) -> (String, u32) {
        let id = self.items.last().map_or("", id_of).to_owned();
        (id, self.items.len().saturating_sub(1) as u32)
    }
}

/// Returns the id of an item.
fn id_of(item: &ResponseItem) -> &str {
    let (ResponseItem::Reasoning { id, .. }
    | ResponseItem::Message { id, .. }
    | ResponseItem::FunctionCall { id, .. }) = item;
    id
}

/// Returns the items of a stored answer: its reasoning, its text and its calls.
pub(super) fn of_answer(response: &str, answer: &BatchAnswer, carries_reasoning: bool) -> Vec<ResponseItem> {
    let BatchAnswer { text, reasoning, tool_calls, finish, scores, .. } = answer;
    let (mut output, mut events) = (Output::new(response, carries_reasoning), Vec::new());
    if !reasoning.is_empty() {
        output.reasoning(reasoning.clone(), &mut events);
    }
    if !text.is_empty() {
        let scored = scores.iter().flatten().map(logprobs::chat_entry).collect();
        output.text(text.clone(), scored, &mut events);
    }
    output.calls(tool_calls, &mut events);
    output.finish(*finish, &mut events);
    output.items
}

/// Returns the status of the item that an answer ends with.
pub(super) fn end_of(finish: ChatFinish) -> ResponseStatus {
    match finish {
        ChatFinish::Length => ResponseStatus::Incomplete,
        ChatFinish::Stop | ChatFinish::ToolCalls => ResponseStatus::Completed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn items_of_a_generation_that_begins_again_are_not_in_the_whole_output() {
        let written = |item: &ResponseItem| serde_json::to_value(item).unwrap();
        let (mut output, mut events) = (Output::new("resp_0123456789abcdef0123456789abcdef", false), vec![]);
        output.text("First.".to_owned(), Vec::new(), &mut events);
        output.close(ResponseStatus::Completed, &mut events);
        output.generated();
        output.reasoning("hm".to_owned(), &mut events);
        output.text("Hal".to_owned(), Vec::new(), &mut events);
        output.begin_again(&mut events);
        output.text("Whole.".to_owned(), Vec::new(), &mut events);
        output.finish(ChatFinish::Stop, &mut events);
        let texts: Vec<Value> =
            output.items().iter().map(|item| written(item)["content"][0]["text"].clone()).collect();
        assert_eq!(texts, ["First.", "Whole."]);
        let done = events.iter().filter_map(|event| match event {
            ResponseEvent::ItemDone { output_index, item } => {
                Some((*output_index, written(item)["status"].clone()))
            }
            _ => None,
        });
        let (whole, half) = (json!("completed"), json!("incomplete"));
        assert_eq!(done.collect::<Vec<_>>(), [(0, whole.clone()), (1, whole.clone()), (2, half), (3, whole)]);
    }
}
