//! A conversation as the model saw it, token for token.
//!
//! Invariant: `tokens` are the tokens of `rendered`, and they contain the tokens that the model produced
//! unchanged. The next answer continues from them: only newer text is encoded, so the KV cache stays warm and
//! history never changes under the model. If the template renders history differently the second time, or if
//! the system message, the tools or the examples changed, the conversation is encoded again.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::answer::ChatOutcome;
use super::dialect::Dialect;
use super::local_answer::LocalAnswer;
use super::message::{ChatMessage, Role, json_bytes};
use super::options::{ChatOptions, Opening};
use super::prompt::{self, Prompt, Sender};
use super::render::Renderer;
use super::stream::ChatStream;
use super::usage_sum::UsageSum;
use crate::{Cancel, Engine, EngineError, Usage};

/// A conversation with the tokens that the model has seen. It is stored with its session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transcript {
    messages: Vec<ChatMessage>,
    tokens: Vec<u32>,
    rendered: String,
    #[serde(with = "UsageSum")]
    usage: Usage,
    /// Number of leading messages that were written for another model, whose spelling of an answer means
    /// nothing to this one.
    #[serde(default, skip_serializing_if = "is_none")]
    foreign: usize,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

impl Transcript {
    /// Creates an empty conversation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all messages in order, a system message first.
    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// Sets the system message. Setting the same text again changes nothing.
    pub fn set_system(&mut self, text: &str) {
        match self.messages.first_mut() {
            Some(first) if first.role == Role::System => {
                if first.content != text {
                    first.content = text.to_owned();
                }
            }
            _ => {
                self.messages.insert(0, ChatMessage::system(text));
                self.foreign = self.foreign.saturating_add(usize::from(self.foreign > 0));
            }
        }
    }

    /// Appends a message. It is encoded when the next answer begins.
    pub fn push(&mut self, message: ChatMessage) {
        self.messages.push(message);
    }

    /// Removes everything but the sum of the usage.
    pub fn clear(&mut self) {
        *self = Transcript { usage: self.usage, ..Transcript::default() };
    }

    /// Forgets the tokens that the model saw and produced. The messages are now for another model, which writes
    /// them in its own way.
    pub fn forget_tokens(&mut self) {
        (self.tokens, self.rendered) = (Vec::new(), String::new());
        self.foreign = self.messages.len();
    }

    /// Returns the approximate size of the transcript, in memory and as JSON.
    pub fn bytes(&self) -> usize {
        /// The size of a number and a comma.
        const TOKEN: usize = 6;
        let messages: usize = self.messages.iter().map(ChatMessage::bytes).sum();
        messages + json_bytes(&self.rendered) + self.tokens.len() * TOKEN
    }

    /// Returns this conversation with other messages, none of which the model has seen yet.
    pub fn rewritten(&self, messages: Vec<ChatMessage>) -> Self {
        let mut foreign = 0;
        if self.foreign > 0 {
            let kept = self
                .messages
                .iter()
                .rev()
                .zip(messages.iter().rev())
                .take_while(|(old, new)| old == new)
                .count();
            let changed = self.messages.len() - kept;
            if self.foreign > changed {
                foreign = messages.len() - kept + (self.foreign - changed).min(kept);
            }
        }
        Transcript { messages, usage: self.usage, foreign, ..Transcript::default() }
    }

    /// Returns the number of tokens of the prompt that the next answer would continue.
    pub fn prompt_tokens(
        &self,
        engine: &Engine,
        opening: Opening<'_>,
        cancel: &Cancel,
    ) -> Result<usize, EngineError> {
        Ok(self.prompt(engine, opening, Sender { tenant: None, cancel })?.tokens.len())
    }

    /// Returns the tokens that the model saw and produced up to the last committed answer.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the text of [`Transcript::tokens`].
    pub fn rendered(&self) -> &str {
        &self.rendered
    }

