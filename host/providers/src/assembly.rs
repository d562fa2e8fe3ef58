//! Collects the parts of an answer.

use std::collections::HashSet;

use skep_engine::{
    Usage,
    chat::{ChatFinish, ChatMessage, ToolCall},
};

use crate::{
    delta::{CallPart, Count, Delta},
    failure::Failure,
};

/// Maximum number of calls in one answer.
const MAX_CALLS: usize = 128;
/// Maximum length of the id of a call. A longer one is replaced.
const MAX_ID_BYTES: usize = 128;
/// Mean length of a token's text, by which tokens are estimated that the server did not count.
pub(crate) const TOKEN_BYTES: usize = 4;

/// The parts of an answer that have arrived.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    text: String,
    reasoning: String,
    calls: Vec<CallPart>,
    count: Count,
    finish: Option<ChatFinish>,
    stopped_by: Option<String>,
    is_done: bool,
}

/// A whole answer, before it is validated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AssembledAnswer {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
    pub finish: ChatFinish,
    /// The stop string at which the answer ends, if the server reports it.
    pub stopped_by: Option<String>,
    pub usage: Usage,
}

impl Assembly {
    pub(crate) fn add(&mut self, delta: &Delta) -> Result<(), Failure> {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::Text(text) => self.text.push_str(text),
            Delta::Call(part) => return self.add_call(part),
            Delta::Count(count) => self.count.update(*count),
            Delta::Finish(finish) => self.finish = Some(*finish),
            Delta::StoppedBy(text) => self.stopped_by = Some(text.clone()),
            Delta::Done => self.is_done = true,
        }
        Ok(())
    }

    /// Returns whether the model has ended its answer, so that only counts may follow.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_done || self.finish.is_some()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Returns the prompt's tokens if the server has counted them.
    pub(crate) fn count(&self) -> Count {
        self.count
    }

    /// Returns what the parts so far used: what the server has counted, and estimates of the rest.
    pub(crate) fn usage(&self, prompt_tokens: usize) -> Usage {
        let arguments: usize = self.calls.iter().map(|call| call.arguments.len()).sum();
        let estimate = (self.text.len() + self.reasoning.len() + arguments).div_ceil(TOKEN_BYTES);
        let narrow = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        let prompt_tokens = self.count.prompt.unwrap_or(narrow(prompt_tokens));
        // Some servers count one token when an answer begins, and all of them when it ends.
        let completion_tokens = match (self.count.completion, self.is_whole()) {
            (Some(counted), true) => counted,
            (counted, _) => counted.unwrap_or(0).max(narrow(estimate)),
        };
        let cached_tokens = self.count.cached.unwrap_or(0).min(prompt_tokens);
        Usage {
            prompt_tokens,
            cached_tokens,
            cache_write_tokens: self.count.cache_write.unwrap_or(0).min(prompt_tokens - cached_tokens),
            completion_tokens,
            reasoning_tokens: self.count.reasoning.unwrap_or(0).min(completion_tokens),
            ..Usage::default()
        }
    }

    /// Returns the answer. Calls get ids that neither the answer nor `history` has. `prompt_tokens` is the estimate
    /// that is used if the server counted nothing.
    pub(crate) fn answer(self, history: &[ChatMessage], prompt_tokens: usize) -> AssembledAnswer {
        let usage = self.usage(prompt_tokens);
        let Assembly { text, reasoning, calls, finish, stopped_by, .. } = self;
        let calls: Vec<ToolCall> = named(calls, history);
        let finish = match finish.unwrap_or(ChatFinish::Stop) {
            ChatFinish::Length => ChatFinish::Length,
            _ if !calls.is_empty() => ChatFinish::ToolCalls,
            _ => ChatFinish::Stop,
        };
        let stopped_by = stopped_by.filter(|_| finish == ChatFinish::Stop);
        AssembledAnswer { text, reasoning, calls, finish, stopped_by, usage }
    }

    /// Appends a part to its call. Servers that number all calls the same, or not at all, begin a new call with a
    /// new id or with a name.
    fn add_call(&mut self, part: &CallPart) -> Result<(), Failure> {
        let known = match part.index {
            Some(index) => self.calls.iter().rposition(|call| call.index == Some(index)),
            None => match self.calls.iter().rposition(|call| !part.id.is_empty() && call.id == part.id) {
                Some(same) => Some(same),
                None => self.calls.len().checked_sub(1),
            },
        };
        let known = known.filter(|at| !begins_another(&self.calls[*at], part));
        let Some(at) = known else {
            if self.calls.len() == MAX_CALLS {
                return Err(Failure::malformed(format!("the answer has more than {MAX_CALLS} calls")));
            }
            self.calls.push(part.clone());
            return Ok(());
        };
        let call = &mut self.calls[at];
        for (whole, more) in [(&mut call.id, &part.id), (&mut call.name, &part.name)] {
            // Some servers repeat these in every part.
            if whole != more {
                whole.push_str(more);
            }
        }
        call.arguments.push_str(&part.arguments);
        Ok(())
    }
}

