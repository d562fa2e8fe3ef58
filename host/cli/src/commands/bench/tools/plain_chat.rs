//! `--chat`: the effect of declared tools on plain answers, if none of the tools may be called.

use anyhow::Result;
use serde::Serialize;
use skep_engine::Engine;
use skep_engine::chat::{ChatEvent, ChatMessage, ChatOptions, ToolChoice, ToolSpec, chat};

use super::cases::{AskedSpelling, Group, of_group};
use super::ours::greedy;
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};

const MAX_TOKENS: usize = 96;
const SYSTEM: &str = "You are a helpful assistant.";

const QUESTIONS: [&str; 20] = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me something about bees.",
    "How do I boil an egg?",
    "Who was Leonardo da Vinci?",
    "What is a good present for a child of six?",
    "Explain in two sentences what a volcano is.",
    "Write a short poem about the sea.",
    "What is the difference between a frog and a toad?",
    "How many days has a leap year?",
    "Give me three tips for a better sleep.",
    "What is photosynthesis?",
    "Describe a rainy day in autumn.",
    "Why do cats purr?",
    "What can I cook with rice and tomatoes?",
    "Name three rivers in Europe.",
    "How does a bicycle stay upright?",
    "What should I pack for a week at the seaside?",
    "Who wrote Romeo and Juliet?",
    "Say something kind to a friend who is sad.",
];

/// Markup that an answer to a plain question has no reason to contain.
const MARKUP: [&str; 6] =
    ["<tool", "</tool", "\"arguments\"", "\"parameters\"", "\"properties\"", "{\"name\""];

/// Results of the plain questions, with and without declared tools.
#[derive(Debug, Serialize)]
pub struct ChatReport {
    model: String,
    tools: Vec<String>,
    without: Figures,
    with: Figures,
    answers: Vec<Pair>,
}

/// Figures of all answers together.
#[derive(Debug, Serialize)]
struct Figures {
    answers: usize,
    /// Answers that contain markup of calls, a declaration, or the name of a tool.
    leaks: usize,
    mean_logprob: f64,
    mean_tokens: f64,
    /// Share of the sequences of four words that appeared before in the same answer.
    repeated_share: f64,
}

#[derive(Debug, Serialize)]
struct Pair {
    question: &'static str,
    without: ChatSample,
    with: ChatSample,
}

#[derive(Debug, Serialize)]
struct ChatSample {
    text: String,
    leaks: bool,
    tokens: usize,
    mean_logprob: f64,
    repeated_share: f64,
}

/// Asks each question twice, with and without declared tools.
pub async fn measure(engine: &Engine, limit: usize) -> Result<ChatReport> {
    let family = of_group(Group::Choice, 1, AskedSpelling::Own)?.remove(0).family;
    let questions = &QUESTIONS[..limit.min(QUESTIONS.len())];
    let step = Terminal.count("plain questions", questions.len() as u64);
    let mut answers = Vec::new();
    for (&question, done) in questions.iter().zip(1..) {
        let without = ask(engine, question, &[], &family.tools).await?;
        let with = ask(engine, question, &family.tools, &family.tools).await?;
        answers.push(Pair { question, without, with });
        step.advance_to(done);
    }
    step.finish("");
    Ok(ChatReport {
        model: engine.info().name.clone(),
        tools: family.tools.iter().map(|tool| tool.name.clone()).collect(),
        without: Figures::new(answers.iter().map(|pair| &pair.without)),
        with: Figures::new(answers.iter().map(|pair| &pair.with)),
        answers,
    })
}

async fn ask(
    engine: &Engine,
    question: &str,
    declared: &[ToolSpec],
    tools: &[ToolSpec],
) -> Result<ChatSample> {
    let options = ChatOptions {
        tools: declared.to_vec(),
        tool_choice: ToolChoice::None,
        sampling: greedy(),
        max_tokens: Some(MAX_TOKENS),
        top_logprobs: Some(0),
        ..ChatOptions::default()
    };
    let messages = [ChatMessage::system(SYSTEM), ChatMessage::user(question)];
    let mut stream = chat(engine, &messages, options)?;
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    while let Some(event) = stream.next().await {
        if let ChatEvent::Text { delta, logprobs: scored } = event? {
            text.push_str(&delta);
            logprobs.extend(scored.iter().map(|token| f64::from(token.logprob)));
        }
    }
    Ok(ChatSample {
        leaks: leaks(&text, tools),
        tokens: logprobs.len(),
        mean_logprob: mean(logprobs.iter().copied()),
        repeated_share: repeated_share(&text),
        text,
    })
}

fn leaks(text: &str, tools: &[ToolSpec]) -> bool {
    MARKUP.iter().any(|markup| text.contains(markup)) || tools.iter().any(|tool| text.contains(&tool.name))
}

fn repeated_share(text: &str) -> f64 {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut seen = std::collections::HashSet::new();
    mean(words.windows(4).map(|four| if seen.insert(four) { 0.0 } else { 1.0 }))
}

/// Returns the mean of the values; 0 if there are none.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0_f64);
    for value in values {
        sum += value;
        count += 1.0;
    }
    sum / count.max(1.0)
}

impl Figures {
    fn new<'a>(said: impl Iterator<Item = &'a ChatSample> + Clone) -> Self {
        Self {
            answers: said.clone().count(),
            leaks: said.clone().filter(|one| one.leaks).count(),
            mean_logprob: mean(said.clone().map(|one| one.mean_logprob)),
            mean_tokens: mean(said.clone().map(|one| one.tokens as f64)),
            repeated_share: mean(said.map(|one| one.repeated_share)),
        }
    }

    fn cells(&self, name: &str) -> [String; 5] {
        let Self { answers, leaks, mean_logprob, mean_tokens, repeated_share } = self;
        [
            name.to_owned(),
            format!("{leaks} of {answers}"),
            format!("{mean_logprob:.3}"),
            format!("{mean_tokens:.1}"),
            format!("{:.1} %", 100.0 * repeated_share),
        ]
    }
}

impl ChatReport {
    /// Prints the results as a table.
    pub fn for_people(&self) -> Result<()> {
        out::line(&format!("{}, greedy: answers to plain questions, calls not allowed", self.model))?;
        let rows = [self.without.cells("none"), self.with.cells(&self.tools.len().to_string())];
        out::table(["TOOLS", "WITH MARKUP", "MEAN LOG-PROB", "TOKENS", "REPEATED"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_declarations_and_tool_names_are_leaks() {
        let tool = ToolSpec { name: "set_light".into(), description: String::new(), parameters: true.into() };
        for text in ["<tool_call>", "use set_light", "{\"name\": 1}", "the \"parameters\" are"] {
            assert!(leaks(text, std::slice::from_ref(&tool)), "{text}");
        }
        assert!(!leaks("Bees make honey, and light is set by nobody.", &[tool]));
    }

    #[test]
    fn repetition_is_the_share_of_word_sequences_seen_before() {
        assert_eq!(repeated_share("a b c d e f"), 0.0);
        assert_eq!(repeated_share("a b c d a b c d"), 0.2);
        assert_eq!(repeated_share("too short"), 0.0);
    }
}