    /// Returns the sum over all committed answers.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Checks a transcript that comes from elsewhere, and returns the problem, if there is one. Its tokens must
    /// belong to the model of `engine`, fit into its context, and spell the transcript's text.
    pub fn check(&self, engine: &Engine) -> Result<(), String> {
        let (info, tokenizer) = (engine.info(), engine.tokenizer());
        let (count, limit) = (self.tokens.len(), info.context_length);
        if count > limit {
            return Err(format!("it has {count} tokens; the context of {} has {limit}", info.name));
        }
        if let Some(id) = self.tokens.iter().find(|id| **id as usize >= info.vocabulary_size) {
            return Err(format!("token {id} is not in the vocabulary of {}", info.name));
        }
        let spelt = tokenizer.decode(&self.tokens, true);
        // Invalid bytes become a replacement character of three bytes; no text is longer than that.
        if self.rendered.len() > tokenizer.decode(&self.tokens, false).len() * 3 {
            return Err(MISSPELT.to_owned());
        }
        // Special tokens that a model produces are not text, and a text may leave out the token that begins
        // every prompt.
        let mut special: Vec<u32> =
            self.tokens.iter().copied().filter(|id| tokenizer.is_special(*id)).collect();
        special.sort_unstable();
        special.dedup();
        let (mut spelt, mut rendered) = (spelt, self.rendered.clone());
        for markup in special.iter().filter_map(|id| tokenizer.token_text(*id)) {
            (spelt, rendered) = (spelt.replace(markup, ""), rendered.replace(markup, ""));
        }
        if !letters(&spelt).eq(letters(&rendered)) {
            return Err(MISSPELT.to_owned());
        }
        Ok(())
    }

    /// Returns the ids of the last assistant message's calls that no tool message answers yet.
    pub fn needs_tool_results(&self) -> Vec<String> {
        let Some(last) = self.messages.iter().rposition(|message| message.role == Role::Assistant) else {
            return Vec::new();
        };
        let (calls, since) = (&self.messages[last].tool_calls, &self.messages[last + 1..]);
        let answered = |id: &str| since.iter().any(|message| message.tool_call_id.as_deref() == Some(id));
        calls.iter().map(|call| &call.id).filter(|id| !answered(id)).cloned().collect()
    }

    /// Generates the next assistant message. The transcript does not change until [`Transcript::commit`].
    pub fn generate(&self, engine: &Engine, mut options: ChatOptions) -> Result<ChatStream, EngineError> {
        options.validate()?;
        self.check_tool_results()?;
        let prompt = self.prompt(engine, options.opening(), Sender::of(&options))?;
        options.affinity.public = prompt::public_part(engine, &self.messages, &options, &prompt.tokens);
        Ok(ChatStream::local(LocalAnswer::start(engine, prompt, options)?))
    }

    /// Checks that all calls of the last assistant message have been answered.
    pub(crate) fn check_tool_results(&self) -> Result<(), EngineError> {
        let unanswered = self.needs_tool_results();
        if unanswered.is_empty() {
            return Ok(());
        }
        let message = format!("no tool message answers the calls {}", unanswered.join(", "));
        Err(EngineError::InvalidRequest { parameter: "messages".into(), message })
    }

    /// Appends the answer, with its exact tokens if the model reported them.
    pub fn commit(&mut self, outcome: &ChatOutcome) {
        if outcome.prompt.is_empty() {
            self.forget_tokens();
            return self.commit_text(outcome);
        }
        self.messages.push(answer(outcome));
        self.tokens.clone_from(&outcome.prompt);
        self.tokens.extend(&outcome.tokens);
        self.rendered.clone_from(&outcome.rendered);
        self.rendered.push_str(&outcome.raw);
        self.add_usage(&outcome.usage);
    }

    /// Appends the answer of another model, whose tokens mean nothing to this one.
    pub fn commit_text(&mut self, outcome: &ChatOutcome) {
        self.messages.push(answer(outcome));
        self.foreign = self.messages.len();
        self.add_usage(&outcome.usage);
    }

    /// Adds the usage of a generation that was made for the conversation but is not one of its answers.
    pub fn add_usage(&mut self, usage: &Usage) {
        self.usage.add(usage);
    }

