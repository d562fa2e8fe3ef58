//! Tests of models on other servers: what reaches them, and what is refused before.

use super::*;
use crate::chat::{ChatEvent, ChatFinish, ChatOutcome, Image, ImageSource, ToolCall};
use crate::{Attempt, Ending, Observation, Observer, RequestObserver, SpentTokens};
use std::sync::Mutex;

/// Repeats the last message, and remembers what it was asked.
struct Echo {
    info: RemoteInfo,
    asked: Mutex<Vec<Vec<ChatMessage>>>,
}

impl Echo {
    fn new(context_length: Option<usize>) -> Arc<Self> {
        let info = RemoteInfo {
            name: "elsewhere/echo".to_owned(),
            digest: ModelDigest::remote("http://localhost", "echo"),
            context_length,
            created_unix_s: 0,
        };
        Arc::new(Echo { info, asked: Mutex::default() })
    }
}

impl RemoteModel for Echo {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn ask(&self, input: Input, _options: ChatOptions) -> RemoteStream {
        let messages = input.messages().to_vec();
        let text = messages.last().map(|last| last.content.clone()).unwrap_or_default();
        self.asked.lock().expect("not poisoned").push(messages);
        let outcome = ChatOutcome::remote(text, ChatFinish::Stop);
        Box::pin(futures::stream::iter([Ok(ChatEvent::Finished(outcome))]))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

#[tokio::test]
async fn answers_of_a_remote_model_join_the_transcript_as_text() {
    let echo = Echo::new(None);
    let model = Model::Remote(echo.clone());
    let mut transcript = Transcript::new();
    for text in ["one", "two"] {
        transcript.push(ChatMessage::user(text));
        let answer = model.answer(&transcript, ChatOptions::default()).expect("started");
        transcript.commit(&answer.outcome().await.expect("an answer"));
    }
    let said: Vec<_> = transcript.messages().iter().map(|message| message.content.as_str()).collect();
    assert_eq!(said, ["one", "one", "two", "two"]);
    assert!(transcript.tokens().is_empty() && transcript.rendered().is_empty());
    assert_eq!(echo.asked.lock().expect("not poisoned")[1].len(), 3, "the whole history is sent");
}

/// Notes what it observes.
#[derive(Debug, Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().expect("not poisoned").push(note);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("not poisoned"))
    }
}

impl Observer for Notes {
    fn request_started(
        &self,
        model: &str,
        said: &mut dyn Iterator<Item = PromptMessage<'_>>,
    ) -> Box<dyn RequestObserver> {
        let said: Vec<String> = said.map(|said| said.text.into_owned()).collect();
        self.add(format!("asked {model}: {}", said.join(", ")));
        Box::new(self.clone())
    }
}

impl RequestObserver for Notes {
    fn observe(&mut self, observation: Observation<'_>) {
        self.add(format!("{observation:?}"));
    }

    fn request_ended(self: Box<Self>, ending: Ending<'_>, _spent: SpentTokens, attempts: Vec<Attempt>) {
        let ending = match ending {
            Ending::Finished { reason, .. } => reason.to_owned(),
            Ending::Failed(error) => error.code().to_owned(),
            Ending::Cancelled => "cancelled".to_owned(),
        };
        let attempts: Vec<_> = attempts.iter().map(|attempt| attempt.model.as_str()).collect();
        self.add(format!("{ending} after {attempts:?}"));
    }
}

/// Asks another model, as a route does.
struct Relay(Model, RemoteInfo);

impl RemoteModel for Relay {
    fn info(&self) -> &RemoteInfo {
        &self.1
    }

    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream {
        options.attempts.begin(Some("elsewhere"), self.0.name()).ended("ok", Some(200));
        Box::pin(self.0.chat(input.messages(), options).expect("started"))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

#[tokio::test]
async fn a_request_is_observed_once_however_many_models_it_passes_through() {
    let (notes, echo) = (Notes::default(), Echo::new(Some(100)));
    let info = RemoteInfo { name: "relay".to_owned(), ..echo.info.clone() };
    let relay = Model::Remote(Arc::new(Relay(Model::Remote(echo), info)));
    let options = || ChatOptions { observer: Some(Arc::new(notes.clone())), ..ChatOptions::default() };
    let messages = [ChatMessage::user("one"), ChatMessage::user("two")];
    relay.chat(&messages, options()).expect("started").outcome().await.expect("an answer");
    assert_eq!(notes.take(), ["asked relay: two, one", "stop after [\"elsewhere/echo\"]"]);
    drop(relay.chat(&messages, options()).expect("started"));
    assert_eq!(notes.take()[1], "cancelled after [\"elsewhere/echo\"]");
    let long = [ChatMessage::user("a".repeat(1_000))];
    relay.chat(&long, options()).err().expect("too long");
    assert_eq!(notes.take()[1], "context_overflow after []");
}

#[tokio::test]
async fn a_model_without_vision_refuses_an_image_and_names_its_position() {
    let echo = Echo::new(None);
    let source = ImageSource::Url("https://a.example/cat.png".to_owned().into());
    let image = Image { at: 0, part: 2, source, detail: None };
    let seen = ChatMessage { images: vec![image], ..ChatMessage::user("Look.") };
    let messages = [ChatMessage::system("Be brief."), seen];
    let error = Model::Remote(echo.clone()).chat(&messages, ChatOptions::default()).err().expect("an image");
    let EngineError::InvalidRequest { parameter, message } = error else { panic!("{error}") };
    assert_eq!(parameter, "messages[1].content[2]");
    assert!(message.contains("the model elsewhere/echo accepts only text"), "{message}");
    assert!(echo.asked.lock().expect("not poisoned").is_empty());
}

#[tokio::test]
async fn a_request_that_is_too_long_or_has_open_calls_is_not_sent() {
    let echo = Echo::new(Some(20));
    let model = Model::Remote(echo.clone());
    let mut transcript = Transcript::new();
    transcript.push(ChatMessage::user("a".repeat(100)));
    let error = model.answer(&transcript, ChatOptions::default()).err().expect("too long");
    assert!(matches!(error, EngineError::ContextOverflow { limit: 20, prompt: 33, .. }), "{error}");
    // Earlier reasoning may not be sent.
    let thought = ChatMessage { reasoning: Some("a".repeat(1_000)), ..ChatMessage::assistant("b") };
    assert!(model.chat(&[thought], ChatOptions::default()).is_ok());
    let call = ToolCall { id: "c1".into(), name: "look".into(), arguments: "{}".into() };
    let mut transcript = Transcript::new();
    transcript.push(ChatMessage { tool_calls: vec![call], ..ChatMessage::assistant("") });
    let error = model.answer(&transcript, ChatOptions::default()).err().expect("a call is open");
    assert!(error.to_string().contains("c1"), "{error}");
    assert_eq!(echo.asked.lock().expect("not poisoned").len(), 1);
}
