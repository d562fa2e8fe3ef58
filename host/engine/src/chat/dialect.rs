//! The dialect of one model: its markup, and the way in which it writes reasoning.

use serde_json::Value;
use skep_model::{ChatTemplate, SpecialTokens, Tokenizer};

use super::markup::{self, Markup, Reading, harmony};
use super::options::{ChatOptions, Reasoning};
use super::prompt::{BegunPart, Prompt};
use super::reading::ThinkReader;
use super::render::Rendering;
use super::typescript;
use crate::{Engine, Thinking};

/// The tags around reasoning, in the order in which a template is searched for them.
const TAGS: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];

/// The markup of a model's calls, and the way in which it writes its reasoning.
#[derive(Debug)]
pub struct Dialect {
    pub markup: &'static Markup,
    /// Whether the model's own template declares tools and shows calls.
    pub(super) is_native: bool,
    /// The tags around reasoning, if the template shows any.
    pub(super) tags: Option<(&'static str, &'static str)>,
    /// Special tokens whose text the readers need.
    pub(super) kept: std::sync::Arc<[u32]>,
    /// The variables of the template that control reasoning.
    variables: Variables,
}

#[derive(Debug, Clone, Copy)]
struct Variables {
    enable_thinking: bool,
    thinking: bool,
    effort: bool,
    /// The declarations of tools as TypeScript.
    declarations: bool,
}

impl Dialect {
    /// Returns the dialect of a running model.
    pub fn of_engine(engine: &Engine) -> Self {
        let named = engine.info().markup.and_then(|name| Markup::named(name).ok());
        Dialect::of(engine.template(), engine.tokenizer(), named)
    }

    /// Returns the dialect that a template and a vocabulary show, or the one with the given markup.
    pub(crate) fn of(template: &ChatTemplate, tokenizer: &Tokenizer, named: Option<&'static Markup>) -> Self {
        let source = template.source();
        let markup = named.unwrap_or_else(|| Markup::of_model(source, Some(tokenizer)));
        let declares = template.knows_tools() || markup.declaration.is_some();
        let is_native = declares && markup.is_shown_by(source);
        let is_harmony = matches!(markup.reading, Reading::Harmony);
        let tags = TAGS.into_iter().find(|(_, end)| !is_harmony && source.contains(end));
        let marks = tags.iter().flat_map(|(begin, end)| [*begin, *end]);
        let texts = markup.tokens.iter().copied().chain(marks);
        let kept = texts.filter_map(|text| markup::special(tokenizer, text)).collect();
        let variables = Variables {
            enable_thinking: source.contains("enable_thinking"),
            thinking: ["thinking is defined", "not thinking", "if thinking"]
                .iter()
                .any(|use_| source.contains(use_)),
            effort: source.contains("reasoning_effort"),
            declarations: source.contains(typescript::VARIABLE),
        };
        Dialect { markup, is_native, tags, kept, variables }
    }

    /// Returns whether the model reasons in a channel, which only a constraint on its answer keeps it from.
    pub(super) fn reasons_in_channel(&self) -> bool {
        matches!(self.markup.reading, Reading::Harmony)
    }

    /// Returns whether the model writes its reasoning apart from its answer.
    pub(crate) fn reasons(&self) -> bool {
        self.tags.is_some() || self.reasons_in_channel()
    }