/// Returns whether a part with the index of `call` belongs to another one.
fn begins_another(call: &CallPart, part: &CallPart) -> bool {
    let other_id = !part.id.is_empty() && !call.id.is_empty() && part.id != call.id;
    let unnumbered = part.index.is_none() && part.id.is_empty() && !call.arguments.is_empty();
    !part.name.is_empty() && (other_id || unnumbered)
}

fn named(parts: Vec<CallPart>, history: &[ChatMessage]) -> Vec<ToolCall> {
    let earlier = history.iter().flat_map(|message| &message.tool_calls).map(|call| call.id.clone());
    let mut taken: HashSet<String> = earlier.collect();
    let mut calls = Vec::with_capacity(parts.len());
    for CallPart { id, name, arguments, .. } in parts {
        let usable = (1..=MAX_ID_BYTES).contains(&id.len()) && !taken.contains(&id);
        let id = if usable { id } else { ToolCall::mint_id() };
        taken.insert(id.clone());
        let arguments = if arguments.trim().is_empty() { "{}".to_owned() } else { arguments };
        calls.push(ToolCall { id, name, arguments });
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(index: Option<usize>, id: &str, name: &str, arguments: &str) -> Delta {
        Delta::Call(CallPart { index, id: id.into(), name: name.into(), arguments: arguments.into() })
    }

    fn calls(deltas: &[Delta]) -> Vec<(String, String, String)> {
        let mut assembly = Assembly::default();
        deltas.iter().for_each(|delta| assembly.add(delta).expect("in bounds"));
        let answer = assembly.answer(&[], 0);
        answer.calls.into_iter().map(|call| (call.id, call.name, call.arguments)).collect()
    }

    fn expected(calls: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
        calls.iter().map(|(a, b, c)| ((*a).to_owned(), (*b).to_owned(), (*c).to_owned())).collect()
    }

    #[test]
    fn parts_of_calls_find_each_other() {
        let split = [
            part(Some(0), "c", "", ""),
            part(Some(0), "", "lo", ""),
            part(Some(1), "d", "g", "{}"),
            part(Some(0), "", "ok", "{\"a\""),
            part(Some(0), "c", "look", ": 1}"),
        ];
        // "look" after "lo" + "ok" is a repetition of the whole name.
        assert_eq!(calls(&split), expected(&[("c", "look", "{\"a\": 1}"), ("d", "g", "{}")]));
        let same_index = [part(Some(0), "a", "f", "{}"), part(Some(0), "b", "f", "[1]")];
        assert_eq!(calls(&same_index), expected(&[("a", "f", "{}"), ("b", "f", "[1]")]));
        let no_index = [part(None, "a", "f", "{"), part(None, "", "", "}"), part(None, "b", "g", "")];
        assert_eq!(calls(&no_index), expected(&[("a", "f", "{}"), ("b", "g", "{}")]));
        let nothing = calls(&[part(None, "", "f", "{}"), part(None, "", "f", "{}")]);
        assert_eq!(nothing.len(), 2);
        assert!(nothing.iter().all(|call| call.0.starts_with("call_")) && nothing[0].0 != nothing[1].0);
    }

    #[test]
    fn an_id_that_was_used_before_is_replaced() {
        let earlier = ToolCall { id: "functions.f:0".into(), name: "f".into(), arguments: "{}".into() };
        let history = [ChatMessage { tool_calls: vec![earlier], ..ChatMessage::assistant("") }];
        let mut assembly = Assembly::default();
        assembly.add(&part(Some(0), "functions.f:0", "f", "{}")).expect("in bounds");
        assembly.add(&part(Some(1), "functions.f:1", "f", "{}")).expect("in bounds");
        let calls = assembly.answer(&history, 0).calls;
        assert!(calls[0].id.starts_with("call_"), "{calls:?}");
        assert_eq!(calls[1].id, "functions.f:1");
    }

    #[test]
    fn tokens_are_estimated_where_the_server_counts_none() {
        let mut assembly = Assembly::default();
        assembly.add(&Delta::Text("12345678".into())).expect("in bounds");
        assert!(!assembly.is_whole());
        let usage = assembly.answer(&[], 7).usage;
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (7, 2));
    }

    #[test]
    fn an_early_count_of_the_output_does_not_hide_what_followed() {
        let mut assembly = Assembly::default();
        let count = |completion| Delta::Count(Count { completion: Some(completion), ..Count::default() });
        assembly.add(&count(1)).expect("in bounds");
        assembly.add(&Delta::Text("12345678".into())).expect("in bounds");
        assert_eq!(assembly.usage(0).completion_tokens, 2);
        assembly.add(&count(1)).expect("in bounds");
        assembly.add(&Delta::Finish(ChatFinish::Stop)).expect("in bounds");
        assert_eq!(assembly.usage(0).completion_tokens, 1, "the last count is the server's");
    }
}