    /// Returns the messages. An answer of another model is reduced to its text and its calls, however that
    /// model spelled it.
    pub(crate) fn messages_for_model(&self) -> Cow<'_, [ChatMessage]> {
        let mut messages = Cow::Borrowed(self.messages.as_slice());
        // Imported data may contain any value.
        let foreign = self.foreign.min(messages.len());
        if messages[..foreign].iter().any(|message| message.raw.is_some()) {
            messages.to_mut()[..foreign].iter_mut().for_each(|message| message.raw = None);
        }
        messages
    }

    fn prompt(
        &self,
        engine: &Engine,
        opening: Opening<'_>,
        sender: Sender<'_>,
    ) -> Result<Prompt, EngineError> {
        let cancel = sender.cancel;
        cancel.check()?;
        let messages = self.messages_for_model();
        let dialect = Dialect::of_engine(engine);
        let rendering = Renderer::of(engine, &dialect).render(&messages, opening, &self.rendered)?;
        cancel.check()?;
        let known = self.tokens.iter().all(|&id| engine.tokenizer().token_bytes(id).is_some());
        let tokens = if !self.rendered.is_empty() && rendering.text.starts_with(&self.rendered) && known {
            prompt::refuse_oversized(engine, &rendering.text[self.rendered.len()..], cancel)?;
            let (tokenizer, known) = (engine.tokenizer(), self.tokens.clone());
            prompt::encode_onto(tokenizer, known, &rendering, self.rendered.len())?
        } else {
            if !self.rendered.is_empty() {
                let same =
                    rendering.text.bytes().zip(self.rendered.bytes()).take_while(|(a, b)| a == b).count();
                tracing::debug!(
                    same_bytes = same,
                    recorded_bytes = self.rendered.len(),
                    "history changed; re-encoding it"
                );
            }
            match dialect.keeps_common_tokens() && known {
                true => prompt::encode_after(engine, &rendering, &self.tokens, sender)?,
                false => prompt::encode_whole(engine, &rendering, sender)?,
            }
        };
        Ok(Prompt { text: rendering.text, tokens, begun: None })
    }
}

/// Returns the message for an answer.
fn answer(outcome: &ChatOutcome) -> ChatMessage {
    ChatMessage {
        tool_calls: outcome.tool_calls.clone(),
        reasoning: Some(outcome.reasoning.clone()).filter(|reasoning| !reasoning.is_empty()),
        raw: Some(outcome.raw.clone()),
        ..ChatMessage::assistant(outcome.text.clone())
    }
}

const MISSPELT: &str = "its tokens do not spell its rendered text";