    /// Returns the texts that only the template and the model write, besides special tokens. Messages may contain the markup
    /// of Hermes, so that it has none.
    pub(super) fn own_tokens(&self) -> Vec<&'static str> {
        if !self.is_native || self.markup.is_hermes() {
            return Vec::new();
        }
        let marks = self.tags.into_iter().flat_map(|(begin, end)| [begin, end]);
        self.markup.tokens.iter().copied().chain(marks).collect()
    }

    /// Returns the part of the model's own text that is the answer; `None` if it cannot be identified.
    pub(super) fn answer_of<'a>(&self, raw: &'a str) -> Option<&'a str> {
        match (&self.markup.reading, self.tags) {
            (Reading::Harmony, _) => None,
            (_, Some((_, end))) if raw.contains(end) => {
                raw.split_once(end).map(|(_, answer)| answer.trim_start())
            }
            _ => Some(raw),
        }
    }

    /// Returns whether a conversation that has changed is encoded again from where it differs, rather than from its
    /// beginning.
    pub(super) fn keeps_common_tokens(&self) -> bool {
        !self.markup.is_hermes() || self.tags.is_some()
    }

    /// Returns the tokens whose text is kept in an answer.
    pub(super) fn kept_special(&self, options: &ChatOptions) -> std::sync::Arc<[u32]> {
        match self.markup.is_hermes() && self.tags.is_none() && !options.calls_tools() {
            true => std::sync::Arc::default(),
            false => self.kept.clone(),
        }
    }

    /// Returns the tokens with which a call ends a reasoning that has no end, with their texts. Reasoning often mentions
    /// the markup of calls, so there are none where the answer may not be a call, or where the text is not a token of
    /// its own.
    fn interrupts(&self, tokenizer: &Tokenizer, options: &ChatOptions) -> Vec<(u32, &'static str)> {
        if !options.calls_tools() || options.output.is_some() {
            return Vec::new();
        }
        let marks = self.markup.first_marks().iter();
        marks.filter_map(|text| Some((tokenizer.token_id(text)?, *text))).collect()
    }

    /// Returns the reader of the reasoning in an answer to a prompt, if the model writes any.
    pub(super) fn think_reader(
        &self,
        prompt: &Prompt,
        tokenizer: &Tokenizer,
        options: &ChatOptions,
    ) -> Option<ThinkReader> {
        let tags = self.tags?;
        let interrupts = self.interrupts(tokenizer, options).into_iter().map(|(_, text)| text).collect();
        match self.opening(prompt)? {
            Opened::Closed => None,
            Opened::Open if prompt.begun.is_some() => {
                Some(ThinkReader::new(tags, interrupts, true).continued())
            }
            Opened::Open => Some(ThinkReader::new(tags, interrupts, true)),
            Opened::No => Some(ThinkReader::new(tags, interrupts, false)),
        }
    }

    /// Returns the reasoning of an output for the engine, which holds a constraint back until the answer begins.
    pub(super) fn thinking(
        &self,
        prompt: &Prompt,
        tokenizer: &Tokenizer,
        options: &ChatOptions,
    ) -> Option<Thinking> {
        let wanted = &options.reasoning;
        // A template without a reasoning switch does not close the reasoning itself.
        let budget = if wanted.is_off() { Some(0) } else { wanted.budget };
        if self.reasons_in_channel() {
            // An answer without reasoning begins with its own channel, by its constraint.
            return if wanted.is_off() { None } else { harmony_thinking(tokenizer, budget) };
        }
        let (begin, end) = self.tags?;
        let is_open = match self.opening(prompt)? {
            Opened::Closed => return None,
            Opened::Open => true,
            Opened::No => false,
        };
        let id = |text: &str| tokenizer.token_id(text);
        let interrupts = self.interrupts(tokenizer, options).into_iter().map(|(id, _)| id).collect();
        let between = if self.writes_lines() { "\n\n" } else { "" };
        Some(Thinking {
            is_open,
            begin: vec![id(begin)?],
            end: id(end)?,
            between: tokenizer.encode(between, SpecialTokens::Literal).ok()?,
            interrupts,
            budget,
        })
    }

    /// Returns the variables of the template that control reasoning, as far as the request says something.
    pub(super) fn template_variables(&self, wanted: &Reasoning) -> Vec<(&'static str, Value)> {
        let mut variables = Vec::new();
        if let Some(enabled) = wanted.enabled {
            for (name, is_known) in
                [("enable_thinking", self.variables.enable_thinking), ("thinking", self.variables.thinking)]
            {
                if is_known {
                    variables.push((name, enabled.into()));
                }
            }
        }
        if let Some(effort) = wanted.template_effort().filter(|_| self.variables.effort) {
            variables.push(("reasoning_effort", effort.into()));
        }
        variables
    }

    /// Returns the variable with the declarations of tools, which are in OpenAI's form, if the template has it. Such
    /// templates get tools with sorted keys.
    pub(super) fn declared_tools(&self, tools: &mut [Value]) -> Option<(&'static str, Value)> {
        if !self.variables.declarations {
            return None;
        }
        tools.iter_mut().for_each(Value::sort_all_objects);
        Some((typescript::VARIABLE, typescript::declarations(tools)?.into()))
    }

    /// Writes the beginning of an answer after the opening of the assistant's message, and returns the part of the answer in
    /// which it ends. None of the beginning becomes a special token, except the tags around the reasoning.
    pub(super) fn write_begun(
        &self,
        rendering: &mut Rendering,
        reasoning: &str,
        answer: &str,
    ) -> Option<BegunPart> {
        let opened = self.opening_of(&rendering.text);
        let mut write = |text: &str, is_literal: bool| {
            let start = rendering.text.len();
            rendering.text.push_str(text);
            if is_literal && !text.is_empty() {
                rendering.literals.push(start..rendering.text.len());
            }
        };
        let Some((begin, end)) = self.tags else {
            write(answer, true);
            return Some(BegunPart::Answer);
        };
        let line = if self.writes_lines() { "\n" } else { "" };
        if !matches!(opened, Some(Opened::Closed)) {
            let is_open = matches!(opened, Some(Opened::Open));
            if !is_open && !reasoning.is_empty() {
                write(&format!("{begin}{line}"), false);
            }
            write(reasoning, true);
            if answer.is_empty() {
                return (is_open || !reasoning.is_empty()).then_some(BegunPart::Reasoning);
            }
            if is_open || !reasoning.is_empty() {
                write(&format!("{line}{end}{line}{line}"), false);
            }
        }
        write(answer, true);
        Some(BegunPart::Answer)
    }

    /// Returns whether reasoning and answer are separated by an empty line.
    fn writes_lines(&self) -> bool {
        self.markup.is_hermes() || self.markup.name == "qwen3-coder"
    }

    fn opening(&self, prompt: &Prompt) -> Option<Opened> {
        match prompt.begun {
            Some(BegunPart::Answer) => return Some(Opened::Closed),
            Some(BegunPart::Reasoning) => return Some(Opened::Open),
            None => {}
        }
        self.opening_of(&prompt.text)
    }

    fn opening_of(&self, text: &str) -> Option<Opened> {
        let (begin, end) = self.tags?;
        let prompt = text.trim_end();
        Some(if prompt.ends_with(end) {
            Opened::Closed
        } else if prompt.ends_with(begin) {
            Opened::Open
        } else {
            Opened::No
        })
    }
}

/// Returns the reasoning of a model that writes it into a channel.
fn harmony_thinking(tokenizer: &Tokenizer, budget: Option<usize>) -> Option<Thinking> {
    let id = |text: &str| tokenizer.token_id(text);
    let plain = |text: &str| tokenizer.encode(text, SpecialTokens::Literal).ok();
    let mut begin = vec![id(harmony::CHANNEL)?];
    begin.extend(plain("analysis")?);
    begin.push(id(harmony::MESSAGE)?);
    let mut between = vec![id(harmony::START)?];
    between.extend(plain("assistant")?);
    Some(Thinking { is_open: false, begin, end: id(harmony::END)?, between, interrupts: Vec::new(), budget })
}

/// The position of a prompt's end.
enum Opened {
    /// Before any reasoning.
    No,
    /// Within the reasoning.
    Open,
    /// After the reasoning.
    Closed,
}