/// Returns the characters by which two decoded texts are compared: some tokenizers add blanks, and invalid
/// bytes have no unique spelling.
fn letters(text: &str) -> impl Iterator<Item = char> {
    text.chars().filter(|c| !c.is_whitespace() && *c != char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::fixture::{self, EOS};
    use crate::chat::{ChatEvent, ChatFinish, ToolCall, ToolSpec};
    use serde_json::json;
    use skep_model::{ChatTemplate, SpecialTokens};

    async fn turn(transcript: &mut Transcript, engine: &Engine, options: ChatOptions) -> ChatOutcome {
        let outcome = transcript.generate(engine, options).unwrap().outcome().await.unwrap();
        transcript.commit(&outcome);
        outcome
    }

    fn whole_text(engine: &Engine, transcript: &Transcript) -> Vec<u32> {
        engine.tokenizer().encode(&transcript.rendered, SpecialTokens::Parse).unwrap()
    }

    #[tokio::test]
    async fn history_is_extended_and_never_re_encoded() {
        let engine =
            fixture::engine(ChatTemplate::chatml_default(), &["hello, the user", "the tool", "and so on"]);
        let mut transcript = Transcript::new();
        transcript.set_system("Be brief.");
        for (question, answer) in [("one?", "hello, the user"), ("two?", "the tool"), ("three?", "and so on")]
        {
            let before = transcript.tokens().to_vec();
            transcript.push(ChatMessage::user(question));
            let outcome = turn(&mut transcript, &engine, ChatOptions::default()).await;
            assert_eq!(outcome.text, answer);
            assert_eq!(outcome.finish, ChatFinish::Stop);
            assert!(transcript.tokens().starts_with(&before));
            assert!(outcome.prompt.len() > before.len());
            // Special tokens stand between one message and the next, so no tokens merge across a boundary.
            assert_eq!(transcript.tokens(), whole_text(&engine, &transcript));
        }
        let usage = transcript.usage();
        assert!(usage.cached_tokens > 0 && usage.cached_tokens < usage.prompt_tokens, "{usage:?}");
        assert_eq!(transcript.messages().len(), 7);
    }

    #[tokio::test]
    async fn produced_tokens_are_kept_where_encoding_gives_others() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &["x", "again"]);
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("spell it"));
        let mut outcome =
            transcript.generate(&engine, ChatOptions::default()).unwrap().outcome().await.unwrap();
        // A model may produce single letters where the tokenizer would merge them.
        let letters: Vec<u32> =
            "the".chars().map(|c| engine.tokenizer().token_id(&c.to_string()).unwrap()).collect();
        (outcome.raw, outcome.text, outcome.tokens) = ("the".into(), "the".into(), letters.clone());
        transcript.commit(&outcome);
        transcript.push(ChatMessage::user("again"));
        let next = turn(&mut transcript, &engine, ChatOptions::default()).await;
        let start = outcome.prompt.len();
        assert_eq!(next.prompt[start..start + 3], letters);
        assert_ne!(transcript.tokens(), whole_text(&engine, &transcript));
    }

    #[tokio::test]
    async fn endings_leave_the_history_exact() {
        let said = "one two STOP three";
        for (options, raw, finish) in [
            (ChatOptions::default(), said, ChatFinish::Stop),
            (ChatOptions { stop: vec!["STOP".into()], ..Default::default() }, "one two ", ChatFinish::Stop),
            (ChatOptions { stop: vec!["wo S".into()], ..Default::default() }, "one t", ChatFinish::Stop),
            (ChatOptions { max_tokens: Some(2), ..Default::default() }, "one", ChatFinish::Length),
        ] {
            let engine = fixture::engine(ChatTemplate::chatml_default(), &[said, "next"]);
            let mut transcript = Transcript::new();
            transcript.push(ChatMessage::user("count"));
            let outcome = turn(&mut transcript, &engine, options).await;
            assert_eq!((outcome.raw.as_str(), outcome.finish), (raw, finish));
            assert_eq!(engine.tokenizer().decode(&outcome.tokens, false), raw);
            assert!(!outcome.tokens.contains(&EOS));
            transcript.push(ChatMessage::user("go on"));
            let before = transcript.tokens().to_vec();
            let next = turn(&mut transcript, &engine, ChatOptions::default()).await;
            assert!(next.prompt.starts_with(&before));
            let text = engine.tokenizer().decode(&next.prompt, false);
            assert!(text.contains(&format!("assistant\n{raw}<|im_end|>\n<|im_start|>user\ngo on")), "{text}");
        }
    }

    #[tokio::test]
    async fn tool_calls_and_their_results_extend_the_history() {
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[call, "It is noon."]);
        let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let tool = ToolSpec { name: "now".into(), description: "The time.".into(), parameters };
        let options = ChatOptions { tools: vec![tool], parallel_tool_calls: false, ..Default::default() };
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("What time is it?"));
        let outcome = turn(&mut transcript, &engine, options.clone()).await;
        assert_eq!(outcome.finish, ChatFinish::ToolCalls);
        assert_eq!(transcript.needs_tool_results(), [outcome.tool_calls[0].id.clone()]);
        let error = transcript.generate(&engine, options.clone()).err().unwrap();
        assert!(matches!(error, EngineError::InvalidRequest { .. }), "{error}");
        transcript.push(ChatMessage::tool(outcome.tool_calls[0].id.clone(), "12:00"));
        assert!(transcript.needs_tool_results().is_empty());
        let before = transcript.tokens().to_vec();
        let outcome = turn(&mut transcript, &engine, options).await;
        assert_eq!(outcome.text, "It is noon.");
        assert!(outcome.prompt.starts_with(&before));
    }

    #[tokio::test]
    async fn examples_are_shown_to_the_model_and_never_stored() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &["one", "two", "three"]);
        let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let tool = ToolSpec { name: "now".into(), description: "The time.".into(), parameters };
        let call = ToolCall { id: "example".into(), name: "now".into(), arguments: "{}".into() };
        let examples = vec![
            ChatMessage::user("the time?"),
            ChatMessage { tool_calls: vec![call], ..ChatMessage::assistant("") },
            ChatMessage::tool("example", "\"noon\""),
            ChatMessage::assistant("the noon"),
        ];
        let options = ChatOptions { tools: vec![tool], examples, ..Default::default() };
        let mut transcript = Transcript::new();
        transcript.set_system("Be brief.");
        transcript.push(ChatMessage::user("hello"));
        let outcome = turn(&mut transcript, &engine, options.clone()).await;
        let shown = "<|im_start|>user\nthe time?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"now\", \
                     \"arguments\": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n\"noon\"\n</tool_response>\
                     <|im_end|>\n<|im_start|>assistant\nthe noon<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n";
        assert!(outcome.rendered.contains(shown), "{}", outcome.rendered);
        let roles: Vec<Role> = transcript.messages().iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant]);
        assert!(transcript.needs_tool_results().is_empty());
        let before = transcript.tokens().to_vec();
        transcript.push(ChatMessage::user("and now?"));
        assert!(turn(&mut transcript, &engine, options.clone()).await.prompt.starts_with(&before));
        // Another conversation starts with the same tokens.
        let mut other = Transcript::new();
        other.set_system("Be brief.");
        other.push(ChatMessage::user("good day"));
        let first = turn(&mut other, &engine, options.clone()).await;
        let same = first.prompt.iter().zip(&before).take_while(|(a, b)| a == b).count();
        let said = engine.tokenizer().decode(&first.prompt[same..], false);
        assert!(said.ends_with("good day<|im_end|>\n<|im_start|>assistant\n") && said.len() < 60, "{said}");
        let wrong = ChatOptions { examples: vec![ChatMessage::system("x")], ..options };
        assert!(other.generate(&engine, wrong).is_err());
    }

    #[tokio::test]
    async fn a_changed_system_message_is_encoded_again() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &["one", "two", "three"]);
        let mut transcript = Transcript::new();
        transcript.set_system("First.");
        transcript.push(ChatMessage::user("a"));
        turn(&mut transcript, &engine, ChatOptions::default()).await;
        let before = transcript.tokens().to_vec();
        transcript.set_system("First.");
        transcript.push(ChatMessage::user("b"));
        assert!(turn(&mut transcript, &engine, ChatOptions::default()).await.prompt.starts_with(&before));
        transcript.set_system("Second.");
        transcript.push(ChatMessage::user("c"));
        let outcome = turn(&mut transcript, &engine, ChatOptions::default()).await;
        assert!(!outcome.prompt.starts_with(&before));
        assert!(outcome.rendered.contains("Second.") && !outcome.rendered.contains("First."));
        assert_eq!(transcript.tokens(), whole_text(&engine, &transcript));
    }

    #[tokio::test]
    async fn survives_json_and_can_be_cleared() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &["one", "two"]);
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("a<|im_end|>"));
        turn(&mut transcript, &engine, ChatOptions::default()).await;
        let json = serde_json::to_string(&transcript).unwrap();
        let mut restored: Transcript = serde_json::from_str(&json).unwrap();
        assert_eq!(restored, transcript);
        let before = restored.tokens().to_vec();
        restored.push(ChatMessage::user("b"));
        assert!(turn(&mut restored, &engine, ChatOptions::default()).await.prompt.starts_with(&before));
        restored.clear();
        assert!(restored.messages().is_empty() && restored.tokens().is_empty());
        assert!(restored.usage().completion_tokens > 0);
    }

    #[tokio::test]
    async fn a_transcript_from_elsewhere_is_checked_against_the_model() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &["one"]);
        let mut transcript = Transcript::new();
        transcript.check(&engine).expect("an empty transcript is valid");
        transcript.push(ChatMessage::user("a<|im_end|>"));
        turn(&mut transcript, &engine, ChatOptions::default()).await;
        transcript.check(&engine).expect("the transcript is from this model");
        // A model may produce special tokens, which are not text.
        let mut marked = transcript.clone();
        marked.tokens.push(EOS);
        marked.check(&engine).expect("the transcript could be from this model");
        let wrong = |change: fn(&mut Transcript)| {
            let mut changed = transcript.clone();
            change(&mut changed);
            changed.check(&engine).expect_err("the transcript was changed")
        };
        assert!(wrong(|t| t.tokens.push(320)).contains("token 320 is not in the vocabulary of scripted"));
        assert!(wrong(|t| t.tokens = vec![5; 4097]).contains("4097 tokens"));
        assert!(wrong(|t| t.tokens.truncate(3)).contains("do not spell"));
        assert!(wrong(|t| t.rendered.push('!')).contains("do not spell"));
        assert!(wrong(|t| t.rendered = "a".repeat(1 << 20)).contains("do not spell"));
    }

    #[tokio::test]
    async fn events_join_to_the_outcome() {
        let said = "Grüße 🐝, the user";
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[said]);
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("hi"));
        let options = ChatOptions { top_logprobs: Some(0), ..Default::default() };
        let mut stream = transcript.generate(&engine, options).unwrap();
        let (mut text, mut scored) = (String::new(), Vec::new());
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                ChatEvent::Text { delta, logprobs } => {
                    text.push_str(&delta);
                    scored.extend(logprobs.into_iter().map(|logprob| logprob.id));
                }
                ChatEvent::Finished(outcome) => {
                    assert_eq!((outcome.text.as_str(), text.as_str()), (said, said));
                    assert_eq!(outcome.tokens, scored);
                }
                _ => {}
            }
        }
        assert_eq!(text, said);
    }
}
